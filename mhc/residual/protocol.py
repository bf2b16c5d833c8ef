"""What a residual topology is to a decoder, and the registry of kinds.

A decoder does, and knows no more than this:

    state = topology.expand(h)                     h [..., D], once before block 0
    u, context = connection.read(state)            u [..., D] goes to the sublayer's own norm
    state = connection.write(state, y, context)    y [..., D], what the sublayer returned
    h = topology.collapse(state)                   once, after the last block

``state`` is a pytree that only the topology understands: streams, or streams and more. Its structure, shapes and dtypes
stay the same from sublayer to sublayer, since it is the carry of a scan over depth.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from mhc import kinds as _kinds
from mhc.kinds import Kind
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

    def __call__(self, state: State, sublayer: Callable[..., jax.Array], *args: Any, **kwargs: Any) -> State:
        """The state after ``sublayer``, which gets u [..., D] and the further arguments and returns y [..., D].

        A sublayer that returns more than y is called between ``read`` and ``write``::

            u, context = connection.read(state)
            y, cache = attention(u)
            state = connection.write(state, y, context)

        Raises:
          TypeError: the sublayer returns something else than one array.
          ValueError: the array has another shape than u.
        """
        u, context = self.read(state)
        y = sublayer(u, *args, **kwargs)
        if not hasattr(y, "shape"):
            raise TypeError(
                f"a sublayer must return one array, got {type(y).__name__}; call one that returns more between "
                "connection.read and connection.write"
            )
        if y.shape != u.shape:
            raise ValueError(f"a sublayer must return the shape of its input {u.shape}, got {y.shape}")
        return self.write(state, y, context)

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


def register(kind: Kind, builder: Builder) -> None:
    """Make a kind known everywhere: to ``build``, the configuration, the layout over a mesh and the optimiser.

    Args:
      kind: its name, what it allows, and its parameters.
      builder: ``builder(width, *, rngs, **options) -> ResidualTopology``. A decoder hands it those fields of
        ``residual.*`` that its signature names.

    Raises:
      ValueError: the name is taken, the builder does not name its options, or a parameter's path is declared in another
        way by another kind.
    """
    if kind.name in _REGISTRY:
        raise ValueError(f"residual kind {kind.name!r} is already registered")
    _signature(builder)
    _kinds.declare(kind)
    _REGISTRY[kind.name] = builder


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


def _signature(builder: Builder) -> tuple[str, ...]:
    """The names of a builder's options. A module class hides them behind its metaclass: only ``__init__`` tells."""
    bound: set[str] = {"self", "width", "rngs"}
    while isinstance(builder, functools.partial):
        bound |= set(builder.keywords)
        builder = builder.func
    named = inspect.getattr_static(builder, "__init__") if isinstance(builder, type) else builder
    parameters = inspect.signature(named).parameters
    for parameter in parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(f"the builder must name its options, so that a configuration reaches it: {parameter}")
    return tuple(name for name in parameters if name not in bound)


def options(kind: str) -> tuple[str, ...]:
    """Names of the options that a kind takes.

    Raises:
      ValueError: unknown kind.
    """
    return _signature(builder(kind))


def build(kind: str, width: int, *, rngs: nnx.Rngs | PathKey, **given: Any) -> ResidualTopology:
    """The topology of a kind over a stream of ``width``; options as the kind's builder takes them.

    Raises:
      ValueError: unknown kind, or a number of streams, preset or collapse that it does not have.
    """
    make = builder(kind)
    for field in ("n", "init", "collapse"):
        allowed = _kinds.known()[kind].refusal(field, given.get(field))
        if allowed is not None:
            raise ValueError(f"{field}: given {given[field]!r}, allowed: {allowed}")
    return make(width, rngs=rngs, **given)
