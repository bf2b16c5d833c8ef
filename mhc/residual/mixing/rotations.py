"""Define H_res of ``ortho`` and ``iso``: rotations of the streams, all of them or those that keep the streams' mean."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from mhc.residual.mixing import Mixing
from mhc.residual.mixing.cayley import CayleyRunner, angles, on_differences, rotation, solve_multiplies


class OrthogonalRunner(CayleyRunner):
    """Rotate the streams."""

    def mixing(self, logits, n):
        return self.rotation(logits, n)


@dataclasses.dataclass(frozen=True)
class Orthogonal(Mixing):
    """Computes H_res = Q, a rotation of the N streams; R = N(N-1)/2. Norms are kept, the streams' mean is not."""

    runner = OrthogonalRunner
    exact = frozenset({"norm", "isometry"})

    def logits(self, n: int) -> int:
        return angles(n)

    def initial(self, n: int, gap: float) -> jax.Array:
        return jnp.zeros((self.logits(n),), jnp.float32)

    def multiplies(self, n: int) -> int:
        return solve_multiplies(n)

    def reference(self, logits: jax.Array, n: int) -> jax.Array:
        return rotation(logits, n)


class IsometricRunner(CayleyRunner):
    """Rotate the streams' differences."""

    def mixing(self, logits, n):
        z = self.helmert(n)
        return 1.0 / n + z @ self.rotation(logits, n - 1) @ z.T


@dataclasses.dataclass(frozen=True)
class Isometric(Mixing):
    """Computes H_res = J + Z Q Z^T, a rotation that keeps the streams' mean; R = (N-1)(N-2)/2.

    Rows and columns sum to one, entries may be negative, and H^T H = I. Up to N = 2 H_res is the identity.
    """

    runner = IsometricRunner
    exact = frozenset({"rows", "columns", "norm", "isometry"})

    def logits(self, n: int) -> int:
        return angles(n - 1)

    def initial(self, n: int, gap: float) -> jax.Array:
        return jnp.zeros((self.logits(n),), jnp.float32)

    def multiplies(self, n: int) -> int:
        return solve_multiplies(n - 1)

    def reference(self, logits: jax.Array, n: int) -> jax.Array:
        if n == 1:
            return jnp.ones((*logits.shape[:-1], 1, 1), logits.dtype)
        return on_differences(rotation(logits, n - 1), n)
