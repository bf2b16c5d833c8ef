"""Find unintended differences between the arms of a comparison: fields, code, versions, devices, data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mhc import config as configs
from mhc.errors import UserError
from mhc.eval.compare.runs import RATE, SEEDS, Arm, differing_fields, material
from mhc.grid import plan
from mhc.provenance import comparable

_COVERED = ("data.", "train.steps", "train.batch_size")  # the findings say what follows from these
_DATA = {"corpus": "data.", "manifest": "data.", "tokenizer": "data.tokenizer"}  # hashes that a varied field changes
_LONGEST = 60  # characters of a value that are shown


def unintended(arms: Sequence[Arm], root: Path | None) -> list[str]:
    """Return a warning for each thing in which arms differ beyond what their comparison varies.

    A comparison varies what the grid of ``root`` does, if its grid.json has all the arms; else the residual, the
    learning rate and the seeds. A field that was derived from others is no difference by itself.
    """
    varied = _varied(arms, root)
    warnings = []
    strange = [
        field
        for field in differing_fields(arms)
        if material(field)
        and not field.startswith(_COVERED)
        and not (_usual(field) if varied is None else field in varied)
        and not all(_derived(arm, field) for arm in arms)
    ]
    if strange:
        what = "the residual, the learning rate and the seeds" if varied is None else "what their grid varies"
        warnings.append(f"The arms differ in more than {what}: {_listed(strange)}.")
    return warnings + _starts(arms, varied or frozenset())


def _varied(arms: Sequence[Arm], root: Path | None) -> frozenset[str] | None:
    """Return the fields that the grid of the runs varies; None if the runs are of no grid."""
    if root is None or not (root / plan.FILE).is_file():
        return None
    try:
        changes = plan.read(root).arms
    except UserError:  # of another version
        return None
    if not all(arm.name in changes for arm in arms):
        return None
    return frozenset(field for arm in arms for field in changes[arm.name])


def _usual(field: str) -> bool:
    return field.startswith("residual.") or field in (RATE, *SEEDS)


def _derived(arm: Arm, field: str) -> bool:
    """Return whether a field holds what it would if nobody had set it."""
    if arm.flat.get(field) is None:
        return True
    try:
        return field in configs.field_names() and configs.is_derived(configs.from_json(json.dumps(arm.config)), field)
    except (UserError, ValueError):  # of another version, or made up: not resolved
        return False


def _starts(arms: Sequence[Arm], varied: frozenset[str]) -> list[str]:
    """Return a warning for each way in which the arms were started differently, by all starts in their run.json."""
    known = [arm for arm in arms if arm.starts]
    if not known:
        return []
    out = []
    if len(known) < len(arms):
        missing = [arm.name for arm in arms if not arm.starts]
        out.append(f"There is no run.json of {_listed(missing)}: the code and machine of these runs are not known.")
    values: dict[str, dict[str, list[str]]] = {}  # name: {value: arms}
    for arm in known:
        each = [comparable(start) for start in arm.starts]
        for name in dict.fromkeys(name for start in each for name in start):
            value = " then ".join(dict.fromkeys(_shown(start.get(name)) for start in each))
            values.setdefault(name, {}).setdefault(value, []).append(arm.name)
    for name, by_value in values.items():
        absent = [arm.name for arm in known if not any(arm.name in names for names in by_value.values())]
        if absent:
            by_value.setdefault(_shown(None), []).extend(absent)
        changed = any(" then " in value for value in by_value)
        if (len(by_value) > 1 or changed) and not any(field.startswith(_DATA.get(name, "-")) for field in varied):
            apart = "; ".join(f"{value} ({_listed(names)})" for value, names in by_value.items())
            out.append(f"The arms were not all started alike: {name}: {apart}.")
    return out


def _shown(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _listed(parts: Sequence[str]) -> str:
    """Return names with commas; of more than nine the rest are counted."""
    return ", ".join(parts) if len(parts) <= 9 else f"{', '.join(parts[:7])} and {len(parts) - 7} more"
