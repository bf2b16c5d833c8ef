"""Run the kernels as ``mhc.residual.functional`` writes them, differentiable in every mode.

``kernels.target("reference")`` chooses them. Each is the function of that name between two changes of
layout: the kernels have the tokens' axes last.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mhc.residual import functional


def add(x: jax.Array, y: jax.Array, post: jax.Array) -> jax.Array:
    """Return ``functional.write`` under the identity map: x [..., N, D], y [..., D], post [N, ...] -> [..., N, D]."""
    return functional.write(x, y, _tokens_first(post, 1), jnp.eye(x.shape[-2], dtype=post.dtype)).astype(x.dtype)


def project(x: jax.Array, phi: jax.Array, eps: float) -> jax.Array:
    """Return ``functional.normed_projection`` tokens last: x [..., N, D], phi [N, D, R] -> [R, ...]."""
    return jnp.moveaxis(functional.normed_projection(x, phi.reshape(-1, phi.shape[-1]), rms_eps=eps), -1, 0)


def read(x: jax.Array, pre: jax.Array) -> jax.Array:
    """Return ``functional.read`` in the dtype of x: x [..., N, D], pre [N, ...] -> [..., D]."""
    return functional.read(x, _tokens_first(pre, 1)).astype(x.dtype)


def sinkhorn(logits: jax.Array, iters: int, preset: str, eps: float) -> jax.Array:
    """Return ``functional.sinkhorn`` tokens last: logits [N, N, ...] -> [N, N, ...]."""
    h = functional.sinkhorn(_tokens_first(logits, 2), iters=iters, preset=preset, eps=eps)
    return jnp.moveaxis(h, (-2, -1), (0, 1))


def write(x: jax.Array, y: jax.Array, post: jax.Array, res: jax.Array) -> jax.Array:
    """Return ``functional.write`` in the dtype of x.

    x [..., N, D], y [..., D], post [N, ...], res [N, N, ...] -> [..., N, D].
    """
    return functional.write(x, y, _tokens_first(post, 1), _tokens_first(res, 2)).astype(x.dtype)


def _tokens_first(maps: jax.Array, axes: int) -> jax.Array:
    """Return maps whose leading ``axes`` are moved to the end."""
    return jnp.moveaxis(maps, tuple(range(axes)), tuple(range(-axes, 0)))
