"""Find fields by their dotted names, such as ``residual.n``, and read their values from texts."""

from __future__ import annotations

import ast
import contextlib
import functools
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from mhc import kinds
from mhc.config.derived import Groups
from mhc.config.fields import ResidualConfig
from mhc.config.group import Group, hints, rules, unknown_field
from mhc.errors import UserError, did_you_mean
from mhc.rules import Rule


class Field(NamedTuple):
    """Describes a field of a group."""

    name: str
    """The name within the group."""
    hint: Any
    """The type, such as ``int | None``."""
    default: Any
    rule: Rule
    """The rule; an ``mhc.kinds.Option`` where the field belongs to residual kinds."""


@functools.cache
def groups() -> Mapping[str, type[Group]]:
    """Return the class of every group by its name, in the order of ``Config``."""
    return types.MappingProxyType(typing.get_type_hints(Groups))


def fields_of(group: str) -> Mapping[str, Field]:
    """Return the fields of a group by name; those of ``residual`` include the options of every known kind."""
    declared = groups()[group]
    fields = {
        name: Field(name, hints(declared)[name], declared.__dataclass_fields__[name].default, rule)  # type: ignore[attr-defined]
        for name, rule in rules(declared).items()
    }
    if declared is ResidualConfig:
        fields |= {name: Field(name, option.type, option.default, option) for name, option in kinds.options().items()}
    return fields


def field_names() -> Iterator[str]:
    """Yield the dotted name of every field, in the order of ``Config``; options of kinds end the group ``residual``."""
    for group in groups():
        yield from (f"{group}.{name}" for name in fields_of(group))


def find(name: str) -> Field:
    """Return the field of a dotted name. Raises UserError for an unknown one, with the nearest name."""
    known = groups()
    group, _, leaf = name.partition(".")
    if group not in known:
        # Where the group was forgotten, the places of the field are the better hint.
        same_leaf = [full for full in field_names() if full.partition(".")[2] == (leaf or group)]
        hint = f" (did you mean {' or '.join(same_leaf)}?)" if same_leaf and not leaf else did_you_mean(group, known)
        raise UserError(f"{name}: unknown group {group}{hint}; groups: {', '.join(known)}")
    fields = fields_of(group)
    if leaf not in fields:
        raise unknown_field(name, fields)
    return fields[leaf]


def value_of(config: Groups, name: str) -> Any:
    """Return the value of a field by its dotted name; the default for an option that the config's kind lacks."""
    group, _, leaf = name.partition(".")
    return getattr(getattr(config, group), leaf)


def default_of(name: str) -> Any:
    """Return the default of a field by its dotted name. Raises UserError for an unknown name."""
    return find(name).default


def describe(name: str) -> str:
    """Return in one line what a field means and what it may hold. Raises UserError for an unknown name."""
    field = find(name)
    return f"{field.rule.doc} [{field.rule.type_words(field.hint)}]"


def parse_value(name: str, text: str) -> Any:
    """Return the value of a field from its text on the command line, checked as far as one field can be.

    Args:
      name: the field's dotted name.
      text: the value as it was typed.

    Raises:
      UserError: the field is unknown, or the value has another type or is out of range.
    """
    field = find(name)
    options = typing.get_args(field.hint) if isinstance(field.hint, types.UnionType) else (field.hint,)
    value: Any = text
    if type(None) in options and text == "None":
        value = None
    elif bool in options:
        value = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}.get(text.lower(), text)
    elif str not in options:
        # The rule refuses what is no number, in the words of every other refusal.
        with contextlib.suppress(ValueError, SyntaxError):
            value = float(text) if float in options else ast.literal_eval(text)
    return field.rule.check(name, field.hint, value)
