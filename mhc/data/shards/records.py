"""Define the files of a shard: a record for each document, and a table of the documents."""

from __future__ import annotations

import dataclasses

import numpy as np

ENDINGS = ("array_record", "npy")  # of a shard's two files
TABLE = np.dtype(
    [
        ("file", "<i4"),  # number of the document's file in the manifest
        ("start", "<i8"),  # place in the file, as `mhc.data.corpus.indexed.Index` has it
        ("stop", "<i8"),
        ("number", "<i8"),
        ("ends", "?"),
        ("ids", "<u4"),
        ("bytes", "<u4"),  # of text
    ]
)


@dataclasses.dataclass(frozen=True)
class Tokenised:
    """Holds a document that was tokenised beforehand, in pieces: its ids may depend on where it is cut."""

    ids: np.ndarray  # unsigned[n]
    lengths: np.ndarray | None  # unsigned[n]: bytes of text that each id stands for; None: the tokeniser's byte_lengths
    ends: np.ndarray  # int64[p]: ids up to the end of each piece
    rests: np.ndarray  # int64[p]: bytes of each piece beyond those of its ids

    @property
    def rest(self) -> int:
        """Return the bytes of text that no id stands for."""
        return int(self.rests.sum())

    def part(self, part: int, parts: int) -> Tokenised:
        """Return one of ``parts`` parts: a piece as it was tokenised, or a run of ids if there are not as many."""
        first, last = part, part + 1
        if parts == len(self.ends):
            start, stop = int(self.ends[part - 1]) if part else 0, int(self.ends[part])
        else:
            start, stop = len(self.ids) * part // parts, len(self.ids) * (part + 1) // parts
            first = int(np.searchsorted(self.ends, start, side="right")) if part else 0
            last = int(np.searchsorted(self.ends, stop, side="right"))
        lengths = None if self.lengths is None else self.lengths[start:stop]
        return Tokenised(self.ids[start:stop], lengths, np.array([stop - start]), self.rests[first:last])


def pack(document: Tokenised) -> bytes:
    """Return a document as a record, for `unpack`.

    A record holds, all little-endian: the number of pieces p, the bytes of an id and the bytes of a length (0: lengths
    are the tokeniser's), as uint32[3]; ends and rests, as uint32[p] each; ids and lengths [n], unsigned of those
    widths.
    """
    arrays = [_narrow(document.ids)] + ([] if document.lengths is None else [_narrow(document.lengths)])
    widths = [array.dtype.itemsize for array in arrays] + ([0] if document.lengths is None else [])
    header = np.concatenate([[len(document.ends), *widths], document.ends, document.rests]).astype("<u4")
    return b"".join(array.tobytes() for array in (header, *arrays))


def unpack(record: bytes) -> Tokenised:
    """Return the document that `pack` was given, as views of the record."""
    pieces, width, length_width = (int(value) for value in np.frombuffer(record, "<u4", 3))
    ends = np.frombuffer(record, "<u4", pieces, 12)
    rests = np.frombuffer(record, "<u4", pieces, 12 + 4 * pieces)
    start, count = 12 + 8 * pieces, int(ends[-1])
    ids = np.frombuffer(record, f"<u{width}", count, start)
    lengths = np.frombuffer(record, f"<u{length_width}", count, start + width * count) if length_width else None
    return Tokenised(ids, lengths, ends, rests)


def _narrow(values: np.ndarray) -> np.ndarray:
    """Return values as unsigned integers of as few bytes as hold them all."""
    return values.astype(np.min_scalar_type(int(values.max(initial=0))).newbyteorder("<"))
