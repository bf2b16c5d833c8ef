"""Choose the source of a mixture that each sequence of each batch comes from.

The source of row r at step s is read off a sequence of low discrepancy: the fraction of u + s·α + r·β, with α and β of
irrational ratio and u by the seed, falls into one of K parts of [0, 1) as long as the weights. So shares come near the
weights at once, in every row and in every batch, and depend on the seed, s and r alone: not on the batch size, the
number of processes or what was read before. The arithmetic is that of 64-bit integers, the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_STEP = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio
_ROW = 0xC13FA9A902A6328F  # 2^64 over the plastic number
_WHOLE = 1 << 64


class Assignment:
    """Gives the number of the source of each sequence."""

    def __init__(self, weights: Sequence[float], seed: int):
        """Prepare the parts of [0, 1) for ``weights``, which add up to 1."""
        ends = np.cumsum(np.asarray(weights, np.float64))[:-1]
        self._ends = [min(int(end * _WHOLE), _WHOLE - 1) for end in ends]
        self._start = int(np.random.SeedSequence((seed, 0x6D6978)).generate_state(1, np.uint64)[0])

    def __call__(self, step: int, row: int) -> int:
        """Return the number of the source of the sequence in ``row`` of batch ``step``, both counted from 0."""
        place = (self._start + step * _STEP + row * _ROW) % _WHOLE
        return sum(place >= end for end in self._ends)
