"""The decoder: embedding, a scan over blocks, final norm, head. It never asks which residual kind it carries."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mhc import residual
from mhc.config import Config, ResidualConfig
from mhc.model.attention import Attention, causal_mask
from mhc.model.layers import Embedding, Head, Mlp, RMSNorm, Sublayer
from mhc.residual.protocol import Connection, Context, ResidualTopology, State
from mhc.rng import PathKey, path_key

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


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


# What it returns is stacked over depth. Its keys may differ between attention and feed-forward, not between blocks.
Observer = Callable[[SublayerView], dict[str, jax.Array]]


def build_topology(config: ResidualConfig, width: int, key: PathKey) -> ResidualTopology:
    """The configured topology, given those fields of the config that its kind takes."""
    fields = dataclasses.asdict(config)
    kind = fields.pop("kind")
    options = {name: fields[name] for name in residual.protocol.options(kind) if name in fields}
    return residual.build(kind, width, rngs=key, **options)


class Block(nnx.Module):
    """Attention, then feed-forward, each an F with its own residual connection."""

    def __init__(self, config: Config, topology: ResidualTopology, layer: int | jax.Array, *, key: PathKey):
        self.attention = Sublayer(config, Attention(config, key=key / "attention"))
        self.mlp = Sublayer(config, Mlp(config, key=key / "mlp"))
        self.attention_residual = topology.connection(2 * layer, rngs=key / "attention_residual")
        self.mlp_residual = topology.connection(2 * layer + 1, rngs=key / "mlp_residual")

    def __call__(
        self,
        state: State,
        positions: jax.Array,
        mask: jax.Array,
        topology: ResidualTopology,
        observe: Observer | None = None,
    ) -> tuple[State, tuple[dict[str, jax.Array], ...]]:
        seen = []
        for connection, sublayer, args in (
            (self.attention_residual, self.attention, (positions, mask)),
            (self.mlp_residual, self.mlp, ()),
        ):
            u, context = connection.read(state)
            y = sublayer(u, *args)
            state = connection.write(state, y, context)
            if observe is not None:
                seen.append(observe(SublayerView(topology, connection, context, sublayer, args, u, y, state)))
        return state, tuple(seen)


REMAT_POLICIES: dict[str, Any] = {
    "full": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class Decoder(nnx.Module):
    """Decoder-only transformer over a residual topology.

    Parameters are float32 whatever the compute dtype; those of the blocks are stacked on a leading axis of length L.
    The initial value of each depends only on its path, its layer and the key.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs | PathKey | jax.Array):
        key = path_key(rngs)
        self.config = config
        self.embed = Embedding(config, key=key / "embed")
        self.residual = build_topology(config.residual, config.model.width, key / "residual")
        self.blocks = stack_blocks(
            lambda layer: Block(config, self.residual, layer, key=key / "blocks" / layer), config.model.layers
        )
        self.final_norm = RMSNorm(config.model.width, config.norm.eps)
        if not config.head.tied:
            self.head = Head(config, key=key / "head")

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        observe: Observer | None = None,
    ) -> tuple[Float[Array, "B T D"], dict[str, jax.Array]]:
        """(hidden states after the final norm, what ``observe`` returned, stacked over depth).

        A key that ``observe`` gives for every sublayer is stacked to [S, ...] in depth order, one that it gives only
        for attention or only for feed-forward to [L, ...].

        ``segment_ids`` keeps packed documents apart (None: one document a row); ``positions`` default to 0 .. T-1.
        """
        length = tokens.shape[1]
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
        mask = causal_mask(segment_ids, length)
        graph, stacked = nnx.split(self.blocks)

        def run_block(state: State, params: Any) -> tuple[State, Any]:
            return nnx.merge(graph, params)(state, positions, mask, self.residual, observe)

        model = self.config.model
        if model.remat != "none":
            run_block = jax.checkpoint(run_block, policy=REMAT_POLICIES[model.remat], prevent_cse=not model.scan)
        state = self.residual.expand(self.embed(tokens, jnp.dtype(model.dtype)))
        if model.scan:
            state, seen = jax.lax.scan(run_block, state, stacked)
        else:
            each = []
            for layer in range(model.layers):
                state, one = run_block(state, jax.tree.map(lambda leaf, layer=layer: leaf[layer], stacked))
                each.append(one)
            seen = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
        return self.final_norm(self.residual.collapse(state)), _by_depth(seen)

    def logits(self, h: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Float32 logits of final hidden states."""
        if self.config.head.tied:
            table = self.embed.table[...].astype(h.dtype)
            return jnp.einsum("btd,vd->btv", h, table, preferred_element_type=jnp.float32)
        return self.head(h)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T V"]:
        return self.logits(self.hidden(tokens, segment_ids, positions)[0])


def _by_depth(seen: tuple[dict[str, jax.Array], ...]) -> dict[str, jax.Array]:
    """What the sublayers of a block gave, each stacked over blocks, as one mapping in depth order."""
    out: dict[str, jax.Array] = {}
    for name in dict.fromkeys(name for one in seen for name in one):
        have = [one[name] for one in seen if name in one]
        out[name] = jnp.stack(have, axis=1).reshape(-1, *have[0].shape[1:])
    return out


def stack_blocks(make: Callable[[int | jax.Array], Block], count: int) -> Block:
    """``count`` blocks as one whose parameters carry a leading axis; ``make`` is called with a traced layer index."""
    graph, state = nnx.split(nnx.eval_shape(lambda: make(0)))
    leaves = jax.vmap(lambda layer: nnx.to_pure_dict(nnx.state(make(layer))))(jnp.arange(count))
    nnx.replace_by_pure_dict(state, leaves)
    return nnx.merge(graph, state)


Params = dict[str, Any]


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
