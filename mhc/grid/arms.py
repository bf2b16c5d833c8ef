"""Build the arms of a grid by product, zip and chain, and name them.

An *arm* is a mapping {"group.field": value} of what it changes in the grid's base config. *Arms* are a tuple of
them, and every function here returns Arms, so that they combine freely:

    product(axis("residual.kind", "plain", "mhc"), seeds(0, 1, 2))      # 6 arms
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from mhc import config as configs
from mhc.errors import UserError

ARM = "arm:"  # before the name, in train.init_from, of an arm of the same grid: arm:NAME@STEP
Arm = Mapping[str, Any]
Arms = tuple[Arm, ...]


@dataclasses.dataclass(frozen=True)
class Grid:
    """Holds what ``get_grid()`` of a grid file returns."""

    base: str
    """The config file that every arm starts from, ``file.py`` or ``file.py:text``, relative to the grid file."""
    arms: Arms
    """What each arm changes."""


# Options of residual kinds that are not known yet, while a grid file runs for the first time. None refuses them.
_UNKNOWN: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("unknown options", default=None)


@contextlib.contextmanager
def options_unknown() -> Iterator[list[str]]:
    """Let options of residual kinds pass that no known kind declares, and list them.

    The base config may import the module that declares them.
    """
    names: list[str] = []
    token = _UNKNOWN.set(names)
    try:
        yield names
    finally:
        _UNKNOWN.reset(token)


def _check_known(field: str) -> None:
    try:
        configs.describe(field)
    except UserError:
        unknown = _UNKNOWN.get()
        if unknown is None or not field.startswith("residual."):
            raise
        unknown.append(field)


def arm(fields: Arm) -> Arms:
    """Return one arm that sets these fields, as ``arm({"residual.kind": "plain"})``; {} is the base itself.

    Raises:
      UserError: a field is unknown. The line has the nearest name.
    """
    for name in fields:
        _check_known(name)
    return (dict(fields),)


def axis(field: str, *values: Any) -> Arms:
    """Return an arm for each value of a field. Raises UserError for an unknown field or without a value."""
    _check_known(field)
    if not values:
        raise UserError(f"axis {field}: no value given, allowed: at least one")
    return tuple({field: value} for value in values)


def seeds(*numbers: int) -> Arms:
    """Return an arm for each seed, of both initial weights and data order: arms of one seed are pairs."""
    return zipped(axis("seed.init", *numbers), axis("seed.data", *numbers))


def product(*factors: Arms) -> Arms:
    """Return every combination of one arm from each factor. Raises UserError where two arms set the same field."""
    return functools.reduce(lambda left, right: tuple(_join(a, b) for a in left for b in right), factors, ({},))


def zipped(*parts: Arms) -> Arms:
    """Return the first arms of all parts joined, then the second ones, and so on.

    Raises:
      UserError: the parts have different lengths, or two arms set the same field.
    """
    lengths = [len(part) for part in parts]
    if len(set(lengths)) > 1:
        raise UserError(f"zipped: parts of {', '.join(map(str, lengths))} arms, allowed: parts of one length")
    return tuple(functools.reduce(_join, row, {}) for row in zip(*parts, strict=True))


def branches(trunks: Arms, step: int, changes: Arms = ({},)) -> Arms:
    """Return arms that go on from the checkpoint of ``step`` of each trunk, one for each of ``changes``.

    A branch has its trunk's fields, with the changes. It takes over the trunk's weights, optimiser state, and position
    in the schedule and the data. It starts when its trunk, an arm of the same grid, has finished.
    """
    return tuple(
        {
            **trunk,
            "train.init_from": f"{ARM}{name_of(trunk)}@{step}",
            "train.init_optimizer": True,
            "train.init_data": True,
            **change,
        }
        for trunk in trunks
        for change in changes
    )


def source_of(fields: Arm) -> tuple[str, int] | None:
    """Return (name, step) of the trunk that an arm of this grid branches from; None if it branches from none.

    Raises:
      UserError: a source begins with arm: and is not of that form.
    """
    text = str(fields.get("train.init_from"))
    if not text.startswith(ARM):
        return None
    name, _, step = text.removeprefix(ARM).rpartition("@")
    if not (name and step.isdigit()):
        raise UserError(f"train.init_from: given {text!r}, allowed in a grid: {ARM}NAME@STEP, an arm of the same grid")
    return name, int(step)


def chain(*parts: Arms) -> Arms:
    """Return the arms of the parts, one part after the other."""
    return tuple(fields for part in parts for fields in part)


def _join(left: Arm, right: Arm) -> Arm:
    for name in right:
        if name in left:
            raise UserError(f"{name} is set twice in one arm: {left[name]!r} and {right[name]!r}")
    return {**left, **right}


# Names ----------------------------------------------------------------------------------------------------------------

# Short names of fields, in the order in which the name of an arm lists them; with "" the value stands alone. Every
# other field has its full name, and the seeds come last. A name depends on the arm's own fields alone, so that other
# arms do not change it. This list is not derived from the declared fields: a changed or added entry would rename the
# arms of existing workdirs.
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
_DECAY = {"schedule.wsd_steps": "decay", "schedule.wsd_shape": "shape"}  # short names that follow a branch's start
_SEEDS = ("seed.init", "seed.data")
_LONGEST = 100  # bytes of a name; file systems allow 255, and Kubernetes, logs and reports add to it


def name_of(fields: Arm) -> str:
    """Return the name of an arm, which is also its folder: ``mhc,lr=0.003,seed=0``.

    A name has letters, digits and ``._+=,-`` only. It depends on these fields and their values, and not on their order
    or on other arms. It ends with a hash of the fields if a value has other characters, if the name could be that of
    another arm, or if it is long.
    """
    rest = dict(fields)
    taken = _take_branch(rest)
    parts = [(short, rest.pop(field)) for field, short in _SHORT.items() if field in rest]
    seeds_last: list[tuple[str, Any]] = []
    if all(field in rest for field in _SEEDS) and rest["seed.init"] == rest["seed.data"]:
        seeds_last = [("seed", rest.pop("seed.init"))]
        del rest["seed.data"]
    parts += taken + [(short, rest.pop(field)) for field, short in _DECAY.items() if field in rest]
    parts += [(field, rest[field]) for field in sorted(rest)] + seeds_last
    plain = ",".join(f"{label}={_text(value)}" if label else _text(value) for label, value in parts) or "base"
    safe = re.sub(r"[^A-Za-z0-9._+=,-]", "_", plain)
    # A text that is empty, or has characters that join names, could make the name of another arm.
    texts = {field: value for field, value in fields.items() if isinstance(value, str)}
    if taken:  # the name has the step alone
        del texts["train.init_from"]
    clear = (not taken or _follows(fields)) and all(re.fullmatch(r"[^+=,]+", value) for value in texts.values())
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


def _take_branch(rest: dict[str, Any]) -> list[tuple[str, Any]]:
    """Take the fields that say where an arm branches from out of ``rest``, and return their parts of the name.

    The usual branch, a decay of wsd_steps with all of its trunk's state, needs no further words.
    """
    source = source_of(rest)
    if source is None:
        return []
    del rest["train.init_from"]
    usual = {**_USUAL, "train.steps": rest.get("schedule.wsd_steps")}
    given = {field: rest.pop(field, None) for field in usual}
    return [("from", source[1]), *((field, value) for field, value in given.items() if value != usual[field])]


_USUAL = {"train.init_optimizer": True, "train.init_data": True, "schedule.kind": "wsd"}


def _follows(fields: Arm) -> bool:
    """Return whether the name of a branch's trunk follows from the branch's other fields."""
    of_branch = {*_USUAL, *_DECAY, "train.init_from", "train.steps"}
    source = source_of(fields)
    return source is not None and source[0] == name_of(
        {field: value for field, value in fields.items() if field not in of_branch}
    )


def _text(value: Any) -> str:
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    if isinstance(value, (tuple, list)):
        return "+".join(map(_text, value)) + ("+" if len(value) < 2 else "")  # ("a",) is not "a"
    return str(value)
