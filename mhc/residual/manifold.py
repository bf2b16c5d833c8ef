"""Implement manifold-constrained Hyper-Connections (arXiv:2512.24880) and relatives that differ in ``Mixing``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mhc import kernels
from mhc.kernels import Form
from mhc.kernels.checks import check_sinkhorn
from mhc.residual import initial
from mhc.residual.arrays import promoted
from mhc.residual.mixing import Mixing, configured
from mhc.residual.mixing.sinkhorn import Sinkhorn
from mhc.residual.runner import Runner
from mhc.residual.streams import Projection, StreamConnection, StreamTopology, TokenMaps
from mhc.rng import PathKey, path_key


class ManifoldMaps(StreamConnection):
    """Computes maps from the normalised streams of a token: sigmoid reads and writes, and the topology's mixing.

    Parameters, float32: phi [N, D, 2N+R], alpha [3], bias [2N+R]; the order is pre, post, res. A mixing may have
    several gates alpha of its logits, and parameters of its own.
    """

    def __init__(self, topology: ManifoldHyperConnections, k: int | jax.Array, *, rngs: nnx.Rngs | PathKey):
        t = topology
        self.n, self.mixing, self.preset = t.n, t.mixing, t.preset
        self.rms_eps, self.map_eps = t.rms_eps, t.map_eps
        key = (path_key(rngs) / "phi").key if initial.draws(t.init, t.mixing) else None
        start = initial.mhc_params(
            t.n, t.width, kind=t.mixing, init=t.init, k=k, key=key, alpha=t.alpha, res_gap=t.res_gap
        )
        self.phi = nnx.Param(start["phi"].reshape(t.n, t.width, -1))
        self.alpha = nnx.Param(start["alpha"])
        self.bias = nnx.Param(start["bias"])
        self.own = tuple(t.mixing.own())
        for name in self.own:
            setattr(self, name, nnx.Param(start[name]))

    def token_maps(self, x: jax.Array) -> TokenMaps:
        return self.maps_of(kernels.project(x, self.phi[...], self.rms_eps))

    def _gates(self, alpha: jax.Array) -> jax.Array:
        """Return the gate of each logit, [2N+R]."""
        n, columns = self.n, self.bias[...].shape[0]
        return jnp.repeat(alpha, jnp.array([n, n, *self.mixing.gates(n)]), total_repeat_length=columns)

    @property
    def _offset(self) -> float:
        return self.map_eps if self.preset == "deepseek" else 0.0

    def projection(self) -> Projection | None:
        if type(self).token_maps is not ManifoldMaps.token_maps:
            return None
        alpha, bias = promoted(alpha=self.alpha[...], bias=self.bias[...])
        form = Form(each=False, squash="sigmoid", offset=self._offset, eps=self.rms_eps)
        return Projection(form, self.phi[...], self._gates(alpha), bias)

    def maps_of(self, raw: jax.Array) -> TokenMaps:
        n = self.n
        raw, alpha, bias = promoted(raw=raw, alpha=self.alpha[...], bias=self.bias[...])  # raw [2N+R, ...]
        tokens = (1,) * (raw.ndim - 1)
        logits = raw * self._gates(alpha).reshape(-1, *tokens) + bias.reshape(-1, *tokens)
        pre = jax.nn.sigmoid(logits[:n]) + self._offset
        mixing = self.mixing.with_own({name: getattr(self, name)[...] for name in self.own})
        return TokenMaps(pre, 2.0 * jax.nn.sigmoid(logits[n : 2 * n]), mixing(logits[2 * n :], n))


def reordered(params: Mapping[str, jax.Array], order: np.ndarray) -> dict[str, jax.Array]:
    """Return the parameters of a connection with its residual logits in another order, [R] of places.

    They are the last R entries of the last axis of phi and bias.
    """

    def swap(leaf: jax.Array) -> jax.Array:
        rest = leaf.shape[-1] - len(order)
        return jnp.concatenate([leaf[..., :rest], leaf[..., rest:][..., order]], axis=-1)

    return {**params, **{name: swap(params[name]) for name in ("phi", "bias")}}


class ManifoldHyperConnections(StreamTopology):
    """Builds the topology of mhc and its relatives, which ``mixing`` tells apart.

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
        if of_mixing.pop("single_pass", False):
            raise ValueError(f"single_pass: {type(self).__name__} carries no read weights; allowed: False")
        super().__init__(width, 4 if n is None else n, collapse or "mean", rms_eps=rms_eps, map_eps=map_eps, rngs=rngs)
        self.mixing = configured(mixing, {"sinkhorn": sinkhorn, "sublayers": sublayers, **of_mixing})
        self.mixing.check(self.n)
        self.init, self.alpha, self.res_gap, self.preset = init or "home", alpha, res_gap, sinkhorn
        self.rms_eps, self.map_eps = rms_eps, map_eps

    def numpy_form(self) -> type[Runner] | None:
        return self.mixing.runner

    def connection(self, k: int | jax.Array, *, rngs: nnx.Rngs | PathKey) -> ManifoldMaps:
        return self.maps_class(self, k, rngs=rngs)

    def map_multiplies(self) -> int:
        return self.n * self.width * (2 * self.n + self.mixing.logits(self.n)) + self.mixing.multiplies(self.n)
