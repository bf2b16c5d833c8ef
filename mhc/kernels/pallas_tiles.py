"""Compute passes over the streams on one tile of tokens, as the bodies of the kernels in ``mhc.kernels.pallas_tpu``.

A kernel gets references to a tile's part of each array. Streams are [N, t, D] of t tokens. The numbers of a token's
maps are columns of [t, K], each of which is broadcast along D. All is computed in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mhc.kernels.form import Form

Tile = jax.Array  # [t, D], or [t, K]


def _halves(x: jax.Array) -> list[jax.Array]:
    """Return x as a bfloat16 number and what is left of it in bfloat16: sixteen bits of it together."""
    high = x.astype(jnp.bfloat16)
    return [high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)]


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int], dtype: Any) -> jax.Array:
    """Return a float32 product over one axis of each; it is exact to the rounding of streams of this ``dtype``.

    An operand of that dtype is given in it.
    """
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    if dtype == jnp.float32:
        exact = jax.lax.Precision.HIGHEST
        return jax.lax.dot_general(a, b, dimensions, precision=exact, preferred_element_type=jnp.float32)
    # Products of bfloat16 numbers are exact in float32, so numbers of more bits are cut into two.
    parts = [[x] if x.dtype == jnp.bfloat16 else _halves(x) for x in (a, b)]
    pairs = [(i, j) for i in range(len(parts[0])) for j in range(len(parts[1])) if i + j < 2]
    terms = [
        jax.lax.dot_general(parts[0][i], parts[1][j], dimensions, preferred_element_type=jnp.float32) for i, j in pairs
    ]
    return _total(terms)


def _column(maps: Tile, number: int) -> Tile:
    return maps[:, number : number + 1]


def _total(terms: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, terms)


def _scales(xs: Sequence[Tile], form: Form) -> list[Tile]:
    """Return the factor [t, 1] of each stream that normalises it."""
    squares = [jnp.sum(x * x, axis=1, keepdims=True) for x in xs]
    width = xs[0].shape[1]
    if form.each:
        return [jax.lax.rsqrt(square / width + form.eps) for square in squares]
    return [jax.lax.rsqrt(_total(squares) / (len(xs) * width) + form.eps)] * len(xs)


def _by_column(scales: Sequence[Tile], columns: int, form: Form) -> Tile:
    """Return the factors of the columns, [t, C] or [t, 1]: with ``each`` column c belongs to stream c mod N."""
    if not form.each:
        return scales[0]
    which = jax.lax.broadcasted_iota(jnp.int32, (scales[0].shape[0], columns), 1) % len(scales)
    out = jnp.zeros(which.shape, jnp.float32)
    for j, scale in enumerate(scales):
        out = jnp.where(which == j, scale, out)
    return out


def _projected(xs: Sequence[Tile], phi: Any, form: Form, dtype: Any) -> Tile:
    """Return raw [t, C] of streams of this dtype, which are float32 here, and of phi [N, C, D]."""
    raw = _total([_dot(x.astype(dtype), phi[j], (1, 1), dtype) for j, x in enumerate(xs)])
    return raw * _by_column(_scales(xs, form), raw.shape[1], form)


def weights(raw: Tile, gain: jax.Array, bias: jax.Array, form: Form) -> tuple[Tile, Tile, Tile]:
    """Return (act, its derivative, pre) over all columns [t, C]; gain and bias are [1, C]."""
    if form.squash == "sigmoid":
        value = jax.nn.sigmoid(gain * raw + bias)
        return value, value * (1.0 - value) * gain, value + form.offset
    if form.squash == "tanh":
        value = jnp.tanh(raw)
        return value, (1.0 - value * value) * gain, gain * value + bias + form.offset
    return raw, jnp.broadcast_to(gain, raw.shape), gain * raw + bias + form.offset


def _mixed(xs: Sequence[Tile], y: Tile, maps: Tile, dtype: Any) -> list[Tile]:
    """Return x'_i = sum_j res[i, j] x_j + post[i] y, rounded to the streams' dtype; maps [t, N + N^2]: post, res."""
    n = len(xs)
    out = []
    for i in range(n):
        terms = [_column(maps, n + i * n + j) * x for j, x in enumerate(xs)]
        out.append((_total(terms) + _column(maps, i) * y).astype(dtype).astype(jnp.float32))
    return out


def _streams(ref: Any) -> list[Tile]:
    return [ref[j].astype(jnp.float32) for j in range(ref.shape[0])]


def _store(ref: Any, tiles: Sequence[Tile]) -> None:
    for j, tile in enumerate(tiles):
        ref[j] = tile.astype(ref.dtype)


def _read_tile(xs: Sequence[Tile], phi: Any, gain: Any, bias: Any, raw_ref: Any, u_ref: Any, form: Form) -> None:
    raw = _projected(xs, phi, form, u_ref.dtype)
    pre = weights(raw, gain[...], bias[...], form)[2]
    raw_ref[...] = raw
    u_ref[...] = _total([_column(pre, j) * x for j, x in enumerate(xs)]).astype(u_ref.dtype)


def _pulled(
    xs: Sequence[Tile],
    gs: Sequence[Tile],
    du: Tile,
    raw: Tile,
    d_raw: Tile,
    phi: Any,
    gain: jax.Array,
    bias: jax.Array,
    form: Form,
    dtype: Any,
) -> tuple[list[Tile], Tile, Tile]:
    """Return (the whole gradient of each stream, that of pre [t, C], and draw scale [t, C], which phi's is made of).

    Args:
      gs: the gradients of the streams as they are handed on. d_raw: that of raw by the maps outside.
      dtype: that of the streams in memory.
    """
    n, width, columns = len(xs), xs[0].shape[1], raw.shape[1]
    _, slope, pre = weights(raw, gain, bias, form)
    place = jax.lax.broadcasted_iota(jnp.int32, raw.shape, 1)
    d_pre = jnp.zeros(raw.shape, jnp.float32)
    for j, x in enumerate(xs):
        d_pre = jnp.where(place == j, jnp.sum(du * x, axis=1, keepdims=True), d_pre)
    d_raw = d_raw + d_pre * slope
    scales = _scales(xs, form)
    scaled = d_raw * _by_column(scales, columns, form)
    # d scale / d x = -scale^3 x / width, and raw already carries one scale.
    terms = d_raw * raw
    out = []
    for j, (x, g) in enumerate(zip(xs, gs, strict=True)):
        mine = jnp.where(place % n == j, terms, 0.0) if form.each else terms
        pull = -jnp.sum(mine, axis=1, keepdims=True) * scales[j] * scales[j] / (width if form.each else n * width)
        through = _dot(scaled, phi[j], (1, 0), dtype)
        out.append(g + _column(pre, j) * du + through + pull * x)
    return out, d_pre, scaled


def _add_phi(ref: Any, scaled: Tile, xs: Sequence[Tile], dtype: Any) -> None:
    """Add a tile's part of phi's gradient [N, C, D], which stays in the chip over all tiles."""

    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
        ref[...] = jnp.zeros(ref.shape, ref.dtype)

    for j, x in enumerate(xs):
        ref[j] += _dot(scaled, x.astype(dtype), (0, 0), dtype)


# ------------------------------------------------------------------------------------------------------------- kernels


def enter_kernel(form: Form, x: Any, phi: Any, gain: Any, bias: Any, raw: Any, u: Any) -> None:
    _read_tile(_streams(x), phi, gain, bias, raw, u, form)


def enter_backward_kernel(
    form: Form,
    x: Any,
    g: Any,
    du: Any,
    raw: Any,
    d_raw: Any,
    phi: Any,
    gain: Any,
    bias: Any,
    d_x: Any,
    d_pre: Any,
    d_phi: Any,
) -> None:
    xs = _streams(x)
    args = (du[...].astype(jnp.float32), raw[...], d_raw[...], phi, gain[...], bias[...], form, x.dtype)
    whole, d_pre[...], scaled = _pulled(xs, _streams(g), *args)
    _store(d_x, whole)
    _add_phi(d_phi, scaled, xs, x.dtype)


def follow_kernel(
    form: Form, x: Any, y: Any, maps: Any, phi: Any, gain: Any, bias: Any, after: Any, raw: Any, u: Any
) -> None:
    xs = _mixed(_streams(x), y[...].astype(jnp.float32), maps[...], after.dtype)
    _store(after, xs)
    _read_tile(xs, phi, gain, bias, raw, u, form)


def follow_backward_kernel(
    form: Form,
    x: Any,
    y: Any,
    maps: Any,
    g: Any,
    du: Any,
    raw: Any,
    d_raw: Any,
    phi: Any,
    gain: Any,
    bias: Any,
    d_x: Any,
    d_y: Any,
    d_maps: Any,
    d_pre: Any,
    d_phi: Any,
) -> None:
    before, wide, written = _streams(x), y[...].astype(jnp.float32), maps[...]
    after = _mixed(before, wide, written, x.dtype)  # again, in the chip: it costs no reading
    args = (du[...].astype(jnp.float32), raw[...], d_raw[...], phi, gain[...], bias[...], form, x.dtype)
    whole, d_pre[...], scaled = _pulled(after, _streams(g), *args)
    _add_phi(d_phi, scaled, after, x.dtype)
    _unwritten(before, wide, written, whole, d_x, d_y, d_maps)


def write_kernel(x: Any, y: Any, maps: Any, after: Any) -> None:
    _store(after, _mixed(_streams(x), y[...].astype(jnp.float32), maps[...], after.dtype))


def write_backward_kernel(x: Any, y: Any, maps: Any, g: Any, d_x: Any, d_y: Any, d_maps: Any) -> None:
    _unwritten(_streams(x), y[...].astype(jnp.float32), maps[...], _streams(g), d_x, d_y, d_maps)


def _unwritten(xs: Sequence[Tile], y: Tile, maps: Tile, gs: Sequence[Tile], d_x: Any, d_y: Any, d_maps: Any) -> None:
    """Store the gradients of a write's streams, of y and of the maps, from those of what it wrote."""
    n = len(xs)
    _store(d_x, [_total([_column(maps, n + i * n + j) * g for i, g in enumerate(gs)]) for j in range(n)])
    d_y[...] = _total([_column(maps, i) * g for i, g in enumerate(gs)]).astype(d_y.dtype)
    place = jax.lax.broadcasted_iota(jnp.int32, maps.shape, 1)
    out = jnp.zeros(maps.shape, jnp.float32)
    for i, g in enumerate(gs):
        out = jnp.where(place == i, jnp.sum(g * y, axis=1, keepdims=True), out)
        for j, x in enumerate(xs):
            out = jnp.where(place == n + i * n + j, jnp.sum(g * x, axis=1, keepdims=True), out)
    d_maps[...] = out
