"""Decide which fields may differ when a run is resumed, and which stored values it keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mhc.config.config import Config
from mhc.config.fields import ValidationConfig
from mhc.config.names import field_names, value_of
from mhc.errors import UserError

# Fields that affect how a run executes but not its result; a name that ends in a dot is a whole group.
MACHINE = ("watchdog.", "kernels.", "mesh.", "distributed.", "data.prefetch", "data.workers", "data.cache_dir")
# Fields that may differ between a stored run and the command that resumes it, in the same form.
RESUMABLE = (
    "residual.module",
    "train.steps",
    "validation.every",
    "checkpoint.",
    "monitor.probe_every",
    "monitor.probe_sequences",
    "monitor.tensorboard",
    "monitor.wandb",
    "monitor.progress_every",
    *MACHINE,
)


def diff(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Return the fields whose values differ: {dotted name: (old value, new value)}, in the order of ``Config``."""
    pairs = ((name, (value_of(old, name), value_of(new, name))) for name in field_names())
    return {name: (before, after) for name, (before, after) in pairs if before != after}


def check_resume(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Return what changes when a run continues with another config: {dotted name: (old value, new value)}.

    The end of the decay may move with train.steps where it is the last step before and after.

    Args:
      old: the stored config, resolved.
      new: the config of the command that resumes the run, resolved.

    Raises:
      UserError: a field that is not in RESUMABLE changes; the message names each with both values.
    """
    changes = diff(old, keep_history(old, new))
    decay_is_last = all(config.schedule.decay_steps in (None, config.last_step) for config in (old, new))
    refused = {
        name: pair
        for name, pair in changes.items()
        if not _resumable(name) and not (name == "schedule.decay_steps" and decay_is_last)
    }
    if refused:
        listed = "; ".join(f"{name}: stored {before!r}, given {after!r}" for name, (before, after) in refused.items())
        may = ", ".join(name + "*" if name.endswith(".") else name for name in RESUMABLE)
        raise UserError(f"this run was started with another config: {listed}. Only these may change on resume: {may}")
    return changes


def _resumable(name: str) -> bool:
    return any(name.startswith(entry) if entry.endswith(".") else name == entry for entry in RESUMABLE)


# Stored values that a run keeps ---------------------------------------------------------------------------------------


def keep_validation_rule(old: Config, new: Config) -> Config:
    """Return the unresolved config `new`, with the validation rule of an older version if `old` has that rule.

    Fields that `new` sets stay as they are.
    """
    if old.validation.rule != "first":
        return new
    kept = kept_validation(vars(old.validation), vars(new.validation))
    return dataclasses.replace(new, validation=ValidationConfig(**kept))


def kept_validation(stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the group ``validation`` as given, completed by the stored ones of an older version's run.

    Args:
      stored: the stored fields; those of a run from before ``validation.rule`` have none.
      given: the fields of the command.
    """
    kept = {"rule": "first", "batches": stored.get("batches")} if stored.get("rule", "first") == "first" else {}
    return {**given, **{name: value for name, value in kept.items() if given.get(name) is None}}


def keep_history(old: Config, new: Config) -> Config:
    """Return `new` with the stored history before the first z-score, unless `new` asks for another.

    The history derives from train.steps, which may change on resume; what counts as a spike shall not change with it.
    """
    monitor = dataclasses.replace(new.monitor, zscore_min_history=None)
    if new.monitor.zscore_min_history not in (None, dataclasses.replace(new, monitor=monitor).zscore_min_history):
        return new
    kept = old.monitor.zscore_min_history
    kept = kept if kept is None else min(kept, new.monitor.zscore_window)
    return dataclasses.replace(new, monitor=dataclasses.replace(monitor, zscore_min_history=kept))
