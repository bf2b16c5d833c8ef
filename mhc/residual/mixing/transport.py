"""Define H_res of tbp_mhc (arXiv:2605.21724): entries filled in one by one within what rows and columns have left."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from mhc.residual.mixing import Mixing
from mhc.residual.runner import ManifoldRunner, sigmoid

HOME_GAP, DELTA = 4.0, -8.0
"""The initial logits on the diagonal, negative off it, under ``home``; the initial logit of the uniform map's share."""
UNROLLED = 4
"""The largest N whose rows are unrolled. Beyond it they are a scan: each entry uses all before it, and XLA takes 44 s
to compile the gradient of eight streams unrolled (two cores, 2026-12-01)."""


class TransportRunner(ManifoldRunner):
    """Computes H_res in numpy, filled entry by entry, with the uniform matrix mixed in."""

    def mixing_of(self, name, logits, n):
        h = self.mixing(logits, n)
        if not self.r["minorize"]:
            return h
        share = sigmoid(self.w(f"{name}.delta"))
        return (1.0 - share) * h + share / n

    def mixing(self, logits, n):
        t = sigmoid(logits)
        h = np.zeros((*logits.shape[:-1], n, n))
        column = np.ones((*logits.shape[:-1], n))
        for i in range(n - 1):
            row = np.ones(logits.shape[:-1])
            for j in range(n - 1):
                low = np.maximum(0.0, np.maximum(row - column[..., j + 1 :].sum(-1), column[..., j] - (n - 1 - i)))
                width = np.maximum(np.minimum(row, column[..., j]) - low, 0.0)
                h[..., i, j] = low + width * t[..., i * (n - 1) + j]
                row = row - h[..., i, j]
                column[..., j] -= h[..., i, j]
            h[..., i, n - 1] = row
            column[..., n - 1] -= row
        h[..., n - 1, :] = column
        return h


@dataclasses.dataclass(frozen=True)
class Transport(Mixing):
    """Computes every doubly stochastic matrix by the bounds that earlier entries leave; R = (N-1)^2, row by row.

    Entry (i, j) lies between L, the least that the other columns and rows leave it, and U, what its row and its column
    have left: X = L + max(U - L, 0) sigmoid(t). The last column and the last row take what is left. With ``minorize``
    H = (1 - d) X + d/N, d = sigmoid(delta), so that no entry is zero.

    At logits of zero the last two rows, and columns, are equal: two streams would merge at every sublayer.
    """

    runner = TransportRunner
    exact = frozenset({"rows", "columns", "signs", "norm"})
    from_zero = False

    minorize: bool = True
    delta: jax.Array | None = None
    """The parameter []; see ``own``."""

    def logits(self, n: int) -> int:
        return (n - 1) ** 2

    def start(self, n: int, *, init: str, gap: float, key: jax.Array | None = None) -> jax.Array:
        height = HOME_GAP if init == "home" else gap
        return (height * (2.0 * jnp.eye(n - 1, dtype=jnp.float32) - 1.0)).reshape(-1)

    def own(self) -> dict[str, jax.Array]:
        return {"delta": jnp.full((), DELTA, jnp.float32)} if self.minorize else {}

    def reference(self, logits: jax.Array, n: int) -> jax.Array:
        return jnp.moveaxis(self(jnp.moveaxis(logits, -1, 0), n), (0, 1), (-2, -1))

    def __call__(self, logits: jax.Array, n: int) -> jax.Array:
        t = jax.nn.sigmoid(logits)
        one = jnp.ones(logits.shape[1:], logits.dtype)
        if n <= UNROLLED:
            columns, rows = [one] * n, []
            for i in range(n - 1):
                columns, row = _fill_row(columns, t[i * (n - 1) : (i + 1) * (n - 1)], n - 1 - i)
                rows.append(row)
            h = jnp.stack([*rows, jnp.stack(columns)])
        else:

            def step(columns: jax.Array, of_row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                left, row = _fill_row(list(columns), *of_row)
                return jnp.stack(left), row

            below = jnp.arange(n - 1, 0, -1).astype(t.dtype)
            last, filled = jax.lax.scan(step, jnp.stack([one] * n), (t.reshape(n - 1, n - 1, *t.shape[1:]), below))
            h = jnp.concatenate([filled, last[None]])
        if not self.minorize:
            return h
        assert self.delta is not None  # of `own`
        share = jax.lax.broadcast_to_rank(jax.nn.sigmoid(self.delta).astype(h.dtype), h.ndim)
        return (1.0 - share) * h + share / n


def _fill_row(columns: list[jax.Array], t: jax.Array, below: int | jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Return (what N columns have left after a row, the row [N, ...]).

    Args:
      columns: N arrays [...], what each column has left.
      t: [N-1, ...] in (0, 1), the place of each entry between its bounds.
      below: rows that follow; each can take at most 1 of a column.
    """
    columns, row, left, n = list(columns), [], jnp.ones_like(columns[0]), len(columns)
    for j in range(n - 1):
        others = sum(columns[j + 2 :], columns[j + 1])  # what the columns after this one have left
        low = jnp.maximum(jnp.maximum(0.0, left - others), columns[j] - below)
        entry = low + jnp.maximum(jnp.minimum(left, columns[j]) - low, 0.0) * t[j]
        left, columns[j] = left - entry, columns[j] - entry
        row.append(entry)
    columns[n - 1] = columns[n - 1] - left
    return columns, jnp.stack([*row, left])
