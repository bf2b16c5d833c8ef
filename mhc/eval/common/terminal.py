"""What the evaluation programs print: progress of long work, and tables."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence


class Progress:
    """A line on stderr every few seconds of long work; quick work prints none."""

    def __init__(self, every: float = 5.0) -> None:
        self._every = every
        self._start = self._last = time.monotonic()

    def __call__(self, line: Callable[[float], str]) -> None:
        """``line``: made of the seconds since the start, only when it is due."""
        now = time.monotonic()
        if now - self._last >= self._every:
            self._last = now
            print(line(now - self._start), file=sys.stderr, flush=True)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as lines whose columns stand under one another, two spaces apart."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
