"""Check the fields of a group by their rules when the group is made."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from mhc.errors import UserError, did_you_mean
from mhc.rules import Rule, refuse


def setting(default: Any, doc: str, **rule: Any) -> Any:
    """Return a dataclass field with its rule.

    Args:
      default: the field's default.
      doc: what the field means, in one line.
      rule: the other arguments of `mhc.rules.Rule`.
    """
    return dataclasses.field(default=default, metadata={"rule": Rule(doc, **rule)})


def hints(group: Any) -> Mapping[str, Any]:
    """Return the types of a group's fields."""
    return _hints(group)


@functools.cache  # every change of a config makes new groups
def _hints(group: Any) -> Mapping[str, Any]:
    return typing.get_type_hints(group)


def rules(group: Any) -> Mapping[str, Rule]:
    """Return the rules of a group's declared fields by name."""
    return {declared.name: declared.metadata["rule"] for declared in dataclasses.fields(group) if declared.metadata}


class Group:
    """Holds a group of fields; checks the type and range of each when it is made, under the name ``GROUP.FIELD``."""

    group: ClassVar[str]

    def __init_subclass__(cls, *, group: str | None = None) -> None:
        if group is not None:
            cls.group = group

    def __post_init__(self) -> None:
        for name, rule in rules(type(self)).items():
            value = rule.check(f"{self.group}.{name}", hints(type(self))[name], getattr(self, name))
            object.__setattr__(self, name, value)


def refuse_unused(group: Group, names: Sequence[str], reason: str) -> None:
    """Refuse a value that would silently have no effect: any of ``names`` that differs from its default.

    Args:
      group: the group that holds the fields.
      names: the names of the fields.
      reason: ends the message, after the default, such as ``unless schedule.kind=wsd``.

    Raises:
      UserError: a field differs from its default.
    """
    for declared in dataclasses.fields(group):  # type: ignore[arg-type]  # every subclass is a dataclass
        value = getattr(group, declared.name)
        if declared.name in names and value != declared.default:
            refuse(f"{group.group}.{declared.name}", value, f"{declared.default} {reason}")


def unknown_field(name: str, known: Iterable[str]) -> UserError:
    """Return the error for a field that a group lacks: the nearest name, and the names that there are.

    Args:
      name: the dotted name; that of the group alone where a value was given to the group.
      known: the names of the group's fields.
    """
    fields = list(known)
    group, _, leaf = name.partition(".")
    nearest = did_you_mean(leaf, fields).replace("did you mean ", f"did you mean {group}.") if leaf else ""
    problem = "unknown field" if leaf else "is a group, not a field"
    return UserError(f"{name}: {problem}{nearest}; {group} has: {', '.join(fields)}")
