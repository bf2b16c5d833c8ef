"""Cut documents, before they are tokenised, into the pieces that training reads."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Protocol

import numpy as np

from mhc.config import DataConfig
from mhc.data.shards.records import Tokenised

_MOST_PIECES = 64  # pieces of a document; to read any of them the whole document is read


@dataclasses.dataclass(frozen=True)
class Piece:
    """Holds a document before it is tokenised, or a part of it."""

    content: bytes | np.ndarray | Tokenised  # UTF-8 text, or ids
    ends: bool  # whether the document ends here
    begins: bool = True  # whether the document begins here
    name: Callable[[], str] | None = None  # gives the document's name, for messages


class Documents(Protocol):
    """Gives documents at random; a `mhc.data.corpus.sources.Source` does."""

    @property
    def sizes(self) -> np.ndarray | None:
        """Return int64[n]: about how many bytes or ids each document has; None if there are too many to find out."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> bytes | np.ndarray | Tokenised: ...

    def ends(self, index: int) -> bool: ...


class Pieces:
    """Cuts documents into pieces of about ``size`` bytes or ids, at most 64 each, and gives the pieces at random.

    A row reads a document to its end. If long documents were left whole, a batch would come from the same few documents
    for hundreds of steps, and the first batches only from their beginnings. Text is cut after a line if one ends
    nearby, otherwise after a space, and at worst between two characters. The pieces of a document add up to it.
    """

    def __init__(self, documents: Documents, size: int | None):
        """Cut ``documents``; a ``size`` of None leaves each of them whole."""
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
        """Return the number of the document that a piece comes from."""
        return index if self._first is None else int(np.searchsorted(self._first, index, side="right")) - 1


def _always(document: int) -> bool:
    return True


def piece_size(data: DataConfig) -> int:
    """Return about how many bytes (ids, for tokens:) a piece has: those of 8 sequences.

    Pieces are short enough for a batch to change its documents every few steps, and long enough to break few sequences.
    """
    bytes_per_token = 1 if data.tokenizer == "bytes" or data.source.startswith("tokens:") else 4
    return 8 * data.sequence_length * bytes_per_token


def count_pieces(sizes: np.ndarray, size: int) -> np.ndarray:
    """Return int64[n]: how many pieces of about ``size`` bytes or ids each document has."""
    return np.clip(sizes // size, 1, _MOST_PIECES)


def cut_text(content: bytes, parts: int, size: int) -> list[bytes]:
    """Return the pieces of a text, as `Pieces` gives them one by one."""
    places = [_cut(content, part, parts, size) for part in range(parts + 1)]
    return [content[start:stop] for start, stop in itertools.pairwise(places)]


def _cut(content: bytes | np.ndarray, part: int, parts: int, size: int) -> int:
    """Return the byte at which a part of the text begins."""
    place = len(content) * part // parts
    if part in (0, parts) or not isinstance(content, bytes):
        return place
    for mark in (b"\n", b" "):
        end = content.find(mark, place, place + size // 4)
        if end >= 0:
            return end + 1
    while place < len(content) and content[place] & 0xC0 == 0x80:
        place += 1
    return place
