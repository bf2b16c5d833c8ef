"""Compute the residual topologies' mathematics in pure functions.

Shapes: ``N`` streams, ``D`` model width, ``R`` residual logits, ``S`` sublayers in depth order; ``...`` any leading
axes (batch and tokens). Every function computes in ``promote_types(input, float32)``, so bfloat16 streams are read in
float32 and float64 stays float64. Every function raises ValueError for an array of another shape than it names, and
TypeError for one that holds no real numbers.

One sublayer F with its maps is

    x'_i = sum_j res[i, j] x_j + post[i] F(sum_j pre[j] x_j)

``res[i, j]`` is the weight of input stream j in output stream i for every topology, whatever other projects store.

These are the reference: short, differentiable in both modes, exact. The training path uses ``mhc.kernels``, which is
tested against them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from mhc.kernels.checks import SINKHORN_PRESETS, check_sinkhorn
from mhc.residual.arrays import check_axes, check_count, check_leading, check_square, check_streams, named, promoted
from mhc.residual.initial import PRESETS, draws, hc_params, head_params, mhc_alpha, mhc_bias, mhc_params, mhc_phi
from mhc.residual.mixing import Mixing, mixing_of
from mhc.residual.mixing.kronecker import kronecker_mixture
from mhc.residual.mixing.permutations import permutation_mixture
from mhc.residual.mixing.sinkhorn import sinkhorn
from mhc.residual.reads import SlotMaps, depth_read, frac_maps, gated_read, laurel_write, value_mix

if TYPE_CHECKING:
    from jax.typing import ArrayLike

__all__ = [
    "PRESETS",
    "SINKHORN_PRESETS",
    "Gains",
    "Maps",
    "SlotMaps",
    "collapse_head",
    "composite_gains",
    "composite_maps",
    "depth_read",
    "draws",
    "frac_maps",
    "gated_read",
    "hc_maps",
    "hc_params",
    "head_params",
    "kronecker_mixture",
    "laurel_write",
    "maps_from_logits",
    "mhc_alpha",
    "mhc_bias",
    "mhc_logits",
    "mhc_maps",
    "mhc_params",
    "mhc_phi",
    "normed_projection",
    "permutation_mixture",
    "read",
    "residual_logits",
    "single_gains",
    "sinkhorn",
    "value_mix",
    "write",
]


class Maps(NamedTuple):
    """Holds the three maps of one sublayer, per token: ``pre[..., N]``, ``post[..., N]``, ``res[..., N, N]``."""

    pre: jax.Array
    post: jax.Array
    res: jax.Array


class Gains(NamedTuple):
    """Holds signal gains per sublayer and token, ``[S, ...]`` each; see ``composite_gains``."""

    forward: jax.Array
    backward: jax.Array


def residual_logits(kind: str, n: int) -> int:
    """Return R, the number of residual logits of one token.

    Raises:
      ValueError: unknown kind, or an N that the kind does not have (mhc_lite: at most 5, kromhc: powers of two).
    """
    check_count("n", n)
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

    Raises:
      ValueError: a parameter is missing or misshapen.
    """
    static, weights = ("b_pre", "b_post", "b_res"), ("w_pre", "w_post", "w_res")
    names = static if not dynamic else (*weights, *static, "alpha")
    x, *arrays = promoted(x=x, **named(params, names, "hc_maps"))
    n, d = check_streams("x", x)
    shapes = {
        **{"w_pre": [("D", d)], "w_post": [("D", d)], "w_res": [("D", d), ("N", n)], "alpha": [("gates", 3)]},
        **{"b_pre": [("N", n)], "b_post": [("N", n)], "b_res": [("N", n), ("N", n)]},
    }
    for name, array in zip(names, arrays, strict=True):
        check_axes(name, array, *shapes[name], leading=False)
    if not dynamic:
        return Maps(*(jnp.broadcast_to(b, x.shape[:-2] + b.shape) for b in arrays))
    w_pre, w_post, w_res, b_pre, b_post, b_res, alpha = arrays
    b_pre, b_post = (jax.lax.broadcast_to_rank(b, x.ndim - 1) for b in (b_pre, b_post))
    b_res = jax.lax.broadcast_to_rank(b_res, x.ndim)
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
    s: int = 2,
    gamma: ArrayLike | None = None,
) -> Maps:
    """Compute the maps of manifold-constrained Hyper-Connections (arXiv:2512.24880) and its relatives.

    m = vec(x) rsqrt(mean(vec(x)^2) + rms_eps) with one statistic over all N*D; logits = alpha_k (m phi)_k + b_k in the
    order pre, post, res; pre = sigmoid(.) (+ map_eps under ``deepseek``), post = 2 sigmoid(.), res = the kind's
    projection of the res logits: Sinkhorn (``mhc``), a softmax over permutation matrices (``mhc_lite``,
    arXiv:2601.05732), a Kronecker product of 2x2 matrices (``kromhc``, arXiv:2601.21579), the identity, or what the
    kind's file in ``mhc.residual.mixing`` says.

    Args:
      x: streams [..., N, D].
      params: phi [N*D, 2N+R] (rows stream-major), alpha [3], bias [2N+R]. ``tbp_mhc`` may add delta [], which mixes the
        uniform map in; ``shc`` adds gamma [2], and its alpha is [5].
      kind: ``mhc`` or one of its relatives: a kind with residual logits.
      preset, iters, sinkhorn_eps: see ``sinkhorn``; ``preset`` also decides whether map_eps is added to pre.
      rms_eps: inside the square root. map_eps: added to pre under ``deepseek``.
      s: of ``go_mhc``: the rows and columns of Q that make one of H_res.
      gamma: of ``circulant``, which needs it: the share of what is not the identity, from 0 to 1. Of ``shc``: the two
        factors, where params lacks them.

    Returns:
      Maps, float32 or wider.

    Raises:
      ValueError: unknown kind or preset, an N the kind does not have, or misshapen parameters.
    """
    own = mixing_of(kind, minorize="delta" in params).own()
    if gamma is not None and "gamma" in own:
        params = {"gamma": gamma, **params}
    given = named(params, ("phi", "alpha", "bias", *own), "mhc_maps")
    x, phi, alpha, bias, *values = promoted(x=x, **given)
    n, d = check_streams("x", x)
    mixing = mixing_of(
        kind,
        **{"sinkhorn": preset, "iters": iters, "sinkhorn_eps": sinkhorn_eps},
        **{"s": s, "gamma": None if "gamma" in own else gamma, "minorize": "delta" in params},
    )
    mixing.check(n)
    for (name, start), value in zip(own.items(), values, strict=True):
        check_axes(f"{name} of {kind}", value, *((name, size) for size in start.shape), leading=False)
    mixing = mixing.with_own(dict(zip(own, values, strict=True)))
    columns = ("2N+R", 2 * n + mixing.logits(n))
    check_axes(f"phi of {kind} with N={n}, D={d}", phi, ("N*D", n * d), columns, leading=False)
    logits = mhc_logits(normed_projection(x, phi, rms_eps=rms_eps), alpha, bias, n, gates=mixing.gates(n))
    return _maps_of(mixing, logits, n, preset, map_eps)


def normed_projection(x: ArrayLike, phi: ArrayLike, *, rms_eps: float = 1e-6) -> jax.Array:
    """Return m phi with m = vec(x) rsqrt(mean(vec(x)^2) + rms_eps): x [..., N, D], phi [N*D, R] -> [..., R]."""
    x, phi = promoted(x=x, phi=phi)
    n, d = check_streams("x", x)
    if phi.ndim != 2 or phi.shape[0] != n * d:
        raise ValueError(f"phi must be [N*D={n * d}, R], got shape {phi.shape}")
    # The norm is one scalar a token, so it is applied after the matmul. (N, D) is contracted without a reshape of x,
    # which would gather a width sharded over a tensor-parallel mesh.
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=(-2, -1)) + rms_eps)
    return jnp.einsum("...nd,ndr->...r", x, phi.reshape(n, d, -1)) * scale[..., None]


def mhc_logits(
    raw: ArrayLike, alpha: ArrayLike, bias: ArrayLike, n: int, *, gates: tuple[int, ...] | None = None
) -> jax.Array:
    """Return alpha_k raw_k + b_k: raw [..., 2N+R], alpha [3], bias [2N+R] -> logits [..., 2N+R].

    Args:
      gates: how many residual logits share each gate after the first two (``Mixing.gates``); None: all share one.
    """
    raw, alpha, bias = promoted(raw=raw, alpha=alpha, bias=bias)
    check_axes("alpha", alpha, ("gates", 3 if gates is None else 2 + len(gates)), leading=False)
    if not raw.ndim:
        raise ValueError("raw must be [..., 2N+R], got shape ()")
    check_axes("bias", bias, ("2N+R", raw.shape[-1]), leading=False)
    width = raw.shape[-1]
    sizes = jnp.array([n, n, *((width - 2 * n,) if gates is None else gates)])
    scale = jnp.repeat(alpha, sizes, total_repeat_length=width)
    return raw * jax.lax.broadcast_to_rank(scale, raw.ndim) + jax.lax.broadcast_to_rank(bias, raw.ndim)


def maps_from_logits(
    logits: ArrayLike, *, kind: str, preset: str, iters: int, map_eps: float, sinkhorn_eps: float
) -> Maps:
    """Return the kind's maps from its logits [..., 2N+R], under the defaults of its own options; see ``mhc_maps``.

    Raises:
      ValueError: an unknown preset, a number of logits that no N has, or a kind with parameters of its own.
    """
    mixing = mixing_of(kind, sinkhorn=preset, iters=iters, sinkhorn_eps=sinkhorn_eps)
    if mixing.own():
        raise ValueError(f"{kind} needs the parameters {', '.join(mixing.own())} beside its logits: mhc_maps")
    (logits,) = promoted(logits=logits)
    return _maps_of(mixing, logits, streams_of(mixing, logits.shape[-1] if logits.ndim else 0), preset, map_eps)


def _maps_of(mixing: Mixing, logits: jax.Array, n: int, preset: str, map_eps: float) -> Maps:
    """Return the maps of logits [..., 2N+R] that a mixing makes."""
    check_sinkhorn(preset)
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
    x, pre = promoted(x=x, pre=pre)
    n, _ = check_streams("x", x)
    check_axes("pre", pre, ("N", n))
    check_leading(x=x.shape[:-2], pre=pre.shape[:-1])
    return jnp.einsum("...nd,...n->...d", x, pre)


def write(x: ArrayLike, y: ArrayLike, post: ArrayLike, res: ArrayLike) -> jax.Array:
    """Return x'_i = sum_j res[i, j] x_j + post[i] y.

    x [..., N, D], y [..., D], post [..., N], res [..., N, N] -> x' [..., N, D].
    """
    x, y, post, res = promoted(x=x, y=y, post=post, res=res)
    n, d = check_streams("x", x)
    check_axes("y", y, ("D", d))
    check_axes("post", post, ("N", n))
    check_axes("res", res, ("N", n), ("N", n))
    check_leading(x=x.shape[:-2], y=y.shape[:-1], post=post.shape[:-1], res=res.shape[:-2])
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
    x, fn, base, scale = promoted(x=x, fn=fn, base=base, scale=scale)
    n, d = check_streams("x", x)
    check_axes("fn", fn, ("N*D", n * d), ("N", n), leading=False)
    check_axes("base", base, ("N", n), leading=False)
    if scale.shape not in ((), (1,)):
        raise ValueError(f"scale must be () or [1], got shape {scale.shape}")
    raw = normed_projection(x, fn, rms_eps=rms_eps)
    scale, base = (jax.lax.broadcast_to_rank(leaf, raw.ndim) for leaf in (scale, base))
    return read(x, jax.nn.sigmoid(scale * raw + base) + map_eps)


def single_gains(res: ArrayLike) -> Gains:
    """Return the gains of each map alone, [..., N, N] -> [...].

    The forward gain is max_i |sum_j H[i, j]|, the backward gain max_j |sum_i H[i, j]|."""
    (res,) = promoted(res=res)
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
    (res,) = promoted(res=res)
    _check_stack(res)

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
    (res,) = promoted(res=res)
    _check_stack(res)

    def multiply(product: jax.Array, h: jax.Array) -> tuple[jax.Array, jax.Array]:
        product = jnp.einsum("...ij,...jk->...ik", h, product)
        return product, product

    identity = jnp.broadcast_to(jnp.eye(res.shape[-1], dtype=res.dtype), res.shape[1:])
    return jax.lax.scan(multiply, identity, res)[1]


def _check_stack(res: jax.Array) -> None:
    """Refuse what is no stack of maps [S, ..., N, N]. Raises ValueError."""
    check_square("res", res.shape)
    if res.ndim < 3:
        raise ValueError(f"res must be [S, ..., N, N], got shape {res.shape}")
