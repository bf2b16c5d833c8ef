"""Define H_res of mhc_lite (arXiv:2601.05732): a mixture of all permutations, doubly stochastic exactly."""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from mhc.residual.mixing import Mixing
from mhc.residual.runner import ManifoldRunner, softmax

LARGEST = 5
"""N! matrices are mixed: 120 of them."""


class PermutationsRunner(ManifoldRunner):
    """Computes H_res in numpy, a mixture of all permutation matrices."""

    def mixing(self, logits, n):
        every = np.eye(n)[list(itertools.permutations(range(n)))]
        return np.einsum("...k,kij->...ij", softmax(logits), every)


@dataclasses.dataclass(frozen=True)
class Permutations(Mixing):
    """Computes H_res = sum_k a_k P_k with a = softmax(logits); R = N!, the identity first."""

    runner = PermutationsRunner
    exact = frozenset({"rows", "columns", "signs", "norm"})

    def logits(self, n: int) -> int:
        if n > LARGEST:
            raise ValueError(f"mhc_lite mixes all N! permutations and is limited to N <= {LARGEST}, got {n}")
        return math.factorial(n)

    def initial(self, n: int, gap: float) -> jax.Array:
        return jnp.full((self.logits(n),), -gap, jnp.float32).at[0].set(0.0)

    def reference(self, logits: jax.Array, n: int) -> jax.Array:
        return permutation_mixture(jax.nn.softmax(logits, axis=-1), n)

    def __call__(self, logits: jax.Array, n: int) -> jax.Array:
        # The softmax runs over the leading axis, where the long one of the tokens is vectorised.
        h = permutation_mixture(jnp.moveaxis(jax.nn.softmax(logits, axis=0), 0, -1), n)
        return jnp.moveaxis(h, (-2, -1), (0, 1))


def permutation_mixture(weights: jax.Array, n: int) -> jax.Array:
    """Return sum_k a_k P_k over the N! permutations in lexicographic order, P_k[i, perm_k(i)] = 1.

    weights [..., N!] -> [..., N, N].
    """
    permutations = list(itertools.permutations(range(n)))
    matrices = jnp.eye(n, dtype=weights.dtype)[jnp.array(permutations)]  # [N!, N, N]; row i is one-hot at perm(i)
    return jnp.einsum("...k,kij->...ij", weights, matrices)
