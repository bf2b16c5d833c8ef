"""Map logits to rotations by the Cayley transform, for all kinds of orthogonal maps.

A has the logits in its strict upper triangle, row by row, and their negatives below; Q = (I - A)(I + A)^-1 is in SO(M).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from mhc.residual.runner import ManifoldRunner


class CayleyRunner(ManifoldRunner):
    """Computes rotations, and the basis of the vectors that sum to zero, in numpy."""

    def rotation(self, logits, m):
        """Return Q [..., M, M] of logits [..., M(M-1)/2]."""
        a = np.zeros((*logits.shape[:-1], m, m))
        a[(..., *np.triu_indices(m, 1))] = logits
        a = a - np.swapaxes(a, -1, -2)
        q = np.linalg.solve(np.eye(m) + a, np.eye(m) - a)
        return 0.5 * q @ (3.0 * np.eye(m) - np.swapaxes(q, -1, -2) @ q)

    def helmert(self, n):
        """Return the basis Z [N, N-1] of the vectors that sum to zero."""
        below = [[1.0] * k + [-k] + [0.0] * (n - k - 1) for k in range(1, n)]
        return np.array([np.array(row) / math.sqrt(k * (k + 1)) for k, row in enumerate(below, 1)]).reshape(n - 1, n).T


def angles(m: int) -> int:
    """Return how many logits a rotation of M axes takes: M(M-1)/2."""
    return m * (m - 1) // 2


def solve_multiplies(m: int) -> int:
    """Return the multiply-adds of one rotation of M axes: elimination, M right-hand sides and the polish, 10/3 M^3."""
    return round(10 * m**3 / 3)


def rotation(logits: jax.Array, m: int) -> jax.Array:
    """Return Q = (I - A)(I + A)^-1 of logits [..., M(M-1)/2] -> [..., M, M], in the dtype of the logits.

    I + A is never singular, but it is ill conditioned where logits are large. Partial pivoting and one step of
    Newton and Schulz, Q (3I - Q^T Q) / 2, whose fixed point Q is, keep abs(Q^T Q - I) within 1e-5 in float32, with
    finite gradients, for logits anywhere in +-1e4.
    """
    if m < 2:
        return jnp.ones((*logits.shape[:-1], m, m), logits.dtype)
    # A[p, q] is a logit, its negative or 0. A gather by fixed places has a gradient that sums two entries a logit.
    places, signs = _triangle(m)
    padded = jnp.concatenate([logits, jnp.zeros_like(logits[..., :1])], axis=-1)
    a = padded[..., places] * jax.lax.broadcast_to_rank(jnp.asarray(signs, logits.dtype), logits.ndim + 1)
    eye = jax.lax.broadcast_to_rank(jnp.eye(m, dtype=logits.dtype), logits.ndim + 1)
    q = jnp.linalg.solve(eye + a, eye - a)  # the two factors commute
    return 0.5 * _product(q, 3.0 * eye - _product(jnp.swapaxes(q, -1, -2), q))


def _triangle(m: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (the place in the logits, with a zero after them, of every entry of A; its sign), [M, M] each."""
    places, signs = np.full((m, m), angles(m)), np.zeros((m, m))
    rows, columns = np.triu_indices(m, 1)
    places[rows, columns] = places[columns, rows] = np.arange(angles(m))
    signs[rows, columns], signs[columns, rows] = 1.0, -1.0
    return places, signs


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a @ b in full precision, which accelerators would otherwise lower for float32."""
    return jnp.matmul(a, b, precision="highest")


def helmert(n: int, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
    """Return the orthonormal basis Z [N, N-1] of the vectors that sum to zero.

    Column k = 1 ... N-1 is (1, ..., 1 [k times], -k, 0, ...) / sqrt(k (k + 1)), so that Z^T Z = I and Z Z^T = I - J.
    """
    z = np.zeros((n, n - 1))
    for k in range(1, n):
        z[:k, k - 1], z[k, k - 1] = 1.0, -k
        z[:, k - 1] /= math.sqrt(k * (k + 1))
    return jnp.asarray(z, dtype)


def on_differences(inner: jax.Array, n: int) -> jax.Array:
    """Return J + Z inner Z^T with J = 11^T / N: [..., N-1, N-1] -> [..., N, N].

    Its rows and columns sum to one whatever ``inner`` is.
    """
    z = helmert(n, inner.dtype)
    spread = jnp.einsum("ik,...kl,jl->...ij", z, inner, z, precision="highest")
    return spread + jnp.full((1,) * spread.ndim, 1.0 / n, inner.dtype)
