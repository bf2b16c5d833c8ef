"""Define H_res of ``circulant``: every stream takes the same shares of itself and of those after it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from mhc.residual.mixing import Mixing
from mhc.residual.runner import ManifoldRunner, softmax

if TYPE_CHECKING:
    from jax.typing import ArrayLike

MOST = 0.25
"""The largest share of what is not the identity."""


class CirculantRunner(ManifoldRunner):
    """Turn one row of shares from stream to stream."""

    def mixing(self, logits, n):
        gamma = min(self.r["beta"] / (4 * self.model.c["model"]["layers"]), 0.25)
        c = (1.0 - gamma) * np.eye(n)[0] + gamma * softmax(logits)
        return np.stack([np.roll(c, i, axis=-1) for i in range(n)], axis=-2)


@dataclasses.dataclass(frozen=True)
class Circulant(Mixing):
    """Computes H[i, j] = c[(j - i) mod N], c = (1 - g) e_0 + g softmax(logits); R = N.

    g is not learned. It shrinks with depth, min(beta / (2 S), 1/4), so that the product over the network still tells
    the streams apart.
    """

    runner = CirculantRunner
    exact = frozenset({"rows", "columns", "signs", "norm"})

    beta: float = 4.0
    sublayers: int | None = None
    """S, the depth of the network."""
    gamma: ArrayLike | None = None
    """g itself; None: by ``beta`` and ``sublayers``."""

    def logits(self, n: int) -> int:
        return n

    def initial(self, n: int, gap: float) -> jax.Array:
        return jnp.zeros((n,), jnp.float32)

    def check(self, n: int) -> None:
        super().check(n)
        if self.gamma is None and self.sublayers is None:
            raise ValueError(
                "circulant needs sublayers, the depth of the network, or gamma, the share of other streams"
            )

    def share(self) -> ArrayLike:
        """Return g, the share of the mixing."""
        if self.gamma is not None:
            return self.gamma
        assert self.sublayers is not None  # `check`
        return min(self.beta / (2 * self.sublayers), MOST)

    def reference(self, logits: jax.Array, n: int) -> jax.Array:
        shares = jax.nn.softmax(logits, axis=-1)
        one_hot = jax.lax.broadcast_to_rank(jnp.eye(n, dtype=logits.dtype)[0], logits.ndim)
        gamma = jax.lax.broadcast_to_rank(jnp.asarray(self.share(), logits.dtype), logits.ndim)
        c = (1.0 - gamma) * one_hot + gamma * shares
        return c[..., np.array([[(j - i) % n for j in range(n)] for i in range(n)])]
