"""Hold and move what no gradient moves: scales of norms, factors of the feed-forward's output, noise of positions.

Each is off by default, and then the compiled step has no trace of it.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mhc.config import Config
from mhc.model.decoder import STACKS, Params
from mhc.sharding import path_of

_NORM = r"(?P<stack>(leading_)?blocks)/(attention|mlp)/(post_)?norm"
_GAMMA = re.compile(rf"{_NORM}/scale$")
_BETA = re.compile(rf"{_NORM}/bias$")
_UPDATE = re.compile(r"(?P<stack>(leading_)?blocks)/mlp/update$")


def _map_paths(function: Any, tree: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, leaf: function(path_of(path), leaf), tree)


def _held(config: Config, path: str) -> tuple[re.Match[str], tuple[int, ...]] | None:
    """Return (match of the path, layers) of a leaf that no gradient may move there; () stands for all layers."""
    norm, update = config.norm, config.update
    if (match := _GAMMA.search(path)) and (norm.gamma_frozen or norm.gamma_schedule is not None):
        return match, norm.gamma_layers
    if (match := _BETA.search(path)) and norm.beta_frozen:
        return match, ()
    if match := _UPDATE.search(path):
        if not update.trained:
            return match, ()
        if update.layers:  # the factors of the other layers stay 1
            return match, tuple(layer for layer in range(config.model.layers) if layer not in update.layers)
    return None


def _in_layers(config: Config, match: re.Match[str], leaf: jax.Array, layers: tuple[int, ...]) -> jax.Array | None:
    """Return a mask [L, 1, ...] of the layers of a stacked leaf [L, ...]; None where all of them are meant."""
    if not layers:
        return None
    first = config.leading_layers if match["stack"] == STACKS[1] else 0
    chosen = np.isin(first + np.arange(leaf.shape[0]), layers)
    return jnp.asarray(chosen.reshape(-1, *(1,) * (leaf.ndim - 1)))


def hold(config: Config, gradients: Params) -> Params:
    """Return the gradients with zeros for what is not trained: frozen and scheduled scales, frozen biases, factors."""

    def held(path: str, g: jax.Array) -> jax.Array:
        untrained = _held(config, path)
        if untrained is None:
            return g
        mask = _in_layers(config, untrained[0], g, untrained[1])
        zeros = jnp.zeros_like(g)
        return zeros if mask is None else jnp.where(mask, zeros, g)

    return _map_paths(held, gradients)


def scheduled(config: Config, params: Params, completed: jax.Array) -> Params:
    """Return ``params`` with the scheduled scales as of ``completed`` updates, in the layers that they are for.

    These are the sublayers' norm scales under ``norm.gamma_schedule``, and the factors of the feed-forward's output
    unless they are trained. With c = min(completed / train.steps, 1), from first to last value: linearly, or as
    last + (first - last) (1 + cos(pi c)) / 2.

    Args:
      config: of the run.
      params: the parameters.
      completed: int32 []; updates that were applied.
    """
    norm, update = config.norm, config.update

    def value(first: float, last: float, shape: str) -> jax.Array:
        progress = jnp.minimum(completed.astype(jnp.float32) / config.train.steps, 1.0)
        if shape == "cosine":
            return last + (first - last) * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
        return first + (last - first) * progress

    def place(match: re.Match[str], leaf: jax.Array, layers: tuple[int, ...], value: jax.Array) -> jax.Array:
        mask = _in_layers(config, match, leaf, layers)
        filled = jnp.full_like(leaf, value)
        return filled if mask is None else jnp.where(mask, filled, leaf)

    if norm.gamma_schedule is not None:
        gamma = value(norm.gamma_init, norm.gamma_schedule, norm.gamma_shape)
        params = _map_paths(
            lambda path, leaf: place(match, leaf, norm.gamma_layers, gamma) if (match := _GAMMA.search(path)) else leaf,
            params,
        )
    if not update.on or update.trained:
        return params
    last = update.scale if update.schedule is None else update.schedule
    factor = value(update.scale, last, update.shape)
    return _map_paths(
        lambda path, leaf: place(match, leaf, update.layers, factor) if (match := _UPDATE.search(path)) else leaf,
        params,
    )


def begin(config: Config, params: Params) -> Params:
    """Return the parameters that a run starts from: factors that are not trained have their first value.

    Weights that were taken over from another run may hold another value.
    """
    if not config.update.on or config.update.trained:
        return params
    factors = scheduled(config, params, jnp.zeros((), jnp.int32))
    return jax.tree_util.tree_map_with_path(
        lambda path, old, new: new if _UPDATE.search(path_of(path)) else old, params, factors
    )


def gamma_norms(gradients: Params) -> jax.Array | None:
    """Return the norm of the gradient in the norm scales of each sublayer, float32 [S]; None where there are none."""
    squares: dict[str, jax.Array] = {}
    counts: dict[str, int] = {}

    def add(path: str, leaf: jax.Array) -> None:
        stack, _, rest = path.partition("/")
        if stack in STACKS:
            counts[stack] = leaf.shape[0]
        if _GAMMA.search(path):
            name = f"{stack}/{rest.partition('/')[0]}"
            each = jnp.sum(jnp.square(leaf.astype(jnp.float32)), axis=1)  # [L]
            squares[name] = squares.get(name, jnp.zeros_like(each)) + each

    _map_paths(add, gradients)
    if not squares:
        return None
    pairs = [
        jnp.stack([squares.get(f"{stack}/{part}", jnp.zeros(counts[stack])) for part in ("attention", "mlp")], axis=1)
        for stack in STACKS
        if stack in gradients
    ]
    return jnp.sqrt(jnp.concatenate([pair.reshape(-1) for pair in pairs]))


def with_noise(config: Config, batch: dict[str, jax.Array], step: jax.Array | int) -> dict[str, jax.Array]:
    """Return the batch with ``position_noise`` [B, T] float32: that of ``positions.noise`` in the step after ``step``.

    It depends on ``seed.noise``, on the number of the step and on a token's place in the batch alone, so that neither
    devices nor micro-batches nor an interruption change it. Without noise the batch is returned as it is.
    """
    std = config.positions.noise
    if not std:
        return batch
    key = jax.random.fold_in(jax.random.key(config.seed.noise), step)
    noise = std * jax.random.normal(key, batch["tokens"].shape, jnp.float32)
    return {**batch, "position_noise": noise}
