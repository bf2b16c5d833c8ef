"""Read the arguments that several measures share: lists of kinds and of numbers, and the file for the figures."""

from __future__ import annotations

from collections.abc import Sequence

from mhc import cli, kinds
from mhc.errors import UserError, did_you_mean


def add_json(parser: cli.Parser) -> None:
    """Add the option ``--json FILE``."""
    parser.add_argument("--json", metavar="FILE", help="write the figures there")


def check_json(file: str | None) -> None:
    """Refuse a file that cannot be written before anything is measured. Raises UserError."""
    if file is not None:
        cli.check_file(file, "--json")


def kind_names(text: str, option: str, *, first: str | None = None) -> list[str]:
    """Return the kinds of a list ``plain,mhc``.

    Args:
      first: a kind that the figures are divided by: it is put first, and added where the list lacks it.

    Raises:
      UserError: a name that is no kind's, or a name twice.
    """
    names = text.split(",")
    for name in names:
        if name not in kinds.names():
            near = did_you_mean(name, kinds.names())
            raise UserError(f"{option}: {name!r}, allowed: {', '.join(kinds.names())}{near}")
    _refuse_repeated(names, option)
    return names if first is None else [first, *(name for name in names if name != first)]


def numbers(text: str, option: str, *, low: int = 1) -> list[int]:
    """Return the whole numbers of a list ``12,24``.

    Raises:
      UserError: something else than whole numbers from ``low``, or a number twice.
    """
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) >= low for part in parts):
        raise UserError(f"{option}: {text!r}, allowed: whole numbers from {low}, separated by commas")
    values = [int(part) for part in parts]
    _refuse_repeated([str(value) for value in values], option)
    return values


def at_least(value: int, option: str, low: int = 1) -> int:
    """Return the value of an option that is a number from ``low``. Raises UserError for a smaller one."""
    if value < low:
        raise UserError(f"{option}: {value}, allowed: an int >= {low}")
    return value


def _refuse_repeated(names: Sequence[str], option: str) -> None:
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise UserError(f"{option}: {repeated} is named twice")
