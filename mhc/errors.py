"""The one exception that stands for a user's mistake, and the nearest name that its message offers."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake of the user: one line that says what is wrong, where, and what is allowed.

    Command-line programs print ``error: <message>`` on stderr and exit with code 2; a traceback is for our own bugs.
    """


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """``" (did you mean NAME?)"`` for the name of `allowed` nearest to `given`, or ``""`` where none is near."""
    names = list(allowed)
    by_folded = {name.lower(): name for name in names}
    found = difflib.get_close_matches(given.lower(), by_folded, n=1, cutoff=0.5)
    return f" (did you mean {by_folded[found[0]]}?)" if found else ""
