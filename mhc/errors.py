"""Define the exception for a user's mistake, and find the nearest name that its message offers."""

from __future__ import annotations

import difflib
import os
import sys
import traceback
from collections.abc import Iterable


class UserError(Exception):
    """Reports a mistake of the user in one line: what is wrong, where, and what is allowed.

    Command-line programs print ``error: <message>`` on stderr and exit with code 2; tracebacks are left to bugs.
    """


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """Return ``" (did you mean NAME?)"`` for the name of `allowed` nearest to `given`, or ``""`` where none is near."""
    names = list(allowed)
    by_folded = {name.lower(): name for name in names}
    matches = difflib.get_close_matches(given.lower(), by_folded, n=1, cutoff=0.5)
    return f" (did you mean {by_folded[matches[0]]}?)" if matches else ""


LONGEST = 300  # characters of somebody else's message that are shown
# Packages whose frames say nothing about where a user's code went wrong.
_LIBRARIES = ("mhc", "jax", "jaxlib", "flax", "numpy", "optax")
_STANDARD = os.path.dirname(os.path.abspath(os.__file__)) + os.sep


def failure(error: BaseException) -> str:
    """Return ``" (FILE, line N): TYPE: message"`` for an error of a user's code, in one line; the place if known."""
    if isinstance(error, SyntaxError):
        place = f" ({error.filename}, line {error.lineno})" if error.filename else ""
    else:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_theirs(frame.filename)]
        place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    # str() of a KeyError is quoted, that of a SyntaxError repeats the place; args[0] of an OSError is its number alone.
    plain = isinstance(error, (KeyError, SyntaxError)) and error.args
    words = " ".join(str(error.args[0] if plain else error).split())
    words = words if len(words) <= LONGEST else f"{words[:LONGEST]} …"
    return f"{place}: {type(error).__name__}: {words}"


def _is_theirs(file: str) -> bool:
    """Return whether a frame's file is the user's: no file of the standard library, a library or this project."""
    if file.startswith("<") or (file.startswith(_STANDARD) and "site-packages" not in file):
        return False
    for name in _LIBRARIES:
        origin = getattr(sys.modules.get(name), "__file__", None)
        if origin and file.startswith(os.path.dirname(os.path.abspath(origin)) + os.sep):
            return False
    return True
