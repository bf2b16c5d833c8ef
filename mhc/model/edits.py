"""Intervene in a forward pass: scale, shift or patch the outputs of heads and sublayers, and the residual state.

Interventions are data: arrays over blocks that are scanned with the parameters. One compiled program therefore serves
every ablation and every patch of a model. A pass without interventions has no trace of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from mhc.residual.protocol import ResidualTopology

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

    from mhc.model.block import Carry

SUBLAYERS = ("attention", "feed-forward")
"""The sublayers of a block, in the order of the axes of length 2 below."""


class Edits(NamedTuple):
    """Holds interventions by block; None stands for no intervention of that sort.

    A scale multiplies, and a shift is added after it. A shift of heads is the same for all tokens, or differs between
    them. Row 0 of the batch is the donor: a patch is True where a token takes what row 0 has at the same place. Heads
    are edited after attention and before their output projection, sublayers at F's output, the residual state (all
    streams) where the block begins. Inside a block the arrays lack their first axis L.
    """

    head_scale: Float[Array, "L H"] | None = None
    head_shift: Float[Array, "L H J"] | Float[Array, "L B T H J"] | None = None
    head_patch: Bool[Array, "L B T H"] | None = None
    output_scale: Float[Array, "L 2"] | None = None
    output_shift: Float[Array, "L 2 D"] | None = None
    output_patch: Bool[Array, "L 2 B T"] | None = None
    state_patch: Bool[Array, "L B T"] | None = None

    def blocks(self, first: int, count: int) -> Edits:
        """Return the interventions of ``count`` blocks from number ``first``."""
        return jax.tree.map(lambda leaf: leaf[first : first + count], self)

    def begin(self, carry: Carry, topology: ResidualTopology) -> Carry:
        """Return the residual state and attention's memory that a block begins with, after the patch."""
        where = self.state_patch
        if where is None:
            return carry
        state = topology.each(topology.settle(carry.state), lambda leaf: _patched(leaf, where))
        memory = {name: leaf if leaf.ndim == 0 else _patched(leaf, where) for name, leaf in carry.memory.items()}
        return carry._replace(state=state, memory=memory)

    def heads(self, y: Float[Array, "B T H J"]) -> Float[Array, "B T H J"]:
        """Return the heads' results after the edits."""
        scale = None if self.head_scale is None else self.head_scale[:, None]
        return _patched(_affine(y, scale, self.head_shift), self.head_patch)

    def output(self, y: Float[Array, "B T D"], sublayer: int) -> Float[Array, "B T D"]:
        """Return F's output after the edits; ``sublayer`` is 0 for attention and 1 for feed-forward."""
        scale, shift, where = (
            None if leaf is None else leaf[sublayer]
            for leaf in (self.output_scale, self.output_shift, self.output_patch)
        )
        return _patched(_affine(y, scale, shift), where)


def _affine(y: jax.Array, scale: jax.Array | None, shift: jax.Array | None) -> jax.Array:
    if scale is None and shift is None:
        return y
    wide = y.astype(jnp.promote_types(y.dtype, jnp.float32))
    wide = wide if scale is None else wide * jax.lax.broadcast_to_rank(scale, y.ndim)
    wide = wide if shift is None else wide + jax.lax.broadcast_to_rank(shift, y.ndim)
    return wide.astype(y.dtype)


def _patched(x: jax.Array, where: jax.Array | None) -> jax.Array:
    """Return ``x`` [B, T, ...] with row 0's values where ``where`` is True; ``where`` has the first axes of ``x``."""
    if where is None:
        return x
    return jnp.where(where.reshape(*where.shape, *(1,) * (x.ndim - where.ndim)), x[:1], x)
