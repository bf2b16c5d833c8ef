"""Report how far a preparation has come, and at what speed."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable

import numpy as np

TELL_EVERY = 5.0  # seconds
_RECENT = 60.0  # seconds that speed and time left are taken over
Tell = Callable[[str], None]


class SpeedMeter:
    """Reports every few seconds how much is done and the speed of the last minute, and at the end the whole speed."""

    def __init__(self, total: int, tell: Tell):
        self._total = total
        self._tell = tell
        self._kept = 0
        self._told = time.monotonic()
        self._began = self._told
        self._seen = collections.deque([(self._told, 0)])  # (time, bytes) of each line, the first of a minute ago

    def keep(self, size: int) -> None:
        """Count bytes of the corpus that were prepared before the start."""
        self._kept += size

    def tell(self, counts: list[int], last: bool = False) -> None:
        """Report how much is done if a report is due; with ``last``, report the end.

        Args:
          counts: documents, tokens and bytes of the corpus that were prepared since the start.
        """
        documents, ids, size = counts
        now = time.monotonic()
        if now - self._told < TELL_EVERY and not last:
            return
        self._told = now
        while len(self._seen) > 1 and self._seen[1][0] <= now - _RECENT:
            self._seen.popleft()
        then, before = (self._began, 0) if last else self._seen[0]
        self._seen.append((now, size))
        rate = (size - before) / max(now - then, 1e-9)
        left = (self._total - self._kept - size) / rate if rate else float("inf")
        time_left = f"{left // 60:.0f} min {left % 60:02.0f} s left" if np.isfinite(left) else "time left unknown"
        kept = f" (and {self._kept / 1e6:,.1f} MB from before)" if self._kept else ""
        self._tell(
            f"{documents:,} documents, {ids:,} tokens, {size / 1e6:,.1f} of {self._total / 1e6:,.1f} MB{kept}, "
            f"{rate / 1e6:.2f} MB/s, {time_left}"
        )
