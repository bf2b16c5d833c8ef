"""Describe what a configuration field may hold, and refuse other values."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable
from typing import Any, NoReturn

from mhc.errors import UserError, did_you_mean


@dataclasses.dataclass(frozen=True)
class Rule:
    """Describes a field beyond its type. ``low`` and ``high`` are inclusive; ``above`` and ``below`` are not."""

    doc: str
    """The field's meaning, in one line."""
    choices: tuple[str, ...] | Callable[[], tuple[str, ...]] = dataclasses.field(default=(), kw_only=True)
    """The values that a string may have; a function where they may grow."""
    low: float | None = dataclasses.field(default=None, kw_only=True)
    high: float | None = dataclasses.field(default=None, kw_only=True)
    above: float | None = dataclasses.field(default=None, kw_only=True)
    below: float | None = dataclasses.field(default=None, kw_only=True)
    words: str = dataclasses.field(default="", kw_only=True)
    """The allowed values in words; "": they follow from type, choices and bounds."""
    further: Callable[[str, Any], None] | None = dataclasses.field(default=None, kw_only=True)
    """A further check of (the field's dotted name, its value), which raises UserError."""

    def allowed(self) -> tuple[str, ...]:
        """Return the choices that are allowed at the moment, since kinds may be registered later."""
        return self.choices() if callable(self.choices) else self.choices

    def bounds(self) -> str:
        """Return the bounds in words, or ``""``."""
        if self.low is not None and self.high is not None:
            return f"from {self.low} to {self.high}"
        parts = ((">=", self.low), (">", self.above), ("<=", self.high), ("<", self.below))
        return " and ".join(f"{sign} {bound}" for sign, bound in parts if bound is not None)

    def holds(self, value: float) -> bool:
        """Return whether a number lies within the bounds; infinities and NaN never do."""
        return (
            math.isfinite(value)
            and (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def type_words(self, hint: Any) -> str:
        """Return in words what a field of this type and rule may hold."""
        base, optional = unwrapped(hint)
        if self.words:
            words = self.words
        elif self.choices:
            words = f"one of {', '.join(self.allowed())}"
        else:
            article = {int: "an int", float: "a float", bool: "True or False", str: "a string"}
            several = "a tuple of ints" if typing.get_args(base)[:1] == (int,) else "a tuple of floats"
            words = f"{article.get(base, several)} {self.bounds()}".rstrip()
        return words + (" or None" if optional else "")

    def check(self, name: str, hint: Any, value: Any) -> Any:
        """Return the value if it is allowed. An int becomes a float, and a list a tuple, where the type asks for it.

        Args:
          name: the field's dotted name, for messages.
          hint: its type, such as ``float | None``.
          value: the given value.

        Raises:
          UserError: the value is of another type, out of range or not among the choices.
        """
        base, optional = unwrapped(hint)
        allowed = self.type_words(hint)
        if value is None:
            return value if optional else refuse(name, value, allowed)
        if base in (int, float):
            return self._number(base, name, value, allowed)
        if typing.get_origin(base) is tuple:
            if not isinstance(value, (tuple, list)):
                refuse(name, value, allowed)
            return tuple(self._number(typing.get_args(base)[0], name, item, allowed) for item in value)
        if not isinstance(value, base):
            refuse(name, value, allowed)
        if self.choices and value not in self.allowed():
            refuse(name, value, allowed, did_you_mean(value, self.allowed()))
        if self.further is not None:
            self.further(name, value)
        return value

    def _number(self, base: type, name: str, value: Any, allowed: str) -> int | float:
        # A bool is an int to Python, and `steps=True` is never meant.
        if isinstance(value, bool) or not isinstance(value, int if base is int else (int, float)):
            refuse(name, value, allowed)
        if not self.holds(value):
            refuse(name, value, allowed)
        return int(value) if base is int else float(value)


def unwrapped(hint: Any) -> tuple[Any, bool]:
    """Return a type without None, and whether it allows None."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next(option for option in options if option is not type(None)), type(None) in options


def refuse(name: str, given: object, allowed: str, nearest: str = "") -> NoReturn:
    """Raise the UserError for a field's value.

    Args:
      name: the field's dotted name.
      given: the value.
      allowed: what is allowed, in words.
      nearest: ends the message, such as what `did_you_mean` returns.
    """
    raise UserError(f"{name}: given {given!r}, allowed: {allowed}{nearest}")
