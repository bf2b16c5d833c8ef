"""Refuse, in one line, run files whose values are not what a run writes: edited, damaged, or of another project."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mhc.errors import UserError
from mhc.monitor.guard import COLLAPSING, MONITORS

# Fields of config.json that a comparison computes with: what each must be. Others are only shown.
_NUMBERS = ("optimizer.lr", "residual.scale", "optimizer.clip_norm", "monitor.zscore_threshold")
_INTEGERS = ("monitor.zscore_min_history", "monitor.probe_every", "seed.init", "seed.data", "train.steps")
_NEEDED = ("residual.kind", "seed.init", "seed.data", "train.steps", "data.source")
_TEXTS = ("residual.kind", "data.source")


def check_config(config: Mapping[str, Any], file: Path) -> None:
    """Raise UserError where config.json lacks what every run has, or a value that is computed with has another type."""
    for group, fields in config.items():
        if not isinstance(fields, Mapping):
            raise UserError(f"{file}: {group}: given {_shown(fields)}, allowed: fields by name")
    for field in _NEEDED:
        group, _, name = field.partition(".")
        if name not in config.get(group, {}):
            raise UserError(f"{file}: {field} is missing, so this is no run of this project")
    for fields, fits, allowed in (
        (_TEXTS, lambda value: isinstance(value, str), "a text"),
        (_INTEGERS, lambda value: _is_integer(value) or value is None, "an integer"),
        (_NUMBERS, lambda value: _is_number(value) or value is None, "a number"),
    ):
        for field in fields:
            group, _, name = field.partition(".")
            if name in config.get(group, {}) and not fits(value := config[group][name]):
                raise UserError(f"{file}: {field}: given {_shown(value)}, allowed: {allowed}")
    for field in _NEEDED:
        group, _, name = field.partition(".")
        if config[group][name] is None:
            raise UserError(f"{file}: {field} is null, so this is no run of this project")


def check_records(records: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Raise UserError for a line of metrics.jsonl or probes.jsonl without a step, or with a value that is no number.

    A value is a number, a truth value, null, an array of numbers and nulls with as many in every row, or several of
    these by name.
    """
    for number, record in enumerate(records, 1):
        if not _is_integer(record.get("step")):
            raise UserError(f"{file}: line {number} has no step")
        for name, value in record.items():
            if not _is_measure(value):
                raise UserError(
                    f"{file}: line {number}: {name}: given {_shown(value)}, allowed: a number, or an array of numbers"
                )


def check_probes(records: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Raise UserError as `check_records`, and for several values by name where a monitor watches an array."""
    check_records(records, file)
    watched = {key for key, _ in MONITORS.values()} | set(COLLAPSING.values())
    for number, record in enumerate(records, 1):
        for name in watched & record.keys():
            if isinstance(record[name], Mapping):
                raise UserError(
                    f"{file}: line {number}: {name}: given {_shown(record[name])}, allowed: a number, or an array of "
                    f"numbers"
                )


def check_numbers(rows: Sequence[tuple[int, Any]], name: str, file: Path) -> None:
    """Raise UserError where one of (step, value) has an array, or several values by name, in place of a number."""
    for step, value in rows:
        if isinstance(value, list | Mapping):
            raise UserError(f"{file}: step {step}: {name}: given {_shown(value)}, allowed: a number")


# What an event holds beside its step, by name.
_EVENT_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "event": (lambda value: isinstance(value, str), "a text"),
    "monitor": (lambda value: isinstance(value, str), "a text"),
    "reason": (lambda value: isinstance(value, str), "a text"),
    "flagged": (
        lambda value: (
            isinstance(value, Sequence | Mapping)
            and not isinstance(value, str)
            and all(isinstance(name, str) for name in value)
        ),
        "a list of names",
    ),
    "to": (lambda value: _is_integer(value), "an integer"),
    "skipped_batches": (lambda value: _is_integer(value), "an integer"),
}


def check_events(events: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Raise UserError for a line of events.jsonl without a step or a name, or with a value of another type."""
    for number, event in enumerate(events, 1):
        if not _is_integer(event.get("step")):
            raise UserError(f"{file}: line {number} has no step")
        if "event" not in event:
            raise UserError(f"{file}: line {number} has no event")
        for name, (fits, allowed) in _EVENT_FIELDS.items():
            if name in event and not fits(event[name]):
                raise UserError(f"{file}: line {number}: {name}: given {_shown(event[name])}, allowed: {allowed}")


def check_summary(summary: Mapping[str, Any], file: Path) -> None:
    """Raise UserError where the run's own summary.json holds values of another type."""
    for name, fits, allowed in (
        ("seconds", _is_number, "a number"),
        ("steps", _is_integer, "an integer"),
        ("params", _is_integer, "an integer"),
        ("exit_reason", lambda value: isinstance(value, str), "a text"),
    ):
        if name in summary and not fits(summary[name]):
            raise UserError(f"{file}: {name}: given {_shown(summary[name])}, allowed: {allowed}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_integer(value)


def _is_measure(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_measure(part) for part in value.values())
    return value is None or isinstance(value, bool) or _is_number(value) or _is_array(value)


def _is_array(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    try:
        return np.asarray(value, np.float64).dtype == np.float64 and not _holds_text(value)
    except (TypeError, ValueError, OverflowError):
        return False


def _holds_text(value: Any) -> bool:
    return any(_holds_text(part) for part in value) if isinstance(value, list) else isinstance(value, str)


def _shown(value: Any, most: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}…"
