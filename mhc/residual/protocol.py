"""Define the protocol between a residual topology and a decoder, and build topologies.

A decoder does this, and knows no more:

    state = topology.expand(h)                     h [..., D], once before block 0
    u, context = connection.read(state)            u [..., D] goes to the sublayer
    state = connection.write(state, y, context)    y [..., D], what the sublayer returned
    h = topology.collapse(topology.settle(state))  once, after the last block

``state`` is a pytree that only the topology understands: streams, or streams and more. Its structure, shapes and dtypes
stay the same from sublayer to sublayer, since it is the carry of a scan over depth. **The state rule**: the first axes
of every leaf are the tokens' (``...`` above), or the leaf is a scalar. A topology that keeps a leaf otherwise shows it
in ``each`` with the tokens first.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import jax
from flax import nnx

from mhc import kinds as _kinds
from mhc.errors import UserError, did_you_mean
from mhc.kernels.checks import is_whole
from mhc.kinds import Kind
from mhc.residual.arrays import check_count
from mhc.residual.elsewhere import KindError, blamed, name_of
from mhc.residual.functional import Maps
from mhc.residual.runner import Runner
from mhc.rng import PathKey

State = Any
Context = Any


class Connection(nnx.Module):
    """Defines the residual connection of one sublayer, with its own parameters."""

    def read(self, state: State) -> tuple[jax.Array, Context]:
        """Return the sublayer's input u [..., D] and what ``write`` needs of this token's maps."""
        raise NotImplementedError

    def write(self, state: State, y: jax.Array, context: Context) -> State:
        """Return the next state from the sublayer's output y [..., D]."""
        raise NotImplementedError

    def enter(self, state: State) -> tuple[State, jax.Array, Context]:
        """Return (state, u, context): what ``read`` returns, and the state to give to ``write``, of the same values.

        A kernel that forms the gradient of a state at once needs to see what else is done with it.
        """
        return state, *self.read(state)

    def follows(self, before: Connection, context: Context) -> bool:
        """Return whether ``follow`` does better than a write and a read, after the sublayer of ``before``."""
        return False

    def follow(
        self, before: Connection, state: State, y: jax.Array, context: Context
    ) -> tuple[State, jax.Array, Context]:
        """Return (state, u, context) of this sublayer: ``before.write(state, y, context)``, then ``enter``."""
        return self.enter(before.write(state, y, context))

    def __call__(self, state: State, sublayer: Callable[..., jax.Array], *args: Any, **kwargs: Any) -> State:
        """Return the state after ``sublayer``, which gets u [..., D] and the further arguments and returns y [..., D].

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

    def maps(self, context: Context) -> Maps | None:
        """Return the maps that ``read`` computed, for the probes: pre [..., N], post [..., N], res [..., N, N].

        None: this topology has no maps of streams, and gains and distances are not measured.
        """
        raise NotImplementedError

    def measures(self, context: Context) -> dict[str, jax.Array]:
        """Return further measures for the probes, per token: {name: float [...] or [..., K]}; they log token means.

        The names are the same for every sublayer.
        """
        return {}


class ResidualTopology(nnx.Module):
    """Defines a kind of residual stream: how it starts, how sublayers connect to it, how it ends."""

    n: int  # streams
    owns_norm: ClassVar[bool] = False
    """Whether ``read`` gives what is normalised already, and ``collapse`` likewise: then a sublayer has no norm before
    its core, and the decoder no final norm."""
    period: int | None = None
    """Blocks after which ``hand_on`` is called, so that depth is a scan over groups of so many; None: one scan."""
    gains_rows: ClassVar[bool] = False
    """Says whether the arrays that are ``held`` only gain rows, and whatever reads a state gives the same, with the
    same derivatives, if rows of later periods are there already. Then the backward pass can start again from the arrays
    as they are after the last block, which are kept once."""
    runner: ClassVar[type[Runner] | None] = None
    """The numpy form that an exported model carries; None: export refuses the kind by name."""

    def expand(self, h: jax.Array) -> State:
        """Return the state before sublayer 0 from the embedding h [..., D]."""
        raise NotImplementedError

    def connection(self, k: int | jax.Array, *, rngs: nnx.Rngs | PathKey) -> Connection:
        """Make the connection of sublayer k in depth order; k may be traced (blocks are initialised under vmap)."""
        raise NotImplementedError

    def collapse(self, state: State) -> jax.Array:
        """Return the hidden state h [..., D] of a settled state, for the final norm."""
        raise NotImplementedError

    def streams(self, state: State) -> jax.Array:
        """Return the streams [..., N, D] of a settled state, for the probes."""
        raise NotImplementedError

    def each(self, state: State, f: Callable[[jax.Array], jax.Array]) -> State:
        """Return the state with ``f`` applied to every leaf of tokens, each as [..., and more] with the tokens first.

        Interventions and the layout over a mesh reach a state by this alone. The default holds where every leaf follows
        the state rule; scalars are left as they are.
        """
        return jax.tree.map(lambda leaf: leaf if leaf.ndim == 0 else f(leaf), state)

    def end_measures(self, state: State) -> dict[str, jax.Array]:
        """Return measures of ``collapse`` for the probes, from a settled state, as ``Connection.measures`` does.

        The probes append it to the sublayers' measures of the same names, or log it alone.
        """
        return {}

    def constants(self) -> dict[str, jax.Array]:
        """Return learned numbers that are the same for every token and belong to no sublayer, for the probes."""
        return {}

    def settle(self, state: State) -> State:
        """Return the state with nothing pending, of the same structure.

        A topology whose ``write`` puts work off until the next ``read`` does it here. A decoder settles a state where
        it collapses it, shows it to probes or edits it, and where recomputation starts again from it. Where a topology
        has a ``period``, it settles a state at the period's end instead: within one, recomputation starts from what
        moves.
        """
        return state

    def held(self, state: State) -> tuple[Any, State]:
        """Split the state of a topology with a ``period`` into (what stays as it is within a period, what moves).

        A scan carries what moves alone, so that what is held is kept once a period for the backward pass and not once a
        layer. ``write`` must return the held leaves as it got them.
        """
        return (), state

    def joined(self, held: Any, moving: State) -> State:
        """Undo ``held``: return the whole state."""
        return moving

    def hand_on(self, state: State) -> State:
        """Return the state that the next period starts from; called after every ``period`` blocks of the network."""
        return state

    def multiplies(self, k: int) -> int:
        """Return the multiply-adds of sublayer k's connection per token, forward: projections, read, mixing, write."""
        raise NotImplementedError

    def end_multiplies(self) -> int:
        """Return the multiply-adds of ``expand`` and ``collapse`` per token, forward."""
        return 0

    def numpy_form(self) -> type[Runner] | None:
        """Return the runner that an exported model carries, if there is one."""
        return self.runner


Builder = Callable[..., ResidualTopology]
_REGISTRY: dict[str, Builder] = {}
_GIVEN = ("n", "init", "collapse", "sublayers")  # what a builder may name beside the options of its kind


def register(kind: Kind, builder: Builder) -> None:
    """Make a kind known everywhere: to ``build``, the configuration, the layout over a mesh and the optimiser.

    The module that calls this is what a run of the kind stores as ``residual.module``, unless that is the main program.

    Args:
      kind: its name, what it allows, its options and its parameters.
      builder: ``builder(width, *, rngs, …) -> ResidualTopology``. It gets the arguments
        that its signature names, out of ``n``, ``init``, ``collapse``, ``sublayers`` (S, the network's depth) and the
        kind's options.

    Raises:
      ValueError: the name is taken, the builder does not take a declared option, or a parameter or an option is
        declared in another way by another kind.
    """
    if kind.name in _REGISTRY or _kinds.known().get(kind.name, kind) != kind:
        place = _kinds.module_of(kind.name)
        raise ValueError(f"residual kind {kind.name!r} is already registered{f' by {place}' if place else ''}")
    of_training = {parameter.decayed_by for parameter in kind.parameters.values()}
    for name in kind.options:
        if name not in _taken(builder, kind) and name not in of_training:
            raise ValueError(f"option {name!r} of kind {kind.name!r}: its builder does not take it")
    _kinds.declare(kind, _importable(sys._getframe(1).f_globals.get("__name__")))
    _REGISTRY[kind.name] = builder


def _importable(module: str | None) -> str | None:
    """Return the name of a module that another process can import; None for a main program or a config file."""
    names = (module or "").split(".")
    known = module in sys.modules and all(name.isidentifier() for name in names)
    return module if known and module != "__main__" else None


def kinds() -> tuple[str, ...]:
    """Return the names of the kinds that can be built."""
    return tuple(name for name, kind in _kinds.known().items() if kind.builder or name in _REGISTRY)


def builder(kind: str) -> Builder:
    """Return the builder of a kind.

    Raises:
      ValueError: unknown kind.
    """
    if not isinstance(kind, str):
        raise ValueError(f"kind: given {kind!r}, allowed: one of {', '.join(kinds())}")
    if kind not in _REGISTRY:
        spec = _kinds.known().get(kind)
        if spec is None or not spec.builder:
            raise ValueError(_kinds.unknown(kind))
        constructor = _kinds.referred(spec.builder)
        _REGISTRY[kind] = (
            functools.partial(constructor, mixing=_kinds.referred(spec.mixing)) if spec.mixing else constructor
        )
    return _REGISTRY[kind]


def _taken(builder: Builder, kind: Kind) -> tuple[str, ...]:
    """Return which of ``_GIVEN`` and of the kind's options a builder takes.

    A module class hides its signature behind its metaclass: only ``__init__`` tells.
    """
    bound: set[str] = set()
    while isinstance(builder, functools.partial):
        bound |= set(builder.keywords)
        builder = builder.func
    described = inspect.getattr_static(builder, "__init__") if isinstance(builder, type) else builder
    parameters = inspect.signature(described).parameters
    rest = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = [name for name in parameters if name not in bound]
    return tuple(name for name in (*_GIVEN, *kind.options) if rest or name in named)


def options(kind: str) -> tuple[str, ...]:
    """Return the names of what the builder of a kind takes beside the width: n, init, collapse, sublayers, its options.

    Raises:
      ValueError: unknown kind.
    """
    return _taken(builder(kind), _kinds.known()[kind])


def build(
    kind: str, width: int, *, rngs: nnx.Rngs | PathKey, sublayers: int | None = None, **given: Any
) -> ResidualTopology:
    """Build the topology of a kind over a stream of ``width``.

    Args:
      sublayers: S, how many sublayers the network has; kinds whose maps or state depend on depth need it.
      given: n, init, collapse and the kind's options, as its builder takes them.

    Raises:
      ValueError: unknown kind or option, a value that an option may not hold, or a width, number of streams, preset or
        collapse that it does not have.
      KindError: the builder of a kind from elsewhere raises, or gives no topology.
    """
    taken, spec = options(kind), _kinds.known()[kind]
    check_count("width", width)
    for field in ("n", "init", "collapse"):
        words = spec.refusal(field, given.get(field))
        if words is not None:
            raise ValueError(f"{field}: given {given[field]!r}, allowed: {words}")
        if given.get(field) is None and field not in taken:
            given.pop(field, None)
    for name in given:
        if name not in taken:
            allowed = [option for option in taken if option != "sublayers"]
            near = did_you_mean(name, [*allowed, "kind", "sublayers", "rngs"])
            raise ValueError(f"kind {kind!r} has no option {name!r}{near}; allowed: {', '.join(allowed)}")
        if name in spec.options:
            try:
                spec.options[name].check(name, spec.options[name].type, given[name])
            except UserError as error:
                raise ValueError(str(error)) from None
    if sublayers is not None and not (is_whole(sublayers) and sublayers >= 1):
        raise ValueError(f"sublayers: given {sublayers!r}, allowed: an int >= 1")
    depth = {"sublayers": sublayers} if "sublayers" in taken else {}
    make = builder(kind)
    with blamed(kind, "its builder"):
        topology = make(width, rngs=rngs, **depth, **given)
    if not isinstance(topology, ResidualTopology):
        raise KindError(f"{name_of(kind)}: its builder must give a ResidualTopology, got {type(topology).__name__}")
    return topology
