"""Define the kernels of the residual stream as plain XLA programs with hand-written backward passes.

Maps have their **tokens last** here (``pre [N, ...]``, ``res [N, N, ...]``), so that the small axes are loops and the
long one is vectorised. Streams are ``x [..., N, D]``. Sums over streams are written out stream by stream: XLA fuses
them into one pass over x, where a batched N x N einsum would run token by token. Every function accumulates in
promote_types(input, float32) and is tested against ``mhc.residual.functional``.

The backward passes are written by hand because the transpose of a slice is a padded add: N slices would make N passes
over an array as large as the streams, where one pass suffices.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mhc.kernels.checks import accumulation_dtype, check_sinkhorn

# Above this spread of logits (in nats) float32 underflows on the way, so Sinkhorn runs on logarithms instead.
LINEAR_SPREAD = 30.0


def _total(terms: Iterable[jax.Array]) -> jax.Array:
    """Return the sum of terms, in their order."""
    return functools.reduce(operator.add, terms)


# ------------------------------------------------------------------------------------------------------------ Sinkhorn


class _Domain(NamedTuple):
    """Describes how a matrix is held while it is normalised: as itself, or as its logarithm."""

    enter: Callable[[jax.Array], jax.Array]  # log M -> held
    value: Callable[[jax.Array], jax.Array]  # held -> M
    divide: Callable[[jax.Array, int, float], tuple[jax.Array, jax.Array]]  # (M / (sum + eps), the divisor)
    undo: Callable[[jax.Array, jax.Array], jax.Array]


def _divide_linear(m: jax.Array, axis: int, eps: float) -> tuple[jax.Array, jax.Array]:
    s = jnp.sum(m, axis=axis, keepdims=True) + eps
    return m * (1.0 / s), s  # N divisions, not N^2


def _divide_log(m: jax.Array, axis: int, eps: float) -> tuple[jax.Array, jax.Array]:
    s = jax.nn.logsumexp(m, axis=axis, keepdims=True)
    s = jnp.logaddexp(s, math.log(eps)) if eps > 0 else s
    return m - s, s


_LINEAR = _Domain(jnp.exp, lambda m: m, _divide_linear, lambda m, s: m * s)
_LOG = _Domain(lambda m: m, jnp.exp, _divide_log, lambda m, s: m + s)


class _Plan(NamedTuple):
    """Lists a preset's divisions: one over each axis of ``prelude``, then in each round one over each of ``axes``."""

    prelude: tuple[int, ...]
    axes: tuple[int, int]
    rounds: int
    eps: float
    always_linear: bool


def _plan(preset: str, iters: int, eps: float) -> _Plan:
    check_sinkhorn(preset, iters, eps)
    if preset == "paper":
        return _Plan((), (0, 1), iters, 0.0, False)
    # The first row division of `deepseek` is the softmax, already in the starting matrix. Every entry stays above eps.
    return _Plan((0,), (1, 0), iters - 1, eps, eps >= math.exp(-LINEAR_SPREAD))


def _log_start(logits: jax.Array, preset: str, eps: float) -> jax.Array:
    if preset == "paper":
        return logits - jnp.max(logits, axis=(0, 1), keepdims=True)
    log_p = jax.nn.log_softmax(logits, axis=1)
    return jnp.logaddexp(log_p, math.log(eps)) if eps > 0 else log_p


def _in_domain(wide: jax.Array | None, run: Callable[[_Domain], Any]) -> Any:
    """Call ``run`` with the logarithmic domain where ``wide``, else with the linear one (None: always linear)."""
    return run(_LINEAR) if wide is None else jax.lax.cond(wide, lambda: run(_LOG), lambda: run(_LINEAR))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def sinkhorn(logits: jax.Array, iters: int, preset: str, eps: float) -> jax.Array:
    """Project logits [N, N, ...] to H_res [N, N, ...] by Sinkhorn over the first two axes; see ``functional.sinkhorn``.

    It iterates on the matrices themselves if the largest spread of the logits allows it, else on their logarithms. The
    backward pass keeps only the result and the divisors, and walks the iterates back from them.

    Raises:
      ValueError: ``iters`` < 1, a negative ``eps`` or an unknown preset.
    """
    return _sinkhorn_forward(logits, iters, preset, eps)[0]


def _sinkhorn_forward(logits: jax.Array, iters: int, preset: str, eps: float) -> tuple[jax.Array, Any]:
    plan = _plan(preset, iters, eps)
    log_m = _log_start(logits.astype(accumulation_dtype(logits)), preset, eps)
    wide = None
    if not plan.always_linear:
        spread = jnp.max(log_m, axis=(0, 1)) - jnp.min(log_m, axis=(0, 1))
        wide = ~(jnp.max(spread, initial=0.0) <= LINEAR_SPREAD)  # NaN counts as wide

    def run(domain: _Domain) -> tuple[jax.Array, Any, Any]:
        m, first = domain.enter(log_m), []
        for axis in plan.prelude:
            m, s = domain.divide(m, axis, plan.eps)
            first.append(s)

        def one_round(m: jax.Array, _: None) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            m, s_a = domain.divide(m, plan.axes[0], plan.eps)
            m, s_b = domain.divide(m, plan.axes[1], plan.eps)
            return m, (s_a, s_b)

        m, sums = jax.lax.scan(one_round, m, None, length=plan.rounds)
        return m, first, sums

    m, first, sums = _in_domain(wide, run)
    h = m if wide is None else jax.lax.cond(wide, jnp.exp, lambda m: m, m)
    return (jnp.swapaxes(h, 0, 1) if preset == "deepseek" else h), (logits, m, first, sums, wide)


def _sinkhorn_backward(iters: int, preset: str, eps: float, residuals: Any, g: jax.Array) -> tuple[jax.Array]:
    logits, m_end, first, sums, wide = residuals
    plan = _plan(preset, iters, eps)
    g = jnp.swapaxes(g, 0, 1) if preset == "deepseek" else g

    def run(domain: _Domain) -> jax.Array:
        # With G the gradient of log M, the transpose of M' = M / (sum M + eps) is G - M' sum(G). It has no division,
        # so nothing overflows.
        def back(carry: tuple[jax.Array, jax.Array], s: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
            grad, m = carry
            return grad - domain.value(m) * jnp.sum(grad, axis=axis, keepdims=True), domain.undo(m, s)

        def one_round(carry: Any, s: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
            return back(back(carry, s[1], plan.axes[1]), s[0], plan.axes[0]), None

        carry, _ = jax.lax.scan(one_round, (g * domain.value(m_end), m_end), sums, reverse=True)
        for axis, s in zip(reversed(plan.prelude), reversed(first), strict=True):
            carry = back(carry, s, axis)
        return carry[0]

    grad = _in_domain(wide, run)
    if preset == "deepseek":  # through M = softmax + eps
        p = jax.nn.softmax(logits.astype(grad.dtype), axis=1)
        grad = grad * (p / (p + eps)) if eps > 0 else grad
        grad = grad - p * jnp.sum(grad, axis=1, keepdims=True)
    return (grad.astype(logits.dtype),)


sinkhorn.defvjp(_sinkhorn_forward, _sinkhorn_backward)


# ---------------------------------------------------------------------------------------------------------- projection


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def project(x: jax.Array, phi: jax.Array, eps: float) -> jax.Array:
    """Return m phi with the tokens last, where m = vec(x) rsqrt(mean(vec(x)^2) + eps).

    The norm is one scalar a token and is applied after the product. (N, D) is contracted without flattening x.

    Args:
      x: streams [..., N, D].
      phi: [N, D, R]; the result is [R, ...].
    """
    return _project_forward(x, phi, eps)[0]


def _project_forward(x: jax.Array, phi: jax.Array, eps: float) -> tuple[jax.Array, Any]:
    dtype = accumulation_dtype(x, phi)
    xw, pw = x.astype(dtype), phi.astype(dtype)
    scale = jax.lax.rsqrt(jnp.mean(xw * xw, axis=(-2, -1)) + eps)
    raw = jnp.moveaxis(jnp.einsum("...nd,ndr->...r", xw, pw), -1, 0) * scale[None]
    return raw, (x, phi, raw, scale)


def _project_backward(eps: float, residuals: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, phi, raw, scale = residuals
    xw, pw = x.astype(raw.dtype), phi.astype(raw.dtype)
    n, d = x.shape[-2:]
    tokens_last = g * scale[None]  # [R, ...]
    tokens = tuple(range(x.ndim - 2))
    # [R, tokens] x [tokens, N, D]: neither has to be transposed.
    d_phi = jnp.moveaxis(jnp.tensordot(tokens_last, xw, axes=(tuple(t + 1 for t in tokens), tokens)), 0, -1)
    gs = jnp.moveaxis(tokens_last, 0, -1)
    # d scale / d x = -scale^3 x / (N D), and raw already carries one scale.
    pull = -jnp.sum(g * raw, axis=0) * scale * scale / (n * d)
    d_x = jnp.einsum("...r,ndr->...nd", gs, pw) + pull[..., None, None] * xw
    return d_x.astype(x.dtype), d_phi.astype(phi.dtype)


project.defvjp(_project_forward, _project_backward)


# ------------------------------------------------------------------------------------------------------ read and write


@jax.custom_vjp
def read(x: jax.Array, pre: jax.Array) -> jax.Array:
    """Return u = sum_j pre[j] x_j: x [..., N, D], pre [N, ...] -> u [..., D] in the dtype of x."""
    return _read(x, pre)


def _read(x: jax.Array, pre: jax.Array) -> jax.Array:
    dtype = accumulation_dtype(x, pre)
    weights = pre.astype(dtype)
    # Cut first and widened then: a wide copy of x that several passes share would be kept in memory.
    u = _total(weights[j, ..., None] * x[..., j, :].astype(dtype) for j in range(x.shape[-2]))
    return u.astype(x.dtype)


def _read_forward(x: jax.Array, pre: jax.Array) -> tuple[jax.Array, Any]:
    return _read(x, pre), (x, pre)


def _read_backward(residuals: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, pre = residuals
    dtype = accumulation_dtype(x, pre)
    gw = g.astype(dtype)
    d_x = jnp.moveaxis(pre.astype(dtype), 0, -1)[..., None] * gw[..., None, :]
    d_pre = jnp.einsum("...nd,...d->n...", x.astype(dtype), gw)
    return d_x.astype(x.dtype), d_pre.astype(pre.dtype)


read.defvjp(_read_forward, _read_backward)


@jax.custom_vjp
def write(x: jax.Array, y: jax.Array, post: jax.Array, res: jax.Array) -> jax.Array:
    """Return x'_i = sum_j res[i, j] x_j + post[i] y, in the dtype of x.

    x [..., N, D], y [..., D], post [N, ...], res [N, N, ...] -> x' [..., N, D].
    """
    return _write(x, y, post, res)


def _write(x: jax.Array, y: jax.Array, post: jax.Array, res: jax.Array) -> jax.Array:
    dtype = accumulation_dtype(x, y, post, res)
    out = _mix(x, res.astype(dtype), transpose=False)
    out = out + jnp.moveaxis(post.astype(dtype), 0, -1)[..., None] * y.astype(dtype)[..., None, :]
    return _kept(out.astype(x.dtype), dtype)


def _kept(x: jax.Array, dtype: Any) -> jax.Array:
    """Return x, which XLA then keeps in memory as it is where it is narrower than ``dtype``.

    XLA skips a rounding that is followed by its reverse, and would keep the wider streams beside the narrow ones.
    """
    return x if x.dtype == dtype else jax.lax.optimization_barrier(x)


def _mix(x: jax.Array, res: jax.Array, transpose: bool) -> jax.Array:
    """Return sum_j res[i, j] x_j (with ``transpose`` res[j, i]) in one fused pass: an output element reads N inputs."""
    columns = res if transpose else jnp.swapaxes(res, 0, 1)  # [j, i, ...]
    weights = jnp.moveaxis(columns, 1, -1)  # [j, ..., i]
    return _total(weights[j, ..., :, None] * x[..., j : j + 1, :].astype(res.dtype) for j in range(x.shape[-2]))


def _write_forward(x: jax.Array, y: jax.Array, post: jax.Array, res: jax.Array) -> tuple[jax.Array, Any]:
    return _write(x, y, post, res), (x, y, post, res)


def _write_backward(residuals: Any, g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    x, y, post, res = residuals
    dtype = accumulation_dtype(x, y, post, res)
    g = _kept(g, dtype)
    gw, xw, yw = g.astype(dtype), x.astype(dtype), y.astype(dtype)
    d_x = _mix(g, res.astype(dtype), transpose=True)
    d_y = _total(post[i, ..., None].astype(dtype) * g[..., i, :].astype(dtype) for i in range(x.shape[-2]))
    d_post = jnp.einsum("...nd,...d->n...", gw, yw)
    d_res = jnp.moveaxis(jnp.einsum("...id,...jd->...ij", gw, xw), (-2, -1), (0, 1))
    return d_x.astype(x.dtype), d_y.astype(y.dtype), d_post.astype(post.dtype), d_res.astype(res.dtype)


write.defvjp(_write_forward, _write_backward)


def add(x: jax.Array, y: jax.Array, post: jax.Array) -> jax.Array:
    """Return x'_i = x_i + post[i] y, which is ``write`` with res = I: x [..., N, D], y [..., D], post [N, ...]."""
    dtype = accumulation_dtype(x, y, post)
    spread = jnp.moveaxis(post.astype(dtype), 0, -1)[..., None] * y.astype(dtype)[..., None, :]
    return (x.astype(dtype) + spread).astype(x.dtype)
