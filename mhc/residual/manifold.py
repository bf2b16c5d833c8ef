"""Manifold-constrained Hyper-Connections (arXiv:2512.24880) and relatives: one read, one write, any ``Mixing``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mhc import kernels
from mhc.kernels.presets import check_sinkhorn
from mhc.residual.mixing import Mixing, configured
from mhc.residual.mixing.sinkhorn import Sinkhorn
from mhc.residual.runner import Runner
from mhc.residual.streams import StreamConnection, StreamTopology, TokenMaps
from mhc.rng import PathKey, path_key


def initial_bias(mixing: Mixing, init: str, n: int, home: int | jax.Array, res_gap: float) -> jax.Array:
    """Return the bias [2N+R] of a preset: pre, post, then res logits. ``home``, the sublayer's home stream, may be
    traced."""
    if init in ("fanin", "v4"):
        return jnp.zeros((2 * n + mixing.logits(n),), jnp.float32)
    res = mixing.initial(n, 8.0 if init == "home" else res_gap)
    if init == "home":
        at_home = 2.0 * jax.nn.one_hot(home, n, dtype=jnp.float32) - 1.0
        return jnp.concatenate([at_home, at_home, res])
    # equivalent: the streams are read as their mean (17 saturates the sigmoid in float32), each gets the output once.
    read_mean = -math.log(n - 1) if n > 1 else 17.0
    return jnp.concatenate([jnp.full((n,), read_mean, jnp.float32), jnp.zeros((n,), jnp.float32), res])


class ManifoldMaps(StreamConnection):
    """Maps from the normalised streams of a token: sigmoid reads and writes, and the topology's mixing.

    Parameters, float32: phi [N, D, 2N+R], alpha [3], bias [2N+R]; the order is pre, post, res.
    """

    def __init__(self, topology: ManifoldHyperConnections, k: int | jax.Array, *, rngs: nnx.Rngs | PathKey):
        t = topology
        self.n, self.mixing, self.preset = t.n, t.mixing, t.preset
        self.rms_eps, self.map_eps = t.rms_eps, t.map_eps
        shape = (t.n, t.width, 2 * t.n + t.mixing.logits(t.n))
        std = {"home": 0.0, "equivalent": (t.n * t.width) ** -0.5, "fanin": (t.n * t.width) ** -0.5, "v4": 0.02}[t.init]
        alpha = {"home": 0.01, "equivalent": 0.0, "fanin": 0.01, "v4": 1.0}[t.init] if t.alpha is None else t.alpha
        self.phi = nnx.Param(
            std * jax.random.normal((path_key(rngs) / "phi").key, shape, jnp.float32)
            if std
            else jnp.zeros(shape, jnp.float32)
        )
        self.alpha = nnx.Param(jnp.full((3,), alpha, jnp.float32))
        self.bias = nnx.Param(initial_bias(t.mixing, t.init, t.n, k % t.n, t.res_gap))

    def token_maps(self, x: jax.Array) -> TokenMaps:
        n = self.n
        raw = kernels.project(x, self.phi[...], self.rms_eps)  # [2N+R, ...]
        tokens = (1,) * (raw.ndim - 1)
        alpha = jnp.repeat(self.alpha[...], jnp.array([n, n, raw.shape[0] - 2 * n]), total_repeat_length=raw.shape[0])
        logits = raw * alpha.reshape(-1, *tokens) + self.bias[...].reshape(-1, *tokens)
        pre = jax.nn.sigmoid(logits[:n]) + (self.map_eps if self.preset == "deepseek" else 0.0)
        return TokenMaps(pre, 2.0 * jax.nn.sigmoid(logits[n : 2 * n]), self.mixing(logits[2 * n :], n))


def reordered(params: Mapping[str, jax.Array], order: np.ndarray) -> dict[str, jax.Array]:
    """Return the parameters of a connection with its residual logits in another order, [R] of places.

    They are the last R entries of the last axis of phi and bias.
    """

    def swap(leaf: jax.Array) -> jax.Array:
        rest = leaf.shape[-1] - len(order)
        return jnp.concatenate([leaf[..., :rest], leaf[..., rest:][..., order]], axis=-1)

    return {**params, **{name: swap(params[name]) for name in ("phi", "bias")}}


class ManifoldHyperConnections(StreamTopology):
    """The topology of mhc and its relatives: ``mixing`` tells them apart.

    Options are the config fields of the same names, and those of the mixing; ``build`` checks n, init and collapse.

    Raises:
      ValueError: unknown Sinkhorn preset, less than one iteration, or an N that the mixing does not have.
    """

    maps_class: ClassVar[type[ManifoldMaps]] = ManifoldMaps

    def __init__(
        self,
        width: int,
        *,
        rngs: nnx.Rngs | PathKey | None = None,
        sublayers: int | None = None,
        mixing: type[Mixing] = Sinkhorn,
        n: int | None = None,
        init: str | None = None,
        alpha: float | None = None,
        res_gap: float = 4.0,
        sinkhorn: str = "paper",
        collapse: str | None = None,
        rms_eps: float = 1e-6,
        map_eps: float = 1e-6,
        **of_mixing: Any,
    ):
        check_sinkhorn(sinkhorn)
        super().__init__(width, 4 if n is None else n, collapse or "mean", rms_eps=rms_eps, map_eps=map_eps, rngs=rngs)
        self.mixing = configured(mixing, {"sinkhorn": sinkhorn, "sublayers": sublayers, **of_mixing})
        self.init, self.alpha, self.res_gap, self.preset = init or "home", alpha, res_gap, sinkhorn
        self.rms_eps, self.map_eps = rms_eps, map_eps

    def numpy_form(self) -> type[Runner] | None:
        return self.mixing.runner

    def connection(self, k: int | jax.Array, *, rngs: nnx.Rngs | PathKey) -> ManifoldMaps:
        return self.maps_class(self, k, rngs=rngs)

    def map_multiplies(self) -> int:
        return self.n * self.width * (2 * self.n + self.mixing.logits(self.n))
