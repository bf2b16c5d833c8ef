"""Cut documents that are not tokenised yet into the pieces that training reads."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Protocol

import numpy as np

from mhc.config import DataConfig
from mhc.data.shards.records import Tokenised

_MOST_PIECES = 64  # of a document: each piece costs a reading of the whole


@dataclasses.dataclass(frozen=True)
class Piece:
    """Holds a document before it is tokenised, or a part of it."""

    content: bytes | np.ndarray | Tokenised  # UTF-8 text, or ids
    ends: bool  # whether the document ends here
    begins: bool = True  # whether it begins here
    name: Callable[[], str] | None = None  # of the document, for messages


class Documents(Protocol):
    """Gives random access to documents of known sizes; a `mhc.data.corpus.sources.Source` is one."""

    @property
    def sizes(self) -> np.ndarray | None:
        """Return int64[n]: about the bytes (ids) of each; None: unknown, and too many to find out."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> bytes | np.ndarray | Tokenised: ...

    def ends(self, index: int) -> bool: ...


class Pieces:
    """Cuts documents into pieces of about ``size`` bytes or ids (at most 64 pieces each), with random access.

    A row stays with its document until that ends. Were long documents left whole, a batch would come from the same few
    for hundreds of steps, and the first batches from their openings alone. Text is cut after a line where one ends
    nearby, otherwise after a space, at worst between two characters; the pieces of a document add up to it.
    """

    def __init__(self, documents: Documents, size: int | None):
        """Take the documents to cut; a ``size`` of None leaves every document whole."""
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
        """Return the number of the document that a piece is of."""
        return index if self._first is None else int(np.searchsorted(self._first, index, side="right")) - 1


def _always(document: int) -> bool:
    return True


def piece_size(data: DataConfig) -> int:
    """Return the size of the pieces that a document is cut into for training: bytes (ids, for tokens:) of 8 sequences.

    Short enough for a batch to change its documents every few steps, long enough for few sequences to be broken.
    """
    bytes_per_token = 1 if data.tokenizer == "bytes" or data.source.startswith("tokens:") else 4
    return 8 * data.sequence_length * bytes_per_token


def count_pieces(sizes: np.ndarray, size: int) -> np.ndarray:
    """Return int64[n]: in how many pieces of about ``size`` bytes or ids documents are read."""
    return np.clip(sizes // size, 1, _MOST_PIECES)


def cut_text(content: bytes, parts: int, size: int) -> list[bytes]:
    """Return the pieces of a text, as `Pieces` gives them one by one."""
    places = [_cut(content, part, parts, size) for part in range(parts + 1)]
    return [content[start:stop] for start, stop in itertools.pairwise(places)]


def _cut(content: bytes | np.ndarray, part: int, parts: int, size: int) -> int:
    """Return where a part begins."""
    place = len(content) * part // parts
    if part in (0, parts) or not isinstance(content, bytes):
        return place
    for mark in (b"\n", b" "):
        mark_at = content.find(mark, place, place + size // 4)
        if mark_at >= 0:
            return mark_at + 1
    while place < len(content) and content[place] & 0xC0 == 0x80:
        place += 1
    return place
