"""Norms, embeddings, feed-forward, and the wrapper that makes a sublayer F of one of them.

Einsum letters, here and everywhere: B batch, T tokens (U the attended ones), N streams, D width, H query heads, G
key-value heads, K head size, F feed-forward width, V vocabulary, L blocks, S sublayers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from mhc.config import Config
from mhc.rng import PathKey

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


def kernel(config: Config, key: PathKey, shape: tuple[int, ...], fan_in: int, *, residual: bool = False) -> nnx.Param:
    """A weight under the config's initialiser; ``residual`` marks the projections that write to the stream."""
    std = config.init.std if config.init.kind == "normal" else 1.0 / math.sqrt(fan_in)
    if residual and config.init.scale_residual:
        std /= math.sqrt(2 * config.model.layers)
    return nnx.Param(std * jax.random.normal(key.key, shape, jnp.float32))


class RMSNorm(nnx.Module):
    """x rsqrt(mean(x^2) + eps) scale over the last axis, in float32, returned in x's dtype; scale [D] starts at 1."""

    def __init__(self, width: int, eps: float):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones((width,), jnp.float32))

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        xw = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        xw = xw * jax.lax.rsqrt(jnp.mean(xw * xw, axis=-1, keepdims=True) + self.eps)
        return (xw * self.scale[...]).astype(x.dtype)


class Embedding(nnx.Module):
    """Token table [V, D]; also the output head when tied."""

    def __init__(self, config: Config, *, key: PathKey):
        d = config.model.width
        self.table = kernel(config, key / "table", (config.vocab_size, d), d)

    def __call__(self, tokens: Int[Array, "B T"], dtype: jnp.dtype) -> Float[Array, "B T D"]:
        return self.table[...].astype(dtype)[tokens]


class Head(nnx.Module):
    """Output projection [D, V] to float32 logits."""

    def __init__(self, config: Config, *, key: PathKey):
        d = config.model.width
        self.kernel = kernel(config, key / "kernel", (d, config.vocab_size), d)

    def __call__(self, h: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        return jnp.einsum("btd,dv->btv", h, self.kernel[...].astype(h.dtype), preferred_element_type=jnp.float32)


class Mlp(nnx.Module):
    """Feed-forward: ``gelu`` gelu(x W_up) W_down, or ``swiglu`` (silu(x W_gate) * x W_up) W_down (arXiv:2002.05202)."""

    def __init__(self, config: Config, *, key: PathKey):
        d, f = config.model.width, config.mlp_width
        self.kind = config.mlp.kind
        if self.kind == "swiglu":
            self.gate = kernel(config, key / "gate", (d, f), d)
        self.up = kernel(config, key / "up", (d, f), d)
        self.down = kernel(config, key / "down", (f, d), f, residual=True)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        up = jnp.einsum("btd,df->btf", x, self.up[...].astype(x.dtype))
        if self.kind == "swiglu":
            hidden = jax.nn.silu(jnp.einsum("btd,df->btf", x, self.gate[...].astype(x.dtype))) * up
        else:
            hidden = jax.nn.gelu(up, approximate=True)
        return jnp.einsum("btf,fd->btd", hidden, self.down[...].astype(x.dtype))


class Sublayer(nnx.Module):
    """F of the residual topologies: the sublayer's own pre-norm, then its core. The streams are never normalised."""

    def __init__(self, config: Config, core: nnx.Module):
        self.norm = RMSNorm(config.model.width, config.norm.eps)
        self.core = core

    def __call__(self, u: Float[Array, "B T D"], *args: object) -> Float[Array, "B T D"]:
        core: Callable[..., jax.Array] = self.core
        return core(self.norm(u), *args)
