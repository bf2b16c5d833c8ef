"""Lay documents end to end and cut them into rows of T tokens, without padding and without loss.

A document of n tokens is ``d = bos + tokens + eos``: n + 1 pairs (input ``d[i]``, target ``d[i + 1]``). A row takes as
many pairs as it has room for; what is left of the document opens the stream's next row, whose first input is then the
last target of the row before. So every token but bos is a target exactly once, no input is eos, and no pair spans two
documents. Each stretch has its own segment id (1, 2, … within the row) and positions from 0: documents, and the
stretches of one document, never see each other.

A stream is described by two integers, the position of its current document in the order and the pairs already taken
from it, which is all that a checkpoint needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Document:
    """Holds a tokenised document, or a piece of one."""

    tokens: np.ndarray  # int32[m + 1]: bos, tokens, and eos unless the document goes on in another piece
    target_bytes: np.ndarray  # int32[m]: bytes of text that tokens[1:] stand for


class DocumentStream:
    """Reads the documents ``position, position + stride, …`` of an order, a stretch at a time.

    Args:
      fetch: gives the document at a position of the order.
      position: where the stream starts, or continues.
      stride: step between documents.
      offset: pairs of the first document that were taken before.
      end: the order's length; None: endless.
    """

    def __init__(
        self,
        fetch: Callable[[int], Document],
        position: int,
        stride: int,
        offset: int = 0,
        end: int | None = None,
    ):
        self._fetch = fetch
        self._stride = stride
        self._end = end
        self._document: Document | None = None
        self.position = position
        self.offset = offset

    def take(self, room: int) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Return up to ``room`` pairs of the current document: (inputs, targets, target_bytes), or None at the end."""
        while self._document is None:
            if self._end is not None and self.position >= self._end:
                return None
            document = self._fetch(self.position)
            if len(document.target_bytes):
                self._document = document
            else:  # a piece that tokenised to nothing
                self.position += self._stride
        document, start = self._document, self.offset
        stop = min(start + room, len(document.target_bytes))
        if stop == len(document.target_bytes):
            self.position += self._stride
            self.offset = 0
            self._document = None
        else:
            self.offset = stop
        return document.tokens[start:stop], document.tokens[start + 1 : stop + 1], document.target_bytes[start:stop]

    def fill(self, batch: Batch, row: int) -> bool:
        """Fill a row as `fill_row` does, from this stream."""
        return fill_row(batch, row, self)


def empty_batch(rows: int, length: int) -> Batch:
    """Return a batch of padding: zeros of shape [rows, length], weights float32, everything else int32."""
    names = ("tokens", "targets", "segment_ids", "positions", "target_bytes")
    batch: Batch = {name: np.zeros((rows, length), np.int32) for name in names}
    batch["weights"] = np.zeros((rows, length), np.float32)
    return batch


def fill_row(batch: Batch, row: int, stream: DocumentStream) -> bool:
    """Fill one row of ``batch``, made by `empty_batch`, from the stream; return False if the stream had ended.

    A row that the end of the stream leaves short keeps its padding: segment 0, weight 0.
    """
    length = batch["tokens"].shape[1]
    filled = segment = 0
    while filled < length:
        piece = stream.take(length - filled)
        if piece is None:
            break
        tokens, targets, target_bytes = piece
        segment += 1
        place = (row, slice(filled, filled + len(tokens)))
        batch["tokens"][place] = tokens
        batch["targets"][place] = targets
        batch["target_bytes"][place] = target_bytes
        batch["segment_ids"][place] = segment
        batch["positions"][place] = np.arange(len(tokens), dtype=np.int32)
        batch["weights"][place] = 1.0
        filled += len(tokens)
    return filled > 0
