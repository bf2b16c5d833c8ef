"""Check that a kind from elsewhere keeps the protocol, on shapes alone, before anything is computed.

A scan over depth, the layout over a mesh, the probes and the interventions rely on what ``mhc.residual.protocol`` says.
Where a kind breaks it, each of them fails far from the cause; here the first break is one line.
"""

from __future__ import annotations

from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from flax import nnx

from mhc import kinds
from mhc.residual.elsewhere import KindError, blamed, is_elsewhere, name_of
from mhc.residual.protocol import Connection, ResidualTopology, State
from mhc.rng import PathKey

_kept: set[Any] = set()  # what was found to keep it in this process


def check(
    kind: str,
    topology: ResidualTopology,
    width: int,
    *,
    dtype: Any = jnp.float32,
    stacked: bool = False,
) -> None:
    """Raise where a topology of a kind from elsewhere breaks the protocol; kinds of this project have tests instead.

    Two sublayers run on abstract arrays [B, T, D]: expand, read, write, settle, collapse, and what the probes call.

    Args:
      kind: its name, under which it is registered.
      topology: as its builder made it. width: D.
      dtype: of the embedding; every leaf of the state must keep the dtype that ``expand`` gives it.
      stacked: whether connections are made with a traced number and their parameters stacked, as in a decoder: then
        every parameter must be declared, float32 and of as many axes as declared.

    Raises:
      KindError: the first break, with the kind and the method.
    """
    if not is_elsewhere(kind):
        return
    dtype = jnp.dtype(dtype)
    key = (kind, nnx.graphdef(topology), width, dtype, stacked)
    try:
        seen = key in _kept
    except TypeError:  # an attribute that has no hash
        _Contract(kind, topology, width, dtype, stacked).run()
        return
    if not seen:
        _Contract(kind, topology, width, dtype, stacked).run()
        _kept.add(key)


class _Contract:
    """Runs a topology on abstract arrays, and compares what each method gives with what the protocol says."""

    def __init__(self, kind: str, topology: ResidualTopology, width: int, dtype: Any, stacked: bool):
        self.kind, self.topology, self.width, self.dtype, self.stacked = kind, topology, width, dtype, stacked
        taken = {width, topology.n if isinstance(getattr(topology, "n", None), int) else 0}
        batch, length = [size for size in (5, 7, 11, 13) if size not in taken][:2]  # no axis is mistaken for another
        self.tokens = (batch, length)

    def run(self) -> None:
        topology = self.topology
        if not (isinstance(getattr(topology, "n", None), int) and topology.n >= 1):
            self.broken("`n`", f"must be the number of streams, got {getattr(topology, 'n', None)!r}")
        period = topology.period
        if period is not None and not (isinstance(period, int) and period >= 1):
            self.broken("`period`", f"must be None or a number of blocks of at least 1, got {period!r}")
        for name, call in (("multiplies", lambda: topology.multiplies(0)), ("end_multiplies", topology.end_multiplies)):
            with blamed(self.kind, f"`{name}`"):
                count = call()
            if not isinstance(count, int):
                self.broken(f"`{name}`", f"must give an int, got {type(count).__name__}")
        h = jax.ShapeDtypeStruct((*self.tokens, self.width), self.dtype)
        jax.eval_shape(self.two_sublayers, h, jnp.int32(0))

    def two_sublayers(self, h: jax.Array, k: jax.Array) -> None:
        topology = self.topology
        with blamed(self.kind, "`expand`"):
            state = topology.expand(h)
        self.state_rule(state)
        names: list[list[str]] = []
        for number in range(2):
            with blamed(self.kind, "`connection`"):
                key = PathKey(jax.random.key(0)) / "connection"
                connection = topology.connection(k + number if self.stacked else number, rngs=key)
            if not isinstance(connection, Connection):
                self.broken("`connection`", f"must give a Connection, got {type(connection).__name__}")
            self.parameters(connection)
            state = self.sublayer(connection, state, names)
        if names[0] != names[1]:
            self.broken("`measures`", f"must have the same names in every sublayer, got {names[0]}, then {names[1]}")
        for name in ("settle", *(("hand_on",) if topology.period is not None else ())):
            with blamed(self.kind, f"`{name}`"):
                after = getattr(topology, name)(state)
            self.same(f"`{name}`", state, after)
        if topology.period is not None:
            with blamed(self.kind, "`held` or `joined`"):
                after = topology.joined(*topology.held(state))
            self.same("`joined` of `held`", state, after)
        with blamed(self.kind, "`settle`"):
            state = topology.settle(state)
        with blamed(self.kind, "`collapse`"):
            self.shaped("`collapse`", topology.collapse(state), (self.width,), self.dtype)
        with blamed(self.kind, "`streams`"):
            self.shaped("`streams`", topology.streams(state), (topology.n, self.width), None)

    def sublayer(self, connection: Connection, state: State, names: list[list[str]]) -> State:
        """Return the state after one sublayer; add the names of its measures."""
        with blamed(self.kind, "`read`"):
            pair = connection.read(state)
        if not (isinstance(pair, tuple) and len(pair) == 2):
            self.broken("`read`", f"must give (the sublayer's input, what `write` needs), got {type(pair).__name__}")
        u, context = pair
        self.shaped("`read`", u, (self.width,), self.dtype)
        with blamed(self.kind, "`write`"):
            after = connection.write(state, u, context)
        self.same("`write`", state, after)
        self.state_rule(after)
        n = self.topology.n
        with blamed(self.kind, "`maps`"):
            maps = connection.maps(context)
        if maps is not None:
            if not (isinstance(maps, tuple) and len(maps) == 3):
                self.broken("`maps`", f"must give Maps(pre, post, res) or None, got {type(maps).__name__}")
            for name, leaf, axes in zip(("pre", "post", "res"), maps, ((n,), (n,), (n, n)), strict=True):
                self.shaped(f"{name} of `maps`", leaf, axes, None)
        with blamed(self.kind, "`measures`"):
            measures = connection.measures(context)
        if not isinstance(measures, dict):
            self.broken("`measures`", f"must give a dict, got {type(measures).__name__}")
        for name, leaf in measures.items():
            vector = getattr(leaf, "shape", ())[len(self.tokens) : len(self.tokens) + 1]  # one a token is allowed
            self.shaped(f"{name!r} of `measures`", leaf, vector, None)
        names.append(list(measures))
        return after

    def state_rule(self, state: State) -> None:
        """Check that ``each`` shows every leaf but scalars, tokens first."""
        shown: list[tuple[int, ...]] = []

        def look(leaf: jax.Array) -> jax.Array:
            shown.append(leaf.shape)
            return leaf

        with blamed(self.kind, "`each`"):
            after = self.topology.each(state, look)
        for shape in shown:
            if shape[:2] != self.tokens:
                self.broken(
                    "the state",
                    f"has a leaf of shape {list(shape)}, whose first axes must be the tokens' "
                    f"{list(self.tokens)}, or it a scalar; `each` may show it so",
                )
        self.same("`each`", state, after)
        leaves = [leaf for leaf in jax.tree.leaves(state) if jnp.ndim(leaf)]
        if len(shown) != len(leaves):
            self.broken("`each`", f"must show every leaf but scalars once: {len(leaves)}, it shows {len(shown)}")

    def parameters(self, connection: Connection) -> None:
        """Check that the parameters which a decoder stacks are declared with their shapes and dtypes."""
        if not self.stacked:
            return
        declared = kinds.known()[self.kind].parameters
        for part in (self.topology, connection):
            for path, leaf in nnx.to_flat_state(nnx.state(part)):
                name = "/".join(map(str, path))
                if name.startswith("head/") and part is self.topology and name not in declared:
                    continue  # of the learned collapse, which every topology of streams has
                value = leaf[...]
                if name not in declared:
                    self.broken(f"the parameter {name!r}", "is not among the Kind's parameters")
                if value.ndim != len(declared[name].axes):
                    axes = ", ".join(declared[name].axes)
                    self.broken(f"the parameter {name!r}", f"has shape {list(value.shape)}, declared: ({axes})")
                if value.dtype != jnp.float32:
                    self.broken(f"the parameter {name!r}", f"must be float32, got {value.dtype}")

    def same(self, part: str, before: State, after: State) -> None:
        """Refuse a state whose structure, shapes or dtypes have changed."""
        if str(jax.tree.structure(before)) != str(jax.tree.structure(after)):
            self.broken(part, f"must keep the state's structure {_words(before)}, got {_words(after)}")
        for (path, old), new in zip(jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True):
            if (jnp.shape(old), jnp.result_type(old)) != (jnp.shape(new), jnp.result_type(new)):
                where = jax.tree_util.keystr(path)
                leaf = f"leaf {where} of the state" if where else "state"
                self.broken(part, f"must keep the {leaf} {_word(old)}, got {_word(new)}")

    def shaped(self, part: str, leaf: Any, axes: tuple[int, ...], dtype: Any) -> None:
        """Refuse a value that is not an array of the tokens' axes and these, of this dtype (None: any)."""
        expected = (*self.tokens, *axes)
        if not hasattr(leaf, "shape") or leaf.shape != expected or (dtype is not None and leaf.dtype != dtype):
            words = f"{dtype}{list(expected)}" if dtype is not None else f"shape {list(expected)}"
            tokens = f"with the tokens' axes {list(self.tokens)} first"
            self.broken(part, f"must give {words}, {tokens}, got {_words(leaf)}")

    def broken(self, part: str, words: str) -> NoReturn:
        raise KindError(f"{name_of(self.kind)}: {part} {words} ({type(self.topology).__name__})")


def _word(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "shape") else type(leaf).__name__


def _words(tree: Any) -> str:
    return str(jax.tree.map(_word, tree)).replace("'", "")
