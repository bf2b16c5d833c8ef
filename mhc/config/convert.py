"""Convert a Config from and to ConfigDicts, nested dicts and JSON, and change it by overrides."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from mhc import extras, kinds
from mhc.config import kind_modules
from mhc.config.config import Config, is_derived
from mhc.config.fields import ResidualConfig
from mhc.config.group import rules
from mhc.config.kind_modules import ModuleError
from mhc.config.names import field_names, fields_of, find, groups
from mhc.errors import UserError
from mhc.rules import unwrapped


def default() -> Any:
    """Return a ``ml_collections.ConfigDict`` of every field with its default, for the ``get_config`` of a config file.

    It is locked: assigning a field that does not exist raises AttributeError. The group ``residual`` is open, because
    the options of a kind from elsewhere are known only once its module is imported; `from_config_dict` checks them.

    Raises:
      mhc.extras.MissingExtra: ml_collections is not installed.
    """
    try:
        from ml_collections import ConfigDict
        from ml_collections.config_dict import placeholder
    except ModuleNotFoundError:
        extras.require_train("mhc.config.default()")
        raise
    config = ConfigDict()
    for group in groups():
        config[group] = part = ConfigDict()
        for field in fields_of(group).values():
            part[field.name] = placeholder(unwrapped(field.hint)[0]) if field.default is None else field.default
    config.lock()
    config.residual.unlock()
    return config


def from_config_dict(raw: Any) -> Config:
    """Return the validated Config of an ``ml_collections.ConfigDict`` or a nested Mapping.

    Fields that are missing take their defaults.

    Raises:
      UserError: a group or field is unknown (the message has the nearest name and the group's fields), a value has
        another type or is out of range, or fields do not go together.
    """
    tree = raw.to_dict() if hasattr(raw, "to_dict") else raw
    if not isinstance(tree, Mapping):
        raise UserError(f"config: given {type(raw).__name__}, allowed: a ConfigDict or a nested dict")
    load_kinds(tree)
    parts: dict[str, Any] = {}
    for group, fields in tree.items():
        if group not in groups() or not isinstance(fields, Mapping):
            find(str(group))  # refuses an unknown group, and a value in the place of a group's fields
        for leaf in fields:
            find(f"{group}.{leaf}")
        parts[group] = groups()[group](**fields)
    return Config(**parts)


def load_kinds(tree: Mapping[str, Any]) -> None:
    """Import the modules that ``residual.module`` of a nested config names, so that its kinds and options are known.

    Raises:
      UserError: a module cannot be imported.
    """
    fields = tree.get("residual")
    modules = fields.get("module") if isinstance(fields, Mapping) else None
    if modules is not None:
        kind_modules.load(rules(ResidualConfig)["module"].check("residual.module", str | None, modules))


def change(config: Config, overrides: Mapping[str, Any]) -> Config:
    """Return a resolved config with other values; the result is to be resolved again.

    What was derived is derived anew, and options that only the old residual kind has go back to their defaults.

    Args:
      config: a resolved config.
      overrides: {dotted name: value}.

    Raises:
      UserError: the values do not go together.
    """
    if not overrides:
        return config
    tree = to_dict(config)
    for name in field_names():
        group, _, leaf = name.partition(".")
        if is_derived(config, name):
            tree[group][leaf] = None
    load_kinds({"residual": {"module": overrides.get("residual.module")}})
    kind = kinds.known().get(overrides.get("residual.kind", ""), config.residual.spec)
    for name in config.residual.spec.options:
        if name not in kind.options and not kinds.options()[name].anywhere:
            del tree["residual"][name]
    for name, value in overrides.items():
        group, _, leaf = name.partition(".")
        tree[group][leaf] = value
    return from_config_dict(tree)


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Return the Config as a nested dict {group: {field: value}}."""
    parts = {group: getattr(config, group) for group in groups()}
    return {
        group: part.flat() if isinstance(part, ResidualConfig) else dataclasses.asdict(part)
        for group, part in parts.items()
    }


def to_json(config: Config) -> str:
    """Return the Config as indented JSON with a final newline; ``from_json`` gives it back exactly."""
    return json.dumps(to_dict(config), indent=2) + "\n"


def from_json(text: str, place: object = None) -> Config:
    """Return the Config of the text that `to_json` wrote.

    Args:
      text: JSON.
      place: the file that holds it, for the message where a module that it names is missing.

    Raises:
      UserError: the text is no JSON or no valid configuration.
      ModuleError: the module of its residual kind cannot be imported.
    """
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"config: not JSON: line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise UserError("config: not JSON: nested too deep") from None
    try:
        return from_config_dict(upgraded(tree))
    except ModuleError as error:
        raise ModuleError(f"{place}: {error}" if place is not None else str(error)) from None


def upgraded(tree: Any) -> Any:
    """Return the nested dict of a stored config with what its version left unsaid.

    A config from before the field ``validation.rule`` gets ``first``, the only rule at that time.
    """
    validation = tree.get("validation") if isinstance(tree, dict) else None
    if not isinstance(validation, dict) or "batches" not in validation or "rule" in validation:
        return tree
    return {**tree, "validation": {**validation, "rule": "first"}}
