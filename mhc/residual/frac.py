"""Implement Frac-Connections (arXiv:2503.14125): the maps of Hyper-Connections between parts of one stream."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mhc.residual import functional
from mhc.residual.functional import Maps, SlotMaps
from mhc.residual.protocol import Connection, ResidualTopology
from mhc.residual.runner import Runner
from mhc.rng import PathKey

ALPHA = 0.01


class FracConnection(Connection):
    """Computes u_i = sum_j pre[i, j] h_j and h'_i = sum_j res[i, j] h_j + post[i] F(u)_i over m slots of the stream.

    Parameters, float32: b_read [m, m], b_post [m], b_res [m, m]; dynamic: w_read and w_res [D/m, m], w_post [D/m],
    alpha [3]. They are those of ``functional.frac_maps``, b_read its b_pre and w_read its w_pre, and start at the plain
    residual: every w 0, alpha 0.01, b_read and b_res the identity, b_post 1.
    """

    def __init__(self, width: int, m: int, *, alpha: float | None, dynamic: bool, tanh: bool, rms_eps: float):
        self.m, self.dynamic, self.tanh, self.rms_eps = m, dynamic, tanh, rms_eps
        self.b_read = nnx.Param(jnp.eye(m, dtype=jnp.float32))
        self.b_post = nnx.Param(jnp.ones((m,), jnp.float32))
        self.b_res = nnx.Param(jnp.eye(m, dtype=jnp.float32))
        if dynamic:
            slot = width // m
            self.w_read = nnx.Param(jnp.zeros((slot, m), jnp.float32))
            self.w_post = nnx.Param(jnp.zeros((slot,), jnp.float32))
            self.w_res = nnx.Param(jnp.zeros((slot, m), jnp.float32))
            self.alpha = nnx.Param(jnp.full((3,), ALPHA if alpha is None else alpha, jnp.float32))

    def slot_maps(self, slots: jax.Array) -> SlotMaps:
        """Return the maps of slots [..., m, D/m]."""
        names = {"b_pre": "b_read", "b_post": "b_post", "b_res": "b_res"}
        if self.dynamic:
            names |= {"w_pre": "w_read", "w_post": "w_post", "w_res": "w_res", "alpha": "alpha"}
        params = {name: getattr(self, ours)[...] for name, ours in names.items()}
        return functional.frac_maps(slots, params, dynamic=self.dynamic, tanh=self.tanh, rms_eps=self.rms_eps)

    def read(self, state: jax.Array) -> tuple[jax.Array, SlotMaps]:
        slots = cut(state, self.m)
        with jax.named_scope("maps"):
            maps = self.slot_maps(slots)
        u = jnp.einsum("...ij,...jc->...ic", maps.pre, slots.astype(maps.pre.dtype))
        return u.reshape(state.shape).astype(state.dtype), maps

    def write(self, state: jax.Array, y: jax.Array, context: SlotMaps) -> jax.Array:
        slots, y = (cut(leaf, self.m).astype(context.res.dtype) for leaf in (state, y))
        after = jnp.einsum("...ij,...jc->...ic", context.res, slots) + context.post[..., None] * y
        return after.reshape(state.shape).astype(state.dtype)

    def maps(self, context: SlotMaps) -> Maps:
        """Return the maps with pre summed over the slots of the input: the total weight of each slot of the stream."""
        return Maps(jnp.sum(context.pre, axis=-2), context.post, context.res)


def cut(h: jax.Array, m: int) -> jax.Array:
    """Return the m slots [..., m, D/m] of a stream [..., D]."""
    return h.reshape(*h.shape[:-1], m, h.shape[-1] // m)


class FracRunner(Runner):
    """Runs Frac-Connections in numpy."""

    def expand(self, x):
        return x

    def read(self, state, name, k):
        slots = state.reshape(*state.shape[:-1], self.n, -1)
        maps = [self.w(f"{name}.b_{which}") for which in ("read", "post", "res")]
        if self.r["dynamic"]:
            unit = slots / np.sqrt((slots * slots).mean(-1, keepdims=True) + self.r["rms_eps"])
            raw = [unit @ self.w(f"{name}.w_{which}") for which in ("read", "post", "res")]
            raw = [np.tanh(y) if self.r["tanh"] else y for y in raw]
            raw[0], raw[2] = np.swapaxes(raw[0], -1, -2), np.swapaxes(raw[2], -1, -2)
            maps = [b + a * y for b, a, y in zip(maps, self.w(f"{name}.alpha"), raw, strict=True)]
        pre, post, res = maps
        return (pre @ slots).reshape(state.shape), (post, res)

    def write(self, state, y, context):
        post, res = context
        slots, parts = (leaf.reshape(*state.shape[:-1], self.n, -1) for leaf in (state, y))
        return (res @ slots + post[..., None] * parts).reshape(state.shape)

    def collapse(self, state):
        return state


class FracConnections(ResidualTopology):
    """Builds the topology ``frac``: the state is the stream, of which every connection mixes m = n parts.

    Args:
      width: D, a multiple of m.
      rngs: unused, since nothing is drawn.
      n: m, the number of slots.
      init: both presets are the plain residual.
      alpha: the gates' initial value; None: 0.01.
      dynamic: the maps depend on the input; False: they are the biases alone.
      tanh: tanh on the input-dependent part.
      rms_eps: inside the square root.

    Raises:
      ValueError: a width that m does not divide.
    """

    runner = FracRunner

    def __init__(
        self,
        width: int,
        *,
        rngs: nnx.Rngs | PathKey | None = None,
        n: int | None = None,
        init: str | None = None,
        alpha: float | None = None,
        dynamic: bool = True,
        tanh: bool = True,
        rms_eps: float = 1e-6,
    ):
        self.width, self.n = width, 2 if n is None else n
        if width % self.n:
            raise ValueError(f"n: given {self.n}, allowed: a divisor of the width {width}, which it cuts into slots")
        self.options: dict[str, Any] = {"alpha": alpha, "dynamic": dynamic, "tanh": tanh, "rms_eps": rms_eps}

    def expand(self, h: jax.Array) -> jax.Array:
        return h

    def connection(self, k: int | jax.Array, *, rngs: nnx.Rngs | PathKey | None = None) -> FracConnection:
        return FracConnection(self.width, self.n, **self.options)

    def collapse(self, state: jax.Array) -> jax.Array:
        return state

    def streams(self, state: jax.Array) -> jax.Array:
        """Return the slots [..., m, D/m]."""
        return cut(state, self.n)

    def multiplies(self, k: int) -> int:
        return (4 * self.n + 2) * self.width if self.options["dynamic"] else (2 * self.n + 1) * self.width
