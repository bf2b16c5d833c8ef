"""Arms of a grid as data: what differs between them, built by product, zip and chain, and their names.

An *arm* is a mapping {"group.field": value} of what it changes in the grid's base config. *Arms* are a tuple of them,
and every function here gives Arms, so that they combine freely:

    product(axis("residual.kind", "plain", "mhc"), seeds(0, 1, 2))      # 6 arms
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from mhc import config as configs
from mhc.errors import UserError

Arm = Mapping[str, Any]
Arms = tuple[Arm, ...]


@dataclasses.dataclass(frozen=True)
class Grid:
    """What ``get_grid()`` of a grid file gives."""

    base: str
    """The config file that every arm starts from, ``file.py`` or ``file.py:text``, relative to the grid file."""
    arms: Arms
    """What each arm changes."""


def arm(fields: Arm) -> Arms:
    """One arm that sets these fields: ``arm({"residual.kind": "plain", "residual.scale": 0.0})``; {}: the base itself.

    Raises: UserError for an unknown field, with the nearest name.
    """
    for name in fields:
        configs.describe(name)
    return (dict(fields),)


def axis(field: str, *values: Any) -> Arms:
    """One arm a value of one field. Raises UserError for an unknown field or without a value."""
    configs.describe(field)
    if not values:
        raise UserError(f"axis {field}: no value given, allowed: at least one")
    return tuple({field: value} for value in values)


def seeds(*numbers: int) -> Arms:
    """One arm a seed, which initial weights and data order share: arms of the same seed are pairs."""
    return zipped(axis("seed.init", *numbers), axis("seed.data", *numbers))


def product(*factors: Arms) -> Arms:
    """Every combination of one arm of each factor. Raises UserError where two of them set the same field."""
    return functools.reduce(lambda left, right: tuple(_join(a, b) for a in left for b in right), factors, ({},))


def zipped(*parts: Arms) -> Arms:
    """The first arms of all parts together, then the second ones, and so on.

    Raises: UserError for parts of different lengths, or where two of them set the same field.
    """
    lengths = [len(part) for part in parts]
    if len(set(lengths)) > 1:
        raise UserError(f"zipped: parts of {', '.join(map(str, lengths))} arms, allowed: parts of one length")
    return tuple(functools.reduce(_join, row, {}) for row in zip(*parts, strict=True))


def chain(*parts: Arms) -> Arms:
    """The arms of one part after the other."""
    return tuple(one for part in parts for one in part)


def _join(left: Arm, right: Arm) -> Arm:
    for name in right:
        if name in left:
            raise UserError(f"{name} is set twice in one arm: {left[name]!r} and {right[name]!r}")
    return {**left, **right}


# Names ----------------------------------------------------------------------------------------------------------------

# What a name calls a field, in the order in which a name lists them; "" gives the bare value. Every other field has its
# full name, and the seeds stand last. A name is made of the arm's own fields alone, so that no other arm changes it: an
# entry changed or added here renames the arms of existing workdirs.
_SHORT = {
    "residual.kind": "",
    "residual.scale": "scale",
    "residual.init": "init",
    "residual.n": "n",
    "residual.iters": "iters",
    "residual.sinkhorn": "sinkhorn",
    "init.scale_residual": "scaled_init",
    "model.layers": "layers",
    "model.width": "width",
    "optimizer.lr": "lr",
}
_SEEDS = ("seed.init", "seed.data")
_LONGEST = 100  # bytes; file systems allow 255, and k8s, logs and reports add to it


def name_of(fields: Arm) -> str:
    """The name of an arm, which is also its folder: ``mhc,lr=0.003,seed=0``.

    Letters, digits and ``._+=,-`` only. It depends on these fields and their values, not on their order and not on
    other arms. Where a value holds other characters, or would make the name of another arm, or the name gets long, a
    hash of the fields ends it.
    """
    rest = dict(fields)
    parts = [(short, rest.pop(field)) for field, short in _SHORT.items() if field in rest]
    seeds_last: list[tuple[str, Any]] = []
    if all(field in rest for field in _SEEDS) and rest["seed.init"] == rest["seed.data"]:
        seeds_last = [("seed", rest.pop("seed.init"))]
        del rest["seed.data"]
    parts += [(field, rest[field]) for field in sorted(rest)] + seeds_last
    plain = ",".join(f"{label}={_text(value)}" if label else _text(value) for label, value in parts) or "base"
    safe = re.sub(r"[^A-Za-z0-9._+=,-]", "_", plain)
    # A text that is empty or holds what joins names could make the name of another arm.
    clear = all(re.fullmatch(r"[^+=,]+", value) for value in fields.values() if isinstance(value, str))
    if (
        clear
        and safe == plain
        and len(safe) <= _LONGEST
        and not safe.startswith(".")
        and (safe != "base" or not fields)
    ):
        return safe
    canonical = json.dumps({field: fields[field] for field in sorted(fields)}, default=list)
    return f"{safe.lstrip('.')[:_LONGEST]}-{hashlib.sha256(canonical.encode()).hexdigest()[:8]}"


def _text(value: Any) -> str:
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    if isinstance(value, (tuple, list)):
        return "+".join(map(_text, value)) + ("+" if len(value) < 2 else "")  # ("a",) is not "a"
    return str(value)
