"""Normalise over the last axis, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from mhc.config import NormConfig

if TYPE_CHECKING:
    from jaxtyping import Array, Float


class RMSNorm(nnx.Module):
    """Computes x rsqrt(mean(x^2) + eps) scale over the last axis, in float32; the result has x's dtype.

    Parameters: scale [D]; with ``bias`` also bias [D], which is added to the result.
    """

    def __init__(self, width: int, eps: float, gamma: float | jax.Array = 1.0, bias: bool = False):
        self.eps, self.has_bias = eps, bias
        self.scale = nnx.Param(jnp.full((width,), gamma, jnp.float32))
        if bias:
            self.bias = nnx.Param(jnp.zeros((width,), jnp.float32))

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        xw = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        xw = xw * jax.lax.rsqrt(jnp.mean(xw * xw, axis=-1, keepdims=True) + self.eps)
        xw = xw * jax.lax.broadcast_to_rank(self.scale[...], x.ndim)
        return (xw + jax.lax.broadcast_to_rank(self.bias[...], x.ndim) if self.has_bias else xw).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Computes (x - mean) rsqrt(variance + eps) scale + bias over the last axis, in float32. Scale and bias [D]."""

    def __init__(self, width: int, eps: float, gamma: float | jax.Array = 1.0):
        self.eps = eps
        self.scale = nnx.Param(jnp.full((width,), gamma, jnp.float32))
        self.bias = nnx.Param(jnp.zeros((width,), jnp.float32))

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        xw = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        xw = xw - jnp.mean(xw, axis=-1, keepdims=True)
        xw = xw * jax.lax.rsqrt(jnp.mean(xw * xw, axis=-1, keepdims=True) + self.eps)
        scale, bias = (jax.lax.broadcast_to_rank(p[...], x.ndim) for p in (self.scale, self.bias))
        return (xw * scale + bias).astype(x.dtype)


def make_norm(config: NormConfig, width: int, gamma: float | jax.Array = 1.0) -> RMSNorm | LayerNorm:
    """Return the configured norm, of the stream or of a sublayer's input or output.

    Args:
      config: of the norms.
      width: D.
      gamma: the initial scale, which may be traced.
    """
    if config.kind == "layernorm":
        return LayerNorm(width, config.eps, gamma)
    return RMSNorm(width, config.eps, gamma, config.bias)
