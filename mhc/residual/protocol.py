"""What a residual topology is to a decoder, and the registry of kinds.

A decoder does, and knows no more than this:

    state = topology.expand(h)                     h [..., D], once before block 0
    u, context = connection.read(state)            u [..., D] goes to the sublayer's own norm
    state = connection.write(state, y, context)    y [..., D], what the sublayer returned
    h = topology.collapse(state)                   once, after the last block

``state`` is a pytree that only the topology understands: streams, or streams and more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from mhc.residual.functional import Maps
from mhc.rng import PathKey

State = Any
Context = Any


class Connection(nnx.Module):
    """The residual connection of one sublayer, with its own parameters."""

    def read(self, state: State) -> tuple[jax.Array, Context]:
        """The sublayer's input u [..., D] and what ``write`` needs of this token's maps."""
        raise NotImplementedError

    def write(self, state: State, y: jax.Array, context: Context) -> State:
        """The next state from the sublayer's output y [..., D]."""
        raise NotImplementedError

    def maps(self, context: Context) -> Maps:
        """The maps that ``read`` computed, for the probes: pre [..., N], post [..., N], res [..., N, N]."""
        raise NotImplementedError


class ResidualTopology(nnx.Module):
    """A kind of residual stream: how it starts, how sublayers connect to it, how it ends."""

    n: int  # streams

    def expand(self, h: jax.Array) -> State:
        """The state before sublayer 0 from the embedding h [..., D]."""
        raise NotImplementedError

    def connection(self, k: int | jax.Array, *, rngs: nnx.Rngs | PathKey) -> Connection:
        """A new connection for sublayer k in depth order; k may be traced (blocks are initialised under vmap)."""
        raise NotImplementedError

    def collapse(self, state: State) -> jax.Array:
        """The hidden state h [..., D] for the final norm."""
        raise NotImplementedError

    def multiplies(self) -> int:
        """Multiply-adds of one connection per token, forward: its map projections, read, mixing and write."""
        raise NotImplementedError

    def streams(self, state: State) -> jax.Array:
        """The streams [..., N, D] of a state, for the probes."""
        raise NotImplementedError


Builder = Callable[..., ResidualTopology]
_REGISTRY: dict[str, Builder] = {}


def register(kind: str, builder: Builder) -> None:
    """Make ``kind`` known: ``builder(width, *, rngs, **options) -> ResidualTopology``.

    Raises:
      ValueError: the kind is taken.
    """
    if kind in _REGISTRY:
        raise ValueError(f"residual kind {kind!r} is already registered")
    _REGISTRY[kind] = builder


def kinds() -> tuple[str, ...]:
    """Registered kinds, in order of registration."""
    return tuple(_REGISTRY)


def builder(kind: str) -> Builder:
    """The builder of a kind.

    Raises:
      ValueError: unknown kind.
    """
    if kind not in _REGISTRY:
        raise ValueError(f"unknown residual kind {kind!r}; allowed: {', '.join(_REGISTRY)}")
    return _REGISTRY[kind]


def build(kind: str, width: int, *, rngs: nnx.Rngs | PathKey, **options: Any) -> ResidualTopology:
    """The topology of a kind over a stream of ``width``; options as the kind's builder takes them.

    Raises:
      ValueError: unknown kind, or an option the kind refuses.
    """
    return builder(kind)(width, rngs=rngs, **options)
