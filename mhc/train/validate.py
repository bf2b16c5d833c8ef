"""Compute the loss over the fixed validation sets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from mhc.data.corpus import fidelity
from mhc.model.decoder import Params
from mhc.monitor.phases import Phases
from mhc.sharding import in_order, put_batch
from mhc.train.step import Trainer

_PARTS = ("nll", "weight", "bytes")


def validate(
    trainer: Trainer,
    params: Params,
    sets: Mapping[str, Iterable[Mapping[str, np.ndarray]]],
    lost: Mapping[str, float],
    phases: Phases,
) -> dict[str, float | None]:
    """Return ``val_loss`` (nats a token) and ``val_bits_per_byte`` of all sets together, and of each of several.

    Tokens weigh alike. At most two batches are on the devices at once.

    Args:
      sets: {name: batches}; the name of a single set is "".
      lost: {name: share of a set's bytes that the tokeniser loses}: above the limit there are no bits per byte.
      phases: told of each batch.
    """
    sums = {name: dict.fromkeys(_PARTS, 0.0) for name in sets}

    def add(name: str, parts: dict[str, jax.Array]) -> None:
        for part, value in jax.device_get(parts).items():
            sums[name][part] += float(value)

    waiting: tuple[str, dict[str, Any]] | None = None
    for name, batches in sets.items():
        for batch in batches:
            parts = in_order(trainer.validate(params, put_batch(batch, trainer.mesh)), trainer.mesh)
            if waiting is not None:
                add(*waiting)
            waiting = (name, parts)
            phases.beat()
    if waiting is not None:
        add(*waiting)

    total = {part: sum(of_set[part] for of_set in sums.values()) for part in _PARTS}
    measures = _measures(total, "", fidelity.worst(lost.values()))
    for name, of_set in sums.items():
        if name:
            measures |= _measures(of_set, f"/{name}", lost[name])
    return measures


def _measures(sums: Mapping[str, float], suffix: str, lost: float) -> dict[str, float | None]:
    told = lost <= fidelity.LIMIT and sums["bytes"] > 0  # symbols of a task stand for no text
    return {
        f"val_loss{suffix}": sums["nll"] / max(sums["weight"], 1.0),
        f"val_bits_per_byte{suffix}": sums["nll"] / math.log(2) / sums["bytes"] if told else None,
    }
