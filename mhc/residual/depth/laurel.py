"""Implement LAuReL (arXiv:2411.07501): x' = a F(x) + b (x + x A B), one stream with learned shares."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mhc.residual import functional
from mhc.residual.arrays import promoted
from mhc.residual.protocol import Connection, ResidualTopology
from mhc.residual.runner import Runner, softmax
from mhc.rng import PathKey

VARIANTS = ("rw", "lr", "rw_lr")


class LaurelConnection(Connection):
    """Computes x' = a F(x) + b (x + x A B), (a, b) = 2 softmax(w).

    Parameters, float32: w [2], unless the variant is ``lr``; A [D, r] and B [r, D], unless it is ``rw``. They start at
    x' = x + F(x): w and B at 0, A at 1 / sqrt(r D) where the row's number modulo r is the column's.
    """

    def __init__(self, width: int, variant: str, rank: int):
        self.names = (*(("w",) if variant != "lr" else ()), *(("A", "B") if variant != "rw" else ()))
        if "w" in self.names:
            self.w = nnx.Param(jnp.zeros((2,), jnp.float32))
        if "A" in self.names:
            diagonal = jnp.arange(width)[:, None] % rank == jnp.arange(rank)[None]
            self.A = nnx.Param(jnp.where(diagonal, jnp.float32((rank * width) ** -0.5), jnp.float32(0.0)))
            self.B = nnx.Param(jnp.zeros((rank, width), jnp.float32))

    def read(self, state: jax.Array) -> tuple[jax.Array, Any]:
        return state, state.shape[:-1]

    def write(self, state: jax.Array, y: jax.Array, context: Any) -> jax.Array:
        params = {name: getattr(self, name)[...] for name in self.names}
        return functional.laurel_write(state, y, params).astype(state.dtype)

    def maps(self, context: Any) -> None:
        return None

    def measures(self, context: Any) -> dict[str, jax.Array]:
        """Return the shares a of the output and b of the stream, the same for every token."""
        shares = 2.0 * jax.nn.softmax(promoted(w=self.w[...])[0]) if "w" in self.names else jnp.ones(2)
        return {name: jnp.broadcast_to(shares[i], context) for i, name in enumerate(("output_share", "stream_share"))}


class LaurelRunner(Runner):
    """Runs LAuReL in numpy."""

    def expand(self, x):
        return x

    def read(self, state, name, k):
        return state, name

    def write(self, state, y, context):
        variant, shares = self.r["variant"], (1.0, 1.0)
        if variant != "lr":
            shares = 2.0 * softmax(self.w(f"{context}.w"))
        if variant != "rw":
            state = state + state @ self.w(f"{context}.A") @ self.w(f"{context}.B")
        return shares[0] * y + shares[1] * state

    def collapse(self, state):
        return state


class Laurel(ResidualTopology):
    """Builds the topology ``laurel``: the state is the stream itself.

    Args:
      width: D.
      rngs: unused, since nothing is drawn.
      n: 1.
      init: both presets are the plain residual.
      variant: ``rw``, ``lr`` or ``rw_lr``.
      rank: r; None: D / 8, at least 1.
    """

    runner = LaurelRunner

    def __init__(
        self,
        width: int,
        *,
        rngs: nnx.Rngs | PathKey | None = None,
        n: int | None = None,
        init: str | None = None,
        variant: str = "rw_lr",
        rank: int | None = None,
    ):
        self.n, self.width, self.variant = 1, width, variant
        self.rank = max(1, width // 8) if rank is None else rank

    def expand(self, h: jax.Array) -> jax.Array:
        return h

    def connection(self, k: int | jax.Array, *, rngs: nnx.Rngs | PathKey | None = None) -> LaurelConnection:
        return LaurelConnection(self.width, self.variant, self.rank)

    def collapse(self, state: jax.Array) -> jax.Array:
        return state

    def streams(self, state: jax.Array) -> jax.Array:
        return state[..., None, :]

    def multiplies(self, k: int) -> int:
        return (2 + (0 if self.variant == "rw" else 2 * self.rank)) * self.width
