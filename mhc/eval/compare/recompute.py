"""Recompute gains from checkpoints: a check on what the training loop logged, and the view of other conventions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mhc.errors import UserError
from mhc.eval.compare.runs import DIRECTIONS, Arm, largest

if TYPE_CHECKING:
    from mhc.train.checkpoint import LoadedRun


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
    from mhc.train.checkpoint import load_run

    try:
        loaded = load_run(arm.path if arm.source is None else arm.source)
    except UserError as error:
        return Recomputed(None, None, str(error), {})
    measured = probed(loaded)
    peaks = {arm.preset or arm.kind: _peaks(measured)}
    for preset in arm.presets:
        if preset != arm.preset:
            peaks[preset] = _peaks(probed(loaded, preset))
    logged = [row for row in arm.probes if row["step"] == loaded.step]
    if not logged:
        return Recomputed(loaded.step, None, f"no probe was logged at step {loaded.step}", peaks)
    difference = gain_difference(measured, logged[-1])
    reason = "the logged probe holds no gains" if difference is None else None
    return Recomputed(loaded.step, difference, reason, peaks)


def probed(loaded: LoadedRun, preset: str | None = None) -> dict[str, np.ndarray]:
    """Return the probe of a loaded run; with ``preset`` under that convention of its kind's projection."""
    from mhc.monitor.probes import probe_run  # compiles a model: only where a recomputation is asked for

    return probe_run(loaded if preset is None else under_convention(loaded, preset))


def under_convention(loaded: LoadedRun, preset: str) -> LoadedRun:
    """Return a run as another convention of its kind's projection sees it: the same matrices are projected.

    Raises ValueError where the kind has no conventions.
    """
    from mhc import kinds
    from mhc.residual.manifold import ManifoldHyperConnections, reordered

    kind = kinds.known()[loaded.config.residual.kind]
    if not kind.convention:
        raise ValueError(f"residual kind {kind.name!r} has no conventions")
    residual = loaded.config.residual.changed(**{kind.convention: preset})
    other = loaded._replace(config=dataclasses.replace(loaded.config, residual=residual))
    ours, theirs = (run.decoder().residual for run in (loaded, other))
    assert isinstance(ours, ManifoldHyperConnections) and isinstance(theirs, ManifoldHyperConnections)
    order = ours.mixing.order_under(theirs.mixing, ours.n)
    if order is None:
        return other
    return other._replace(params=_each_connection(loaded.params, set(kind.parameters), lambda p: reordered(p, order)))


def _each_connection(params: Any, names: set[str], change: Callable[[Mapping[str, Any]], Any]) -> Any:
    """Return a tree of parameters with those of each connection, which has exactly these names, changed."""
    if not isinstance(params, Mapping):
        return params
    if set(params) == names:
        return change(params)
    return {name: _each_connection(part, names, change) for name, part in params.items()}


def gain_difference(recomputed: Mapping[str, Any], logged: Mapping[str, Any]) -> float | None:
    """Return the largest |a − b| / |b| over the entries of every gain key of ``logged`` (b).

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
