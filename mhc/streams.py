"""What a program prints: lines beside its result, which nothing may depend on, and its result.

A stream fails when whoever reads it goes away (``… | head``), when the disk under it is full, or when it was closed
before the program began. Then what is said beside the result is left out, and the program goes on; where the result
itself has no reader any more, the program ends, quietly.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

STDOUT = "stdout"  # in the place of a file's name
CLOSED_PIPE = 141  # exit code: 128 + SIGPIPE, as of other programs whose reader has gone


class ClosedPipe(SystemExit):
    """Whoever read the program's result has gone."""

    def __init__(self) -> None:
        super().__init__(CLOSED_PIPE)


class _Stream:
    """A text stream, or none; everything that is not said here is the stream's own."""

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
        """Return whether it is a terminal."""
        try:
            return self._stream is not None and self._stream.isatty()
        except ValueError:  # closed
            return False

    def fileno(self) -> int:
        """Return the descriptor. Raises io.UnsupportedOperation where there is none."""
        if self._stream is None:
            raise io.UnsupportedOperation("fileno")
        return self._stream.fileno()

    def __getattr__(self, name: str) -> Any:
        if name == "_stream" or self._stream is None:
            raise AttributeError(name)
        return getattr(self._stream, name)


class Unfailing(_Stream):
    """A stream for what is said beside the result: what cannot be written is left out."""

    def write(self, text: str) -> int:
        """Write a text, or leave it out."""
        if self._stream is not None:
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write out what can be."""
        if self._stream is not None:
            with contextlib.suppress(OSError, ValueError):
                self._stream.flush()


class Result(_Stream):
    """A stream for the result. Raises ClosedPipe where its reader has gone, OSError where there is no room.

    Attributes:
      patient: the program has more to do than to print: once the reader has gone it goes on, and ``end`` raises.
    """

    def __init__(self, stream: TextIO | None):
        super().__init__(stream)
        self.patient = False
        self._gone = False

    def write(self, text: str) -> int:
        """Write a text; where the stream was closed before the program began, nobody wants it."""
        if self._stream is not None and not self._gone:
            with self._ending():
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write out what waits."""
        if self._stream is not None and not self._gone:
            with self._ending():
                self._stream.flush()

    def end(self) -> None:
        """Write out what waits; the program has nothing more to do."""
        self.patient = False
        self.flush()
        if self._gone:
            raise ClosedPipe

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            self._gone = True
            if not self.patient:
                raise ClosedPipe from None
        except OSError as error:
            raise OSError(error.errno, error.strerror, STDOUT) from None


def patient() -> None:
    """Have the program go on when the reader of its result has gone: it has a file to write as well."""
    if isinstance(sys.stdout, Result):
        sys.stdout.patient = True


def unfailing(stream: TextIO | None) -> Any:
    """Return the stream as one whose writes never raise."""
    return stream if isinstance(stream, Unfailing) else Unfailing(stream)


def say(line: str) -> None:
    """Write a line to stdout at once; where that cannot be, go on without it."""
    stream = sys.stdout._stream if isinstance(sys.stdout, Result) else sys.stdout
    if stream is None:
        return
    try:
        stream.write(line + "\n")
        stream.flush()
    except (OSError, ValueError):
        drop(stream)


@contextlib.contextmanager
def guarded() -> Iterator[Result]:
    """Put `Result` and `Unfailing` in the place of stdout and stderr meanwhile.

    A descriptor of the three that is closed is opened on nothing first: the next file that is opened would take its
    number, and get what libraries print.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    out, err = sys.stdout, sys.stderr
    result = Result(out)
    sys.stdout, sys.stderr = result, unfailing(err)
    try:
        yield result
    finally:
        sys.stdout, sys.stderr = out, err


def drop(stream: TextIO | None) -> None:
    """Write out what waits in a stream; what cannot be is dropped, so that the interpreter does not fail at its end."""
    if stream is None:
        return
    try:
        stream.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
            stream.flush()
