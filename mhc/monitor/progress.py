"""Write the progress line of a run, and durations in words."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import TextIO

from mhc import stdio
from mhc.files import Record


class Progress:
    """Shows how far a run is: step, loss, tokens per second, time left, and bits per byte once validated.

    On a terminal the line is rewritten in place, at most ten times a second; elsewhere a line is printed at every
    ``every``-th step, at validations and at the last step.

    Args:
        total: steps of the whole run.
        every: steps between lines where the stream is no terminal; 0: write nothing at all.
        label: put before the line, to tell runs apart.
        stream: where to; default stderr. A line that it does not take is left out (`mhc.stdio`).
        clock: seconds, monotonic.

    Attributes:
        log: is called with every line that is printed where the stream is no terminal; None: nothing is.
    """

    log: Callable[[str], None] | None = None

    def __init__(
        self,
        total: int,
        *,
        every: int = 10,
        label: str = "",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._every, self._label = total, every, label
        self._stream = stdio.lossy(sys.stderr if stream is None else stream)
        self._clock = clock
        self._tty = self._stream.isatty()
        self._first: tuple[int, float] | None = None  # step and time of the first record: compilation is behind it
        self._shown = -math.inf
        self._open = False  # a terminal line without its newline
        self._validated: tuple[int, str] | None = None  # step and value, in words, of the last validation

    def write(self, record: Record) -> None:
        """Show a step's metrics.

        They are ``step``, ``loss`` and ``tokens_per_second``; ``val_loss`` and ``val_bits_per_byte`` if it validated.
        """
        if not self._every:
            return
        step, now = int(record["step"]), self._clock()
        if self._first is None:
            self._first = (step, now)
        validated = record.get("val_loss", record.get("val_bits_per_byte")) is not None
        if validated:
            bits = record.get("val_bits_per_byte")
            loss = f"{record.get('val_loss', math.nan):.4f} nats/token"
            self._validated = (step, loss if bits is None else f"{float(bits):.4f} bits/byte")
        last = step >= self._total
        due = last or validated or step % self._every == 0
        if self._tty:
            if last or validated or now - self._shown >= 0.1:
                self._stream.write(f"\r{self._line(record, step, now)}\x1b[K")
                self._stream.flush()
                self._shown, self._open = now, True
        elif due:
            self._stream.write(self._line(record, step, now) + "\n")
            self._stream.flush()
        if due and self.log is not None:
            self.log(self._line(record, step, now))

    def note(self, text: str) -> None:
        """Print a line of its own (an event), without tearing the progress line."""
        self._end_line()
        self._stream.write(text + "\n")
        self._stream.flush()
        if self.log is not None:
            self.log(text)

    def close(self) -> None:
        """End the line on a terminal."""
        self._end_line()

    def _end_line(self) -> None:
        if self._open:
            self._stream.write("\n")
            self._stream.flush()
            self._open = False

    def _line(self, record: Record, step: int, now: float) -> str:
        width = len(str(self._total))
        parts = [f"step {step:{width}d}/{self._total}", f"loss {float(record['loss']):.4f}"]
        if self._validated is not None:
            when, value = self._validated
            parts.append(f"val {value}" + ("" if when == step else f" at step {when}"))
        parts.append(f"{float(record['tokens_per_second']):,.0f} tokens/s")
        assert self._first is not None
        first_step, first_time = self._first
        if step > first_step and step < self._total:
            left = (now - first_time) / (step - first_step) * (self._total - step)
            parts.append(f"{duration(left)} left")
        return (f"{self._label}  " if self._label else "") + "  ".join(parts)


def duration(seconds: float) -> str:
    """Return seconds as people write them: 42s, 3m05s, 2h07m, 3d04h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
