"""Implement the value residual (arXiv:2410.17897): attention of later blocks mixes in the values of block 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from mhc.model.link import Link, Memory, Row
from mhc.residual.functional import value_mix
from mhc.rng import PathKey

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from mhc.config import Config

STARTS = {"home": (0.5, 0.5), "equivalent": (1.0, 0.0)}


class ValueResidual(Link):
    """Computes v <- lam[0] v + lam[1] v_first from block 1 on, with v_first the values of block 0 as they are.

    Parameter, float32: lam [2], which block 0 does not use. It starts from (1/2, 1/2), or from (1, 0) under
    ``residual.value_init=equivalent``, which mixes nothing in.
    """

    def __init__(self, config: Config, key: PathKey):
        self.lam = nnx.Param(jnp.array(STARTS[config.residual.starts_values], jnp.float32))

    @staticmethod
    def begin(config: Config, batch: int, tokens: int, dtype: jnp.dtype) -> Memory:
        shape = (batch, tokens, config.kv_heads, config.head_dim)
        return {"first_values": jnp.zeros(shape, dtype), "values_block": jnp.zeros((), jnp.int32)}

    def constants(self) -> dict[str, jax.Array]:
        """Return lam, for the probes."""
        return {"lam": self.lam[...]}

    def __call__(
        self, q: Float[Array, "B T H K"], k: Float[Array, "B T G K"], v: Float[Array, "B T G J"], memory: Memory
    ) -> tuple[jax.Array, jax.Array, jax.Array, Memory]:
        is_first = memory["values_block"] == 0
        first = jnp.where(is_first, v, memory["first_values"])
        mixed = jnp.where(is_first, v, value_mix(v, first, self.lam[...]).astype(v.dtype))
        return q, k, mixed, {**memory, "first_values": first, "values_block": memory["values_block"] + 1}


ROW = Row(lambda config: config.residual.value_residual, ValueResidual, ValueResidual.begin)
