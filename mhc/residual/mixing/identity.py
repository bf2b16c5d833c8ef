"""Define the control H_res = I, so that streams are read and written by learned maps and never mixed."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from mhc.residual.mixing import Mixing
from mhc.residual.runner import ManifoldRunner


class IdentityRunner(ManifoldRunner):
    """Computes H_res in numpy, the identity."""

    def mixing(self, logits, n):
        return np.broadcast_to(np.eye(n), (*logits.shape[:-1], n, n))


@dataclasses.dataclass(frozen=True)
class Identity(Mixing):
    """Keeps every stream as it is: H_res = I, R = 0."""

    runner = IdentityRunner
    exact = frozenset({"rows", "columns", "signs", "norm", "isometry"})

    def logits(self, n: int) -> int:
        return 0

    def initial(self, n: int, gap: float) -> jax.Array:
        return jnp.zeros((0,), jnp.float32)

    def reference(self, logits: jax.Array, n: int) -> jax.Array:
        return jnp.broadcast_to(jnp.eye(n, dtype=logits.dtype), (*logits.shape[:-1], n, n))

    def __call__(self, logits: jax.Array, n: int) -> None:
        return None
