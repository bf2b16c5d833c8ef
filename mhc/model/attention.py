"""Causal grouped-query attention over packed documents, with rotary positions."""

from __future__ import annotations

import functools
import logging
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from mhc.config import Config
from mhc.model.layers import kernel
from mhc.rng import PathKey

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

log = logging.getLogger(__name__)


def rope(x: Float[Array, "B T H K"], positions: Int[Array, "B T"], theta: float) -> Float[Array, "B T H K"]:
    """Rotary embedding (arXiv:2104.09864): pairs (x_i, x_{i + K/2}) turned by position * theta^(-2i/K), in float32."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None, None].astype(jnp.float32) * frequency  # [B, T, 1, K/2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x.astype(jnp.promote_types(x.dtype, jnp.float32)), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def causal_mask(segment_ids: Int[Array, "B T"] | None, length: int) -> Bool[Array, "b T U"]:
    """True where query t may see key u: u <= t, and within one document when ``segment_ids`` is given."""
    mask = jnp.tril(jnp.ones((1, length, length), bool))
    if segment_ids is None:
        return mask
    return mask & (segment_ids[:, :, None] == segment_ids[:, None, :])


def attend_xla(
    q: Float[Array, "B T H K"], k: Float[Array, "B U G K"], v: Float[Array, "B U G K"], mask: Bool[Array, "b T U"]
) -> Float[Array, "B T H K"]:
    """The reference: scores and softmax in float32; query head h reads key-value head h // (H / G)."""
    b, t, h, size = q.shape
    u, g = k.shape[1:3]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    # The heads of a group are more rows of one matrix, so scores and values are plain batched matmuls over (B, G).
    rows = q.reshape(b, t, g, h // g, size).transpose(0, 2, 3, 1, 4).reshape(b, g, -1, size)
    scores = jnp.einsum("bgrk,bugk->bgru", rows, k, preferred_element_type=wide) / math.sqrt(size)
    scores = jnp.where(mask[:, None, None], scores.reshape(b, g, h // g, t, u), jnp.finfo(wide).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype).reshape(b, g, -1, u)
    values = jnp.einsum("bgru,bugk->bgrk", weights, v)
    return values.reshape(b, g, h // g, t, size).transpose(0, 3, 1, 2, 4).reshape(b, t, h, size)


def attend_sdpa(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """``jax.nn.dot_product_attention``: cuDNN's flash attention on GPU where its shapes allow, XLA otherwise."""
    return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None])


IMPLEMENTATIONS = {"xla": attend_xla, "sdpa": attend_sdpa}


@functools.cache
def choose_implementation(impl: str) -> str:
    """The implementation that ``attention.impl`` stands for on this platform; the choice is logged once."""
    chosen = impl if impl != "auto" else ("sdpa" if jax.default_backend() == "gpu" else "xla")
    log.info("attention: %s (asked for %s, platform %s)", chosen, impl, jax.default_backend())
    return chosen


class Attention(nnx.Module):
    """Grouped-query attention: query [D, H, K], key and value [D, G, K], out [H, K, D], no biases."""

    def __init__(self, config: Config, *, key: PathKey):
        d, h, g, size = config.model.width, config.attention.heads, config.kv_heads, config.head_dim
        self.theta = config.positions.theta if config.positions.kind == "rope" else None
        self.impl = config.attention.impl
        self.query = kernel(config, key / "query", (d, h, size), d)
        self.key = kernel(config, key / "key", (d, g, size), d)
        self.value = kernel(config, key / "value", (d, g, size), d)
        self.out = kernel(config, key / "out", (h, size, d), h * size, residual=True)

    def _queries_keys(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        q = jnp.einsum("btd,dhk->bthk", x, self.query[...].astype(x.dtype))
        k = jnp.einsum("btd,dgk->btgk", x, self.key[...].astype(x.dtype))
        if self.theta is not None:
            q, k = rope(q, positions, self.theta), rope(k, positions, self.theta)
        return q, k

    def statistics(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"], mask: Bool[Array, "b T U"]
    ) -> tuple[Float[Array, ""], Float[Array, "B H T"]]:
        """(largest attention logit of a visible pair, entropy in nats of each query's weights), for the probes."""
        q, k = self._queries_keys(x, positions)
        k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
        scores = jnp.einsum("bthk,buhk->bhtu", q, k, preferred_element_type=jnp.float32) / math.sqrt(q.shape[-1])
        scores = jnp.where(mask[:, None], scores, -jnp.inf)
        log_weights = jax.nn.log_softmax(scores, axis=-1)
        weights = jnp.exp(log_weights)
        return jnp.max(scores), -jnp.sum(jnp.where(weights > 0, weights * log_weights, 0.0), axis=-1)

    def __call__(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"], mask: Bool[Array, "b T U"]
    ) -> Float[Array, "B T D"]:
        q, k = self._queries_keys(x, positions)
        v = jnp.einsum("btd,dgk->btgk", x, self.value[...].astype(x.dtype))
        y = IMPLEMENTATIONS[choose_implementation(self.impl)](q, k, v, mask)
        return jnp.einsum("bthk,hkd->btd", y, self.out[...].astype(x.dtype))
