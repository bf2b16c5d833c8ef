"""Wrap a sublayer of a model that is not this project's decoder in one residual connection of any kind."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mhc.kernels.checks import check_float, is_whole
from mhc.residual import contract
from mhc.residual.elsewhere import blamed
from mhc.residual.functional import Maps
from mhc.residual.linen import refuse_within, warn_of_constants
from mhc.residual.protocol import Connection, Context, ResidualTopology, State, build
from mhc.rng import PathKey, path_key


class HyperConnection(Connection):
    """Wraps sublayer ``k`` in its connection, with the means to begin and end the stream::

        x = first.expand(h)          # h [..., D] -> streams [..., N, D], once, before the first sublayer
        x = first(x, attention)      # any callable [..., D] -> [..., D]; its norm is its own
        x = second(x, mlp)
        h = second.collapse(x)       # once, after the last sublayer

    Every connection of a model has the same kind and N. Only the one that collapses needs ``collapse="head"``, which
    has parameters of its own. Arrays are float32, bfloat16, float16 or float64, and the streams keep the dtype of h.

    Args:
      width: D.
      k: number of the sublayer in depth order, from 0. The presets ``hc`` and ``home`` read stream k mod N at first.
      kind: a registered kind.
      rngs: one key is drawn from it.
      sublayers: S, how many sublayers the model has; kinds whose maps or state depend on depth need it.
      options: as the kind takes them: n (default 4), init, alpha, collapse, sinkhorn, iters, …

    Raises:
      ValueError: an unknown kind or option, a value that an option may not hold, or a k that is no sublayer's number.
        The methods raise it for an array that is not of this width, or a state that is not of this kind.
      RuntimeError: it is made in a method of a Flax Linen module, which would not train it: ``nnx.bridge.to_linen``.
      TypeError: the methods raise it for integers and complex numbers, which the streams' dtype would truncate.
    """

    def __init__(
        self,
        width: int,
        k: int | jax.Array,
        *,
        kind: str = "mhc",
        rngs: nnx.Rngs | PathKey | jax.Array,
        sublayers: int | None = None,
        **options: Any,
    ):
        refuse_within(type(self).__name__, f"{width}, {k}" if is_whole(k) else "width, k")
        _check_number(k, sublayers)
        key = path_key(rngs)
        self.residual = build(kind, width, rngs=key / "residual", sublayers=sublayers, **options)
        contract.check(kind, self.residual, width)
        with blamed(kind, "`connection`"):
            self.connection = self.residual.connection(k, rngs=key / "connection")
        self.width, self.kind = int(width), kind
        # A topology with a period hands on after its last sublayer; a traced number is kept with the parameters.
        if self.residual.period is not None:
            self.number = int(k) if is_whole(k) else nnx.Variable(jnp.asarray(k))
        # What every state looks like is seen from one of 2 x 3 tokens: the axes of each leaf after those of the tokens.
        like = jax.eval_shape(self.residual.expand, jax.ShapeDtypeStruct((2, 3, self.width), jnp.float32))
        self.state_structure = str(jax.tree.structure(like))
        self.state_axes = tuple(
            (leaf.shape[2:], bool(jnp.issubdtype(leaf.dtype, jnp.floating)))
            for leaf in _shown(self.residual, like) or ()
        )

    def expand(self, h: jax.Array) -> State:
        """Return the state from h [..., D]: N copies of it, for a topology of streams."""
        self._check_tokens("expand", "h", h)
        return self.residual.expand(h)

    def collapse(self, state: State) -> jax.Array:
        """Return h [..., D] from the state."""
        self._check_state("collapse", state)
        return self.residual.collapse(self.residual.settle(state))

    def read(self, state: State) -> tuple[jax.Array, Context]:
        self._check_state("read", state)
        warn_of_constants(self, state)
        return self.connection.read(state)

    def write(self, state: State, y: jax.Array, context: Context) -> State:
        lead = self._check_state("write", state)
        self._check_tokens("write", "y", y, lead)
        after = self._handed_on(self.connection.write(state, y, context))
        # A kind from elsewhere may let a wider y widen its state.
        return jax.tree.map(lambda new, old: new if new.dtype == old.dtype else new.astype(old.dtype), after, state)

    def _handed_on(self, state: State) -> State:
        """Return the state for the next sublayer: at the end of a topology's period, what ``hand_on`` makes of it."""
        if self.residual.period is None:
            return state
        sublayers = 2 * self.residual.period
        if isinstance(self.number, nnx.Variable):
            return jax.lax.cond(
                (self.number[...] + 1) % sublayers == 0,
                lambda state: self.residual.hand_on(self.residual.settle(state)),
                lambda state: state,
                state,
            )
        ends = (self.number + 1) % sublayers == 0
        return self.residual.hand_on(self.residual.settle(state)) if ends else state

    def measures(self, context: Context) -> dict[str, jax.Array]:
        return self.connection.measures(context)

    def maps(self, context: Context) -> Maps | None:
        return self.connection.maps(context)

    def _place(self, method: str) -> str:
        """Return the beginning of a message: the connection and the method."""
        return f"HyperConnection(width={self.width}, kind={self.kind!r}).{method}"

    def _check_tokens(self, method: str, name: str, array: Any, lead: tuple[int, ...] | None = None) -> None:
        """Refuse an array that is not [..., D], or [*lead, D], of floating point. Raises TypeError or ValueError."""
        check_float(f"{self._place(method)}: {name}", array)
        expected = (*(array.shape[:-1] if lead is None else lead), self.width)
        if array.ndim == 0 or array.shape != expected:
            axes = ["..."] if lead is None else [str(size) for size in lead]
            words = ", ".join([*axes, f"D={self.width}"])
            raise ValueError(f"{self._place(method)}: {name} must be [{words}], got {_described(array)}")

    def _check_state(self, method: str, state: State) -> tuple[int, ...]:
        """Return the leading axes of a state, those of the tokens.

        Raises:
          ValueError: another structure, width or number of streams, or leaves that disagree about the tokens.
          TypeError: integers or complex numbers where this kind has floats.
        """
        leaves = _shown(self.residual, state) if str(jax.tree.structure(state)) == self.state_structure else None
        if leaves is not None and len(leaves) == len(self.state_axes):
            leads = set()
            for leaf, (axes, is_float) in zip(leaves, self.state_axes, strict=True):
                if is_float:
                    check_float(f"{self._place(method)}: the state", leaf)
                lead = leaf.shape[: max(len(leaf.shape) - len(axes), 0)]
                leads.add(lead if leaf.shape == (*lead, *axes) else None)
            (lead, *others) = leads
            if lead is not None and not others:
                return lead
        expected = ", ".join(self._axes_words(axes) for axes, _ in self.state_axes)
        same_width = _is_array(state) and state.shape[-1:] == (self.width,)
        hint = ": expand first, once for the whole model, with the same kind and n" if same_width else ""
        raise ValueError(f"{self._place(method)}: the state must be {expected}, got {_described(state)}{hint}")

    def _axes_words(self, axes: tuple[int, ...]) -> str:
        """Return the axes of a leaf in words: [..., N=4, D=16]."""
        letters = {(self.width,): ("D",), (self.residual.n, self.width): ("N", "D")}.get(axes)
        sizes = [str(size) for size in axes]
        if letters:
            sizes = [f"{letter}={size}" for letter, size in zip(letters, sizes, strict=True)]
        return f"[{', '.join(['...', *sizes])}]"


def _check_number(k: int | jax.Array, sublayers: int | None) -> None:
    """Raise ValueError for a value that is no number of a sublayer."""
    if isinstance(k, jax.Array):
        good = k.ndim == 0 and jnp.issubdtype(k.dtype, jnp.integer)
        given = _described(k)
    else:
        good = is_whole(k) and k >= 0
        given = repr(k)
    if not good:
        raise ValueError(f"k: given {given}, allowed: the number of the sublayer in depth order, 0, 1, 2, …")
    if isinstance(sublayers, int) and is_whole(k) and k >= sublayers >= 1:
        raise ValueError(f"k: given {k}, allowed: from 0 to {sublayers - 1} with sublayers={sublayers}")


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _described(tree: Any) -> str:
    """Return the dtypes and shapes of a tree's leaves in words: float32[2, 8, 16]."""

    def words(leaf: Any) -> str:
        return f"{leaf.dtype}{list(leaf.shape)}" if _is_array(leaf) else type(leaf).__name__

    return str(jax.tree.map(words, tree)).replace("'", "")


def _shown(topology: ResidualTopology, state: State) -> list[jax.ShapeDtypeStruct] | None:
    """Return every leaf of a state as ``each`` shows it, tokens first; None where it is no state of this topology."""
    leaves: list[jax.ShapeDtypeStruct] = []

    def look(leaf: jax.Array) -> jax.Array:
        leaves.append(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        return leaf

    if not all(map(_is_array, jax.tree.leaves(state))):
        return None
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    try:
        jax.eval_shape(lambda state: topology.each(state, look), shapes)
    except Exception:  # `each` of a kind from elsewhere may count on the right number of axes
        return None
    return leaves
