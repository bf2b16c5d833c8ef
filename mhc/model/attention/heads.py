"""Define multi-head, grouped-query and multi-query attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mhc.config import Config
from mhc.model.attention.base import Attention, Cache
from mhc.model.attention.context import CacheContext
from mhc.model.attention.implementations import attend_xla
from mhc.model.layers import kernel, zeros
from mhc.model.memory import Memory
from mhc.model.norms import RMSNorm
from mhc.model.positions import rotate
from mhc.rng import PathKey


class HeadAttention(Attention):
    """Runs multi-head attention: grouped-query where G < H, multi-query where G is 1.

    Parameters: query [D, H, K], key and value [D, G, K], out [H, K, D]. With ``attention.bias`` also query_bias [H, K],
    key_bias and value_bias [G, K] and out_bias [D]. With ``attention.qk_norm`` also query_norm/scale and
    key_norm/scale [K].
    """

    def __init__(self, config: Config, *, key: PathKey):
        super().__init__(config, key=key)
        d, h, g, size = config.model.width, config.attention.heads, config.kv_heads, config.head_dim
        self.query = kernel(config, key / "query", (d, h, size), d)
        self.key = kernel(config, key / "key", (d, g, size), d)
        self.value = kernel(config, key / "value", (d, g, size), d)
        self.out = kernel(config, key / "out", (h, size, d), h * size, residual=True)
        if config.attention.bias:
            self.query_bias, self.key_bias, self.value_bias = zeros(h, size), zeros(g, size), zeros(g, size)
            self.out_bias = zeros(d)
        if config.attention.qk_norm:
            self.query_norm, self.key_norm = (RMSNorm(size, config.norm.eps) for _ in range(2))

    def _heads(self, x: jax.Array, name: str) -> jax.Array:
        y = jnp.einsum("btd,dhk->bthk", x, getattr(self, name)[...].astype(x.dtype))
        return y + getattr(self, f"{name}_bias")[None, None].astype(x.dtype) if self.config.attention.bias else y

    def project(
        self, x: jax.Array, positions: jax.Array, frequencies: tuple[jax.Array, float] | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        q, k, v = (self._heads(x, name) for name in ("query", "key", "value"))
        if self.config.attention.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        if frequencies is not None:
            q, k = rotate(q, positions, *frequencies), rotate(k, positions, *frequencies)
        return q, k, v

    def join(self, y: jax.Array) -> jax.Array:
        out = jnp.einsum("bthk,hkd->btd", y, self.out[...].astype(y.dtype))
        return out + self.out_bias[None, None].astype(y.dtype) if self.config.attention.bias else out

    def empty_cache(self, batch: int, slots: int, dtype: jnp.dtype) -> Cache:
        shape = (batch, slots, self.config.kv_heads, self.config.head_dim)
        return {"key": jnp.zeros(shape, dtype), "value": jnp.zeros(shape, dtype)}

    def extend(
        self, x: jax.Array, context: CacheContext, cache: Cache, memory: Memory
    ) -> tuple[jax.Array, Cache, Memory]:
        q, k, v, memory = self.recall(x, context.positions, context.frequencies, memory)
        stored_keys, keys = context.store(cache["key"], k)
        stored_values, values = context.store(cache["value"], v)
        bias = self._bias(context.table, context.positions, context.key_positions)
        y = attend_xla(q, keys, values, context.mask, scale=self.scale, bias=bias, softcap=self.softcap)
        return self.join(y), {"key": stored_keys, "value": stored_values}, memory
