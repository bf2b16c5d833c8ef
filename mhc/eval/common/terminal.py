"""Print what the evaluation programs say: the progress of long work, and tables."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence


class Progress:
    """Prints a line on stderr every few seconds of long work: how much is done, how fast, and the time left.

    Quick work prints none. The speed leaves out what came before the first call, such as compiling.
    """

    def __init__(self, unit: str, total: int | None = None, *, name: str = "", every: float = 5.0) -> None:
        """Start the clock.

        Args:
          unit: what is counted, such as "rows".
          total: how many there are, where that is known.
          name: of what is worked on; opens each line.
          every: seconds between two lines.
        """
        self._unit, self._total, self._name, self._every = unit, total, name, every
        self._last = time.monotonic()
        self._first: tuple[int, float] | None = None

    def __call__(self, done: int, total: int | None = None, note: str = "") -> None:
        """Count ``done`` as done; print a line, with ``note`` in it, if one is due."""
        now = time.monotonic()
        if self._first is None:
            self._first = (done, now)
        if now - self._last < self._every:
            return
        self._last = now
        total = self._total if total is None else total
        before, start = self._first
        parts = [f"{done:,}{'' if total is None else f' of {total:,}'} {self._unit}", *([note] if note else [])]
        if done > before and now > start:
            speed = (done - before) / (now - start)
            parts.append(f"{speed:,.1f} a second")
            if total is not None:
                parts.append(f"about {(total - done) / speed:,.0f} s left")
        print(f"{self._name}: " if self._name else "", ", ".join(parts), sep="", file=sys.stderr, flush=True)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as lines whose columns stand under one another, two spaces apart."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
