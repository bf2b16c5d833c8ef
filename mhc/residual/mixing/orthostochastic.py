"""Define H_res of go_mhc (arXiv:2604.02309): sums of squares of a rotation's entries, doubly stochastic exactly."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from mhc.kernels.checks import is_whole
from mhc.residual.mixing import Mixing
from mhc.residual.mixing.cayley import CayleyRunner, angles, rotation, solve_multiplies

LARGEST = 32
"""Axes of the rotation, N s: it takes some 10/3 of their cube a token."""
STD = 0.05
"""Standard deviation of the initial logits."""


class OrthostochasticRunner(CayleyRunner):
    """Square a rotation's entries and sum them by blocks."""

    def mixing(self, logits, n):
        s = 1 if n == 1 else self.r["s"]
        squares = self.rotation(logits, n * s) ** 2
        return squares.reshape(*logits.shape[:-1], n, s, n, s).sum((-3, -1)) / s


@dataclasses.dataclass(frozen=True)
class Orthostochastic(Mixing):
    """Computes H[i, j] = (1/s) sum_{a, b < s} Q[i s + a, j s + b]^2 of a rotation Q of M = N s axes; R = M(M-1)/2.

    s = 1 gives the orthostochastic matrices. At logits of zero the derivative of H is zero, so that training would
    never leave the identity: the initial logits are random.
    """

    runner = OrthostochasticRunner
    exact = frozenset({"rows", "columns", "signs", "norm"})
    draws = True
    from_zero = False

    s: int = 2

    def axes(self, n: int) -> int:
        """Return M, the axes of the rotation. Raises ValueError where they are too many."""
        if not is_whole(self.s) or self.s < 1:
            raise ValueError(f"s must be at least 1 and a whole number, got {self.s!r}")
        if n * self.s > LARGEST:
            raise ValueError(f"go_mhc rotates N s axes and is limited to N s <= {LARGEST}, got {n} * {self.s}")
        return 1 if n == 1 else n * self.s  # one stream has nothing to mix, whatever s is

    def logits(self, n: int) -> int:
        return angles(self.axes(n))

    def start(self, n: int, *, init: str, gap: float, key: jax.Array | None = None) -> jax.Array:
        assert key is not None  # `draws`
        return STD * jax.random.normal(key, (self.logits(n),), jnp.float32)

    def multiplies(self, n: int) -> int:
        return solve_multiplies(self.axes(n))

    def reference(self, logits: jax.Array, n: int) -> jax.Array:
        m = self.axes(n)
        squares = jnp.square(rotation(logits, m))
        return jnp.sum(squares.reshape(*logits.shape[:-1], n, m // n, n, m // n), axis=(-3, -1)) / (m // n)
