"""A disk that is full: what could not be written, how much is free, and an exit code of its own."""

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
from mhc.streams import STDOUT

NO_ROOM = 6  # exit code
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# The same where a library tells it in words alone; numpy counts what it could not write.
_SIGNS = re.compile("|".join([*map(re.escape, map(os.strerror, _FULL)), r"\d+ requested and \d+ written"]))


class NoRoom(UserError):
    """There is no room for what is to be written: a line like that of a user's mistake, and the exit code NO_ROOM."""


def why_full(error: BaseException) -> str | None:
    """Return why there is no room, in the system's words, where that is what an error or one that led to it says."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _FULL:
            return os.strerror(seen.errno)
        sign = None if isinstance(seen, UserError) else _SIGNS.search(str(seen))
        if sign is not None:
            return sign[0] if sign[0][0].isalpha() else os.strerror(errno.ENOSPC)
        seen = seen.__cause__ or seen.__context__
    return None


def kind(error: BaseException) -> type[UserError]:
    """Return the class for a line that says what a system refused: NoRoom for a full disk."""
    return UserError if why_full(error) is None else NoRoom


def free(place: str | os.PathLike[str]) -> str:
    """Return how much the file system of a place has left, in words; ``""`` where that cannot be asked."""
    path = Path(place).absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        left = float(shutil.disk_usage(path).free)
    except OSError:
        return ""
    for unit in ("bytes", "kB", "MB"):
        if left < 999.5:
            return f"{left:.3g} {unit} free in {path}"
        left /= 1000
    return f"{left:,.1f} GB free in {path}"


@contextlib.contextmanager
def writing(what: Any, place: str | os.PathLike[str] | None = None, then: str = "") -> Iterator[None]:
    """Turn what a full disk raises into one line.

    Args:
      what: is written: a file, or words. place: a path on its file system; None: ``what`` is one.
      then: what the user may do, or what is left.

    Raises:
      NoRoom: there is none; every other error is passed on.
    """
    try:
        yield
    except NoRoom:
        raise
    except Exception as error:
        why = why_full(error)
        if why is None:
            raise
        raise NoRoom(_line(what, why, what if place is None else place, then)) from None


def _line(what: Any, why: str, place: str | os.PathLike[str], then: str) -> str:
    left = "" if place == STDOUT else free(place)
    return f"{what}: cannot be written: {why}" + "".join(f"; {part}" for part in (left, then) if part)


def line_of(error: BaseException, targets: Sequence[str] = ()) -> str | None:
    """Return the line for an error that nobody turned into one, None where a full disk is not what it says.

    ``targets``: what the program was to write, for an error that names no file.
    """
    why = why_full(error)
    if why is None:
        return None
    named = [seen.filename for seen in _chain(error) if isinstance(seen, OSError) and isinstance(seen.filename, str)]
    if named or targets:
        return _line(named[0] if named else " or ".join(targets), why, (named or targets)[0], "")
    return f"not all could be written: {why}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
