"""Implement DenseFormer (arXiv:2402.02622): a learned average of all block outputs so far follows every block."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mhc.kernels.checks import accumulation_dtype
from mhc.residual.protocol import Connection, ResidualTopology
from mhc.residual.runner import Runner
from mhc.rng import PathKey

State = dict[str, jax.Array]
"""past [L+1, ..., D]: X_0 to X_i, the embedding first, and zeros; running [..., D]; blocks: i, the number of those that
are complete."""


class DenseFormerConnection(Connection):
    """Computes x + F(x) within a block. It has no parameters: the average is the topology's."""

    def read(self, state: State) -> tuple[jax.Array, None]:
        return state["running"], None

    def write(self, state: State, y: jax.Array, context: None) -> State:
        return {**state, "running": state["running"] + y.astype(state["running"].dtype)}

    def maps(self, context: None) -> None:
        return None


class DenseFormerRunner(Runner):
    """Runs DenseFormer in numpy."""

    def expand(self, x):
        return [x], x

    def read(self, state, name, k):
        return state[1], k

    def write(self, state, y, context):
        past, running = state
        running = running + y
        if context % 2 == 0:
            return past, running
        past, last = [*past, running], context // 2 + 1
        weights = self.w("residual.weights")[context // 2]
        chosen = [j for j in range(last + 1) if (last - j) % self.r["dilation"] == 0]
        return past, np.sum([weights[j] * past[j] for j in chosen], axis=0)

    def collapse(self, state):
        return state[1]


class DenseFormer(ResidualTopology):
    """Builds the topology ``denseformer``: X_{i+1} = Block_i(Y_i), Y_{i+1} = sum_j a[i, j] X_j over j <= i + 1.

    With ``dilation`` only every dilation-th X counts, the newest among them. Parameters, float32: weights [L, L+1], the
    a's, of which those that count are trained; Y_{i+1} = X_{i+1} at the start.

    Args:
      width: D.
      rngs: unused, since nothing is drawn.
      sublayers: S = 2L.
      n: 1.
      init: both presets are the plain residual.
      dilation: see above.

    Raises:
      ValueError: no number of sublayers, or an odd one: a block has two.
    """

    runner = DenseFormerRunner
    period = 1
    gains_rows = True

    def __init__(
        self,
        width: int,
        *,
        rngs: nnx.Rngs | PathKey | None = None,
        sublayers: int | None = None,
        n: int | None = None,
        init: str | None = None,
        dilation: int = 1,
    ):
        if sublayers is None or sublayers % 2:
            raise ValueError(
                f"denseformer: sublayers: given {sublayers}, allowed: an even number, the depth of the network"
            )
        self.n, self.width, self.dilation, self.layers = 1, width, dilation, sublayers // 2
        self.weights = nnx.Param(jnp.eye(self.layers, self.layers + 1, 1, jnp.float32))

    def expand(self, h: jax.Array) -> State:
        rest = jnp.zeros((self.layers, *h.shape), h.dtype)
        return {"past": jnp.concatenate([h[None], rest]), "running": h, "blocks": jnp.zeros((), jnp.int32)}

    def connection(self, k: int | jax.Array, *, rngs: nnx.Rngs | PathKey | None = None) -> DenseFormerConnection:
        return DenseFormerConnection()

    def collapse(self, state: State) -> jax.Array:
        return state["running"]

    def streams(self, state: State) -> jax.Array:
        return state["running"][..., None, :]

    def each(self, state: State, f: Any) -> State:
        past = jnp.moveaxis(f(jnp.moveaxis(state["past"], 0, -2)), -2, 0)
        return {**state, "past": past, "running": f(state["running"])}

    def held(self, state: State) -> tuple[jax.Array, State]:
        return state["past"], {name: leaf for name, leaf in state.items() if name != "past"}

    def joined(self, held: jax.Array, moving: State) -> State:
        return {**moving, "past": held}

    def hand_on(self, state: State) -> State:
        """Return the state after the average that ends a block."""
        past, x, last = state["past"], state["running"], state["blocks"] + 1
        row = jax.lax.dynamic_index_in_dim(self._counted(), state["blocks"], keepdims=False)
        row = row.astype(accumulation_dtype(x, row))
        # The newest X is apart, so that the backward pass needs the rows that the block began with and no second copy.
        earlier = jnp.where(jnp.arange(past.shape[0]) < last, row, 0.0)
        newest = jax.lax.dynamic_index_in_dim(row, last, keepdims=False)
        y = jnp.einsum("j,j...d->...d", earlier, past.astype(row.dtype)) + newest * x.astype(row.dtype)
        past = jax.lax.dynamic_update_index_in_dim(past, x, last, axis=0)
        return {"past": past, "running": y.astype(x.dtype), "blocks": last}

    def _counted(self) -> jax.Array:
        """Return the weights [L, L+1], 0 where they do not count."""
        after = jnp.arange(1, self.layers + 1)[:, None] - jnp.arange(self.layers + 1)[None]
        return jnp.where((after >= 0) & (after % self.dilation == 0), self.weights[...], 0.0)

    def constants(self) -> dict[str, jax.Array]:
        """Return the weights [L, L+1] that count, for the probes."""
        return {"weights": self._counted()}

    def multiplies(self, k: int) -> int:
        return ((k // 2 + 1) // self.dilation + 1) * self.width if k % 2 else 0
