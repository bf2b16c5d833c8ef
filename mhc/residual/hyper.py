"""Implement Hyper-Connections (arXiv:2409.19606): N streams mixed by learned, unconstrained maps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mhc.kernels import Form
from mhc.residual import initial
from mhc.residual.arrays import promoted
from mhc.residual.runner import StreamRunner
from mhc.residual.streams import Projection, StreamConnection, StreamTopology, TokenMaps
from mhc.rng import PathKey


class HyperConnectionMaps(StreamConnection):
    """Computes static maps b plus, when dynamic, a bounded correction from each stream's normalised content.

    Parameters, float32: b_pre [N], b_post [N], b_res [N, N]; dynamic: w_pre [D], w_post [D], w_res [D, N], alpha [3].
    They start from ``functional.hc_params``.
    """

    def __init__(
        self,
        k: int | jax.Array,
        width: int,
        n: int,
        *,
        alpha: float | None = None,
        dynamic: bool = True,
        tanh: bool = True,
        rms_eps: float = 1e-6,
    ):
        self.n, self.dynamic, self.tanh, self.rms_eps = n, dynamic, tanh, rms_eps
        start = initial.hc_params(n, width, k=k, alpha=alpha, dynamic=dynamic)
        self.b_pre = nnx.Param(start["b_pre"])
        self.b_post = nnx.Param(start["b_post"])
        self.b_res = nnx.Param(start["b_res"])
        if dynamic:
            self.w_pre = nnx.Param(start["w_pre"])
            self.w_post = nnx.Param(start["w_post"])
            self.w_res = nnx.Param(start["w_res"])
            self.alpha = nnx.Param(start["alpha"])

    def token_maps(self, x: jax.Array) -> TokenMaps:
        lead = x.shape[:-2]
        if not self.dynamic:
            # In float32 or wider, also where somebody has cast the parameters.
            static = [promoted(b=p[...])[0] for p in (self.b_pre, self.b_post, self.b_res)]
            spread = (jnp.broadcast_to(b.reshape(*b.shape, *(1,) * len(lead)), (*b.shape, *lead)) for b in static)
            return TokenMaps(*spread)
        # The three projections are one matmul; its row r of stream j is (m_j . w_r), tokens last.
        xw, w = promoted(x=x, w=self._rows())
        scale = jax.lax.rsqrt(jnp.mean(xw * xw, axis=-1) + self.rms_eps)  # [..., N]
        return self._maps(jnp.moveaxis((xw @ w) * scale[..., None], (-1, -2), (0, 1)))

    def _rows(self) -> jax.Array:
        """Return the weights of the three projections side by side, [D, 2+N]."""
        return jnp.concatenate([self.w_pre[...][:, None], self.w_post[...][:, None], self.w_res[...]], axis=1)

    def projection(self) -> Projection | None:
        if not self.dynamic or type(self).token_maps is not HyperConnectionMaps.token_maps:
            return None
        n, columns = self.n, (2 + self.n) * self.n
        alpha, b_pre = promoted(alpha=self.alpha[...], b_pre=self.b_pre[...])
        # Column r N + j is row r of stream j, which no other stream is projected on.
        phi = self._rows()[None, :, :, None] * jnp.eye(n)[:, None, None, :]
        form = Form(each=True, squash="tanh" if self.tanh else "none", offset=0.0, eps=self.rms_eps)
        gain = jnp.full((columns,), alpha[0])
        return Projection(form, phi.reshape(n, -1, columns), gain, jnp.pad(b_pre, (0, columns - n)))

    def maps_of(self, raw: jax.Array) -> TokenMaps:
        return self._maps(raw.reshape(2 + self.n, self.n, *raw.shape[1:]))

    def _maps(self, raw: jax.Array) -> TokenMaps:
        """Return the maps from the projections raw [2+N, N, ...]."""
        raw = jnp.tanh(raw) if self.tanh else raw
        static = promoted(b_pre=self.b_pre[...], b_post=self.b_post[...], b_res=self.b_res[...])
        b_pre, b_post, b_res = (b.reshape(*b.shape, *(1,) * (raw.ndim - 2)) for b in static)
        raw, alpha, b_pre, b_post, b_res = promoted(
            raw=raw, alpha=self.alpha[...], b_pre=b_pre, b_post=b_post, b_res=b_res
        )
        return TokenMaps(alpha[0] * raw[0] + b_pre, alpha[1] * raw[1] + b_post, alpha[2] * raw[2:] + b_res)


class HyperRunner(StreamRunner):
    """Runs Hyper-Connections in numpy: static maps, and a bounded correction where they are dynamic."""

    def maps(self, x, name):
        static = [self.w(f"{name}.b_{which}") for which in ("pre", "post", "res")]
        moved = [np.zeros((*x.shape[:2], *b.shape)) for b in static]
        if self.r["dynamic"]:
            m = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.r["rms_eps"])
            raw = [m @ self.w(f"{name}.w_{which}") for which in ("pre", "post", "res")]
            raw[2] = np.swapaxes(raw[2], -1, -2)
            gates = self.w(f"{name}.alpha")
            moved = [a * (np.tanh(y) if self.r["tanh"] else y) for a, y in zip(gates, raw, strict=True)]
        return [b + y for b, y in zip(static, moved, strict=True)]


class HyperConnections(StreamTopology):
    """Builds the topology ``hc``. Options are the config fields of the same names; ``build`` checks them."""

    runner = HyperRunner

    def __init__(
        self,
        width: int,
        *,
        rngs: nnx.Rngs | PathKey | None = None,
        n: int | None = None,
        init: str | None = None,  # there is one preset
        alpha: float | None = None,
        collapse: str | None = None,
        dynamic: bool = True,
        tanh: bool = True,
        rms_eps: float = 1e-6,
        map_eps: float = 1e-6,
    ):
        super().__init__(width, 4 if n is None else n, collapse or "sum", rms_eps=rms_eps, map_eps=map_eps, rngs=rngs)
        self.alpha, self.dynamic, self.tanh, self.rms_eps = alpha, dynamic, tanh, rms_eps

    def connection(self, k: int | jax.Array, *, rngs: nnx.Rngs | PathKey | None = None) -> HyperConnectionMaps:
        return HyperConnectionMaps(
            k, self.width, self.n, alpha=self.alpha, dynamic=self.dynamic, tanh=self.tanh, rms_eps=self.rms_eps
        )

    def map_multiplies(self) -> int:
        return self.n * self.width * (2 + self.n) if self.dynamic else 0
