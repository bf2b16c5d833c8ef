"""Run one block: attention, then feed-forward, each between the read and the write of its own residual connection."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mhc import kernels, residual, sharding
from mhc.config import Config
from mhc.errors import UserError
from mhc.model.attention import Attention, AttentionContext, Cache, CacheContext, make_attention
from mhc.model.edits import Edits
from mhc.model.layers import Mlp, Sublayer
from mhc.model.memory import Memory
from mhc.model.moe import Moe
from mhc.residual import contract
from mhc.residual.protocol import Connection, Context, ResidualTopology, State
from mhc.rng import PathKey


class Carry(NamedTuple):
    """Holds what one block hands to the next."""

    state: State  # of the residual topology
    memory: Memory  # of attention


class SublayerView(NamedTuple):
    """Holds what an observer sees of one sublayer."""

    topology: ResidualTopology
    connection: Connection
    context: Context  # what the connection's read handed to its write
    sublayer: Sublayer
    args: tuple[Any, ...]  # what F takes beside u
    u: jax.Array  # F's input [B, T, D]
    y: jax.Array  # F's output [B, T, D]
    state: State  # after the write, settled
    heads: jax.Array | None  # attention's results by head [B, T, H, J]
    memory: Memory  # before F


SCOPES = ("attention", "feed_forward")
"""The names of a block's two sublayers in the metadata of compiled programs, beside ``read`` and ``write``."""

Observer = Callable[[SublayerView], dict[str, jax.Array]]
"""A function that looks at a sublayer. Its results are stacked over depth, so its keys may differ between attention and
feed-forward, but not between blocks."""


class Seen(NamedTuple):
    """Holds the outputs of a block beside its carry."""

    observed: tuple[dict[str, jax.Array], ...]  # what the observer returned, by sublayer
    router: dict[str, jax.Array]  # statistics of the experts; empty without experts


def build_topology(config: Config, key: PathKey) -> ResidualTopology:
    """Build the configured topology from those fields of ``residual.*`` that the builder of its kind names."""
    fields = config.residual.flat()
    kind = fields["kind"]
    options = {name: fields[name] for name in residual.protocol.options(kind) if name in fields}
    topology = residual.build(kind, config.model.width, rngs=key, sublayers=2 * config.model.layers, **options)
    contract.check(kind, topology, config.model.width, dtype=config.model.dtype, stacked=True)
    return topology


def chosen_kernels(config: Config) -> AbstractContextManager[None]:
    """Return the context in which the residual kernels are those of ``kernels.impl``.

    ``auto`` leaves the choice as it is: ``xla``, unless the caller has made another by ``mhc.kernels.target``.

    Raises:
      UserError: kernels for one device are asked for on a mesh of several.
    """
    impl, mesh = config.kernels.impl, sharding.current_mesh()
    if impl == "pallas_tpu" and mesh is not None and mesh.size > 1:
        raise UserError(f"kernels.impl: given pallas_tpu on a mesh of {mesh.size} devices, allowed: auto, xla")
    return contextlib.nullcontext() if impl == "auto" else kernels.target(impl)


def laid_out(topology: ResidualTopology, state: State, shape: tuple[int, ...]) -> State:
    """Return the state laid out over the mesh: a leaf whose last axis is D like the streams, any other by its rows.

    Args:
      shape: (B, T, D) of the tokens.

    Raises:
      ValueError: a leaf breaks the state rule of ``mhc.residual.protocol``.
    """

    def place(leaf: jax.Array) -> jax.Array:
        if leaf.shape[:2] != shape[:2]:
            raise ValueError(
                f"{type(topology).__name__}: a leaf of its state has shape {leaf.shape}; the first axes must be the "
                f"tokens' {shape[:2]}, or the leaf a scalar (or `each` must show it so)"
            )
        wide = leaf.ndim >= 3 and leaf.shape[-1] == shape[2]
        return sharding.constrain_streams(leaf) if wide else sharding.constrain_batch(leaf)

    return topology.each(state, place)


def in_layers(value: float, layers: tuple[int, ...], layer: int | jax.Array) -> float | jax.Array:
    """Return ``value`` in one of the ``layers``, else 1; () stands for all layers."""
    if not layers:
        return value
    return jnp.where(jnp.any(jnp.asarray(layers) == layer), jnp.float32(value), jnp.float32(1.0))


class Block(nnx.Module):
    """Runs attention, then feed-forward (dense, or of experts), each an F with its own residual connection."""

    def __init__(
        self, config: Config, topology: ResidualTopology, layer: int | jax.Array, *, key: PathKey, experts: bool = False
    ):
        normed, gamma = topology.owns_norm, in_layers(config.norm.gamma_init, config.norm.gamma_layers, layer)
        heads = make_attention(config, key=key / "attention")
        self.attention = Sublayer(config, heads, gamma=gamma, normed=normed)
        core: Mlp | Moe = Moe(config, key=key / "mlp") if experts else Mlp(config, key=key / "mlp")
        update = in_layers(config.update.scale, config.update.layers, layer) if config.update.on else None
        self.mlp = Sublayer(config, core, gamma=gamma, update=update, normed=normed)
        self.attention_residual = topology.connection(2 * layer, rngs=key / "attention_residual")
        self.mlp_residual = topology.connection(2 * layer + 1, rngs=key / "mlp_residual")

    @property
    def heads(self) -> Attention:
        """Return the attention itself, without its norms."""
        core = self.attention.core
        assert isinstance(core, Attention)
        return core

    def feed_forward(self, u: jax.Array, valid: jax.Array | None) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return (F(u), statistics of its experts over the ``valid`` tokens; empty without experts)."""
        if isinstance(self.mlp.core, Moe):
            y, router = self.mlp.core.with_statistics(self.mlp.before(u), valid)
            return self.mlp.after(y), router
        return self.mlp(u), {}

    def __call__(
        self,
        carry: Carry,
        context: AttentionContext,
        topology: ResidualTopology,
        observe: Observer | None = None,
        edits: Edits | None = None,
    ) -> tuple[Carry, Seen]:
        """Run whole rows through the block; return (the carry for the next block, this block's other outputs)."""
        router: dict[str, jax.Array] = {}
        heads: list[jax.Array] = []

        def change(y: jax.Array) -> jax.Array:
            heads.append(y if edits is None else edits.heads(y))
            return heads[-1]

        def attention(u: jax.Array, memory: Memory) -> tuple[jax.Array, Memory]:
            changed = () if observe is None and edits is None else (change,)
            y, memory = self.heads.remembering(self.attention.before(u), context, memory, *changed)
            return self.attention.after(y), memory

        def feed_forward(u: jax.Array) -> jax.Array:
            valid = None if context.segment_ids is None else context.segment_ids > 0
            y, statistics = self.feed_forward(u, valid)
            router.update(statistics)
            return y

        seen: list[dict[str, jax.Array]] = []

        def look(number: int, view: SublayerView) -> None:
            if observe is not None:
                args = ((context,), ())[number]
                seen.append(observe(view._replace(args=args, heads=heads[0] if number == 0 else None)))

        carry = self._through(carry, topology, attention, feed_forward, None if observe is None else look, edits)
        return carry, Seen(tuple(seen), router)

    def extend(
        self,
        carry: Carry,
        context: CacheContext,
        cache: Cache,
        topology: ResidualTopology,
        observe: Observer | None = None,
    ) -> tuple[Carry, Cache, tuple[dict[str, jax.Array], ...]]:
        """Run new tokens whose past is in the cache.

        Returns:
          (the carry for the next block, the cache with the tokens, what ``observe`` returned by sublayer). The views
          that it gets have no args and no heads.
        """
        kept = [cache]  # the sublayer puts its new cache here, since the carry alone is handed on

        def attention(u: jax.Array, memory: Memory) -> tuple[jax.Array, Memory]:
            y, kept[0], memory = self.heads.extend(self.attention.before(u), context, cache, memory)
            return self.attention.after(y), memory

        seen: list[dict[str, jax.Array]] = []

        def look(number: int, view: SublayerView) -> None:
            assert observe is not None
            seen.append(observe(view))

        carry = self._through(carry, topology, attention, self.mlp, None if observe is None else look)
        return carry, kept[0], tuple(seen)

    def _through(
        self,
        carry: Carry,
        topology: ResidualTopology,
        attention: Callable[[jax.Array, Memory], tuple[jax.Array, Memory]],
        feed_forward: Callable[[jax.Array], jax.Array],
        look: Callable[[int, SublayerView], None] | None = None,
        edits: Edits | None = None,
    ) -> Carry:
        """Run the two given sublayers: the one loop of training, observing and decoding."""
        if edits is not None:
            carry = edits.begin(carry, topology)
        state, memory = carry
        connections = (self.attention_residual, self.mlp_residual)
        sublayers = (self.attention, self.mlp)
        with jax.named_scope("read"):
            state, u, maps = connections[0].enter(state)
        for number, (connection, sublayer) in enumerate(zip(connections, sublayers, strict=True)):
            before = memory
            with jax.named_scope(SCOPES[number]):
                if number == 0:
                    y, memory = attention(u, memory)
                else:
                    y = feed_forward(u)
                y = y if edits is None else edits.output(y, number)
            fused = number == 0 and connections[1].follows(connection, maps)
            with jax.named_scope("write"):
                if fused:  # one pass over the state writes to it, and reads it for the next sublayer
                    state, *read = connections[1].follow(connection, state, y, maps)
                else:
                    state = connection.write(state, y, maps)
                state = laid_out(topology, state, u.shape)
            if look is not None:
                settled = topology.settle(state)
                look(number, SublayerView(topology, connection, maps, sublayer, (), u, y, settled, None, before))
            if number == 0:
                with jax.named_scope("read"):
                    state, u, maps = (state, *read) if fused else connections[1].enter(state)
        return Carry(state, memory)
