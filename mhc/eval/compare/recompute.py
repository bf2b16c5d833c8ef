"""Recompute gains from checkpoints, to check what the training loop logged and to see them under other conventions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from mhc.errors import UserError
from mhc.eval.compare.runs import DIRECTIONS, Arm, largest


@dataclasses.dataclass(frozen=True)
class Recomputed:
    """Holds the gains of one arm's final checkpoint.

    Attributes:
        step: the checkpoint's; None when it could not be read.
        difference: largest relative difference between the recomputed and the logged gains, over all of the probe's
            gain keys; None with a reason.
        reason: why there is no difference.
        peaks: {convention: {"forward": gain, "backward": gain}}, the largest token-mean composite gain over sublayers
            with the parameters projected by that convention: the run's and, where its kind has them, others. A kind
            without conventions has its name here.
    """

    step: int | None
    difference: float | None
    reason: str | None
    peaks: Mapping[str, Mapping[str, float | None]]


def recompute(arm: Arm) -> Recomputed:
    """Load the arm's last checkpoint, probe it, and compare with the probe that the run logged at that step."""
    from mhc.eval.compare.probe_again import probe_run  # both load jax: only where a recomputation is asked for
    from mhc.train.checkpoint import load_run

    try:
        loaded = load_run(arm.path if arm.source is None else arm.source)
    except UserError as error:
        return Recomputed(None, None, str(error), {})
    measured = probe_run(loaded)
    peaks = {arm.preset or arm.kind: _peaks(measured)}
    for preset in arm.presets:
        if preset != arm.preset:
            peaks[preset] = _peaks(probe_run(loaded, preset))
    logged = [row for row in arm.probes if row["step"] == loaded.step]
    if not logged:
        return Recomputed(loaded.step, None, f"no probe was logged at step {loaded.step}", peaks)
    difference = gain_difference(measured, logged[-1])
    reason = "the logged probe holds no gains" if difference is None else None
    return Recomputed(loaded.step, difference, reason, peaks)


def gain_difference(recomputed: Mapping[str, Any], logged: Mapping[str, Any]) -> float | None:
    """Return the largest |a − b| / |b| over the entries of every gain key; b are the ``logged`` gains.

    Infinity where a key or its shape does not match; None without gain keys. Equal non-finite entries do not differ.
    """
    keys = [key for key in logged if key.startswith("gain/")]
    if not keys:
        return None
    worst = 0.0
    for key in keys:
        b = np.asarray(logged[key], np.float64)
        if key not in recomputed or np.shape(recomputed[key]) != b.shape:
            return float("inf")
        a = np.asarray(recomputed[key], np.float64)
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = np.where(same, 0.0, np.abs(a - b) / np.abs(b))
        relative = np.where(np.isnan(relative), np.inf, relative)
        worst = max(worst, float(relative.max(initial=0.0)))
    return worst


def _peaks(probe: Mapping[str, Any]) -> dict[str, float | None]:
    return {
        direction: largest(np.asarray(probe.get(f"gain/{direction}_composite_mean", ()), np.float64))
        for direction in DIRECTIONS
    }
