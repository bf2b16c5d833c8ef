"""Run the decoder: embedding, a scan over blocks, final norm, head. It never asks which residual kind it carries."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mhc import sharding
from mhc.config import Config
from mhc.model import depth, memory
from mhc.model.attention import (
    AttentionContext,
    Cache,
    CacheContext,
    attention_context,
)
from mhc.model.block import Block, Carry, Observer, Seen, SublayerView, build_topology, chosen_kernels, laid_out
from mhc.model.cache import (
    DecoderCache,
    LayerRun,
    NewTokens,
    cache_context,
    check_length,
    computes_anew,
    layer_runs,
    place,
    slots_of,
)
from mhc.model.edits import Edits
from mhc.model.layers import Embedding, Head, kernel, output_logits
from mhc.model.memory import Memory
from mhc.model.norms import make_norm
from mhc.model.positions import sinusoidal
from mhc.residual.protocol import State
from mhc.rng import PathKey, path_key

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, Real


class PositionTable(nnx.Module):
    """Holds learned position vectors [positions, D], or learned biases of attention's logits [buckets, H]."""

    def __init__(self, config: Config, *, key: PathKey):
        if config.positions.kind == "learned":
            d = config.model.width
            self.table = kernel(config, key / "table", (config.max_length, d), d)
        else:
            shape, key = (config.positions.buckets, config.attention.heads), key / "bias"
            self.bias = nnx.Param(np.float32(config.init.std) * jax.random.normal(key.key, shape, jnp.float32))


class _CachedCarry(NamedTuple):
    """Holds what one block hands to the next while a cache is extended."""

    state: State
    memory: Memory
    kept: Cache  # caches of all layers of a run


class Hidden(NamedTuple):
    """Holds the results of a pass over whole rows."""

    h: jax.Array  # hidden states before the head [B, T, D]
    state: State  # the residual topology's, settled, that they were collapsed from
    observed: dict[str, jax.Array]  # what the observer returned, stacked over depth
    router: dict[str, jax.Array]  # load [L', E], balance [L'] and z [L'] of the L' layers with experts, or empty


class Decoder(nnx.Module):
    """Runs a decoder-only transformer over a residual topology.

    Parameters are float32 whatever the compute dtype. Those of the blocks are stacked on a leading axis of length L,
    under ``blocks``; leading dense blocks before blocks with experts are a stack of their own, ``leading_blocks``. A
    parameter's initial value depends only on its path, its layer and the key.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs | PathKey | jax.Array):
        key = path_key(rngs)
        self.config = config
        self.embed = Embedding(config, key=key / "embed")
        if config.positions.kind in ("learned", "relative_bias"):
            self.positions = PositionTable(config, key=key / "positions")
        if config.norm.embedding:
            self.embed_norm = make_norm(config.norm, config.model.width)
        self.residual = build_topology(config, key / "residual")
        leading, experts = config.leading_layers, config.moe.experts > 0

        def stack(name: str, first: int, count: int, experts: bool) -> Block:
            def make(layer: int | jax.Array) -> Block:
                return Block(config, self.residual, layer, key=key / name / layer, experts=experts)

            return stack_blocks(make, first, count)

        if leading:
            self.leading_blocks = stack("leading_blocks", 0, leading, False)
        self.blocks = stack("blocks", leading, config.model.layers - leading, experts)
        self.norms_output = config.norm.final and not self.residual.owns_norm
        if self.norms_output:
            self.final_norm = make_norm(config.norm, config.model.width)
        if not config.head.tied:
            self.head = Head(config, key=key / "head")

    @property
    def stacks(self) -> list[tuple[Block, int, int]]:
        """Return (blocks with stacked parameters, number of the first, how many) of each stack, in depth order."""
        leading, layers = self.config.leading_layers, self.config.model.layers
        first = [(self.leading_blocks, 0, leading)] if leading else []
        return [*first, (self.blocks, leading, layers - leading)]

    @property
    def bias_table(self) -> jax.Array | None:
        """Return the learned biases of attention's logits [buckets, H], or None."""
        return self.positions.bias[...] if self.config.positions.kind == "relative_bias" else None

    @property
    def head_weight(self) -> jax.Array:
        """Return the weight of the output logits: the head's [D, V], or the embedding's [V, D] under ``head.tied``."""
        return self.embed.table[...] if self.config.head.tied else self.head.kernel[...]

    def embed_tokens(self, tokens: Int[Array, "B T"], positions: Real[Array, "B T"]) -> Float[Array, "B T D"]:
        """Return the embeddings that the topology's streams start from, in the compute dtype."""
        dtype = jnp.dtype(self.config.model.dtype)
        with jax.named_scope("embed"):
            x = self.embed(tokens, dtype)
            if self.config.positions.kind == "learned":
                x = x + sharding.whole_rows(self.positions.table[...].astype(dtype), "positions")[positions]
            elif self.config.positions.kind == "sinusoidal":
                x = x + sinusoidal(positions, self.config.model.width).astype(dtype)
            return self.embed_norm(x) if self.config.norm.embedding else x

    def forward(
        self,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        observe: Observer | None = None,
        *,
        prefix: Int[Array, " B"] | int | None = None,
        edits: Edits | None = None,
        noise: Float[Array, "B T"] | None = None,
    ) -> Hidden:
        """Return the hidden states of whole rows, and what was observed on the way.

        Args:
          segment_ids: numbers that keep packed documents apart; padding has id 0. None: one document a row.
          positions: by default those within each document.
          observe: looks at each sublayer. A key that it returns for every sublayer is stacked to [S, ...] in depth
            order; a key that it returns for attention alone, or for feed-forward alone, to [L, ...].
          prefix: how many first positions of a document see one another both ways, by row; ``attention.prefix`` by
            default.
          edits: interventions in the blocks.
          noise: added to the positions that are encoded (``positions.noise``).
        """
        config = self.config
        context = attention_context(config, tokens.shape, segment_ids, positions, prefix, self.bias_table, noise)
        carry = self._begin(tokens, context.positions)
        seen: list[Seen] = []
        with chosen_kernels(config):
            for blocks, first, count in self.stacks:
                changes = None if edits is None else edits.blocks(first, count)
                carry, seen_in_stack = self._run_stack(blocks, first, carry, context, observe, changes)
                seen.append(seen_in_stack)
        observed = jax.tree.map(lambda *parts: jnp.concatenate(parts), *[stack.observed for stack in seen])
        h = self._collapse(carry.state)
        return Hidden(h, self.residual.settle(carry.state), _by_depth(observed), seen[-1].router)

    def _begin(self, tokens: jax.Array, positions: jax.Array) -> Carry:
        """Return the carry that block 0 starts from."""
        x = self.embed_tokens(tokens, positions)
        state = laid_out(self.residual, self.residual.expand(sharding.split_width(x)), x.shape)
        return Carry(state, memory.empty(self.config, *tokens.shape))

    def _collapse(self, state: State) -> jax.Array:
        """Return the hidden states before the head."""
        return self.before_head(self.residual.collapse(self.residual.settle(state)))

    def _run_stack(
        self,
        blocks: Block,
        first: int,
        carry: Carry,
        context: AttentionContext,
        observe: Observer | None,
        edits: Edits | None,
    ) -> tuple[Carry, Seen]:
        graph, stacked = nnx.split(blocks)
        local = self.config.local_layers[first : first + jax.tree.leaves(stacked)[0].shape[0]]
        # The choice of a mask is data only where layers differ; where they agree, a constant spares it in every layer.
        mixed = len(set(local)) > 1

        def block(carry: Carry, layer: Any) -> tuple[Carry, Seen]:
            params, flag, changes = layer
            where = context.at(flag if mixed else local[0])
            return nnx.merge(graph, params)(carry, where, self.residual, observe, changes)

        whole_state = edits is not None and edits.state_patch is not None
        return depth.through(
            self.residual,
            depth.training_run(self.config, self.residual),
            block,
            carry,
            (stacked, jnp.asarray(local) if mixed else None, edits),
            first=first,
            scan=self.config.model.scan,
            whole_state=whole_state,
            once=depth.keeps_once(self.config, self.residual) and not whole_state,
        )

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        observe: Observer | None = None,
    ) -> tuple[Float[Array, "B T D"], dict[str, jax.Array]]:
        """Return (hidden states before the head, what ``observe`` returned), as ``forward`` does."""
        out = self.forward(tokens, segment_ids, positions, observe)
        return out.h, out.observed

    # Decoding with a cache -----------------------------------------------------------------------------------------

    def empty_cache(self, batch: int, max_length: int) -> DecoderCache:
        """Return a cache for ``batch`` rows of up to ``max_length`` tokens, in the compute dtype.

        Raises:
          ValueError: the model has no positions for so many tokens.
        """
        config = self.config
        check_length(config, max_length)
        lengths, prefix = (jnp.zeros(batch, jnp.int32) for _ in range(2))  # two buffers, so that both can be donated
        if computes_anew(config, max_length):
            return DecoderCache(lengths, prefix, (), jnp.zeros((batch, max_length), jnp.int32), max_length)
        layers = []
        for blocks, _, run in self._cached_runs():
            slots = slots_of(config, max_length, run.local)
            of_layer = blocks.heads.empty_cache(batch, slots, jnp.dtype(config.model.dtype))
            layers.append(jax.tree.map(lambda leaf, n=run.layers: jnp.zeros((n, *leaf.shape), leaf.dtype), of_layer))
        return DecoderCache(lengths, prefix, tuple(layers), None, max_length)

    def extend(
        self,
        tokens: Int[Array, "B T"],
        cache: DecoderCache,
        valid: Bool[Array, "B T"] | None = None,
        *,
        prefix: Int[Array, " B"] | int | None = None,
    ) -> tuple[Float[Array, "B T V"], DecoderCache]:
        """Return (logits of T more tokens a row, cache with them), to prefill, to decode or to go on from a prefix.

        Do not give a row more tokens in all than the cache's ``max_length``: the results would be wrong. Under
        ``positions.scaling=dynamic``, once rows may be longer than the original length, every call computes all tokens
        so far anew.

        Args:
          valid: tokens that count (None: all). Others take no position and no slot; their logits are finite and mean
            nothing.
          prefix: as in ``forward``, over the tokens of a row's first call only.

        Raises:
          ValueError: T alone exceeds the cache's ``max_length``.
        """
        h, cache = self.extend_hidden(tokens, cache, valid, prefix=prefix)
        return self.logits(h), cache

    def extend_hidden(
        self,
        tokens: Int[Array, "B T"],
        cache: DecoderCache,
        valid: Bool[Array, "B T"] | None = None,
        *,
        prefix: Int[Array, " B"] | int | None = None,
    ) -> tuple[Float[Array, "B T D"], DecoderCache]:
        """Return what ``extend`` does, with the hidden states before the head in place of the logits."""
        h, cache, _ = self.extend_observed(tokens, cache, valid, prefix=prefix)
        return h, cache

    def extend_observed(
        self,
        tokens: Int[Array, "B T"],
        cache: DecoderCache,
        valid: Bool[Array, "B T"] | None = None,
        observe: Observer | None = None,
        *,
        prefix: Int[Array, " B"] | int | None = None,
    ) -> tuple[Float[Array, "B T D"], DecoderCache, dict[str, jax.Array]]:
        """Return what ``extend_hidden`` does, and what ``observe`` returned of the new tokens, stacked over depth.

        Args:
          observe: as in ``forward``, of results [B, T, ...] each; its views have no args and no heads.
        """
        if valid is None:
            if tokens.shape[1] > cache.max_length:
                raise ValueError(f"tokens: given {tokens.shape[1]} a row, allowed: the cache's {cache.max_length}")
            valid = jnp.ones(tokens.shape, bool)
        new = place(cache, valid, self.config.attention.prefix if prefix is None else prefix)
        if cache.tokens is not None:
            return self._computed_anew(tokens, cache, new, observe)
        contexts = {
            local: cache_context(self.config, cache, new, local, self.bias_table)
            for local in set(self.config.local_layers)
        }
        carry = self._begin(tokens, new.positions)
        layers, seen = [], []
        for (blocks, first, run), kept in zip(self._cached_runs(), cache.layers, strict=True):
            carry, kept, observed = self._extend_run(blocks, first, run, carry, contexts[run.local], kept, observe)
            layers.append(kept)
            seen.append(observed)
        h = self._collapse(carry.state)
        cache = dataclasses.replace(cache, lengths=new.lengths, prefix=new.prefix, layers=tuple(layers))
        return h, cache, _by_depth(jax.tree.map(lambda *parts: jnp.concatenate(parts), *seen))

    def _cached_runs(self) -> list[tuple[Block, int, LayerRun]]:
        """Return (blocks of a stack, number of its first block, a run of its layers) of every run, in depth order."""
        local = self.config.local_layers
        return [
            (blocks, first, run)
            for blocks, first, count in self.stacks
            for run in layer_runs(local[first : first + count])
        ]

    def _extend_run(
        self,
        blocks: Block,
        first: int,
        run: LayerRun,
        carry: Carry,
        context: CacheContext,
        kept: Cache,
        observe: Observer | None,
    ) -> tuple[Carry, Cache, tuple[dict[str, jax.Array], ...]]:
        graph, stacked = nnx.split(blocks)

        # Parameters are picked from their whole stack, and the caches are carried: neither is copied.
        def layer(carry: _CachedCarry, index: jax.Array) -> tuple[_CachedCarry, tuple[dict[str, jax.Array], ...]]:
            state, memory, kept = carry
            params = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, run.first + index, 0, False), stacked)
            cache = {name: jax.lax.dynamic_index_in_dim(leaf, index, 0, False) for name, leaf in kept.items()}
            block = nnx.merge(graph, params)
            (state, memory), cache, seen = block.extend(Carry(state, memory), context, cache, self.residual, observe)
            kept = {
                name: jax.lax.dynamic_update_index_in_dim(leaf, cache[name], index, 0) for name, leaf in kept.items()
            }
            return _CachedCarry(state, memory, kept), seen

        begin = _CachedCarry(carry.state, carry.memory, kept)
        layers = jnp.arange(run.layers)
        end, seen = depth.through(
            self.residual, depth.scanned, layer, begin, layers, first=first + run.first, scan=True
        )
        return Carry(end.state, end.memory), end.kept, seen

    def _computed_anew(
        self, tokens: jax.Array, cache: DecoderCache, new: NewTokens, observe: Observer | None
    ) -> tuple[jax.Array, DecoderCache, dict[str, jax.Array]]:
        assert cache.tokens is not None
        rows = jnp.arange(tokens.shape[0])[:, None]
        slots = jnp.where(new.valid, new.positions, cache.max_length)
        every = cache.tokens.at[rows, slots].set(tokens, mode="drop")
        segment_ids = (jnp.arange(cache.max_length)[None] < new.lengths[:, None]).astype(jnp.int32)
        out = self.forward(every, segment_ids, observe=observe, prefix=new.prefix)

        def of_new(leaf: jax.Array, axis: int) -> jax.Array:
            places = jnp.expand_dims(new.positions, [*range(axis - 1), *range(axis + 1, leaf.ndim)])
            return jnp.take_along_axis(leaf, places, axis=axis)

        observed = {name: of_new(leaf, 2) for name, leaf in out.observed.items()}
        cache = dataclasses.replace(cache, lengths=new.lengths, prefix=new.prefix, tokens=every)
        return of_new(out.h, 1), cache, observed

    def before_head(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Return the hidden states before the head of a collapsed stream, of any depth (a logit lens)."""
        return sharding.gather_width(self.final_norm(x) if self.norms_output else x)

    def logits(self, h: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Return float32 logits of the hidden states before the head, capped by ``head.softcap``."""
        head = self.config.head
        return output_logits(h, self.head_weight, tied=head.tied, softcap=head.softcap)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        *,
        prefix: Int[Array, " B"] | int | None = None,
    ) -> Float[Array, "B T V"]:
        return self.logits(self.forward(tokens, segment_ids, positions, prefix=prefix).h)


def _by_depth(seen: tuple[dict[str, jax.Array], ...]) -> dict[str, jax.Array]:
    """Join the observations of attention and of feed-forward, each stacked over blocks, in depth order."""
    joined: dict[str, jax.Array] = {}
    for name in dict.fromkeys(name for sublayer in seen for name in sublayer):
        values = [sublayer[name] for sublayer in seen if name in sublayer]
        joined[name] = jnp.stack(values, axis=1).reshape(-1, *values[0].shape[1:])
    return joined


def stack_blocks(make: Callable[[int | jax.Array], Block], first: int, count: int) -> Block:
    """Return ``count`` blocks from number ``first`` as one whose parameters have a leading axis.

    Args:
      make: makes one block; it is called with a traced layer number.
    """
    graph, state = nnx.split(nnx.eval_shape(lambda: make(0)))
    leaves = jax.vmap(lambda layer: nnx.to_pure_dict(nnx.state(make(layer))))(first + jnp.arange(count))
    nnx.replace_by_pure_dict(state, leaves)
    return nnx.merge(graph, state)


__all__ = ["STACKS", "Decoder", "DecoderDefinition", "Hidden", "Observer", "Params", "SublayerView", "build_topology"]

Params = dict[str, Any]
STACKS = ("leading_blocks", "blocks")  # of the parameters, in depth order


class DecoderDefinition:
    """Describes a decoder without its parameters, which a pure train step keeps outside as a nested dict of arrays."""

    def __init__(self, config: Config):
        self.config = config
        self._graph, self._state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=jax.random.key(0))))

    def init(self, key: jax.Array) -> Params:
        """Return initial parameters, float32. Under jit with output shardings no device holds the whole model."""
        return nnx.to_pure_dict(nnx.state(Decoder(self.config, rngs=key)))

    def abstract(self) -> Params:
        """Return the parameters' shapes and dtypes; nothing is allocated."""
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), nnx.to_pure_dict(self._state))

    def bind(self, params: Params) -> Decoder:
        """Return the decoder with these parameters."""
        state = jax.tree.map(lambda leaf: leaf, self._state)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(self._graph, state)
