"""Define what all kinds of attention heads share; each kind adds its own projections to queries, keys and values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from mhc.config import Config
from mhc.model.attention.context import AttentionContext, CacheContext, with_masks
from mhc.model.attention.implementations import attend_flash, attend_sdpa, attend_xla, choose_implementation, masked
from mhc.model.layers import kept
from mhc.model.memory import Link, Memory, links
from mhc.model.positions import logit_bias
from mhc.rng import PathKey

if TYPE_CHECKING:
    from jaxtyping import Array, Float

Cache = dict[str, jax.Array]
"""It holds what one layer keeps of the tokens so far, by name, each [B, slots, ...]."""


class Attention(nnx.Module):
    """Runs attention over the queries, keys and values of ``project``, which each kind of heads defines."""

    def __init__(self, config: Config, *, key: PathKey):
        self.config = config
        self.scale = config.attention.scale or 1.0 / math.sqrt(config.head_dim + config.rope_dim)
        self.softcap = config.attention.softcap
        between_layers = links(config, key / "links")
        self.link_names = tuple(between_layers)
        if between_layers:
            self.links = nnx.Dict(**between_layers)

    def named_links(self) -> list[tuple[str, Link]]:
        """Return the links to other layers by name, in the order in which they act."""
        return [(name, self.links[name]) for name in self.link_names]

    def project(
        self, x: jax.Array, positions: jax.Array, frequencies: tuple[jax.Array, float] | None
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "B T G K"], Float[Array, "B T G J"]]:
        """Return queries and keys, rotated if ``frequencies`` are given, and values."""
        raise NotImplementedError

    def join(self, y: Float[Array, "B T H J"]) -> Float[Array, "B T D"]:
        """Return the heads' results, projected to the model's width."""
        raise NotImplementedError

    def empty_cache(self, batch: int, slots: int, dtype: jnp.dtype) -> Cache:
        """Return one layer's cache, all zeros."""
        raise NotImplementedError

    def extend(
        self, x: Float[Array, "B T D"], context: CacheContext, cache: Cache, memory: Memory
    ) -> tuple[jax.Array, Cache, Memory]:
        """Attend from T new tokens a row to the cache and themselves; return (output, cache with them, memory)."""
        raise NotImplementedError

    def recall(
        self, x: jax.Array, positions: jax.Array, frequencies: tuple[jax.Array, float] | None, memory: Memory
    ) -> tuple[jax.Array, jax.Array, jax.Array, Memory]:
        """Return queries, keys and values after the links to other layers, and the memory for the next layer."""
        q, k, v = self.project(x, positions, frequencies)
        for _, link in self.named_links():
            q, k, v, memory = link(q, k, v, memory)
        return q, k, v, memory

    def _bias(self, table: jax.Array | None, queries: jax.Array, keys: jax.Array) -> jax.Array | None:
        return logit_bias(self.config, table, queries, keys)

    def scores(
        self, x: Float[Array, "B T D"], context: AttentionContext, memory: Memory | None = None
    ) -> Float[Array, "B H T U"]:
        """Return attention logits in float32, with cap and bias; -inf where a query does not see the key."""
        if context.full is None:  # the implementation makes its own masks
            context = with_masks(context, self.config, jnp.arange(x.shape[1], dtype=jnp.int32)[None], None)
        q, k, _, _ = self.recall(x, context.positions, context.frequencies, memory or {})
        k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
        scores = jnp.einsum("bthk,buhk->bhtu", q, k, preferred_element_type=jnp.float32) * self.scale
        bias = self._bias(context.table, context.distances, context.distances)
        mask = context.mask[:, None]
        return jnp.where(mask, masked(scores[:, :, None], jnp.array(True), bias, self.softcap)[:, :, 0], -jnp.inf)

    def statistics(
        self, x: Float[Array, "B T D"], context: AttentionContext, memory: Memory | None = None
    ) -> tuple[Float[Array, ""], Float[Array, "B H T"]]:
        """Return (largest logit of a visible pair, entropy in nats of each query's weights), for the probes."""
        scores = self.scores(x, context, memory)
        log_weights = jax.nn.log_softmax(scores, axis=-1)
        weights = jnp.exp(log_weights)
        return jnp.max(scores), -jnp.sum(jnp.where(weights > 0, weights * log_weights, 0.0), axis=-1)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        context: AttentionContext,
        change: Callable[[Float[Array, "B T H J"]], Float[Array, "B T H J"]] | None = None,
    ) -> Float[Array, "B T D"]:
        """Return the output, in a model whose layers have no memory; see ``remembering``."""
        return self.remembering(x, context, {}, change)[0]

    def remembering(
        self,
        x: Float[Array, "B T D"],
        context: AttentionContext,
        memory: Memory,
        change: Callable[[Float[Array, "B T H J"]], Float[Array, "B T H J"]] | None = None,
    ) -> tuple[Float[Array, "B T D"], Memory]:
        """Return (output, memory for the next layer).

        Args:
          memory: the arrays that earlier layers' attention left.
          change: gets the heads' results and returns those to join in their place.
        """
        y, memory = self._attend(x, context, memory)
        y = kept(y)
        return kept(self.join(y if change is None else change(y))), memory

    def _attend(self, x: jax.Array, context: AttentionContext, memory: Memory) -> tuple[jax.Array, Memory]:
        """Return (the heads' results [B, T, H, J], memory for the next layer)."""
        q, k, v, memory = self.recall(x, context.positions, context.frequencies, memory)
        return self._attended(kept(q), kept(k), kept(v), context), memory

    def _attended(self, q: jax.Array, k: jax.Array, v: jax.Array, context: AttentionContext) -> jax.Array:
        impl = choose_implementation(self.config)
        if impl == "flash" and context.full is not None:
            impl = "xla"  # the call gave a prefix, which flash cannot honour
        if impl == "flash":
            window = self.config.attention.window

            def flash(window: int | None) -> jax.Array:
                return attend_flash(q, k, v, context.segment_ids, window=window, scale=self.scale, softcap=self.softcap)

            if isinstance(context.local, bool):
                return flash(window if context.local else None)
            return jax.lax.cond(context.local, lambda: flash(window), lambda: flash(None))
        attend = {"xla": attend_xla, "sdpa": attend_sdpa}[impl]
        bias = self._bias(context.table, context.distances, context.distances)
        return attend(q, k, v, context.mask, scale=self.scale, bias=bias, softcap=self.softcap)
