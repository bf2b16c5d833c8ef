"""Manifold-constrained Hyper-Connections (arXiv:2512.24880) and relatives: mixing by doubly stochastic matrices."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from mhc import kernels
from mhc.residual.functional import SINKHORN_PRESETS, kronecker_mixture, permutation_mixture, residual_logits
from mhc.residual.streams import StreamConnection, StreamTopology, TokenMaps
from mhc.rng import PathKey, path_key


def initial_bias(kind: str, init: str, n: int, home: int | jax.Array, res_gap: float) -> jax.Array:
    """The bias [2N+R] of a preset: pre, post, then res logits. ``home``, the sublayer's home stream, may be traced."""
    r = residual_logits(kind, n)
    if init in ("fanin", "v4"):
        return jnp.zeros((2 * n + r,), jnp.float32)
    gap = 8.0 if init == "home" else res_gap
    if kind == "mhc":
        res = -gap * (1.0 - jnp.eye(n, dtype=jnp.float32)).reshape(-1)
    elif kind == "mhc_lite":  # the identity is the first permutation
        res = jnp.full((r,), -gap, jnp.float32).at[0].set(0.0)
    else:  # kromhc: logits of (p, q) with p on the diagonal; identity has none
        res = jnp.tile(jnp.array([0.0, -gap], jnp.float32), r // 2)
    if init == "home":
        at_home = 2.0 * jax.nn.one_hot(home, n, dtype=jnp.float32) - 1.0
        return jnp.concatenate([at_home, at_home, res])
    # equivalent: the streams are read as their mean (17 saturates the sigmoid in float32), each gets the output once.
    read_mean = -math.log(n - 1) if n > 1 else 17.0
    return jnp.concatenate([jnp.full((n,), read_mean, jnp.float32), jnp.zeros((n,), jnp.float32), res])


class ManifoldMaps(StreamConnection):
    """Maps from the normalised streams of a token: sigmoid reads and writes, doubly stochastic mixing.

    Parameters, float32: phi [N, D, 2N+R], alpha [3], bias [2N+R]; the order is pre, post, res.
    """

    def __init__(self, topology: ManifoldHyperConnections, k: int | jax.Array, *, rngs: nnx.Rngs | PathKey):
        t = topology
        self.kind, self.n, self.preset, self.iters = t.kind, t.n, t.preset, t.iters
        self.rms_eps, self.map_eps, self.sinkhorn_eps = t.rms_eps, t.map_eps, t.sinkhorn_eps
        shape = (t.n, t.width, 2 * t.n + residual_logits(t.kind, t.n))
        std = {"home": 0.0, "equivalent": (t.n * t.width) ** -0.5, "fanin": (t.n * t.width) ** -0.5, "v4": 0.02}[t.init]
        alpha = {"home": 0.01, "equivalent": 0.0, "fanin": 0.01, "v4": 1.0}[t.init] if t.alpha is None else t.alpha
        self.phi = nnx.Param(
            std * jax.random.normal((path_key(rngs) / "phi").key, shape, jnp.float32)
            if std
            else jnp.zeros(shape, jnp.float32)
        )
        self.alpha = nnx.Param(jnp.full((3,), alpha, jnp.float32))
        self.bias = nnx.Param(initial_bias(t.kind, t.init, t.n, k % t.n, t.res_gap))

    def token_maps(self, x: jax.Array) -> TokenMaps:
        n = self.n
        raw = kernels.project(x, self.phi[...], self.rms_eps)  # [2N+R, ...]
        tokens = (1,) * (raw.ndim - 1)
        alpha = jnp.repeat(self.alpha[...], jnp.array([n, n, raw.shape[0] - 2 * n]), total_repeat_length=raw.shape[0])
        logits = raw * alpha.reshape(-1, *tokens) + self.bias[...].reshape(-1, *tokens)
        pre = jax.nn.sigmoid(logits[:n]) + (self.map_eps if self.preset == "deepseek" else 0.0)
        return TokenMaps(pre, 2.0 * jax.nn.sigmoid(logits[n : 2 * n]), self.mixing(logits[2 * n :]))

    def mixing(self, logits: jax.Array) -> jax.Array | None:
        """H_res [N, N, ...] from the residual logits [R, ...]; None for the identity."""
        n, lead = self.n, logits.shape[1:]
        if self.kind == "mhc":
            return kernels.sinkhorn(logits.reshape(n, n, *lead), self.iters, self.preset, self.sinkhorn_eps)
        if self.kind == "identity":
            return None
        if self.kind == "mhc_lite":
            h = permutation_mixture(jnp.moveaxis(jax.nn.softmax(logits, axis=0), 0, -1), n)
        else:
            pairs = jax.nn.softmax(logits.reshape(-1, 2, *lead), axis=1)
            h = kronecker_mixture(jnp.moveaxis(pairs, (0, 1), (-2, -1)))
        return jnp.moveaxis(h, (-2, -1), (0, 1))


class ManifoldHyperConnections(StreamTopology):
    """``residual.kind`` mhc, mhc_lite, kromhc or identity. Options as the config fields of the same names.

    ``build`` checks n, init and collapse.

    Raises:
      ValueError: unknown Sinkhorn preset, or less than one iteration.
    """

    def __init__(
        self,
        width: int,
        *,
        rngs: nnx.Rngs | PathKey | None = None,
        kind: str = "mhc",
        n: int | None = None,
        init: str | None = None,
        alpha: float | None = None,
        res_gap: float = 4.0,
        sinkhorn: str = "paper",
        iters: int = 20,
        collapse: str | None = None,
        rms_eps: float = 1e-6,
        map_eps: float = 1e-6,
        sinkhorn_eps: float = 1e-6,
    ):
        if sinkhorn not in SINKHORN_PRESETS:
            raise ValueError(f"unknown Sinkhorn preset {sinkhorn!r}; allowed: {', '.join(SINKHORN_PRESETS)}")
        super().__init__(width, 4 if n is None else n, collapse or "mean", rms_eps=rms_eps, map_eps=map_eps, rngs=rngs)
        if iters < 1:
            raise ValueError(f"iters must be at least 1, got {iters}")
        self.kind, self.init, self.alpha, self.res_gap = kind, init or "home", alpha, res_gap
        self.preset, self.iters = sinkhorn, iters
        self.rms_eps, self.map_eps, self.sinkhorn_eps = rms_eps, map_eps, sinkhorn_eps

    def connection(self, k: int | jax.Array, *, rngs: nnx.Rngs | PathKey) -> ManifoldMaps:
        return ManifoldMaps(self, k, rngs=rngs)

    def map_multiplies(self) -> int:
        return self.n * self.width * (2 * self.n + residual_logits(self.kind, self.n))
