"""Define H_res of shc (arXiv:2603.20896): the mean is kept, and differences are turned, shrunk and turned again."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from mhc.residual.mixing import Mixing
from mhc.residual.mixing.cayley import CayleyRunner, angles, on_differences, rotation, solve_multiplies

HOME, EQUIVALENT = 4.0, 2.0
"""The initial logits of the singular values: tanh(4) = 0.9993, tanh(2) = 0.964."""


class SpectralRunner(CayleyRunner):
    """Turn, shrink and turn the streams' differences."""

    def gates(self, n, logits):
        return [(n - 1) * (n - 2) // 2, (n - 1) * (n - 2) // 2, n - 1]

    def mixing_of(self, name, logits, n):
        gamma, z, k = self.w(f"{name}.gamma"), self.helmert(n), (n - 1) * (n - 2) // 2
        u = self.rotation(gamma[0] * np.tanh(logits[..., :k]), n - 1)
        v = self.rotation(gamma[1] * np.tanh(logits[..., k : 2 * k]), n - 1)
        inner = (u * np.tanh(logits[..., None, 2 * k :])) @ np.swapaxes(v, -1, -2)
        return 1.0 / n + z @ inner @ z.T


@dataclasses.dataclass(frozen=True)
class Spectral(Mixing):
    """Computes H_res = J + Z U diag(tanh l) V^T Z^T; R = (N-1)^2: the angles of U, those of V, then l.

    U and V are rotations of gamma[0] tanh(.) and gamma[1] tanh(.) of their logits. Rows and columns sum to one, entries
    may be negative, and no singular value is above 1.
    """

    runner = SpectralRunner
    exact = frozenset({"rows", "columns", "norm"})

    gamma: jax.Array | None = None
    """The parameter [2]; see ``own``."""

    def logits(self, n: int) -> int:
        return (n - 1) ** 2

    def gates(self, n: int) -> tuple[int, ...]:
        return (angles(n - 1), angles(n - 1), n - 1)

    def start(self, n: int, *, init: str, gap: float, key: jax.Array | None = None) -> jax.Array:
        still = jnp.zeros((2 * angles(n - 1),), jnp.float32)
        return jnp.concatenate([still, jnp.full((n - 1,), HOME if init == "home" else EQUIVALENT, jnp.float32)])

    def own(self) -> dict[str, jax.Array]:
        return {"gamma": jnp.ones((2,), jnp.float32)}

    def multiplies(self, n: int) -> int:
        return 2 * solve_multiplies(n - 1)

    def reference(self, logits: jax.Array, n: int) -> jax.Array:
        if n == 1:
            return jnp.ones((*logits.shape[:-1], 1, 1), logits.dtype)
        assert self.gamma is not None  # of `own`
        k = angles(n - 1)
        gamma = self.gamma.astype(logits.dtype)
        u = rotation(gamma[0] * jnp.tanh(logits[..., :k]), n - 1)
        v = rotation(gamma[1] * jnp.tanh(logits[..., k : 2 * k]), n - 1)
        inner = jnp.einsum("...ik,...k,...jk->...ij", u, jnp.tanh(logits[..., 2 * k :]), v, precision="highest")
        return on_differences(inner, n)
