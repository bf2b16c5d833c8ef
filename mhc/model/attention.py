"""Self-attention: which keys a query may see, the implementations, heads and latent heads, with and without a cache.

Two kinds of heads share everything but their projections: ``HeadAttention`` (multi-head, grouped, multi-query) and
``LatentAttention`` (MLA). A sublayer gets an ``AttentionContext``, which holds what all layers share: positions,
segments, masks, rotary frequencies; with a cache, a ``CacheContext``.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from mhc import attention_impls, sharding
from mhc.config import Config
from mhc.model.layers import kept, kernel, zeros
from mhc.model.memory import Memory, links
from mhc.model.norms import RMSNorm
from mhc.model.positions import logit_bias, rotary_frequencies, rotate
from mhc.rng import PathKey

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

log = logging.getLogger(__name__)

# Which keys a query sees ---------------------------------------------------------------------------------------------


def positions_of(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Positions that restart wherever the segment changes, int32."""
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    before = jnp.pad(segment_ids, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    start = jax.lax.cummax(jnp.where(segment_ids != before, index, 0), axis=1)
    return index - start


def visible(
    queries: Int[Array, "b T"],
    keys: Int[Array, "b U"],
    *,
    window: int | None = None,
    prefix: Int[Array, " b"] | int | None = None,
) -> Bool[Array, "b T U"]:
    """True where a query at one position may see a key at another, of the same document.

    It sees itself and the past, of it at most ``window`` positions, its own included; and where both lie within the
    first ``prefix`` positions, everything.
    """
    q, k = queries[:, :, None], keys[:, None, :]
    mask = k <= q
    if window is not None:
        mask &= q - k < window
    if prefix is not None:
        within = jnp.broadcast_to(jnp.asarray(prefix), (queries.shape[0],))[:, None, None]
        mask |= (q < within) & (k < within)
    return mask


@dataclasses.dataclass(frozen=True)
class AttentionContext:
    """What every layer's attention shares in a pass over whole rows."""

    positions: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"] | None
    distances: Int[Array, "b T"]  # positions for differences: one row where all rows agree
    frequencies: tuple[jax.Array, float] | None  # rotary
    table: Float[Array, "buckets H"] | None  # relative_bias
    full: Bool[Array, "b T U"] | None  # masks; None where the implementation makes its own
    windowed: Bool[Array, "b T U"] | None
    local: bool | jax.Array = False  # whether the layer at hand sees a window only; traced where layers are scanned

    def at(self, local: bool | jax.Array) -> AttentionContext:
        """As the layer sees it."""
        return dataclasses.replace(self, local=local)

    @property
    def mask(self) -> Bool[Array, "b T U"]:
        """Of the layer at hand."""
        assert self.full is not None
        if self.local is False or self.windowed is None:
            return self.full
        return self.windowed if self.local is True else jnp.where(self.local, self.windowed, self.full)


def attention_context(
    config: Config,
    shape: tuple[int, ...],
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    prefix: jax.Array | int | None = None,
    table: jax.Array | None = None,
) -> AttentionContext:
    """The context of rows [B, T]. ``segment_ids`` keeps packed documents apart, and tokens from padding, which has id 0
    on either side; ``positions`` default to those within each segment. ``prefix`` defaults to attention.prefix."""
    index = jnp.arange(shape[1], dtype=jnp.int32)[None]
    distances = index
    if positions is not None:
        distances = positions
    elif segment_ids is not None:
        # Differences within a document are those of places in the row.
        positions = positions_of(segment_ids)
    else:
        positions = jnp.broadcast_to(index, shape)
    lengths = None
    if config.positions.scaling == "dynamic":
        last = positions[:, None, :]
        if segment_ids is not None:
            last = jnp.where(segment_ids[:, :, None] == segment_ids[:, None, :], last, 0)
        lengths = jnp.broadcast_to(jnp.max(last, axis=-1) + 1, shape)
    frequencies = None
    if config.positions.kind == "rope":
        frequencies = rotary_frequencies(config, config.rope_dim or config.head_dim, lengths)
    context = AttentionContext(positions, segment_ids, distances, frequencies, table, None, None)
    prefix = prefix if prefix is not None else config.attention.prefix or None
    if choose_implementation(config) == "flash" and prefix is None:
        return context
    return _with_masks(context, config, index, prefix)


def _with_masks(
    context: AttentionContext, config: Config, index: Int[Array, "1 T"], prefix: jax.Array | int | None
) -> AttentionContext:
    positions, segment_ids = context.positions, context.segment_ids

    def mask(window: int | None) -> jax.Array:
        seen = visible(index, index, window=window)
        if prefix is not None:
            seen = seen | visible(positions, positions, window=1, prefix=prefix)
        if segment_ids is not None:
            seen = seen & (segment_ids[:, :, None] == segment_ids[:, None, :])
        return seen

    windowed = mask(config.attention.window) if any(config.local_layers) else None
    return dataclasses.replace(context, full=mask(None), windowed=windowed)


# Implementations ------------------------------------------------------------------------------------------------------


def attend_xla(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B U G K"],
    v: Float[Array, "B U G J"],
    mask: Bool[Array, "b T U"],
    *,
    scale: float | None = None,
    bias: Float[Array, "b H T U"] | None = None,
    softcap: float | None = None,
) -> Float[Array, "B T H J"]:
    """The reference: logits and softmax in float32; query head h reads key-value head h // (H / G)."""
    b, t, h, size = q.shape
    u, g = k.shape[1:3]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    # The heads of a group are more rows of one matrix, so logits and values are plain batched matmuls over (B, G).
    rows = q.reshape(b, t, g, h // g, size).transpose(0, 2, 3, 1, 4).reshape(b, g, -1, size)
    scores = jnp.einsum("bgrk,bugk->bgru", rows, k, preferred_element_type=wide)
    scores = scores * (1.0 / math.sqrt(size) if scale is None else scale)
    scores = _masked(scores.reshape(b, g, h // g, t, u), mask[:, None, None], bias, softcap)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype).reshape(b, g, -1, u)
    values = jnp.einsum("bgru,bugk->bgrk", weights, v)
    return values.reshape(b, g, h // g, t, -1).transpose(0, 3, 1, 2, 4).reshape(b, t, h, -1)


def _masked(scores: jax.Array, mask: jax.Array, bias: jax.Array | None, softcap: float | None) -> jax.Array:
    """Logits [B, G, H/G, T, U], capped, biased, masked."""
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.reshape(bias.shape[0], *scores.shape[1:3], *bias.shape[2:])
    return jnp.where(mask, scores, jnp.finfo(scores.dtype).min)


def attend_sdpa(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    *,
    scale: float | None = None,
    bias: jax.Array | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """``jax.nn.dot_product_attention``: cuDNN's flash attention on GPU where its types and shapes allow, else XLA."""
    if softcap is not None:
        raise ValueError("sdpa has no softcap")
    fits = q.dtype in (jnp.bfloat16, jnp.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 128
    cudnn: Literal["cudnn"] | None = "cudnn" if jax.default_backend() == "gpu" and fits else None
    bias = None if bias is None else bias.astype(q.dtype)
    return jax.nn.dot_product_attention(q, k, v, bias, mask[:, None], scale=scale, implementation=cudnn)


LANES = 128  # of the TPU's vector registers: flash attention's blocks are multiples of it


def attend_flash(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G J"],
    segment_ids: Int[Array, "B T"] | None,
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Float[Array, "B T H J"]:
    """JAX's splash attention for TPU: causal, within a window if any, within each segment. Interpreted elsewhere.

    The scores are never held. Under a mesh each device takes its rows and heads.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    t, size = q.shape[1], q.shape[-1]
    padded = -(-t // LANES) * LANES
    block = max(b for b in (512, 256, 128) if padded % b == 0)
    interpret = jax.default_backend() != "tpu" and not sharding.compiles_for_tpu()
    causal = masks.CausalMask((padded, padded))
    mask = causal if window is None else masks.LocalMask((padded, padded), (window - 1, 0), 0)
    if segment_ids is None:
        segment_ids = jnp.ones(q.shape[:2], jnp.int32)

    def one_device(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        def arranged(x: jax.Array) -> jax.Array:  # [B, H, padded, K]
            return jnp.pad(jnp.moveaxis(x, 2, 1), ((0, 0), (0, 0), (0, padded - t), (0, 0)))

        attend = splash.make_splash_mha(
            masks.MultiHeadMask([mask] * q.shape[2]),
            block_sizes=splash.BlockSizes(
                block_q=block,
                block_kv=block,
                block_kv_compute=block,
                block_q_dkv=block,
                block_kv_dkv=block,
                block_kv_dkv_compute=block,
                block_q_dq=block,
                block_kv_dq=block,
            ),
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=softcap,
            interpret=interpret,
        )
        # What was padded is a segment of its own, so that every row of the softmax has a key.
        segments = jnp.pad(segments, ((0, 0), (0, padded - t)), constant_values=-1)
        scaled = q * (1.0 / math.sqrt(size) if scale is None else scale)
        out = jax.vmap(attend)(arranged(scaled), arranged(k), arranged(v), splash.SegmentIds(segments, segments))
        return jnp.moveaxis(out[:, :, :t], 1, 2).astype(q.dtype)

    mesh = sharding.current_mesh()
    if mesh is None or mesh.size == 1:
        return one_device(q, k, v, segment_ids)
    heads = "tensor" if q.shape[2] % mesh.shape["tensor"] == 0 else None
    if heads and k.shape[2] % mesh.shape["tensor"]:  # each device needs whole groups
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    spec, rows = PartitionSpec(sharding.BATCH_AXES, None, heads, None), PartitionSpec(sharding.BATCH_AXES, None)
    return jax.shard_map(one_device, mesh=mesh, in_specs=(spec, spec, spec, rows), out_specs=spec, check_vma=False)(
        q, k, v, segment_ids
    )


@functools.cache
def _choose(impl: str, platform: str, dtype: str, lacks: tuple[tuple[str, str | None], ...]) -> str:
    reason, chosen, lacking = "", impl, dict(lacks)
    if impl == "auto":
        wanted = {"gpu": "sdpa", "tpu": "flash"}.get(platform, "xla")
        chosen = "xla" if lacking.get(wanted) else wanted
        if chosen != wanted:
            reason = f": {wanted} has no {lacking[wanted]}"
    log.info("attention: %s (asked for %s, platform %s, %s%s)", chosen, impl, platform, dtype, reason)
    if chosen == "flash" and platform != "tpu":
        log.warning("attention: flash is a TPU kernel; on %s it is interpreted, which is slow", platform)
    return chosen


def choose_implementation(config: Config) -> str:
    """The implementation that ``attention.impl`` stands for: by platform, and never one that lacks what the mask, the
    bias, the cap or the widths need. The choice is logged once."""
    platform = "tpu" if sharding.compiles_for_tpu() else jax.default_backend()
    lacks = tuple((impl, attention_impls.lacks(impl, config.attention_needs)) for impl in ("sdpa", "flash"))
    return _choose(config.attention.impl, platform, config.model.dtype, lacks)


# The sublayer ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CacheContext:
    """What every layer of one kind (windowed or not) shares when T tokens a row are added to a cache of U slots."""

    positions: Int[Array, "B T"]  # of the new tokens
    slots: Int[Array, "B T"]  # where they go; U for one that is not kept
    key_positions: Int[Array, "B K"]  # of what is attended: the slots after writing, or the slots before and the tokens
    mask: Bool[Array, "B T K"]
    in_place: bool  # whether the slots after writing hold all that is attended
    frequencies: tuple[jax.Array, float] | None
    table: jax.Array | None

    def store(self, slots: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(slots [B, U, ...] with ``new`` [B, T, ...] in its places, what is to be attended)."""
        rows = jnp.arange(new.shape[0])[:, None]
        written = slots.at[rows, self.slots].set(new.astype(slots.dtype), mode="drop")
        return written, written if self.in_place else jnp.concatenate([slots, new.astype(slots.dtype)], axis=1)


Cache = dict[str, jax.Array]


class Attention(nnx.Module):
    """What both kinds of heads share: ``project`` gives them their queries, keys and values."""

    def __init__(self, config: Config, *, key: PathKey):
        self.config = config
        self.scale = config.attention.scale or 1.0 / math.sqrt(config.head_dim + config.rope_dim)
        self.softcap = config.attention.softcap
        made = links(config, key / "links")
        self.link_names = tuple(made)
        if made:
            self.links = nnx.Dict(**made)

    def project(
        self, x: jax.Array, positions: jax.Array, frequencies: tuple[jax.Array, float] | None
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "B T G K"], Float[Array, "B T G J"]]:
        """Queries and keys, rotated, and values."""
        raise NotImplementedError

    def join(self, y: Float[Array, "B T H J"]) -> Float[Array, "B T D"]:
        """The heads' results, projected to the stream."""
        raise NotImplementedError

    def empty_cache(self, batch: int, slots: int, dtype: jnp.dtype) -> Cache:
        """Zeros for a layer's cache."""
        raise NotImplementedError

    def extend(
        self, x: Float[Array, "B T D"], context: CacheContext, cache: Cache, memory: Memory
    ) -> tuple[jax.Array, Cache, Memory]:
        """Return (result, cache with the new tokens, memory): attention of T new tokens a row over the cache and
        themselves."""
        raise NotImplementedError

    def recall(
        self, x: jax.Array, positions: jax.Array, frequencies: tuple[jax.Array, float] | None, memory: Memory
    ) -> tuple[jax.Array, jax.Array, jax.Array, Memory]:
        """Return queries, keys and values as the links to other layers leave them, and the memory for the next one."""
        q, k, v = self.project(x, positions, frequencies)
        for name in self.link_names:
            q, k, v, memory = self.links[name](q, k, v, memory)
        return q, k, v, memory

    def _bias(self, table: jax.Array | None, queries: jax.Array, keys: jax.Array) -> jax.Array | None:
        return logit_bias(self.config, table, queries, keys)

    def scores(
        self, x: Float[Array, "B T D"], context: AttentionContext, memory: Memory | None = None
    ) -> Float[Array, "B H T U"]:
        """Return attention logits in float32, capped and biased; -inf where a query does not see the key."""
        if context.full is None:  # an implementation that makes its own masks
            context = _with_masks(context, self.config, jnp.arange(x.shape[1], dtype=jnp.int32)[None], None)
        q, k, _, _ = self.recall(x, context.positions, context.frequencies, memory or {})
        k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
        scores = jnp.einsum("bthk,buhk->bhtu", q, k, preferred_element_type=jnp.float32) * self.scale
        bias = self._bias(context.table, context.distances, context.distances)
        mask = context.mask[:, None]
        return jnp.where(mask, _masked(scores[:, :, None], jnp.array(True), bias, self.softcap)[:, :, 0], -jnp.inf)

    def statistics(
        self, x: Float[Array, "B T D"], context: AttentionContext, memory: Memory | None = None
    ) -> tuple[Float[Array, ""], Float[Array, "B H T"]]:
        """Return (largest attention logit of a visible pair, entropy in nats of each query's weights), for the
        probes."""
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
        """Return the sublayer's output, of a model whose layers hand each other nothing; see ``remembering``."""
        return self.remembering(x, context, {}, change)[0]

    def remembering(
        self,
        x: Float[Array, "B T D"],
        context: AttentionContext,
        memory: Memory,
        change: Callable[[Float[Array, "B T H J"]], Float[Array, "B T H J"]] | None = None,
    ) -> tuple[Float[Array, "B T D"], Memory]:
        """Return (the sublayer's output, the memory for the next layer).

        ``change`` is given the heads' results and returns what is joined instead.
        """
        y, memory = self._attend(x, context, memory)
        y = kept(y)
        return kept(self.join(y if change is None else change(y))), memory

    def _attend(self, x: jax.Array, context: AttentionContext, memory: Memory) -> tuple[jax.Array, Memory]:
        """Return (the heads' results [B, T, H, J], the memory for the next layer)."""
        q, k, v, memory = self.recall(x, context.positions, context.frequencies, memory)
        return self._attended(kept(q), kept(k), kept(v), context), memory

    def _attended(self, q: jax.Array, k: jax.Array, v: jax.Array, context: AttentionContext) -> jax.Array:
        impl = choose_implementation(self.config)
        if impl == "flash" and context.full is not None:
            impl = "xla"  # a prefix that the call gave: flash cannot honour it
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


class HeadAttention(Attention):
    """Multi-head, grouped-query or multi-query attention.

    Parameters: query [D, H, K], key and value [D, G, K], out [H, K, D]; with attention.bias those four with _bias, [H,
    K], [G, K], [G, K], [D]; with attention.qk_norm query_norm/scale and key_norm/scale [K].
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
        return y + getattr(self, f"{name}_bias")[...].astype(x.dtype) if self.config.attention.bias else y

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
        return out + self.out_bias[...].astype(y.dtype) if self.config.attention.bias else out

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


class LatentAttention(Attention):
    """Multi-head latent attention (arXiv:2405.04434): keys and values of all heads come from one latent of width C.

    Parameters: query [D, H, K+R], or with attention.q_rank Q query_down [D, Q], query_norm/scale [Q] and query_up [Q,
    H, K+R]; kv_down [D, C+R], kv_norm/scale [C], key_up [C, H, K], value_up [C, H, J], out [H, J, D]. The last R of a
    head are rotated; their key is one for all heads. The cache holds the latent and that key: C + R numbers a token.
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
        """(plain part [B, T, H, K], rotated part [B, T, H, R])."""
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
        """(latent [B, T, C], rotated key [B, T, 1, R])."""
        down = jnp.einsum("btd,dc->btc", x, self.kv_down[...].astype(x.dtype))
        latent, rotary = jnp.split(down, [self.config.attention.kv_rank], axis=-1)
        rotary = rotary[:, :, None]
        return self.kv_norm(latent), rotary if frequencies is None else rotate(rotary, positions, *frequencies)

    def _expand(self, latent: jax.Array, rotary: jax.Array) -> tuple[jax.Array, jax.Array]:
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
        # One token: the up-projections go to the query and the result, so that no key or value is ever formed.
        q = jnp.einsum("bthk,chk->bthc", plain, self.key_up[...].astype(x.dtype))
        q = jnp.concatenate([q, turned], axis=-1)
        keys = jnp.concatenate([latents[:, :, None], rotaries], axis=-1)  # one key head
        y = attend_xla(q, keys, latents[:, :, None], context.mask, scale=self.scale, bias=bias, softcap=self.softcap)
        return self.join(jnp.einsum("bthc,chj->bthj", y, self.value_up[...].astype(x.dtype))), stored, memory


def make_attention(config: Config, *, key: PathKey) -> Attention:
    """The configured kind of heads."""
    return (LatentAttention if config.attention.kind == "mla" else HeadAttention)(config, key=key)


def relative_table(config: Config, key: PathKey) -> nnx.Param:
    """The learned biases of ``relative_bias`` [buckets, H], one table for all layers."""
    shape = (config.positions.buckets, config.attention.heads)
    return nnx.Param(np.float32(config.init.std) * jax.random.normal((key / "bias").key, shape, jnp.float32))
