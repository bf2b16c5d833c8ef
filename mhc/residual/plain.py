"""Define the plain residual: x' = s x + F(x), one stream."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mhc.kernels.checks import common_dtype
from mhc.residual.functional import Maps
from mhc.residual.protocol import Connection, ResidualTopology
from mhc.residual.runner import Runner
from mhc.rng import PathKey


class PlainConnection(Connection):
    """Computes x' = scale * x + y; its maps are pre = post = 1, res = scale."""

    def __init__(self, scale: float):
        self.scale = scale

    def read(self, state: jax.Array) -> tuple[jax.Array, Any]:
        return state, state.shape[:-1]

    def write(self, state: jax.Array, y: jax.Array, context: Any) -> jax.Array:
        dtype = common_dtype(state, y)
        kept = state if self.scale == 1.0 else self.scale * state
        return (kept.astype(dtype) + y.astype(dtype)).astype(state.dtype)

    def maps(self, context: Any) -> Maps:
        ones = jnp.ones((*context, 1), jnp.float32)
        return Maps(ones, ones, self.scale * ones[..., None])


class PlainRunner(Runner):
    """Runs the plain residual in numpy."""

    def expand(self, x):
        return x

    def read(self, state, name, k):
        return state, None

    def write(self, state, y, context):
        return self.r["scale"] * state + y

    def collapse(self, state):
        return state


class PlainResidual(ResidualTopology):
    """Keeps one stream, which every ``collapse`` returns; ``scale`` 0 is the control without a residual."""

    runner = PlainRunner

    def __init__(
        self,
        width: int,
        *,
        rngs: nnx.Rngs | PathKey | None = None,
        n: int | None = None,
        scale: float = 1.0,
        collapse: str | None = None,
    ):
        self.n, self.scale = 1, scale

    def expand(self, h: jax.Array) -> jax.Array:
        return h

    def connection(self, k: int | jax.Array, *, rngs: nnx.Rngs | PathKey | None = None) -> PlainConnection:
        return PlainConnection(self.scale)

    def collapse(self, state: jax.Array) -> jax.Array:
        return state

    def multiplies(self, k: int) -> int:
        return 0

    def streams(self, state: jax.Array) -> jax.Array:
        return state[..., None, :]
