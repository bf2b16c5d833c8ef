"""Guard the standard streams of a program: its result on stdout, and everything else that it prints.

A stream fails when its reader goes away (``… | head``), when the disk under it is full, or when it was closed before
the program began. A program then goes on without its log lines. It ends, quietly, when nobody reads its result.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

STDOUT = "stdout"  # stands where messages otherwise name a file
CLOSED_PIPE = 141  # exit code: 128 + SIGPIPE, as other programs have it


class ClosedPipe(SystemExit):
    """Ends a program whose result has no reader any more."""

    def __init__(self) -> None:
        super().__init__(CLOSED_PIPE)


class _Stream:
    """Wraps a text stream, or None; attributes that are not defined here are those of the stream."""

    def __init__(self, stream: TextIO | None):
        self._stream = stream

    def writelines(self, lines: Iterable[str]) -> None:
        """Write lines one after the other."""
        for line in lines:
            self.write(line)

    def write(self, text: str) -> int:
        """Write a text."""
        raise NotImplementedError

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        try:
            return self._stream is not None and self._stream.isatty()
        except ValueError:  # closed
            return False

    def fileno(self) -> int:
        """Return the file descriptor. Raises io.UnsupportedOperation where there is none."""
        if self._stream is None:
            raise io.UnsupportedOperation("fileno")
        return self._stream.fileno()

    def __getattr__(self, name: str) -> Any:
        if name == "_stream" or self._stream is None:
            raise AttributeError(name)
        return getattr(self._stream, name)


class LossyStream(_Stream):
    """Writes log lines and discards what cannot be written; its writes never raise."""

    def write(self, text: str) -> int:
        """Write a text, or discard it."""
        if self._stream is not None:
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write out what is buffered, as far as possible."""
        if self._stream is not None:
            with contextlib.suppress(OSError, ValueError):
                self._stream.flush()


class ResultStream(_Stream):
    """Writes a program's result. Raises ClosedPipe where its reader has gone, OSError where the disk is full.

    Attributes:
      keep_going: the program has files to write as well: it goes on without a reader, and ``end`` raises ClosedPipe.
    """

    def __init__(self, stream: TextIO | None):
        super().__init__(stream)
        self.keep_going = False
        self._closed = False

    def write(self, text: str) -> int:
        """Write a text; discard it where the stream was closed before the program began."""
        if self._stream is not None and not self._closed:
            with self._noticing_closed_pipe():
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write out what is buffered."""
        if self._stream is not None and not self._closed:
            with self._noticing_closed_pipe():
                self._stream.flush()

    def end(self) -> None:
        """Write out what is buffered, at the end of the program. Raises ClosedPipe where the reader has gone."""
        self.keep_going = False
        self.flush()
        if self._closed:
            raise ClosedPipe

    @contextlib.contextmanager
    def _noticing_closed_pipe(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            self._closed = True
            if not self.keep_going:
                raise ClosedPipe from None
        except OSError as error:
            raise OSError(error.errno, error.strerror, STDOUT) from None


def keep_going() -> None:
    """Let the program go on when its result has no reader any more, because it also writes files."""
    if isinstance(sys.stdout, ResultStream):
        sys.stdout.keep_going = True


def lossy(stream: TextIO | None) -> Any:
    """Return a stream whose writes never raise."""
    return stream if isinstance(stream, LossyStream) else LossyStream(stream)


def write_line(line: str) -> None:
    """Write a line to stdout and flush it; discard it where stdout fails."""
    stream = sys.stdout._stream if isinstance(sys.stdout, ResultStream) else sys.stdout
    if stream is None:
        return
    try:
        stream.write(line + "\n")
        stream.flush()
    except (OSError, ValueError):
        flush_or_discard(stream)


@contextlib.contextmanager
def guarded() -> Iterator[ResultStream]:
    """Replace stdout by a `ResultStream` and stderr by a `LossyStream` for the duration of a program.

    Closed descriptors among 0, 1 and 2 are opened on the null device first: otherwise the next file that is opened
    would take the number, and what libraries print would end up in it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    out, err = sys.stdout, sys.stderr
    result = ResultStream(out)
    sys.stdout, sys.stderr = result, lossy(err)
    try:
        yield result
    finally:
        sys.stdout, sys.stderr = out, err


def flush_or_discard(stream: TextIO | None) -> None:
    """Write out what a stream has buffered, or discard it, so that the interpreter's own flush at exit cannot fail."""
    if stream is None:
        return
    try:
        stream.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
            stream.flush()
