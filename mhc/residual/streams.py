"""Share what all topologies of N streams need: expanding, collapsing, and mixing with per-token maps."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mhc import kernels
from mhc.kernels import Form
from mhc.kernels.checks import accumulation_dtype
from mhc.residual import functional
from mhc.residual.arrays import check_axes
from mhc.residual.functional import Maps
from mhc.residual.protocol import Connection, ResidualTopology
from mhc.rng import PathKey, path_key

COLLAPSES = ("mean", "sum", "head")


class TokenMaps(NamedTuple):
    """Holds maps with tokens last, as the kernels take them: pre and post [N, ...], res [N, N, ...].

    A res of None stands for the identity.
    """

    pre: jax.Array
    post: jax.Array
    res: jax.Array | None


class Projection(NamedTuple):
    """Holds a projection of streams, m phi, and how the reading weights come of its first N columns."""

    form: Form
    phi: jax.Array  # [N, D, C]
    gain: jax.Array  # [C]
    bias: jax.Array  # [C]

    @property
    def arrays(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return phi, gain and bias."""
        return self.phi, self.gain, self.bias


class StreamConnection(Connection):
    """Computes x' = H_res x + H_post^T F(H_pre x) on streams [..., N, D]; a subclass says what the maps are."""

    n: int

    def token_maps(self, x: jax.Array) -> TokenMaps:
        """Return every token's maps from the streams x [..., N, D], float32 or wider."""
        raise NotImplementedError

    def projection(self) -> Projection | None:
        """Return what a kernel needs to project and read in one pass; None: ``token_maps`` is all that there is."""
        return None

    def maps_of(self, raw: jax.Array) -> TokenMaps:
        """Return every token's maps from the projection raw [C, ...], where there is a ``projection``."""
        raise NotImplementedError

    def _check(self, state: jax.Array) -> None:
        if state.ndim < 2 or state.shape[-2] != self.n:
            raise ValueError(f"the state must be streams [..., N={self.n}, D], got shape {state.shape}: expand first")

    def read(self, state: jax.Array) -> tuple[jax.Array, TokenMaps]:
        self._check(state)
        with jax.named_scope("maps"):  # a trace tells it from the rest of the read
            maps = self.token_maps(state)
        return kernels.read(state, maps.pre), maps

    def write(self, state: jax.Array, y: jax.Array, context: TokenMaps) -> jax.Array:
        if context.res is None:
            return kernels.add(state, y, context.post)
        return kernels.write(state, y, context.post, context.res)

    def _fused(self) -> Projection | None:
        """Return the projection where the chosen kernels read it in one pass, and no subclass reads otherwise."""
        return self.projection() if type(self).read is StreamConnection.read and kernels.fuses() else None

    def enter(self, state: jax.Array) -> tuple[jax.Array, jax.Array, TokenMaps]:
        projection = self._fused()
        if projection is None:
            return super().enter(state)
        self._check(state)
        state, raw, u = kernels.enter(projection.form, state, *projection.arrays)
        with jax.named_scope("maps"):
            return state, u, self.maps_of(raw)

    def follows(self, before: Connection, context: TokenMaps) -> bool:
        writes = isinstance(before, StreamConnection) and type(before).write is StreamConnection.write
        return writes and context.res is not None and self._fused() is not None

    def follow(
        self, before: Connection, state: jax.Array, y: jax.Array, context: TokenMaps
    ) -> tuple[jax.Array, jax.Array, TokenMaps]:
        projection = self._fused()
        if projection is None or context.res is None:
            return super().follow(before, state, y, context)
        self._check(state)
        state, raw, u = kernels.follow(projection.form, state, y, context.post, context.res, *projection.arrays)
        with jax.named_scope("maps"):
            return state, u, self.maps_of(raw)

    def maps(self, context: TokenMaps) -> Maps:
        pre, post = (jnp.moveaxis(m, 0, -1) for m in (context.pre, context.post))
        if context.res is None:
            n = pre.shape[-1]
            return Maps(pre, post, jnp.broadcast_to(jnp.eye(n, dtype=pre.dtype), (*pre.shape, n)))
        return Maps(pre, post, jnp.moveaxis(context.res, (0, 1), (-2, -1)))


class LearnedCollapse(nnx.Module):
    """Collapses streams as DeepSeek-V4 does, by ``functional.collapse_head``.

    Parameters, float32: fn [N, D, N], base [N], scale [1]. They start from ``functional.head_params``.
    """

    def __init__(self, n: int, width: int, *, rms_eps: float, map_eps: float, rngs: nnx.Rngs | PathKey):
        key = path_key(rngs)
        self.rms_eps, self.map_eps = rms_eps, map_eps
        start = functional.head_params(n, width, key=(key / "fn").key)
        self.fn = nnx.Param(start["fn"].reshape(n, width, n))
        self.base = nnx.Param(start["base"])
        self.scale = nnx.Param(start["scale"])

    def __call__(self, x: jax.Array) -> jax.Array:
        n, d = x.shape[-2:]
        fn = self.fn[...].reshape(n * d, n)
        return functional.collapse_head(
            x, fn, self.base[...], self.scale[...], rms_eps=self.rms_eps, map_eps=self.map_eps
        ).astype(x.dtype)


class StreamTopology(ResidualTopology):
    """Copies the embedding to N streams, and collapses them by ``sum``, ``mean`` or the learned ``head``.

    ``rngs`` and the epsilons are those of the learned head.

    Raises:
      ValueError: unknown collapse, or N below 1.
    """

    def __init__(
        self,
        width: int,
        n: int,
        collapse: str,
        *,
        rngs: nnx.Rngs | PathKey | None = None,
        rms_eps: float = 1e-6,
        map_eps: float = 1e-6,
    ):
        if collapse not in COLLAPSES:
            raise ValueError(f"unknown collapse {collapse!r}; allowed: {', '.join(COLLAPSES)}")
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        self.width, self.n, self.mode = width, n, collapse
        if collapse == "head":
            if rngs is None:
                raise ValueError("the head collapse has parameters and needs rngs")
            self.head = LearnedCollapse(n, width, rms_eps=rms_eps, map_eps=map_eps, rngs=path_key(rngs) / "head")

    def expand(self, h: jax.Array) -> jax.Array:
        check_axes("h", h, ("D", self.width))
        return jnp.broadcast_to(h[..., None, :], (*h.shape[:-1], self.n, h.shape[-1]))

    def collapse(self, state: jax.Array) -> jax.Array:
        if self.mode == "head":
            return self.head(state)
        total = jnp.sum(state.astype(accumulation_dtype(state)), axis=-2)
        return (total if self.mode == "sum" else total / self.n).astype(state.dtype)

    def map_multiplies(self) -> int:
        """Return the multiply-adds of the projections that give one connection's logits, per token."""
        raise NotImplementedError

    def multiplies(self, k: int) -> int:
        return self.map_multiplies() + (2 * self.n + self.n**2) * self.width

    def streams(self, state: jax.Array) -> jax.Array:
        return state
