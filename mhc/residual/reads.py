"""Compute what kinds of other forms read and write, in pure functions: slots of one stream, gated reads, depth.

``mhc.residual.functional`` exports these functions, and says what all of them share: any leading axes ``...``, and a
computation in ``promote_types(input, float32)``. Each kind's module calls the same function in training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from mhc.kernels.checks import accumulation_dtype
from mhc.residual.arrays import check_axes, check_leading, check_streams, named, promoted

if TYPE_CHECKING:
    from jax.typing import ArrayLike


class SlotMaps(NamedTuple):
    """Holds the maps of m slots, per token: ``pre[..., m, m]``, ``post[..., m]``, ``res[..., m, m]``."""

    pre: jax.Array
    post: jax.Array
    res: jax.Array


def frac_maps(
    x: ArrayLike,
    params: Mapping[str, ArrayLike],
    *,
    dynamic: bool = True,
    tanh: bool = True,
    rms_eps: float = 1e-6,
) -> SlotMaps:
    """Compute the maps of Frac-Connections (arXiv:2503.14125), whose slots are parts of one stream.

    With m_j the slot x_j under RMSNorm without weight, and f = tanh or the identity:
    pre[i, j] = a_0 f(m_j . w_pre[:, i]) + b_pre[i, j]; post[j] = a_1 f(m_j . w_post) + b_post[j];
    res[i, j] = a_2 f(m_j . w_res[:, i]) + b_res[i, j]. The sublayer's input is u_i = sum_j pre[i, j] x_j, slot by slot,
    and x'_i = sum_j res[i, j] x_j + post[i] F(u)_i.

    Args:
      x: slots [..., m, D/m].
      params: w_pre, w_res [D/m, m], w_post [D/m], b_pre, b_res [m, m], b_post [m], alpha [3]; static: the b's alone.
      dynamic: False leaves only the b's.
      tanh: False drops the tanh.
      rms_eps: inside the square root.

    Returns:
      SlotMaps, float32 or wider.

    Raises:
      ValueError: a parameter is missing or misshapen.
    """
    static, weights = ("b_pre", "b_post", "b_res"), ("w_pre", "w_post", "w_res")
    names = static if not dynamic else (*weights, *static, "alpha")
    x, *arrays = promoted(x=x, **named(params, names, "frac_maps"))
    m, c = check_streams("x", x)
    slot, slots = ("D/m", c), ("m", m)
    shapes = {
        **{"w_pre": [slot, slots], "w_post": [slot], "w_res": [slot, slots], "alpha": [("gates", 3)]},
        **{"b_pre": [slots, slots], "b_post": [slots], "b_res": [slots, slots]},
    }
    for name, array in zip(names, arrays, strict=True):
        check_axes(name, array, *shapes[name], leading=False)
    if not dynamic:
        return SlotMaps(*(jnp.broadcast_to(b, x.shape[:-2] + b.shape) for b in arrays))
    w_pre, w_post, w_res, b_pre, b_post, b_res, alpha = arrays
    b_pre, b_res = (jax.lax.broadcast_to_rank(b, x.ndim) for b in (b_pre, b_res))
    squash = jnp.tanh if tanh else (lambda z: z)
    unit = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + rms_eps)
    # unit @ w is indexed [j, i]: each slot says how much of it every slot of the result takes.
    pre, res = (squash(jnp.swapaxes(unit @ w, -1, -2)) for w in (w_pre, w_res))
    post = alpha[1] * squash(unit @ w_post) + jax.lax.broadcast_to_rank(b_post, x.ndim - 1)
    return SlotMaps(alpha[0] * pre + b_pre, post, alpha[2] * res + b_res)


def gated_read(
    x: ArrayLike, params: Mapping[str, ArrayLike], *, rms_eps: float = 1e-6
) -> tuple[jax.Array, jax.Array | None]:
    """Read streams through gates of low rank (arXiv:2608.30320), which normalises them too.

    n_j = x_j rsqrt(mean(x_j^2) + rms_eps) (1 + w_norm[j]); with n all N*D of them, stream-major:
    g = sigmoid(silu(n w_down / N) w_up), u = (1/N) sum_j g_j * n_j, and post = 2 sigmoid(n w_inject / N), by which the
    output is written: x'_i = x_i + post[i] F(u).

    Args:
      x: streams [..., N, D].
      params: w_norm [N, D], w_down [N*D, r], w_up [r, N*D], w_inject [N*D, N]; without w_inject it is the last read,
        after which nothing is written.
      rms_eps: inside the square root.

    Returns:
      (u [..., D], post [..., N] or None), float32 or wider.

    Raises:
      ValueError: a parameter is missing or misshapen.
    """
    u, _, post = gated_parts(x, params, rms_eps=rms_eps)
    return u, post


def gated_parts(
    x: ArrayLike, params: Mapping[str, ArrayLike], *, rms_eps: float = 1e-6
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return (u, the gates g [..., N, D], post) of ``gated_read``."""
    names = ("w_norm", "w_down", "w_up", *(("w_inject",) if "w_inject" in params else ()))
    x, w_norm, w_down, w_up, *inject = promoted(x=x, **named(params, names, "gated_read"))
    n, d = check_streams("x", x)
    check_axes("w_norm", w_norm, ("N", n), ("D", d), leading=False)
    rank = w_down.shape[-1] if w_down.ndim else 0
    check_axes("w_down", w_down, ("N*D", n * d), ("r", rank), leading=False)
    check_axes("w_up", w_up, ("r", rank), ("N*D", n * d), leading=False)
    unit = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + rms_eps)
    unit = unit * (1.0 + jax.lax.broadcast_to_rank(w_norm, x.ndim))

    # (N, D) is contracted without a reshape of the streams, which would gather a width that lies over several devices.
    def projected(w: jax.Array) -> jax.Array:
        return jnp.einsum("...nd,ndr->...r", unit, w.reshape(n, d, -1)) / n

    gates = jax.nn.sigmoid(jnp.einsum("...r,rnd->...nd", jax.nn.silu(projected(w_down)), w_up.reshape(rank, n, d)))
    u = jnp.mean(gates * unit, axis=-2)
    if not inject:
        return u, gates, None
    check_axes("w_inject", inject[0], ("N*D", n * d), ("N", n), leading=False)
    return u, gates, 2.0 * jax.nn.sigmoid(projected(inject[0]))


def depth_read(
    sources: ArrayLike, query: ArrayLike, scale: ArrayLike, *, rms_eps: float = 1e-6
) -> tuple[jax.Array, jax.Array]:
    """Read what earlier sublayers left by attention over depth (Attention Residuals, arXiv:2603.15031).

    u = sum_j a_j s_j with a = softmax_j(sum_d query[d] scale[d] s_j[d] rsqrt(mean(s_j^2) + rms_eps)).

    Args:
      sources: s [J, ..., D].
      query, scale: [D].
      rms_eps: inside the square root.

    Returns:
      (u [..., D], the weights a [J, ...]), float32 or wider.

    Raises:
      ValueError: an array of another shape, or no source.
    """
    sources, query, scale = promoted(sources=sources, query=query, scale=scale)
    if sources.ndim < 2 or not sources.shape[0]:
        raise ValueError(f"sources must be [J, ..., D] with J from 1, got shape {sources.shape}")
    d = sources.shape[-1]
    check_axes("query", query, ("D", d), leading=False)
    check_axes("scale", scale, ("D", d), leading=False)
    return depth_read_parts((sources,), (jnp.ones(sources.shape[0], bool),), query * scale, rms_eps)


def depth_read_parts(
    parts: Sequence[jax.Array], there: Sequence[jax.Array], weight: jax.Array, rms_eps: float
) -> tuple[jax.Array, jax.Array]:
    """Compute ``depth_read`` over sources in several arrays, of which some rows are not written yet.

    The arrays are not joined: that would copy all sources at every read.

    Args:
      parts: sources [J_i, ..., D] each.
      there: [J_i] bool each: the rows that count; at least one of all does.
      weight: query times scale [D].

    Returns:
      (u [..., D], the weights of all rows in their order [sum J_i, ...]; 0 where a row does not count).
    """

    dtype = accumulation_dtype(weight, *parts)
    weight = weight.astype(dtype)

    def logits(part: jax.Array, there: jax.Array) -> jax.Array:
        part = part.astype(dtype)
        raw = part @ weight * jax.lax.rsqrt(jnp.mean(part * part, axis=-1) + rms_eps)
        return jnp.where(there.reshape(-1, *(1,) * (raw.ndim - 1)), raw, -jnp.inf)

    weights = jax.nn.softmax(jnp.concatenate([logits(*pair) for pair in zip(parts, there, strict=True)]), axis=0)
    u, first = None, 0
    for part in parts:
        share = weights[first : first + part.shape[0]]
        term = jnp.einsum("j...,j...d->...d", share, part.astype(dtype))
        u, first = term if u is None else u + term, first + part.shape[0]
    assert u is not None
    return u, weights


def laurel_write(x: ArrayLike, y: ArrayLike, params: Mapping[str, ArrayLike]) -> jax.Array:
    """Return x' = a y + b (x + x A B) with (a, b) = 2 softmax(w) (LAuReL, arXiv:2411.07501).

    Args:
      x, y: the stream and the sublayer's output, [..., D].
      params: w [2], and A [D, r] with B [r, D]; without w, a = b = 1; without A and B, their term is left out.

    Returns:
      x' [..., D], float32 or wider.

    Raises:
      ValueError: A without B or B without A, or an array of another shape.
    """
    x, y = promoted(x=x, y=y)
    if not x.ndim:
        raise ValueError("x must be [..., D], got shape ()")
    d = x.shape[-1]
    check_axes("y", y, ("D", d))
    check_leading(x=x.shape[:-1], y=y.shape[:-1])
    if "A" in params or "B" in params:
        a, b = promoted(**named(params, ("A", "B"), "laurel_write"))
        rank = a.shape[-1] if a.ndim else 0
        check_axes("A", a, ("D", d), ("r", rank), leading=False)
        check_axes("B", b, ("r", rank), ("D", d), leading=False)
        x = x + x @ a @ b
    if "w" not in params:
        return y + x
    (w,) = promoted(w=params["w"])
    check_axes("w", w, ("terms", 2), leading=False)
    share = 2.0 * jax.nn.softmax(w)
    return share[0] * y + share[1] * x


def value_mix(v: ArrayLike, v_first: ArrayLike, lam: ArrayLike) -> jax.Array:
    """Return lam[0] v + lam[1] v_first, the values of a value residual (arXiv:2410.17897).

    Args:
      v, v_first: values of this block and of block 0, of one shape [..., G, J].
      lam: [2].

    Returns:
      Values [..., G, J], float32 or wider.

    Raises:
      ValueError: values of two shapes, or a lam that is not [2].
    """
    v, v_first, lam = promoted(v=v, v_first=v_first, lam=lam)
    if v.shape != v_first.shape:
        raise ValueError(f"v and v_first must have one shape, got {v.shape} and {v_first.shape}")
    check_axes("lam", lam, ("terms", 2), leading=False)
    return lam[0] * v + lam[1] * v_first
