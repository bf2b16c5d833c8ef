"""The decoder: embedding, a scan over blocks, final norm, head. It never asks which residual kind it carries."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mhc import residual, sharding
from mhc.config import Config, ResidualConfig
from mhc.model.attention import (
    Attention,
    AttentionContext,
    Cache,
    CacheContext,
    attention_context,
    make_attention,
    relative_table,
)
from mhc.model.cache import (
    DecoderCache,
    LayerRun,
    NewTokens,
    cache_context,
    check_length,
    computes_again,
    layer_runs,
    place,
    slots_of,
)
from mhc.model.edits import Edits
from mhc.model.layers import KEPT, Embedding, Head, Mlp, Sublayer, kernel
from mhc.model.moe import Moe
from mhc.model.norms import make_norm
from mhc.model.positions import sinusoidal
from mhc.residual.protocol import Connection, Context, ResidualTopology, State
from mhc.rng import PathKey, path_key

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


def _laid_out(state: State, of: tuple[int, ...]) -> State:
    """The state of tokens x, whose shape is ``of`` [B, T, D], with its leaves [B, T, ..., D] as the mesh wants them."""

    def place(leaf: jax.Array) -> jax.Array:
        tokens = leaf.ndim >= 3 and leaf.shape[:2] == of[:2] and leaf.shape[-1] == of[2]
        return sharding.constrain_streams(leaf) if tokens else leaf

    return jax.tree.map(place, state)


class SublayerView(NamedTuple):
    """What an observer sees of one sublayer."""

    topology: ResidualTopology
    connection: Connection
    context: Context  # of its maps
    sublayer: Sublayer
    args: tuple[Any, ...]  # that F takes beside u
    u: jax.Array  # F's input [B, T, D]
    y: jax.Array  # F's output [B, T, D]
    state: State  # after the write
    heads: jax.Array | None  # attention's results by head [B, T, H, J]


# What it returns is stacked over depth. Its keys may differ between attention and feed-forward, not between blocks.
Observer = Callable[[SublayerView], dict[str, jax.Array]]


def build_topology(config: ResidualConfig, width: int, key: PathKey) -> ResidualTopology:
    """The configured topology, given those fields of the config that its kind takes."""
    fields = dataclasses.asdict(config)
    kind = fields.pop("kind")
    options = {name: fields[name] for name in residual.protocol.options(kind) if name in fields}
    return residual.build(kind, width, rngs=key, **options)


class Seen(NamedTuple):
    """What a block leaves beside the state."""

    observed: tuple[dict[str, jax.Array], ...]  # by sublayer
    router: dict[str, jax.Array]  # statistics of its experts; empty without


class Block(nnx.Module):
    """Attention, then feed-forward (dense, or ``experts``), each an F with its own residual connection."""

    def __init__(
        self, config: Config, topology: ResidualTopology, layer: int | jax.Array, *, key: PathKey, experts: bool = False
    ):
        self.attention = Sublayer(config, make_attention(config, key=key / "attention"))
        core: Mlp | Moe = Moe(config, key=key / "mlp") if experts else Mlp(config, key=key / "mlp")
        self.mlp = Sublayer(config, core)
        self.attention_residual = topology.connection(2 * layer, rngs=key / "attention_residual")
        self.mlp_residual = topology.connection(2 * layer + 1, rngs=key / "mlp_residual")

    @property
    def heads(self) -> Attention:
        """The attention itself, without its norms."""
        core = self.attention.core
        assert isinstance(core, Attention)
        return core

    def feed_forward(self, u: jax.Array, valid: jax.Array | None) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(F(u), its experts' statistics over the ``valid`` tokens)."""
        if isinstance(self.mlp.core, Moe):
            y, router = self.mlp.core.with_statistics(self.mlp.before(u), valid)
            return self.mlp.after(y), router
        return self.mlp(u), {}

    def __call__(
        self,
        state: State,
        context: AttentionContext,
        topology: ResidualTopology,
        observe: Observer | None = None,
        edits: Edits | None = None,
    ) -> tuple[State, Seen]:
        router: dict[str, jax.Array] = {}
        heads: list[jax.Array] = []

        def change(y: jax.Array) -> jax.Array:
            heads.append(y if edits is None else edits.heads(y))
            return heads[-1]

        def attention(u: jax.Array, context: AttentionContext) -> jax.Array:
            return self.attention(u, context, *(() if observe is None and edits is None else (change,)))

        def feed_forward(u: jax.Array) -> jax.Array:
            valid = None if context.segment_ids is None else context.segment_ids > 0
            y, statistics = self.feed_forward(u, valid)
            router.update(statistics)
            return y

        seen = []
        state = state if edits is None else edits.state(state)
        sublayers: tuple[tuple[Connection, Sublayer, Callable[..., jax.Array], tuple[Any, ...]], ...] = (
            (self.attention_residual, self.attention, attention, (context,)),
            (self.mlp_residual, self.mlp, feed_forward, ()),
        )
        for number, (connection, sublayer, run, args) in enumerate(sublayers):
            u, maps = connection.read(state)
            y = run(u, *args)
            y = y if edits is None else edits.output(y, number)
            state = _laid_out(connection.write(state, y, maps), u.shape)
            if observe is not None:
                by_head = heads[0] if number == 0 else None
                seen.append(observe(SublayerView(topology, connection, maps, sublayer, args, u, y, state, by_head)))
        return state, Seen(tuple(seen), router)

    def extend(self, state: State, context: CacheContext, cache: Cache) -> tuple[State, Cache]:
        """(state, cache with the new tokens): as a call, with the past in the cache."""
        u, maps = self.attention_residual.read(state)
        y, cache = self.heads.extend(self.attention.before(u), context, cache)
        state = _laid_out(self.attention_residual.write(state, self.attention.after(y), maps), u.shape)
        u, maps = self.mlp_residual.read(state)
        return _laid_out(self.mlp_residual.write(state, self.mlp(u), maps), u.shape), cache


REMAT_POLICIES: dict[str, Any] = {
    "full": None,
    "streams": jax.checkpoint_policies.save_only_these_names(KEPT),
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class PositionTable(nnx.Module):
    """Learned position vectors [positions, D], or learned biases of attention's logits [buckets, H]."""

    def __init__(self, config: Config, *, key: PathKey):
        if config.positions.kind == "learned":
            d = config.model.width
            self.table = kernel(config, key / "table", (config.max_length, d), d)
        else:
            self.bias = relative_table(config, key)


class Hidden(NamedTuple):
    """What a pass over whole rows gives."""

    h: jax.Array  # hidden states before the head [B, T, D]
    observed: dict[str, jax.Array]  # what the observer returned, stacked over depth
    router: dict[str, jax.Array]  # load [L', E], balance [L'], z [L'] of the L' layers with experts; empty without


class Decoder(nnx.Module):
    """Decoder-only transformer over a residual topology.

    Parameters are float32 whatever the compute dtype; those of the blocks are stacked on a leading axis of length L,
    under ``blocks``; leading dense blocks before blocks with experts are a stack of their own, ``leading_blocks``. The
    initial value of each depends only on its path, its layer and the key.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs | PathKey | jax.Array):
        key = path_key(rngs)
        self.config = config
        self.embed = Embedding(config, key=key / "embed")
        if config.positions.kind in ("learned", "relative_bias"):
            self.positions = PositionTable(config, key=key / "positions")
        if config.norm.embedding:
            self.embed_norm = make_norm(config.norm, config.model.width)
        self.residual = build_topology(config.residual, config.model.width, key / "residual")
        leading, experts = config.leading_layers, config.moe.experts > 0

        def stack(name: str, first: int, count: int, experts: bool) -> Block:
            def make(layer: int | jax.Array) -> Block:
                return Block(config, self.residual, layer, key=key / name / layer, experts=experts)

            return stack_blocks(make, first, count)

        if leading:
            self.leading_blocks = stack("leading_blocks", 0, leading, False)
        self.blocks = stack("blocks", leading, config.model.layers - leading, experts)
        if config.norm.final:
            self.final_norm = make_norm(config.norm, config.model.width)
        if not config.head.tied:
            self.head = Head(config, key=key / "head")

    @property
    def stacks(self) -> list[tuple[Block, int, int]]:
        """(blocks with stacked parameters, number of the first, how many), in depth order."""
        leading, layers = self.config.leading_layers, self.config.model.layers
        first = [(self.leading_blocks, 0, leading)] if leading else []
        return [*first, (self.blocks, leading, layers - leading)]

    @property
    def bias_table(self) -> jax.Array | None:
        """The learned biases of attention's logits [buckets, H], if any."""
        return self.positions.bias[...] if self.config.positions.kind == "relative_bias" else None

    def embed_tokens(self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """What the topology's streams start from, in the compute dtype."""
        dtype = jnp.dtype(self.config.model.dtype)
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
    ) -> Hidden:
        """Hidden states of whole rows; ``edits``: interventions in the blocks.

        A key that ``observe`` gives for every sublayer is stacked to [S, ...] in depth order, one that it gives only
        for attention or only for feed-forward to [L, ...].

        ``segment_ids`` keeps packed documents apart and tokens from padding, which has id 0 (None: one document a row);
        ``positions`` default to those within each document. ``prefix``: first positions of a document that see one
        another both ways, by row; None: attention.prefix.
        """
        config = self.config
        context = attention_context(config, tokens.shape, segment_ids, positions, prefix, self.bias_table)
        state = self._expand(self.embed_tokens(tokens, context.positions))
        seen: list[Seen] = []
        for blocks, first, count in self.stacks:
            local = config.local_layers[first : first + count]
            changes = None if edits is None else edits.of(first, count)
            state, one = self._run_stack(blocks, state, context, local, observe, changes)
            seen.append(one)
        observed = jax.tree.map(lambda *parts: jnp.concatenate(parts), *[one.observed for one in seen])
        h = self._collapse(state)
        return Hidden(h, _by_depth(observed), seen[-1].router)

    def _expand(self, x: jax.Array) -> State:
        return _laid_out(self.residual.expand(sharding.split_width(x)), x.shape)

    def _collapse(self, state: State) -> jax.Array:
        """Hidden states before the head."""
        h = self.residual.collapse(state)
        return sharding.gather_width(self.final_norm(h) if self.config.norm.final else h)

    def _run_stack(
        self,
        blocks: Block,
        state: State,
        context: AttentionContext,
        local: tuple[bool, ...],
        observe: Observer | None,
        edits: Edits | None,
    ) -> tuple[State, Seen]:
        graph, stacked = nnx.split(blocks)
        model, mixed = self.config.model, len(set(local)) > 1

        def block(state: State, params: Any, flag: Any, edits: Edits | None) -> tuple[State, Seen]:
            return nnx.merge(graph, params)(state, context.at(flag), self.residual, observe, edits)

        # Only where layers differ is the kind of their mask data: a constant spares the choice in every layer.
        flags = jnp.asarray(local) if mixed else None

        layers = (stacked, flags, edits)

        def scanned(state: State, layers: Any) -> tuple[State, Seen]:
            return jax.lax.scan(
                lambda s, layer: block(s, layer[0], layer[1] if mixed else local[0], layer[2]), state, layers
            )

        def unrolled(state: State, layers: Any) -> tuple[State, Seen]:
            each = []
            for number in range(jax.tree.leaves(layers)[0].shape[0]):
                params, flag, changes = jax.tree.map(lambda leaf, i=number: leaf[i], layers)
                state, one = block(state, params, local[0] if flag is None else flag, changes)
                each.append(one)
            return state, jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)

        run = scanned if model.scan else unrolled
        if model.remat == "none":
            return run(state, layers)
        # The backward pass starts again from the state before each group, and keeps of it what the policy says.
        policy, size = REMAT_POLICIES[model.remat], self.config.remat_blocks if model.remat == "streams" else 1
        group = jax.checkpoint(run if size > 1 else unrolled, policy=policy, prevent_cse=not model.scan)
        whole = len(local) // size * size if model.scan else 0
        seen = []
        if whole:
            groups = jax.tree.map(lambda leaf: leaf[:whole].reshape(-1, size, *leaf.shape[1:]), layers)
            state, one = jax.lax.scan(group, state, groups)
            seen.append(jax.tree.map(lambda leaf: leaf.reshape(whole, *leaf.shape[2:]), one))
        for first in range(whole, len(local), size):
            state, one = group(state, jax.tree.map(lambda leaf, i=first: leaf[i : i + size], layers))
            seen.append(one)
        return state, jax.tree.map(lambda *parts: jnp.concatenate(parts), *seen)

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        observe: Observer | None = None,
    ) -> tuple[Float[Array, "B T D"], dict[str, jax.Array]]:
        """(hidden states before the head, what ``observe`` returned), as ``forward``."""
        out = self.forward(tokens, segment_ids, positions, observe)
        return out.h, out.observed

    # Decoding with a cache -----------------------------------------------------------------------------------------

    def empty_cache(self, batch: int, max_length: int) -> DecoderCache:
        """A cache of ``batch`` rows of up to ``max_length`` tokens, in the compute dtype.

        Raises ValueError where the model has no positions for so many.
        """
        config = self.config
        check_length(config, max_length)
        lengths, prefix = (jnp.zeros(batch, jnp.int32) for _ in range(2))  # two buffers, so that both can be donated
        if computes_again(config, max_length):
            return DecoderCache(lengths, prefix, (), jnp.zeros((batch, max_length), jnp.int32), max_length)
        layers = []
        for blocks, run in self._cached_runs():
            slots = slots_of(config, max_length, run.local)
            one = blocks.heads.empty_cache(batch, slots, jnp.dtype(config.model.dtype))
            layers.append(jax.tree.map(lambda leaf, n=run.layers: jnp.zeros((n, *leaf.shape), leaf.dtype), one))
        return DecoderCache(lengths, prefix, tuple(layers), None, max_length)

    def extend(
        self,
        tokens: Int[Array, "B T"],
        cache: DecoderCache,
        valid: Bool[Array, "B T"] | None = None,
        *,
        prefix: Int[Array, " B"] | int | None = None,
    ) -> tuple[Float[Array, "B T V"], DecoderCache]:
        """(logits of T more tokens a row, cache with them): prefill, decoding, and going on from a cached prefix.

        Tokens that are not ``valid`` (None: all are) take no position and no slot; their logits are finite and mean
        nothing. ``prefix``: as in ``forward``, over tokens of a row's first call only. Under positions.scaling=dynamic,
        once rows may be longer than the original length, all tokens so far are computed again at every call.

        More tokens than the cache's max_length must not be given: the results would be wrong. Raises ValueError where T
        alone exceeds it.
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
        """As ``extend``, with the hidden states before the head."""
        if valid is None:
            if tokens.shape[1] > cache.max_length:
                raise ValueError(f"tokens: given {tokens.shape[1]} a row, allowed: the cache's {cache.max_length}")
            valid = jnp.ones(tokens.shape, bool)
        new = place(cache, valid, self.config.attention.prefix if prefix is None else prefix)
        if cache.tokens is not None:
            return self._computed_again(tokens, cache, new)
        contexts = {
            local: cache_context(self.config, cache, new, local, self.bias_table)
            for local in set(self.config.local_layers)
        }
        state = self._expand(self.embed_tokens(tokens, new.positions))
        layers = []
        for (blocks, run), kept in zip(self._cached_runs(), cache.layers, strict=True):
            state, kept = self._extend_run(blocks, run, state, contexts[run.local], kept)
            layers.append(kept)
        h = self._collapse(state)
        return h, dataclasses.replace(cache, lengths=new.lengths, prefix=new.prefix, layers=tuple(layers))

    def _cached_runs(self) -> list[tuple[Block, LayerRun]]:
        local = self.config.local_layers
        return [
            (blocks, run) for blocks, first, count in self.stacks for run in layer_runs(local[first : first + count])
        ]

    def _extend_run(
        self, blocks: Block, run: LayerRun, state: State, context: CacheContext, kept: Cache
    ) -> tuple[State, Cache]:
        graph, stacked = nnx.split(blocks)

        # Parameters are picked from their whole stack, and the caches are carried: neither is copied.
        def layer(carry: tuple[State, Cache], index: jax.Array) -> tuple[tuple[State, Cache], None]:
            state, kept = carry
            params = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, run.first + index, 0, False), stacked)
            own = {name: jax.lax.dynamic_index_in_dim(leaf, index, 0, False) for name, leaf in kept.items()}
            state, own = nnx.merge(graph, params).extend(state, context, own)
            kept = {name: jax.lax.dynamic_update_index_in_dim(leaf, own[name], index, 0) for name, leaf in kept.items()}
            return (state, kept), None

        return jax.lax.scan(layer, (state, kept), jnp.arange(run.layers))[0]

    def _computed_again(self, tokens: jax.Array, cache: DecoderCache, new: NewTokens) -> tuple[jax.Array, DecoderCache]:
        assert cache.tokens is not None
        rows = jnp.arange(tokens.shape[0])[:, None]
        slots = jnp.where(new.valid, new.positions, cache.max_length)
        every = cache.tokens.at[rows, slots].set(tokens, mode="drop")
        segment_ids = (jnp.arange(cache.max_length) < new.lengths[:, None]).astype(jnp.int32)
        h = self.forward(every, segment_ids, prefix=new.prefix).h
        h = jnp.take_along_axis(h, new.positions[:, :, None], axis=1)
        return h, dataclasses.replace(cache, lengths=new.lengths, prefix=new.prefix, tokens=every)

    def logits(self, h: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Float32 logits of final hidden states, capped by head.softcap."""
        if self.config.head.tied:
            table = self.embed.table[...].astype(h.dtype)
            logits = jnp.einsum("btd,vd->btv", h, table, preferred_element_type=jnp.float32)
        else:
            logits = self.head(h)
        cap = self.config.head.softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

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
    """What the sublayers of a block gave, each stacked over blocks, as one mapping in depth order."""
    out: dict[str, jax.Array] = {}
    for name in dict.fromkeys(name for one in seen for name in one):
        have = [one[name] for one in seen if name in one]
        out[name] = jnp.stack(have, axis=1).reshape(-1, *have[0].shape[1:])
    return out


def stack_blocks(make: Callable[[int | jax.Array], Block], first: int, count: int) -> Block:
    """``count`` blocks from number ``first`` as one whose parameters carry a leading axis; ``make`` is called with a
    traced layer index."""
    graph, state = nnx.split(nnx.eval_shape(lambda: make(0)))
    leaves = jax.vmap(lambda layer: nnx.to_pure_dict(nnx.state(make(layer))))(first + jnp.arange(count))
    nnx.replace_by_pure_dict(state, leaves)
    return nnx.merge(graph, state)


Params = dict[str, Any]
STACKS = ("leading_blocks", "blocks")  # of the parameters, in depth order


class DecoderDefinition:
    """A decoder without its parameters, which live outside as a nested dict of arrays: what a pure train step wants."""

    def __init__(self, config: Config):
        self.config = config
        self._graph, self._state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=jax.random.key(0))))

    def init(self, key: jax.Array) -> Params:
        """Fresh parameters, float32. Traceable: jit it with output shardings and no device holds the whole model."""
        return nnx.to_pure_dict(nnx.state(Decoder(self.config, rngs=key)))

    def abstract(self) -> Params:
        """The parameters' shapes and dtypes, with nothing allocated."""
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), nnx.to_pure_dict(self._state))

    def bind(self, params: Params) -> Decoder:
        """The decoder with these parameters."""
        state = jax.tree.map(lambda leaf: leaf, self._state)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(self._graph, state)
