"""Define a control without context: each token is computed from itself alone, with as many parameters as attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mhc.config import Config
from mhc.model.attention.base import Cache
from mhc.model.attention.context import AttentionContext, CacheContext
from mhc.model.attention.heads import HeadAttention
from mhc.model.memory import Memory
from mhc.rng import PathKey


class Tokenwise(HeadAttention):
    """Replaces attention by a gated feed-forward of the same four matrices: (gelu(x W_q) ⊙ x W_k + x W_v) W_out.

    It is the control of tasks that need context: all its parameters are used, and no token sees another. Parameters
    are those of `HeadAttention`, with as many key and value heads as query heads. Nothing is cached.
    """

    def __init__(self, config: Config, *, key: PathKey):
        """Make the four matrices. Raises ValueError for links, which hand on keys and values."""
        super().__init__(config, key=key)
        if self.link_names:
            raise ValueError("attention.kind=tokenwise has no keys and values that a link could hand on")

    def _mixed(self, x: jax.Array) -> jax.Array:
        """Return the results by head [B, T, H, K]."""
        gate, up, skip = self.project(x, jnp.zeros(x.shape[:2], jnp.int32), None)
        return jax.nn.gelu(gate, approximate=True) * up + skip

    def _attend(self, x: jax.Array, context: AttentionContext, memory: Memory) -> tuple[jax.Array, Memory]:
        return self._mixed(x), memory

    def scores(self, x: jax.Array, context: AttentionContext, memory: Memory | None = None) -> jax.Array:
        """Return 0 where a token meets itself and -inf elsewhere, [B, H, T, T] float32."""
        batch, length = x.shape[:2]
        alone = jnp.where(jnp.eye(length, dtype=bool), 0.0, -jnp.inf)
        return jnp.broadcast_to(alone, (batch, self.config.attention.heads, length, length))

    def empty_cache(self, batch: int, slots: int, dtype: jnp.dtype) -> Cache:
        """Return an empty cache: no token looks back."""
        return {}

    def extend(
        self, x: jax.Array, context: CacheContext, cache: Cache, memory: Memory
    ) -> tuple[jax.Array, Cache, Memory]:
        """Return (result, the empty cache, memory) of new tokens, as of whole rows."""
        return self.join(self._mixed(x)), cache, memory
