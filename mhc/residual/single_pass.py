"""Implement single-pass mHC (arXiv:2609.19969, equation 6): sublayer k reads with the weights that sublayer k - 1 made.

    u_k = sum_j p_{k-1}[j] x_k[j];   pre_k, post_k, H_k from x_k;   x_{k+1} = H_k x_k + post_k F(u_k);   p_k = pre_k

The write of sublayer k and the read of sublayer k + 1 need x_{k+1} alone: one pass over the streams can do both.
Sublayer 0 reads stream 0, and the last weights collapse the streams.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mhc import kernels
from mhc.kernels.checks import accumulation_dtype
from mhc.residual.functional import Maps
from mhc.residual.manifold import ManifoldHyperConnections, ManifoldMaps
from mhc.residual.streams import TokenMaps
from mhc.rng import PathKey

State = tuple[jax.Array, jax.Array]
"""(streams [..., N, D], the weights of the next read [..., N], float32 or wider)."""


class SinglePassMaps(ManifoldMaps):
    """Computes the maps of a sublayer, and reads with those of the sublayer before."""

    def read(self, state: State) -> tuple[jax.Array, tuple[jax.Array, TokenMaps]]:  # type: ignore[override]
        x, weights = state
        if x.ndim < 2 or x.shape[-2] != self.n:
            raise ValueError(f"the state's streams must be [..., N={self.n}, D], got shape {x.shape}: expand first")
        with jax.named_scope("maps"):
            maps = self.token_maps(x)
        return kernels.read(x, jnp.moveaxis(weights, -1, 0)), (weights, maps)

    def write(self, state: State, y: jax.Array, context: tuple[jax.Array, TokenMaps]) -> State:  # type: ignore[override]
        _, maps = context
        return super().write(state[0], y, maps), jnp.moveaxis(maps.pre, 0, -1).astype(state[1].dtype)

    def maps(self, context: tuple[jax.Array, TokenMaps]) -> Maps:  # type: ignore[override]
        """Return the maps that the sublayer applied: ``pre`` are the weights that it read with."""
        weights, maps = context
        return super().maps(maps)._replace(pre=weights)


class SinglePassHyperConnections(ManifoldHyperConnections):
    """Builds mhc or a relative with the option ``single_pass``; the state is ``State``."""

    maps_class = SinglePassMaps

    def expand(self, h: jax.Array) -> State:  # type: ignore[override]
        first = jnp.eye(self.n, dtype=accumulation_dtype(h))[0]
        return super().expand(h), jnp.broadcast_to(first, (*h.shape[:-1], self.n))

    def collapse(self, state: State) -> jax.Array:  # type: ignore[override]
        x, weights = state
        return kernels.read(x, jnp.moveaxis(weights, -1, 0))

    def streams(self, state: State) -> jax.Array:  # type: ignore[override]
        return state[0]

    def end_multiplies(self) -> int:
        return self.n * self.width


def manifold_topology(
    width: int,
    *,
    rngs: nnx.Rngs | PathKey | None = None,
    single_pass: bool = False,
    collapse: str | None = None,
    **options: Any,
) -> ManifoldHyperConnections:
    """Build mhc or a relative, with or without ``single_pass``; it is the builder of their kinds.

    Raises:
      ValueError: a collapse under ``single_pass``, which leaves no choice; or as ``ManifoldHyperConnections`` does.
    """
    if not single_pass:
        return ManifoldHyperConnections(width, rngs=rngs, collapse=collapse, **options)
    if collapse is not None:
        raise ValueError(
            f"collapse: given {collapse!r}, allowed: None with single_pass=True: the last read weights collapse the "
            "streams"
        )
    return SinglePassHyperConnections(width, rngs=rngs, **options)
