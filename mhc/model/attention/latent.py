"""Define multi-head latent attention (MLA)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mhc.config import Config
from mhc.model.attention.base import Attention, Cache
from mhc.model.attention.context import CacheContext
from mhc.model.attention.implementations import attend_xla
from mhc.model.layers import kernel
from mhc.model.memory import Memory
from mhc.model.norms import RMSNorm
from mhc.model.positions import rotate
from mhc.rng import PathKey


class LatentAttention(Attention):
    """Runs multi-head latent attention (arXiv:2405.04434): keys and values of all heads come from a latent of width C.

    Parameters: kv_down [D, C+R], kv_norm/scale [C], key_up [C, H, K], value_up [C, H, J], out [H, J, D], and query
    [D, H, K+R]. With ``attention.q_rank`` Q, query_down [D, Q], query_norm/scale [Q] and query_up [Q, H, K+R] take the
    place of query. The last R numbers of a head are rotated, and all heads share the key of that part. The cache holds
    the latent and that key: C + R numbers a token.

    Raises:
      ValueError: the model has links between layers.
    """

    def __init__(self, config: Config, *, key: PathKey):
        super().__init__(config, key=key)
        d, h, size, rotary = config.model.width, config.attention.heads, config.head_dim, config.rope_dim
        if self.link_names:
            raise ValueError(f"latent attention keeps no keys and values to hand on: {', '.join(self.link_names)}")
        rank, q_rank, values = config.attention.kv_rank, config.attention.q_rank, config.value_dim
        if q_rank is None:
            self.query = kernel(config, key / "query", (d, h, size + rotary), d)
        else:
            self.query_down = kernel(config, key / "query_down", (d, q_rank), d)
            self.query_norm = RMSNorm(q_rank, config.norm.eps)
            self.query_up = kernel(config, key / "query_up", (q_rank, h, size + rotary), q_rank)
        self.kv_down = kernel(config, key / "kv_down", (d, rank + rotary), d)
        self.kv_norm = RMSNorm(rank, config.norm.eps)
        self.key_up = kernel(config, key / "key_up", (rank, h, size), rank)
        self.value_up = kernel(config, key / "value_up", (rank, h, values), rank)
        self.out = kernel(config, key / "out", (h, values, d), h * values, residual=True)

    def _queries(
        self, x: jax.Array, positions: jax.Array, frequencies: tuple[jax.Array, float] | None
    ) -> tuple[jax.Array, jax.Array]:
        """Return (plain part [B, T, H, K], rotated part [B, T, H, R]) of the queries."""
        if self.config.attention.q_rank is None:
            q = jnp.einsum("btd,dhk->bthk", x, self.query[...].astype(x.dtype))
        else:
            latent = self.query_norm(jnp.einsum("btd,dq->btq", x, self.query_down[...].astype(x.dtype)))
            q = jnp.einsum("btq,qhk->bthk", latent, self.query_up[...].astype(x.dtype))
        plain, rotary = jnp.split(q, [self.config.head_dim], axis=-1)
        return plain, rotary if frequencies is None else rotate(rotary, positions, *frequencies)

    def _latents(
        self, x: jax.Array, positions: jax.Array, frequencies: tuple[jax.Array, float] | None
    ) -> tuple[jax.Array, jax.Array]:
        """Return (latent [B, T, C], rotated key [B, T, 1, R])."""
        down = jnp.einsum("btd,dc->btc", x, self.kv_down[...].astype(x.dtype))
        latent, rotary = jnp.split(down, [self.config.attention.kv_rank], axis=-1)
        rotary = rotary[:, :, None]
        return self.kv_norm(latent), rotary if frequencies is None else rotate(rotary, positions, *frequencies)

    def _expand(self, latent: jax.Array, rotary: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return keys [B, U, H, K+R] and values [B, U, H, J] of all heads."""
        keys = jnp.einsum("buc,chk->buhk", latent, self.key_up[...].astype(latent.dtype))
        shared = jnp.broadcast_to(rotary, (*keys.shape[:3], rotary.shape[-1]))
        values = jnp.einsum("buc,chj->buhj", latent, self.value_up[...].astype(latent.dtype))
        return jnp.concatenate([keys, shared], axis=-1), values

    def project(
        self, x: jax.Array, positions: jax.Array, frequencies: tuple[jax.Array, float] | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        q = jnp.concatenate(self._queries(x, positions, frequencies), axis=-1)
        return q, *self._expand(*self._latents(x, positions, frequencies))

    def join(self, y: jax.Array) -> jax.Array:
        return jnp.einsum("bthj,hjd->btd", y, self.out[...].astype(y.dtype))

    def empty_cache(self, batch: int, slots: int, dtype: jnp.dtype) -> Cache:
        return {
            "latent": jnp.zeros((batch, slots, self.config.attention.kv_rank), dtype),
            "rotary": jnp.zeros((batch, slots, 1, self.config.rope_dim), dtype),
        }

    def extend(
        self, x: jax.Array, context: CacheContext, cache: Cache, memory: Memory
    ) -> tuple[jax.Array, Cache, Memory]:
        plain, turned = self._queries(x, context.positions, context.frequencies)
        latent, rotary = self._latents(x, context.positions, context.frequencies)
        stored_latents, latents = context.store(cache["latent"], latent)
        stored_rotary, rotaries = context.store(cache["rotary"], rotary)
        bias = self._bias(context.table, context.positions, context.key_positions)
        stored = {"latent": stored_latents, "rotary": stored_rotary}
        if x.shape[1] > 1:
            keys, values = self._expand(latents, rotaries)
            q = jnp.concatenate([plain, turned], axis=-1)
            y = attend_xla(q, keys, values, context.mask, scale=self.scale, bias=bias, softcap=self.softcap)
            return self.join(y), stored, memory
        # For one token the up-projections are applied to the query and the result, so that no key or value is formed.
        q = jnp.einsum("bthk,chk->bthc", plain, self.key_up[...].astype(x.dtype))
        q = jnp.concatenate([q, turned], axis=-1)
        keys = jnp.concatenate([latents[:, :, None], rotaries], axis=-1)  # one key head
        y = attend_xla(q, keys, latents[:, :, None], context.mask, scale=self.scale, bias=bias, softcap=self.softcap)
        return self.join(jnp.einsum("bthc,chj->bthj", y, self.value_up[...].astype(x.dtype))), stored, memory
