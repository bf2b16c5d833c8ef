"""Choose the rows of a validation set: spread evenly over its documents, or the first ones.

Spread: n rows begin at n places as far apart as they can be, by the sizes of the documents. (More than 512 rows begin
at 512 places, several at each, since every place costs a document that is tokenised.) A document is cut into rows of T
pairs from its beginning, and a row begins with one of those; a row that its document leaves short goes on with the
documents behind it, as in packing. No pair is in two rows. Which rows these are depends on the documents, the
tokeniser, T and n alone. A set that is sure to fit into n rows is read whole.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mhc.data.rows.packing import Document, DocumentStream

PLACES = 512  # at most, where rows begin


class RowStream(DocumentStream):
    """Reads documents ``first`` to before ``end`` of an order, from which rows of ``length`` pairs are filled in turn.

    ``touched`` holds the documents that a pair was taken from, ``document`` is the last of them.
    """

    def __init__(
        self,
        fetch: Callable[[int], Document],
        first: int,
        end: int,
        *,
        length: int,
        count: int = 0,
        sizes: np.ndarray | None = None,
        spread: bool = True,
    ):
        """Place the rows.

        Args:
          count: rows, or 0 for all.
          sizes: of these documents, as `Documents.sizes`; None counts them as equal.
        """
        super().__init__(fetch, first, 1, end=end)
        self._first, self._length, self._count, self._row = first, length, count, 0
        self.touched: set[int] = set()
        self.document = first
        sizes = np.ones(end - first, np.int64) if sizes is None else np.maximum(sizes, 1).astype(np.int64)
        known = int(sizes.sum()) + len(sizes)
        self._ends = np.cumsum(sizes) if spread and count > 0 and known > count * length else None

    def next_row(self) -> bool:
        """Go to where the next row begins; return False after the last."""
        row, self._row = self._row, self._row + 1
        if self._count and row >= self._count:
            return False
        if self._ends is not None:
            places = min(self._count, PLACES)
            # Rows are shared out evenly: a place's first row is the first whose number falls into its share.
            place = row * places // self._count
            if row == 0 or (row - 1) * places // self._count != place:
                self._go_to(place, places)
        return True

    def _go_to(self, place: int, places: int) -> None:
        """Go to the middle of the next of the equal parts of the documents, unless earlier rows have passed it."""
        assert self._ends is not None
        where = int(self._ends[-1]) * (2 * place + 1) // (2 * places)
        number = int(np.searchsorted(self._ends, where, side="right"))
        start = int(self._ends[number - 1]) if number else 0
        size, position = int(self._ends[number]) - start, self._first + number
        if position < self.position:
            return
        document = self._document if position == self.position and self._document else self._fetch(position)
        chunks = -(-len(document.target_bytes) // self._length)
        offset = chunks * (where - start) // size * self._length
        if (position, offset) > (self.position, self.offset) and chunks:
            self.position, self.offset, self._document = position, offset, document

    def take(self, room: int) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Return pairs as `DocumentStream.take` does, and note their document in ``touched``."""
        taken = super().take(room)
        if taken is not None:
            # A document that is used up leaves the stream at the next one's start.
            self.document = self.position - (self.offset == 0)
            self.touched.add(self.document)
        return taken
