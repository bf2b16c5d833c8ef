"""Define H_res of kromhc (arXiv:2601.21579): a Kronecker product of 2 x 2 matrices, doubly stochastic exactly."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from mhc.residual.mixing import Mixing
from mhc.residual.runner import ManifoldRunner, softmax


class KroneckerRunner(ManifoldRunner):
    """Computes H_res in numpy, the Kronecker product of factors [[p, q], [q, p]], the first of them outermost."""

    def mixing(self, logits, n):
        lead = logits.shape[:-1]
        h = np.ones((*lead, 1, 1))
        for pair in np.moveaxis(softmax(logits.reshape(*lead, n.bit_length() - 1, 2)), -2, 0):
            u = np.stack([pair, pair[..., ::-1]], -2)
            h = np.einsum("...ij,...ab->...iajb", h, u).reshape(*lead, 2 * h.shape[-1], 2 * h.shape[-1])
        return h


@dataclasses.dataclass(frozen=True)
class Kronecker(Mixing):
    """Computes H_res = U_1 (x) ... (x) U_K, N = 2^K, R = 2K: two logits a factor, its diagonal first."""

    runner = KroneckerRunner
    exact = frozenset({"rows", "columns", "signs", "norm"})

    def logits(self, n: int) -> int:
        if n & (n - 1):
            raise ValueError(f"kromhc needs N to be a power of two, got {n}")
        return 2 * (n.bit_length() - 1)

    def initial(self, n: int, gap: float) -> jax.Array:
        return jnp.tile(jnp.array([0.0, -gap], jnp.float32), self.logits(n) // 2)

    def reference(self, logits: jax.Array, n: int) -> jax.Array:
        return kronecker_mixture(jax.nn.softmax(logits.reshape(*logits.shape[:-1], self.logits(n) // 2, 2), axis=-1))

    def __call__(self, logits: jax.Array, n: int) -> jax.Array:
        # -1 for K would fail where there is no token.
        pairs = jax.nn.softmax(logits.reshape(self.logits(n) // 2, 2, *logits.shape[1:]), axis=1)
        h = kronecker_mixture(jnp.moveaxis(pairs, (0, 1), (-2, -1)))
        return jnp.moveaxis(h, (-2, -1), (0, 1))


def kronecker_mixture(pairs: jax.Array) -> jax.Array:
    """Return U_1 (x) ... (x) U_K with U_k = [[p, q], [q, p]], U_1 outermost: [..., K, 2] -> [..., 2^K, 2^K]."""
    lead, factors = pairs.shape[:-2], pairs.shape[-2]
    h = jnp.ones((*lead, 1, 1), pairs.dtype)
    for k in range(factors):
        p, q = pairs[..., k, 0], pairs[..., k, 1]
        u = jnp.stack([jnp.stack([p, q], -1), jnp.stack([q, p], -1)], -2)
        m = h.shape[-1]
        h = jnp.einsum("...ij,...ab->...iajb", h, u).reshape(*lead, 2 * m, 2 * m)
    return h
