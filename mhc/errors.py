"""Define the exception for a user's mistake, and find the nearest name that its message offers."""

from __future__ import annotations

import difflib
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
