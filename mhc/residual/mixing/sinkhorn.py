"""Define H_res of mhc (arXiv:2512.24880) by Sinkhorn-Knopp: almost doubly stochastic after some iterations."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from mhc import kernels
from mhc.kernels.checks import check_sinkhorn
from mhc.residual.arrays import check_square, promoted
from mhc.residual.mixing import Mixing
from mhc.residual.runner import ManifoldRunner, softmax

if TYPE_CHECKING:
    from jax.typing import ArrayLike


class SinkhornRunner(ManifoldRunner):
    """Computes H_res in numpy, by iterations on logarithms in either preset's order."""

    def mixing(self, logits, n):
        deepseek, iters = self.r["sinkhorn"] == "deepseek", self.r["iters"]
        log_eps = math.log(self.r["sinkhorn_eps"]) if deepseek and self.r["sinkhorn_eps"] > 0 else -math.inf
        log_m = logits.reshape(*logits.shape[:-1], n, n)

        def divided(x, axis):  # by the sums over an axis
            top = x.max(axis, keepdims=True)
            total = top + np.log(np.exp(x - top).sum(axis, keepdims=True))
            return x - np.logaddexp(total, log_eps)

        axes = [-2, -1] * iters
        if deepseek:
            log_m = np.logaddexp(np.log(np.maximum(softmax(log_m), 1e-300)), log_eps)
            axes = [-2] + [-1, -2] * (iters - 1)
        for axis in axes:
            log_m = divided(log_m, axis)
        return np.exp(np.swapaxes(log_m, -1, -2) if deepseek else log_m)


@dataclasses.dataclass(frozen=True)
class Sinkhorn(Mixing):
    """Computes H_res = Sinkhorn(logits as [N, N]); R = N^2. Raises ValueError for options that ``sinkhorn`` refuses."""

    runner = SinkhornRunner
    exact = frozenset({"rows", "signs"})

    sinkhorn: str = "paper"
    """The preset: see the function ``sinkhorn``."""
    iters: int = 20
    sinkhorn_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_sinkhorn(self.sinkhorn, self.iters, self.sinkhorn_eps)

    def logits(self, n: int) -> int:
        return n * n

    def initial(self, n: int, gap: float) -> jax.Array:
        return -gap * (1.0 - jnp.eye(n, dtype=jnp.float32)).reshape(-1)

    def order_under(self, other: Mixing, n: int) -> np.ndarray | None:
        # The deepseek preset ends with a transposition, so what it is given is transposed too.
        assert isinstance(other, Sinkhorn)
        alike = (self.sinkhorn == "deepseek") == (other.sinkhorn == "deepseek")
        return None if alike else np.arange(n * n).reshape(n, n).T.ravel()

    def reference(self, logits: jax.Array, n: int) -> jax.Array:
        square = logits.reshape(*logits.shape[:-1], n, n)
        return sinkhorn(square, iters=self.iters, preset=self.sinkhorn, eps=self.sinkhorn_eps)

    def __call__(self, logits: jax.Array, n: int) -> jax.Array:
        return kernels.sinkhorn(logits.reshape(n, n, *logits.shape[1:]), self.iters, self.sinkhorn, self.sinkhorn_eps)


def sinkhorn(logits: ArrayLike, *, iters: int = 20, preset: str = "paper", eps: float = 1e-6) -> jax.Array:
    """Project logits towards the doubly stochastic matrices by Sinkhorn-Knopp iterations.

    ``paper`` (arXiv:2512.24880): exp(logits - max), then ``iters`` times columns (sum over i) and rows (sum over j), no
    eps; rows are exact and the error is left in the columns. ``deepseek`` (DeepSeek-V4): softmax over the last axis +
    eps, one step over axis -2, then ``iters - 1`` steps over axis -1 and axis -2, each dividing by (sum + eps), and a
    transpose, which makes the marginal normalised last the *rows* here too, exact up to the eps. ``H[i, j]`` is the
    weight of input stream j under both.

    Both run in the log domain: finite, with finite gradients of either mode, for logits anywhere in +-1e4.

    Args:
      logits: [..., N, N].
      iters: number of iterations, at least 1.
      preset: ``paper`` or ``deepseek``.
      eps: of ``deepseek`` only.

    Returns:
      H_res [..., N, N] in promote_types(logits, float32).

    Raises:
      ValueError: axes not square, ``iters`` < 1, a negative ``eps``, or an unknown preset.
      TypeError: complex logits.
    """
    check_sinkhorn(preset, iters, eps)
    (logits,) = promoted(logits=logits)
    check_square("logits", logits.shape)
    if preset == "paper":
        log_m, offset, first, second = logits, -jnp.inf, -2, -1
    else:
        offset = math.log(eps) if eps > 0 else -math.inf
        log_m = _log_plus(jax.nn.log_softmax(logits, axis=-1), offset)
        # The first row normalisation is the softmax itself.
        log_m, first, second = _log_normalise(log_m, -2, offset), -1, -2
        iters -= 1

    def iteration(log_m: jax.Array, _: None) -> tuple[jax.Array, None]:
        return _log_normalise(_log_normalise(log_m, first, offset), second, offset), None

    log_m, _ = jax.lax.scan(iteration, log_m, None, length=iters)
    h = jnp.exp(log_m)
    return jnp.swapaxes(h, -1, -2) if preset == "deepseek" else h


def _log_plus(log_x: jax.Array, log_eps: float) -> jax.Array:
    """Return log(x + eps)."""
    return log_x if log_eps == -math.inf else jnp.logaddexp(log_x, log_eps)


def _log_normalise(log_m: jax.Array, axis: int, log_eps: float) -> jax.Array:
    """Return log(M / (sum of M over axis + eps))."""
    return log_m - _log_plus(jax.nn.logsumexp(log_m, axis=axis, keepdims=True), log_eps)
