"""Build learning-rate schedules, and the optimisers over the parameters (optax)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from mhc.config import Config
from mhc.model.decoder import Params
from mhc.model.parameters import parameter
from mhc.sharding import path_of


def map_paths(function: Any, tree: Any) -> Any:
    """Apply ``function(path, leaf)`` to every leaf of a tree, path as a/b/c."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: function(path_of(path), leaf), tree)


def decay_mask(config: Config, params: Params) -> Any:
    """Return a tree with True where weight decay applies.

    It applies to matrices, embeddings, and map parameters that an option of the kind decays."""

    def decays(path: str, _: Any) -> bool:
        row = parameter(path)
        return row.decay or (row.decayed_by is not None and bool(getattr(config.residual, row.decayed_by)))

    return map_paths(decays, params)


def learning_rate(config: Config, completed: jax.Array | int) -> jax.Array:
    """Return the rate of the update after ``completed`` ones, float32.

    With s = completed + 1 the number of this update and W warm-up steps: peak * s / W up to s = W, where the peak is
    reached (never a step at rate 0), then the schedule's fall, which ends at s = decay_steps; past it the last rate
    holds.
    """
    schedule = config.schedule
    peak, warmup = config.optimizer.lr, schedule.warmup_steps
    end = config.decay_steps
    s = jnp.asarray(completed, jnp.float32) + 1.0
    start = float(max(warmup, 1))
    progress = jnp.clip((s - start) / max(end - start, 1.0), 0.0, 1.0)
    final = schedule.final_ratio
    if schedule.kind == "constant":
        ratio = jnp.ones_like(s)
    elif schedule.kind == "cosine":
        ratio = final + (1.0 - final) * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
    elif schedule.kind == "linear":
        ratio = 1.0 + (final - 1.0) * progress
    elif schedule.kind == "step":
        ratio = jnp.ones_like(s)
        for fraction, value in zip(schedule.step_fractions, schedule.step_ratios, strict=True):
            ratio = jnp.where(s > fraction * end, value, ratio)
    else:  # wsd: stable, then down over the last wsd_steps
        decay = max(config.wsd_steps, 1.0)
        decayed = jnp.clip((s - (end - decay)) / decay, 0.0, 1.0)
        ratio = 1.0 + (final - 1.0) * (jnp.sqrt(decayed) if schedule.wsd_shape == "sqrt" else decayed)
    warm = jnp.minimum(s / warmup, 1.0) if warmup else 1.0
    return peak * warm * jnp.where(s < warmup, 1.0, ratio)


def make_optimizer(config: Config, params: Params) -> optax.GradientTransformation:
    """Return the configured optimiser at rate 1: the train step scales its updates by ``learning_rate``.

    ``adamw`` decoupled decay; ``sgd`` with momentum and decay; ``muon`` orthogonalises the matrices of attention,
    feed-forward and the maps' phi, each layer's on its own, and leaves the rest to Adam (with Nesterov momentum, as
    Muon). Decay is decoupled and follows ``decay_mask`` for every optimiser but sgd, where it enters the momentum.

    Args:
      params: the parameters or their shapes: the groups are read off their paths.
    """
    o = config.optimizer
    mask = decay_mask(config, params)
    if o.name == "adamw":
        return optax.adamw(1.0, b1=o.b1, b2=o.b2, eps=o.eps, weight_decay=o.weight_decay, mask=mask)
    if o.name == "sgd":
        decay = optax.add_decayed_weights(o.weight_decay, mask) if o.weight_decay else optax.identity()
        return optax.chain(decay, optax.sgd(1.0, momentum=o.momentum or None))

    def matrices(path: str, leaf: Any) -> optax.contrib.MuonDimensionNumbers | None:
        muon = parameter(path).muon
        if muon is None:
            return None
        inputs, outputs = (tuple(leaf.ndim + axis for axis in axes) for axes in muon)
        return optax.contrib.MuonDimensionNumbers(reduction_axis=inputs, output_axis=outputs)

    muon = optax.contrib.muon(
        1.0,
        beta=o.momentum,
        adam_b1=o.b1,
        adam_b2=o.b2,
        eps=o.eps,
        muon_weight_dimension_numbers=map_paths(matrices, params),
        consistent_rms=0.2,  # updates at AdamW's size, so one rate serves both
    )
    # Its own decay knows no mask for what it leaves to Adam; the updates carry their sign already.
    return optax.chain(muon, optax.add_decayed_weights(-o.weight_decay, mask))
