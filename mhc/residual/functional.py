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

import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jax.typing import ArrayLike

MHC_KINDS = ("mhc", "mhc_lite", "kromhc", "identity")
SINKHORN_PRESETS = ("paper", "deepseek")


class Maps(NamedTuple):
    """The three maps of one sublayer, per token: ``pre[..., N]``, ``post[..., N]``, ``res[..., N, N]``."""

    pre: jax.Array
    post: jax.Array
    res: jax.Array


class Gains(NamedTuple):
    """Signal gains per sublayer and token, ``[S, ...]`` each; see ``composite_gains``."""

    forward: jax.Array
    backward: jax.Array


def _wide(*arrays: ArrayLike) -> tuple[jax.Array, ...]:
    """The arrays in their common dtype, at least float32."""
    dtype = jnp.promote_types(jnp.result_type(*arrays), jnp.float32)
    return tuple(jnp.asarray(a, dtype) for a in arrays)


def _check_square(name: str, shape: tuple[int, ...]) -> None:
    if len(shape) < 2 or shape[-1] != shape[-2]:
        raise ValueError(f"{name} must end in two equal axes [..., N, N], got shape {shape}")


def residual_logits(kind: str, n: int) -> int:
    """R, the number of residual logits of one token.

    Raises:
      ValueError: unknown kind, or an N that the kind does not have (mhc_lite: at most 5, kromhc: powers of two).
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    if kind == "mhc":
        return n * n
    if kind == "mhc_lite":
        if n > 5:
            raise ValueError(f"mhc_lite mixes all N! permutations and is limited to N <= 5, got {n}")
        return math.factorial(n)
    if kind == "kromhc":
        if n & (n - 1):
            raise ValueError(f"kromhc needs N to be a power of two, got {n}")
        return 2 * (n.bit_length() - 1)
    if kind == "identity":
        return 0
    raise ValueError(f"unknown kind {kind!r}; allowed: {', '.join(MHC_KINDS)}")


def sinkhorn(logits: ArrayLike, *, iters: int = 20, preset: str = "paper", eps: float = 1e-6) -> jax.Array:
    """Sinkhorn-Knopp projection of logits towards the doubly stochastic matrices.

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
      ValueError: axes not square, ``iters`` < 1, or an unknown preset.
    """
    (logits,) = _wide(logits)
    _check_square("logits", logits.shape)
    if iters < 1:
        raise ValueError(f"iters must be at least 1, got {iters}")
    if preset == "paper":
        log_m, offset, first, second = logits, -jnp.inf, -2, -1
    elif preset == "deepseek":
        offset = math.log(eps) if eps > 0 else -math.inf
        log_m = _log_plus(jax.nn.log_softmax(logits, axis=-1), offset)
        # The first row normalisation is the softmax itself.
        log_m, first, second = _log_normalise(log_m, -2, offset), -1, -2
        iters -= 1
    else:
        raise ValueError(f"unknown Sinkhorn preset {preset!r}; allowed: {', '.join(SINKHORN_PRESETS)}")

    def iteration(log_m: jax.Array, _: None) -> tuple[jax.Array, None]:
        return _log_normalise(_log_normalise(log_m, first, offset), second, offset), None

    log_m, _ = jax.lax.scan(iteration, log_m, None, length=iters)
    h = jnp.exp(log_m)
    return jnp.swapaxes(h, -1, -2) if preset == "deepseek" else h


def _log_plus(log_x: jax.Array, log_eps: float) -> jax.Array:
    """log(x + eps)."""
    return log_x if log_eps == -math.inf else jnp.logaddexp(log_x, log_eps)


def _log_normalise(log_m: jax.Array, axis: int, log_eps: float) -> jax.Array:
    """log(M / (sum of M over axis + eps))."""
    return log_m - _log_plus(jax.nn.logsumexp(log_m, axis=axis, keepdims=True), log_eps)


def hc_maps(
    x: ArrayLike,
    params: Mapping[str, ArrayLike],
    *,
    dynamic: bool = True,
    tanh: bool = True,
    rms_eps: float = 1e-6,
) -> Maps:
    """Maps of Hyper-Connections (arXiv:2409.19606), unconstrained.

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
        x, b_pre, b_post, b_res = _wide(x, *(params[k] for k in ("b_pre", "b_post", "b_res")))
        lead = x.shape[:-2]
        return Maps(*(jnp.broadcast_to(b, lead + b.shape) for b in (b_pre, b_post, b_res)))
    names = ("w_pre", "w_post", "w_res", "b_pre", "b_post", "b_res", "alpha")
    x, w_pre, w_post, w_res, b_pre, b_post, b_res, alpha = _wide(x, *(params[k] for k in names))
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
    """Maps of manifold-constrained Hyper-Connections (arXiv:2512.24880) and its relatives.

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
    x, phi, alpha, bias = _wide(x, params["phi"], params["alpha"], params["bias"])
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
    """alpha_k raw_k + b_k: raw [..., 2N+R], alpha [3], bias [2N+R] -> logits [..., 2N+R]."""
    return raw * jnp.repeat(alpha, jnp.array([n, n, raw.shape[-1] - 2 * n]), total_repeat_length=raw.shape[-1]) + bias


def maps_from_logits(
    logits: jax.Array, *, kind: str, preset: str, iters: int, map_eps: float, sinkhorn_eps: float
) -> Maps:
    """The kind's maps from its logits [..., 2N+R]; see ``mhc_maps``."""
    if preset not in SINKHORN_PRESETS:
        raise ValueError(f"unknown Sinkhorn preset {preset!r}; allowed: {', '.join(SINKHORN_PRESETS)}")
    n = streams_of(kind, logits.shape[-1])
    pre, post, res = logits[..., :n], logits[..., n : 2 * n], logits[..., 2 * n :]
    lead = logits.shape[:-1]
    pre = jax.nn.sigmoid(pre) + (map_eps if preset == "deepseek" else 0.0)
    post = 2.0 * jax.nn.sigmoid(post)
    if kind == "mhc":
        h = sinkhorn(res.reshape(*lead, n, n), iters=iters, preset=preset, eps=sinkhorn_eps)
    elif kind == "mhc_lite":
        h = permutation_mixture(jax.nn.softmax(res, axis=-1), n)
    elif kind == "kromhc":
        h = kronecker_mixture(jax.nn.softmax(res.reshape(*lead, -1, 2), axis=-1))
    else:
        h = jnp.broadcast_to(jnp.eye(n, dtype=logits.dtype), (*lead, n, n))
    return Maps(pre, post, h)


def streams_of(kind: str, logits: int) -> int:
    """N from the number of logits 2N+R of one token. Raises ValueError where no N fits."""
    for n in range(1, logits // 2 + 1):
        try:
            if 2 * n + residual_logits(kind, n) == logits:
                return n
        except ValueError:
            if kind not in MHC_KINDS:
                raise
    raise ValueError(f"no N gives {logits} logits for kind {kind!r}")


def permutation_mixture(weights: jax.Array, n: int) -> jax.Array:
    """sum_k a_k P_k over the N! permutations in lexicographic order, P_k[i, perm_k(i)] = 1.

    weights [..., N!] -> [..., N, N].
    """
    permutations = list(itertools.permutations(range(n)))
    matrices = jnp.eye(n, dtype=weights.dtype)[jnp.array(permutations)]  # [N!, N, N]; row i is one-hot at perm(i)
    return jnp.einsum("...k,kij->...ij", weights, matrices)


def kronecker_mixture(pairs: jax.Array) -> jax.Array:
    """U_1 (x) ... (x) U_K with U_k = [[p, q], [q, p]], U_1 outermost: [..., K, 2] -> [..., 2^K, 2^K]."""
    lead, factors = pairs.shape[:-2], pairs.shape[-2]
    h = jnp.ones((*lead, 1, 1), pairs.dtype)
    for k in range(factors):
        p, q = pairs[..., k, 0], pairs[..., k, 1]
        u = jnp.stack([jnp.stack([p, q], -1), jnp.stack([q, p], -1)], -2)
        m = h.shape[-1]
        h = jnp.einsum("...ij,...ab->...iajb", h, u).reshape(*lead, 2 * m, 2 * m)
    return h


def read(x: ArrayLike, pre: ArrayLike) -> jax.Array:
    """u = sum_j pre[j] x_j: x [..., N, D], pre [..., N] -> u [..., D]."""
    x, pre = _wide(x, pre)
    return jnp.einsum("...nd,...n->...d", x, pre)


def write(x: ArrayLike, y: ArrayLike, post: ArrayLike, res: ArrayLike) -> jax.Array:
    """x'_i = sum_j res[i, j] x_j + post[i] y.

    x [..., N, D], y [..., D], post [..., N], res [..., N, N] -> x' [..., N, D].

    Raises:
      ValueError: res not [..., N, N] with the N of x.
    """
    x, y, post, res = _wide(x, y, post, res)
    _check_square("res", res.shape)
    if res.shape[-1] != x.shape[-2]:
        raise ValueError(f"res is {res.shape[-1]}x{res.shape[-1]} but x has {x.shape[-2]} streams")
    return jnp.einsum("...ij,...jd->...id", res, x) + post[..., :, None] * y[..., None, :]


def collapse_head(
    x: ArrayLike, fn: ArrayLike, base: ArrayLike, scale: ArrayLike, *, rms_eps: float = 1e-6, map_eps: float = 1e-6
) -> jax.Array:
    """The learned collapse of DeepSeek-V4: w = sigmoid(s (m fn) + base) + map_eps; out = sum_j w_j x_j.

    Args:
      x: streams [..., N, D]. fn: [N*D, N]. base: [N]. scale: () or [1].

    Returns:
      [..., D], float32 or wider.
    """
    x, fn, base, scale = _wide(x, fn, base, scale)
    n, d = x.shape[-2:]
    if fn.shape != (n * d, n):
        raise ValueError(f"fn must be [N*D, N] = {(n * d, n)}, got {fn.shape}")
    norm = jax.lax.rsqrt(jnp.mean(x * x, axis=(-2, -1)) + rms_eps)
    raw = jnp.einsum("...nd,ndm->...m", x, fn.reshape(n, d, n)) * norm[..., None]
    return read(x, jax.nn.sigmoid(scale * raw + base) + map_eps)


def single_gains(res: ArrayLike) -> Gains:
    """Gains of each map alone, [..., N, N] -> [...]: max_i |sum_j H[i, j]| forward, max_j |sum_i H[i, j]| backward."""
    (res,) = _wide(res)
    _check_square("res", res.shape)
    return Gains(jnp.max(jnp.abs(jnp.sum(res, -1)), -1), jnp.max(jnp.abs(jnp.sum(res, -2)), -1))


def composite_gains(res: ArrayLike) -> Gains:
    """Gains of the products over depth, per token (the "Amax gain magnitude" of arXiv:2512.24880).

    forward[k] is the gain max_i |sum_j .| of H_k ... H_1 H_0; backward[k] is max_j |sum_i .| of H_{S-1} ... H_k.

    Args:
      res: [S, ..., N, N], sublayers in depth order.

    Returns:
      Gains, [S, ...] each.
    """
    (res,) = _wide(res)
    _check_square("res", res.shape)
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
    """The products H_k ... H_1 H_0 of every depth k: res [S, ..., N, N] in depth order -> [S, ..., N, N]."""
    (res,) = _wide(res)
    _check_square("res", res.shape)

    def multiply(product: jax.Array, h: jax.Array) -> tuple[jax.Array, jax.Array]:
        product = jnp.einsum("...ij,...jk->...ik", h, product)
        return product, product

    identity = jnp.broadcast_to(jnp.eye(res.shape[-1], dtype=res.dtype), res.shape[1:])
    return jax.lax.scan(multiply, identity, res)[1]
