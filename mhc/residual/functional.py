"""The mathematics of the residual topologies as pure functions.

Shapes: ``N`` streams, ``D`` model width, ``R`` residual logits, ``S`` sublayers in depth order; ``...`` any leading
axes (batch and tokens). Every function computes in ``promote_types(input, float32)``, so bfloat16 streams are read in
float32 and float64 stays float64.

One sublayer F with its maps is

    x'_i = sum_j res[i, j] x_j + post[i] F(sum_j pre[j] x_j)

``res[i, j]`` is the weight of input stream j in output stream i, for every topology and whatever a peer stores.

These are the reference: short, differentiable in both modes, exact. The training path uses ``mhc.kernels``, which is
tested against them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from mhc.residual.arrays import check_square, wide
from mhc.residual.mixing import Mixing, mixing_of
from mhc.residual.mixing.kronecker import kronecker_mixture
from mhc.residual.mixing.permutations import permutation_mixture
from mhc.residual.mixing.sinkhorn import PRESETS as SINKHORN_PRESETS
from mhc.residual.mixing.sinkhorn import check_preset, sinkhorn

if TYPE_CHECKING:
    from jax.typing import ArrayLike

__all__ = [
    "SINKHORN_PRESETS",
    "Gains",
    "Maps",
    "collapse_head",
    "composite_gains",
    "composite_maps",
    "hc_maps",
    "kronecker_mixture",
    "maps_from_logits",
    "mhc_logits",
    "mhc_maps",
    "permutation_mixture",
    "read",
    "residual_logits",
    "single_gains",
    "sinkhorn",
    "write",
]


class Maps(NamedTuple):
    """The three maps of one sublayer, per token: ``pre[..., N]``, ``post[..., N]``, ``res[..., N, N]``."""

    pre: jax.Array
    post: jax.Array
    res: jax.Array


class Gains(NamedTuple):
    """Signal gains per sublayer and token, ``[S, ...]`` each; see ``composite_gains``."""

    forward: jax.Array
    backward: jax.Array


def residual_logits(kind: str, n: int) -> int:
    """Return R, the number of residual logits of one token.

    Raises:
      ValueError: unknown kind, or an N that the kind does not have (mhc_lite: at most 5, kromhc: powers of two).
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    return mixing_of(kind).logits(n)


def hc_maps(
    x: ArrayLike,
    params: Mapping[str, ArrayLike],
    *,
    dynamic: bool = True,
    tanh: bool = True,
    rms_eps: float = 1e-6,
) -> Maps:
    """Compute the maps of Hyper-Connections (arXiv:2409.19606), which are unconstrained.

    With m_j the stream x_j under RMSNorm without weight, and f = tanh or the identity:
    pre_j = a_0 f(m_j . w_pre) + b_pre[j]; post_j = a_1 f(m_j . w_post) + b_post[j];
    res[i, j] = a_2 f(m_j . w_res[:, i]) + b_res[i, j].

    Args:
      x: streams [..., N, D].
      params: w_pre [D], w_post [D], w_res [D, N], b_pre [N], b_post [N], b_res [N, N], alpha [3]; static: b's alone.
      dynamic: False leaves only the b's.
      tanh: False drops the tanh.
      rms_eps: inside the square root.

    Returns:
      Maps, float32 or wider.
    """
    if not dynamic:
        x, b_pre, b_post, b_res = wide(x, *(params[k] for k in ("b_pre", "b_post", "b_res")))
        lead = x.shape[:-2]
        return Maps(*(jnp.broadcast_to(b, lead + b.shape) for b in (b_pre, b_post, b_res)))
    names = ("w_pre", "w_post", "w_res", "b_pre", "b_post", "b_res", "alpha")
    x, w_pre, w_post, w_res, b_pre, b_post, b_res, alpha = wide(x, *(params[k] for k in names))
    n = x.shape[-2]
    if b_res.shape != (n, n):
        raise ValueError(f"b_res must be [N, N] = {(n, n)}, got {b_res.shape}")
    squash = jnp.tanh if tanh else (lambda z: z)
    m = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + rms_eps)
    pre = alpha[0] * squash(m @ w_pre) + b_pre
    post = alpha[1] * squash(m @ w_post) + b_post
    # m @ w_res is indexed [j, i]: each input stream says how much of it every output stream takes.
    res = alpha[2] * squash(jnp.swapaxes(m @ w_res, -1, -2)) + b_res
    return Maps(pre, post, res)


def mhc_maps(
    x: ArrayLike,
    params: Mapping[str, ArrayLike],
    *,
    kind: str = "mhc",
    preset: str = "paper",
    iters: int = 20,
    rms_eps: float = 1e-6,
    map_eps: float = 1e-6,
    sinkhorn_eps: float = 1e-6,
) -> Maps:
    """Compute the maps of manifold-constrained Hyper-Connections (arXiv:2512.24880) and its relatives.

    m = vec(x) rsqrt(mean(vec(x)^2) + rms_eps) with one statistic over all N*D; logits = alpha_k (m phi)_k + b_k in the
    order pre, post, res; pre = sigmoid(.) (+ map_eps under ``deepseek``), post = 2 sigmoid(.), res = the kind's
    projection of the res logits: Sinkhorn (``mhc``), a softmax over permutation matrices (``mhc_lite``,
    arXiv:2601.05732), a Kronecker product of 2x2 matrices (``kromhc``, arXiv:2601.21579), or the identity.

    Args:
      x: streams [..., N, D].
      params: phi [N*D, 2N+R] (rows stream-major), alpha [3], bias [2N+R].
      kind: ``mhc``, ``mhc_lite``, ``kromhc`` or ``identity``.
      preset, iters, sinkhorn_eps: see ``sinkhorn``; ``preset`` also decides whether map_eps is added to pre.
      rms_eps: inside the square root. map_eps: added to pre under ``deepseek``.

    Returns:
      Maps, float32 or wider.

    Raises:
      ValueError: unknown kind or preset, an N the kind does not have, or misshapen parameters.
    """
    x, phi, alpha, bias = wide(x, params["phi"], params["alpha"], params["bias"])
    n, d = x.shape[-2:]
    r = residual_logits(kind, n)
    if phi.shape != (n * d, 2 * n + r) or bias.shape != (2 * n + r,):
        raise ValueError(
            f"{kind} with N={n}, D={d} takes phi [{n * d}, {2 * n + r}] and bias [{2 * n + r}], "
            f"got {phi.shape} and {bias.shape}"
        )
    # The norm is one scalar a token, so it is applied after the matmul. (N, D) is contracted without a reshape of x,
    # which would gather a width sharded over a tensor-parallel mesh.
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=(-2, -1)) + rms_eps)
    raw = jnp.einsum("...nd,ndr->...r", x, phi.reshape(n, d, 2 * n + r)) * scale[..., None]
    return maps_from_logits(
        mhc_logits(raw, alpha, bias, n),
        kind=kind,
        preset=preset,
        iters=iters,
        map_eps=map_eps,
        sinkhorn_eps=sinkhorn_eps,
    )


def mhc_logits(raw: jax.Array, alpha: jax.Array, bias: jax.Array, n: int) -> jax.Array:
    """Return alpha_k raw_k + b_k: raw [..., 2N+R], alpha [3], bias [2N+R] -> logits [..., 2N+R]."""
    return raw * jnp.repeat(alpha, jnp.array([n, n, raw.shape[-1] - 2 * n]), total_repeat_length=raw.shape[-1]) + bias


def maps_from_logits(
    logits: jax.Array, *, kind: str, preset: str, iters: int, map_eps: float, sinkhorn_eps: float
) -> Maps:
    """Return the kind's maps from its logits [..., 2N+R]; see ``mhc_maps``."""
    check_preset(preset)
    mixing = mixing_of(kind, sinkhorn=preset, iters=iters, sinkhorn_eps=sinkhorn_eps)
    n = streams_of(mixing, logits.shape[-1])
    pre, post, res = logits[..., :n], logits[..., n : 2 * n], logits[..., 2 * n :]
    pre = jax.nn.sigmoid(pre) + (map_eps if preset == "deepseek" else 0.0)
    return Maps(pre, 2.0 * jax.nn.sigmoid(post), mixing.reference(res, n))


def streams_of(mixing: Mixing, logits: int) -> int:
    """Return N from the number of logits 2N+R of one token. Raises ValueError where no N fits."""
    for n in range(1, logits // 2 + 1):
        with contextlib.suppress(ValueError):  # an N that the mixing does not have
            if 2 * n + mixing.logits(n) == logits:
                return n
    raise ValueError(f"no N gives {logits} logits for {type(mixing).__name__}")


def read(x: ArrayLike, pre: ArrayLike) -> jax.Array:
    """Return u = sum_j pre[j] x_j: x [..., N, D], pre [..., N] -> u [..., D]."""
    x, pre = wide(x, pre)
    return jnp.einsum("...nd,...n->...d", x, pre)


def write(x: ArrayLike, y: ArrayLike, post: ArrayLike, res: ArrayLike) -> jax.Array:
    """Return x'_i = sum_j res[i, j] x_j + post[i] y.

    x [..., N, D], y [..., D], post [..., N], res [..., N, N] -> x' [..., N, D].

    Raises:
      ValueError: res not [..., N, N] with the N of x.
    """
    x, y, post, res = wide(x, y, post, res)
    check_square("res", res.shape)
    if res.shape[-1] != x.shape[-2]:
        raise ValueError(f"res is {res.shape[-1]}x{res.shape[-1]} but x has {x.shape[-2]} streams")
    return jnp.einsum("...ij,...jd->...id", res, x) + post[..., :, None] * y[..., None, :]


def collapse_head(
    x: ArrayLike, fn: ArrayLike, base: ArrayLike, scale: ArrayLike, *, rms_eps: float = 1e-6, map_eps: float = 1e-6
) -> jax.Array:
    """Apply the learned collapse of DeepSeek-V4: w = sigmoid(s (m fn) + base) + map_eps; out = sum_j w_j x_j.

    Args:
      x: streams [..., N, D]. fn: [N*D, N]. base: [N]. scale: () or [1].

    Returns:
      [..., D], float32 or wider.
    """
    x, fn, base, scale = wide(x, fn, base, scale)
    n, d = x.shape[-2:]
    if fn.shape != (n * d, n):
        raise ValueError(f"fn must be [N*D, N] = {(n * d, n)}, got {fn.shape}")
    norm = jax.lax.rsqrt(jnp.mean(x * x, axis=(-2, -1)) + rms_eps)
    raw = jnp.einsum("...nd,ndm->...m", x, fn.reshape(n, d, n)) * norm[..., None]
    return read(x, jax.nn.sigmoid(scale * raw + base) + map_eps)


def single_gains(res: ArrayLike) -> Gains:
    """Return the gains of each map alone, [..., N, N] -> [...]: max_i |sum_j H[i, j]| forward, max_j |sum_i H[i, j]|
    backward."""
    (res,) = wide(res)
    check_square("res", res.shape)
    return Gains(jnp.max(jnp.abs(jnp.sum(res, -1)), -1), jnp.max(jnp.abs(jnp.sum(res, -2)), -1))


def composite_gains(res: ArrayLike) -> Gains:
    """Return the gains of the products over depth, per token (the "Amax gain magnitude" of arXiv:2512.24880).

    forward[k] is the gain max_i |sum_j .| of H_k ... H_1 H_0; backward[k] is max_j |sum_i .| of H_{S-1} ... H_k.

    Args:
      res: [S, ..., N, N], sublayers in depth order.

    Returns:
      Gains, [S, ...] each.
    """
    (res,) = wide(res)
    check_square("res", res.shape)
    if res.ndim < 3:
        raise ValueError(f"res must be [S, ..., N, N], got shape {res.shape}")

    # A product's row sums are its product with the all-ones vector, so vectors suffice: no N x N products.
    def forward(v: jax.Array, h: jax.Array) -> tuple[jax.Array, jax.Array]:
        v = jnp.einsum("...ij,...j->...i", h, v)
        return v, jnp.max(jnp.abs(v), -1)

    def backward(v: jax.Array, h: jax.Array) -> tuple[jax.Array, jax.Array]:
        v = jnp.einsum("...ij,...i->...j", h, v)
        return v, jnp.max(jnp.abs(v), -1)

    ones = jnp.ones(res.shape[1:-1], res.dtype)
    return Gains(jax.lax.scan(forward, ones, res)[1], jax.lax.scan(backward, ones, res, reverse=True)[1])


def composite_maps(res: ArrayLike) -> jax.Array:
    """Return the products H_k ... H_1 H_0 of every depth k: res [S, ..., N, N] in depth order -> [S, ..., N, N]."""
    (res,) = wide(res)
    check_square("res", res.shape)

    def multiply(product: jax.Array, h: jax.Array) -> tuple[jax.Array, jax.Array]:
        product = jnp.einsum("...ij,...jk->...ik", h, product)
        return product, product

    identity = jnp.broadcast_to(jnp.eye(res.shape[-1], dtype=res.dtype), res.shape[1:])
    return jax.lax.scan(multiply, identity, res)[1]
