"""Packing: documents are laid end to end and cut into rows of T tokens, without padding and without loss.

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
import functools
import itertools
from collections.abc import Callable
from typing import Protocol

import numpy as np

Batch = dict[str, np.ndarray]
_MOST_PIECES = 64  # of a document: each piece costs a reading of the whole


@dataclasses.dataclass(frozen=True)
class Document:
    """A tokenised document, or a piece of one."""

    tokens: np.ndarray  # int32[m + 1]: bos, tokens, and eos unless the document goes on in another piece
    target_bytes: np.ndarray  # int32[m]: bytes of text that tokens[1:] stand for


@dataclasses.dataclass(frozen=True)
class Tokenised:
    """A document that was tokenised beforehand, in pieces: what a tokeniser gives may depend on where it is cut."""

    ids: np.ndarray  # unsigned[n]
    lengths: np.ndarray | None  # unsigned[n]: bytes of text that each id stands for; None: the tokeniser's byte_lengths
    ends: np.ndarray  # int64[p]: ids up to the end of each piece
    rests: np.ndarray  # int64[p]: bytes of each piece beyond those of its ids

    @property
    def rest(self) -> int:
        """Bytes of text beyond those of the ids."""
        return int(self.rests.sum())

    def part(self, part: int, parts: int) -> Tokenised:
        """One of ``parts`` parts: the piece of that number where it was tokenised in as many, else as many ids each."""
        first, last = part, part + 1
        if parts == len(self.ends):
            start, stop = int(self.ends[part - 1]) if part else 0, int(self.ends[part])
        else:
            start, stop = len(self.ids) * part // parts, len(self.ids) * (part + 1) // parts
            first = int(np.searchsorted(self.ends, start, side="right")) if part else 0
            last = int(np.searchsorted(self.ends, stop, side="right"))
        lengths = None if self.lengths is None else self.lengths[start:stop]
        return Tokenised(self.ids[start:stop], lengths, np.array([stop - start]), self.rests[first:last])


@dataclasses.dataclass(frozen=True)
class Piece:
    """A document before it is tokenised, or a part of it."""

    content: bytes | np.ndarray | Tokenised  # UTF-8 text, or ids
    ends: bool  # whether the document ends here
    begins: bool = True  # whether it begins here
    name: Callable[[], str] | None = None  # of the document, for messages


class Documents(Protocol):
    """Random access to documents of known sizes; a `mhc.data.sources.Source` is one."""

    @property
    def sizes(self) -> np.ndarray | None:
        """int64[n]: about the bytes (ids) of each; None: unknown, and too many to find out."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> bytes | np.ndarray | Tokenised: ...

    def ends(self, index: int) -> bool: ...


class Pieces:
    """Documents cut into pieces of about ``size`` bytes or ids (at most 64 pieces each), with random access.

    A row stays with its document until that ends. Were long documents left whole, a batch would come from the same few
    for hundreds of steps, and the first batches from their openings alone. Text is cut after a line where one ends
    nearby, otherwise after a space, at worst between two characters; the pieces of a document add up to it.
    """

    def __init__(self, documents: Documents, size: int | None):
        """Args: ``size``: None leaves every document whole."""
        self._documents = documents
        self._size = size or 0
        self._first: np.ndarray | None = None  # int64[n + 1]: number of each document's first piece
        if size is not None and documents.sizes is not None:
            self._first = np.concatenate([[0], np.cumsum(count_pieces(documents.sizes, size))])

    def __len__(self) -> int:
        return len(self._documents) if self._first is None else int(self._first[-1])

    def __getitem__(self, index: int) -> Piece:
        document = self.document(index)
        name = functools.partial(self._documents.name, document) if hasattr(self._documents, "name") else None
        begins = getattr(self._documents, "begins", _always)(document)
        if self._first is None:
            return Piece(self._documents[index], self._documents.ends(index), begins, name)
        part, parts = index - int(self._first[document]), int(self._first[document + 1] - self._first[document])
        content = self._documents[document]
        ends = part + 1 == parts and self._documents.ends(document)
        begins = begins and part == 0
        if isinstance(content, Tokenised):
            return Piece(content.part(part, parts), ends, begins, name)
        start, stop = (_cut(content, number, parts, self._size) for number in (part, part + 1))
        return Piece(content[start:stop], ends, begins, name)

    def document(self, index: int) -> int:
        """The document that a piece is of."""
        return index if self._first is None else int(np.searchsorted(self._first, index, side="right")) - 1


def _always(document: int) -> bool:
    return True


def count_pieces(sizes: np.ndarray, size: int) -> np.ndarray:
    """int64[n]: in how many pieces of about ``size`` bytes or ids documents are read."""
    return np.clip(sizes // size, 1, _MOST_PIECES)


def cut_text(content: bytes, parts: int, size: int) -> list[bytes]:
    """The pieces of a text, as `Pieces` gives them one by one."""
    places = [_cut(content, part, parts, size) for part in range(parts + 1)]
    return [content[start:stop] for start, stop in itertools.pairwise(places)]


def _cut(content: bytes | np.ndarray, part: int, parts: int, size: int) -> int:
    """Where a part begins."""
    place = len(content) * part // parts
    if part in (0, parts) or not isinstance(content, bytes):
        return place
    for mark in (b"\n", b" "):
        found = content.find(mark, place, place + size // 4)
        if found >= 0:
            return found + 1
    while place < len(content) and content[place] & 0xC0 == 0x80:
        place += 1
    return place


class DocumentStream:
    """Documents ``position, position + stride, …`` of an order, read in pieces.

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
        """Up to ``room`` pairs of the current document: (inputs, targets, target_bytes), or None at the end."""
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


def empty_batch(rows: int, length: int) -> Batch:
    """A batch of padding: zeros of shape [rows, length], weights float32, the rest int32."""
    names = ("tokens", "targets", "segment_ids", "positions", "target_bytes")
    batch: Batch = {name: np.zeros((rows, length), np.int32) for name in names}
    batch["weights"] = np.zeros((rows, length), np.float32)
    return batch


def fill_row(batch: Batch, row: int, stream: DocumentStream) -> bool:
    """Fills one row of ``batch`` (made by `empty_batch`) from the stream; False when the stream had nothing left.

    A row that the stream's end leaves short keeps its padding: segment 0, weight 0.
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
