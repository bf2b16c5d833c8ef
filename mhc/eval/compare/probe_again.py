"""Repeat a run's probe on a checkpoint, also under another convention of its kind's projection."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from mhc import kinds
from mhc.model.decoder import DecoderDefinition
from mhc.monitor.probes import compile_probe, probe_batch
from mhc.residual.manifold import ManifoldHyperConnections, reordered
from mhc.train.checkpoint import LoadedRun


def probe_run(loaded: LoadedRun, preset: str | None = None) -> dict[str, np.ndarray]:
    """Return what the probe measures of a loaded run on the run's probe batch, see `mhc.monitor.probes.measure`.

    Args:
      preset: project by this convention of the run's kind, such as a Sinkhorn preset; None: by the run's.
    """
    run = loaded if preset is None else under_convention(loaded, preset)
    measured = compile_probe(DecoderDefinition(run.config))(run.params, probe_batch(run.config))
    return {name: np.asarray(value) for name, value in jax.device_get(measured).items()}


def under_convention(loaded: LoadedRun, preset: str) -> LoadedRun:
    """Return a run whose maps are projected by another convention of its kind.

    Its residual logits stand in the order of that convention, so that the same matrices are projected, and only the
    order of the divisions differs. Raises ValueError where the kind has no conventions.
    """
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
    """Return a tree of parameters in which ``change`` has replaced each subtree that has exactly these names."""
    if not isinstance(params, Mapping):
        return params
    if set(params) == names:
        return change(params)
    return {name: _each_connection(part, names, change) for name, part in params.items()}
