"""Implement gated residual streams (arXiv:2608.30320): gates of low rank read N streams, and normalise what they read.

What a sublayer reads takes the place of its own norm, and a last read that of the collapse and the final norm.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mhc.residual.arrays import check_axes
from mhc.residual.protocol import Connection, ResidualTopology
from mhc.residual.reads import gated_parts
from mhc.residual.runner import Runner, sigmoid
from mhc.rng import PathKey, path_key

STD = 0.02


class Gates(NamedTuple):
    """Holds the gates that a read computed for each token: g [..., N, D], and post [..., N] unless it is the last."""

    gates: jax.Array
    post: jax.Array | None


class GatedRead(nnx.Module):
    """Computes ``functional.gated_read`` with its own parameters.

    Parameters, float32: w_norm [N, D], w_down [N, D, r], w_up [r, N, D], w_inject [N, D, N] unless it is the last read.
    """

    def __init__(self, topology: GatedResidual, *, rngs: nnx.Rngs | PathKey, last: bool):
        n, d, r, init = topology.n, topology.width, topology.rank, topology.init
        key, self.rms_eps, self.last = path_key(rngs), topology.rms_eps, last

        def normal(name: str, shape: tuple[int, ...], std: float) -> jax.Array:
            return np.float32(std) * jax.random.normal((key / name).key, shape, jnp.float32)

        equal = init == "equivalent"
        self.w_norm = nnx.Param(jnp.full((n, d), 1.0 if equal else 0.0, jnp.float32))
        self.w_down = nnx.Param(normal("w_down", (n, d, r), (n * d) ** -0.5 if equal else STD))
        up = normal("w_up", (r, n, d), r**-0.5 if equal else STD)
        self.w_up = nnx.Param(paired(up) if equal else up)
        if not last:
            self.w_inject = nnx.Param(
                jnp.zeros((n, d, n), jnp.float32) if equal else normal("w_inject", (n, d, n), STD)
            )

    def gated(self, state: jax.Array) -> tuple[jax.Array, Gates]:
        """Return (u [..., D] in the dtype of the streams [..., N, D], what the read computed)."""
        names = ("w_norm", "w_down", "w_up", *(() if self.last else ("w_inject",)))

        # For the backward pass only the streams are kept, and not the normalised streams and the gates.
        @jax.checkpoint
        def read(x: jax.Array, params: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array | None]:
            n, d = x.shape[-2:]
            shapes = {"w_norm": (n, d), "w_down": (n * d, -1), "w_up": (-1, n * d), "w_inject": (n * d, n)}
            flat = {name: leaf.reshape(shapes[name]) for name, leaf in params.items()}
            return gated_parts(x, flat, rms_eps=self.rms_eps)

        u, gates, post = read(state, {name: getattr(self, name)[...] for name in names})
        return u.astype(state.dtype), Gates(gates, post)


def paired(w_up: jax.Array) -> jax.Array:
    """Return w_up [r, N, D] with stream 2i+1 minus stream 2i, and an odd last one 0: equal streams' gates average ½."""
    n = w_up.shape[1]
    even = w_up[:, 0 : n - 1 : 2]
    pairs = jnp.stack([even, -even], axis=2).reshape(w_up.shape[0], -1, w_up.shape[2])
    return pairs if n % 2 == 0 else jnp.concatenate([pairs, jnp.zeros_like(w_up[:, :1])], axis=1)


class GatedConnection(GatedRead, Connection):
    """Reads by gates, and writes x'_i = x_i + post[i] F(u). Parameters: those of ``GatedRead``."""

    def __init__(self, topology: GatedResidual, *, rngs: nnx.Rngs | PathKey):
        super().__init__(topology, rngs=rngs, last=False)

    def read(self, state: jax.Array) -> tuple[jax.Array, Gates]:
        return self.gated(state)

    def write(self, state: jax.Array, y: jax.Array, context: Gates) -> jax.Array:
        assert context.post is not None
        post = context.post[..., None]
        return (state.astype(post.dtype) + post * y[..., None, :].astype(post.dtype)).astype(state.dtype)

    def maps(self, context: Gates) -> None:
        return None

    def measures(self, context: Gates) -> dict[str, jax.Array]:
        """Return the mean gate and the share that is written, both [..., N]."""
        assert context.post is not None
        return {"gate": jnp.mean(context.gates, axis=-1), "inject": context.post}


class GatedRunner(Runner):
    """Runs gated residual streams in numpy."""

    def expand(self, x):
        return np.repeat(x[:, :, None], self.n, axis=2)

    def gated(self, state, name):
        unit = state / np.sqrt((state * state).mean(-1, keepdims=True) + self.r["rms_eps"])
        unit = unit * (1.0 + self.w(f"{name}.w_norm"))
        down = np.tensordot(unit, self.w(f"{name}.w_down"), 2) / self.n
        gates = sigmoid(np.tensordot(down * sigmoid(down), self.w(f"{name}.w_up"), 1))
        return (gates * unit).mean(2), unit

    def read(self, state, name, k):
        u, unit = self.gated(state, name)
        return u, 2.0 * sigmoid(np.tensordot(unit, self.w(f"{name}.w_inject"), 2) / self.n)

    def write(self, state, y, context):
        return state + context[..., None] * y[:, :, None]

    def collapse(self, state):
        return self.gated(state, "residual.end")[0]


class GatedResidual(ResidualTopology):
    """Builds the topology ``gated_residual``: N streams, which each read normalises and gates, channel by channel.

    Args:
      width: D.
      rngs: the weights' key.
      n: N, by default 4.
      init: ``home`` or ``equivalent``; see docs/topologies.md.
      rank: r of the gates; None: D / 8, at least 1.
      rms_eps: inside the square root of the norm.
    """

    owns_norm: ClassVar[bool] = True
    runner = GatedRunner

    def __init__(
        self,
        width: int,
        *,
        rngs: nnx.Rngs | PathKey,
        n: int | None = None,
        init: str | None = None,
        rank: int | None = None,
        rms_eps: float = 1e-6,
    ):
        self.width, self.n, self.init, self.rms_eps = width, 4 if n is None else n, init or "home", rms_eps
        self.rank = max(1, width // 8) if rank is None else rank
        self.end = GatedRead(self, rngs=path_key(rngs) / "end", last=True)

    def expand(self, h: jax.Array) -> jax.Array:
        check_axes("h", h, ("D", self.width))
        return jnp.broadcast_to(h[..., None, :], (*h.shape[:-1], self.n, h.shape[-1]))

    def connection(self, k: int | jax.Array, *, rngs: nnx.Rngs | PathKey) -> GatedConnection:
        return GatedConnection(self, rngs=rngs)

    def collapse(self, state: jax.Array) -> jax.Array:
        return self.end.gated(state)[0]

    def streams(self, state: jax.Array) -> jax.Array:
        return state

    def end_measures(self, state: jax.Array) -> dict[str, jax.Array]:
        """Return the mean gate [..., N] of the last read, which writes nothing."""
        return {"gate": jnp.mean(self.end.gated(state)[1].gates, axis=-1)}

    def multiplies(self, k: int) -> int:
        return self.n * self.width * (2 * self.rank + self.n + 2)

    def end_multiplies(self) -> int:
        return self.n * self.width * (2 * self.rank + 1)
