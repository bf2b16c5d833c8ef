"""Keep train.log: the lines that a run prints, with the time of each."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from mhc import stdio
from mhc.errors import UserError

FILE = "train.log"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class TrainLog:
    """Appends lines, each with its time (UTC), to a file; any thread may write. Lines are lost while the disk is full.

    Args:
      path: the file. A torn last line, left by a crash, is ended first.
      clock: the time as it is written.
    """

    def __init__(self, path: str | os.PathLike[str], clock: Callable[[], str] = _now):
        self.path = Path(path)
        torn = self.path.is_file() and not self.path.read_bytes().endswith(b"\n")
        self._file = self.path.open("ab", buffering=0)
        self._torn = torn and self.path.stat().st_size > 0  # a line that is still to be ended
        self._clock = clock
        self._lock = threading.Lock()
        self._part = ""  # of a line that came in pieces

    def line(self, text: str) -> None:
        """Write whole lines."""
        with self._lock:
            self._write(text.rstrip("\n"))

    def write(self, text: str) -> int:
        """Write text as to a stream: a line is written when it ends; of a rewritten line only its last form is."""
        with self._lock:
            *whole, self._part = (self._part + text).split("\n")
            for line in whole:
                self._write(line.removesuffix("\r").rpartition("\r")[2].removesuffix("\x1b[K"))
        return len(text)

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""

    def fileno(self) -> int:
        """Return the file's descriptor."""
        return self._file.fileno()

    def close(self) -> None:
        """Write what is left of a line, and close the file."""
        with self._lock:
            if self._part:
                self._write(self._part)
                self._part = ""
            self._file.close()

    def _write(self, text: str) -> None:
        if self._file.closed:
            return
        lines = "".join(f"{self._clock()} {line}\n" for line in text.split("\n")).encode(errors="backslashreplace")
        with contextlib.suppress(OSError):
            whole = b"\n" * self._torn + lines
            self._torn = self._file.write(whole) < len(whole)

    @contextlib.contextmanager
    def keeping_stderr(self) -> Iterator[None]:
        """Copy to the log what is written to ``sys.stderr`` meanwhile, and the exception that ends it, if any."""
        before = sys.stderr
        sys.stderr = _Both(stdio.lossy(before), self)
        try:
            yield
        except BaseException:
            self._ended(*sys.exc_info())
            raise
        finally:
            sys.stderr = before

    def _ended(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, UserError):
            self.line(f"error: {error}")
        elif isinstance(error, KeyboardInterrupt):
            self.line("interrupted")
        else:
            self.line("".join(traceback.format_exception(kind, error, trace)))


class _Both:
    """Writes to a text stream and to a log; all other attributes are the stream's own."""

    def __init__(self, stream: TextIO, log: TrainLog):
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        self._log.write(text)
        return self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
