"""One residual connection of any kind, for a sublayer of a model that is not this project's decoder."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from mhc.residual.functional import Maps
from mhc.residual.protocol import Connection, Context, State, build
from mhc.rng import PathKey, path_key


class HyperConnection(Connection):
    """The connection of sublayer ``k``, with the means to begin and end the stream::

        x = first.expand(h)          # h [..., D] -> streams [..., N, D], once, before the first sublayer
        x = first(x, attention)      # any callable [..., D] -> [..., D]; its norm is its own
        x = second(x, mlp)
        h = second.collapse(x)       # once, after the last sublayer

    Every connection of a model has the same kind and N. Only the one that collapses needs ``collapse="head"``, which
    has parameters of its own.

    Args:
      width: D.
      k: number of the sublayer in depth order, from 0. The presets ``hc`` and ``home`` read stream k mod N at first.
      kind: a registered kind.
      rngs: one key is drawn from it.
      sublayers: S, how many sublayers the model has; kinds whose maps or state depend on depth need it.
      options: as the kind takes them: n (default 4), init, alpha, collapse, sinkhorn, iters, …

    Raises:
      ValueError: unknown kind, or a number of streams, preset or collapse that it does not have.
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
        key = path_key(rngs)
        self.residual = build(kind, width, rngs=key / "residual", sublayers=sublayers, **options)
        self.connection = self.residual.connection(k, rngs=key / "connection")

    def expand(self, h: jax.Array) -> State:
        """Return the state from h [..., D]: N copies of it, for a topology of streams."""
        return self.residual.expand(h)

    def collapse(self, state: State) -> jax.Array:
        """Return h [..., D] from the state."""
        return self.residual.collapse(self.residual.settle(state))

    def read(self, state: State) -> tuple[jax.Array, Context]:
        return self.connection.read(state)

    def write(self, state: State, y: jax.Array, context: Context) -> State:
        return self.connection.write(state, y, context)

    def measures(self, context: Context) -> dict[str, jax.Array]:
        return self.connection.measures(context)

    def maps(self, context: Context) -> Maps | None:
        return self.connection.maps(context)
