"""Report a full disk in one line: what could not be written, and how much is free."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mhc.errors import UserError
from mhc.stdio import STDOUT

EXIT_CODE = 6
_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Some libraries report a full disk in words alone; numpy counts the items that it could not write.
_WORDS = re.compile("|".join([*map(re.escape, map(os.strerror, _ERRNOS)), r"\d+ requested and \d+ written"]))


class DiskFull(UserError):
    """Reports a full disk in one line, like a user's mistake; programs end with `EXIT_CODE`."""


def reason(error: BaseException) -> str | None:
    """Return the system's words for a full disk, or None where neither an error nor its causes report one."""
    for cause in _causes(error):
        if isinstance(cause, OSError) and cause.errno in _ERRNOS:
            return os.strerror(cause.errno)
        match = None if isinstance(cause, UserError) else _WORDS.search(str(cause))
        if match is not None:
            return match[0] if match[0][0].isalpha() else os.strerror(errno.ENOSPC)
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def error_class(error: BaseException) -> type[UserError]:
    """Return the class of the one-line error that shall replace an error: DiskFull for a full disk, else UserError."""
    return UserError if reason(error) is None else DiskFull


def free_space(path: str | os.PathLike[str]) -> str:
    """Return how much the file system of a path has left, in words; ``""`` where it cannot be asked."""
    folder = Path(path).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        left = float(shutil.disk_usage(folder).free)
    except OSError:
        return ""
    for unit in ("bytes", "kB", "MB"):
        if left < 999.5:
            return f"{left:.3g} {unit} free in {folder}"
        left /= 1000
    return f"{left:,.1f} GB free in {folder}"


@contextlib.contextmanager
def reporting(target: Any, path: str | os.PathLike[str] | None = None, then: str = "") -> Iterator[None]:
    """Turn the error of a full disk into one line.

    Args:
      target: what is being written, for the message: a path, or words.
      path: a path on the file system that is written to; None: ``target`` is that path.
      then: ends the message: what the user may do, or what remains.

    Raises:
      DiskFull: the disk is full. Every other error passes unchanged.
    """
    try:
        yield
    except DiskFull:
        raise
    except Exception as error:
        why = reason(error)
        if why is None:
            raise
        raise DiskFull(_line(target, why, target if path is None else path, then)) from None


def message(error: BaseException, targets: Sequence[str] = ()) -> str | None:
    """Return the line for an error that no `reporting` caught, or None where it is not about a full disk.

    Args:
      targets: paths that the program was to write, for an error that names no file.
    """
    why = reason(error)
    if why is None:
        return None
    files = [
        cause.filename for cause in _causes(error) if isinstance(cause, OSError) and isinstance(cause.filename, str)
    ]
    if files or targets:
        return _line(files[0] if files else " or ".join(targets), why, (files or targets)[0], "")
    return f"not all output could be written: {why}"


def _line(target: Any, why: str, path: str | os.PathLike[str], then: str) -> str:
    free = "" if path == STDOUT else free_space(path)
    return f"{target}: cannot be written: {why}" + "".join(f"; {part}" for part in (free, then) if part)
