"""Take the config of a run, to continue it or to change it: ``--config configs/of_run.py:runs/a``.

A run's folder does not record which values were given and which were derived. A field that holds what would be derived
is derived again, so that it follows the fields that it depends on.
"""

from __future__ import annotations

from pathlib import Path

from ml_collections import ConfigDict

from mhc import config as configs
from mhc.errors import UserError


def get_config(run: str = "") -> ConfigDict:
    """Return the config of the run in folder ``run``. Raises UserError where there is none."""
    stored = Path(run) / "config.json"
    if not run or not stored.is_file():
        raise UserError(f"configs/of_run.py:{run}: no run folder, allowed: configs/of_run.py:RUN, e.g. runs/a")
    config = configs.from_json(stored.read_text(), stored)
    result = configs.default()
    for name in configs.field_names():
        group, _, field = name.partition(".")
        value = None if configs.is_derived(config, name) else configs.value_of(config, name)
        if value is not None:
            result[group][field] = value
        elif result[group].get(field) is not None:
            with result.ignore_type():
                result[group][field] = None
    return result
