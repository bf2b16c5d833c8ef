"""Define passes over the streams as Pallas kernels for TPU. XLA plans them; they were never run on one.

A connection reads every number of its streams for the statistic, the projection and the read, and the connection before
it had just written them. ``follow`` does both in one pass over the streams, and forms their gradient once; ``enter`` is
its second half, for the streams that a block begins with, and ``write`` its first, for those that it ends with.

Shapes: ``N`` streams, ``D`` width, ``C`` columns of the projection; ``...`` the axes of the tokens. Streams are
``x [..., N, D]`` outside, and ``[N, tokens, D]`` in a kernel, which is how XLA lays them out in a TPU's memory anyway.
Maps have the tokens last outside and first in a kernel, where one is a column that is broadcast along D. A kernel holds
a tile of tokens with all their streams; what is summed over tokens, the gradient of the projection, stays in the chip
from tile to tile.

What a read needs of the maps is its weights alone, which ``Form`` describes. The other maps come from ``raw`` outside,
from a few numbers a token. Elsewhere than on a TPU the kernels are interpreted, slowly.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mhc.kernels import pallas_tiles as tiles
from mhc.kernels.form import Form

LIMIT = 48 * 2**20
"""Bytes of on-chip memory that a kernel may use."""
BUDGET = 20 * 2**20
"""Bytes that a tile may take; the rest is the compiler's."""
SUBLANES = 16  # a tile has a multiple of so many tokens: bfloat16 lies in pairs of eight rows

Input = tuple[jax.Array, str]
"""An array of a kernel, and how it is cut: ``streams`` [N, tokens, D], ``tokens`` [tokens, K], or ``whole``."""
Output = tuple[tuple[int, ...], Any, str]
"""The shape and dtype of a kernel's result, and how it is cut."""

# ------------------------------------------------------------------------------------------------------- kernels' calls


class _Cut(NamedTuple):
    """Describes how a kernel sees the tokens of arrays."""

    lead: tuple[int, ...]  # the tokens' axes outside
    tokens: int  # in a kernel: a multiple of the tile
    tile: int

    def streams(self, x: jax.Array) -> jax.Array:
        """Return streams [..., N, D] as [N, tokens, D]."""
        return self._filled(jnp.moveaxis(x, -2, 0).reshape(x.shape[-2], -1, x.shape[-1]), 1)

    def rows(self, y: jax.Array) -> jax.Array:
        """Return an array [..., D] as [tokens, D]."""
        return self._filled(y.reshape(-1, y.shape[-1]), 0)

    def maps(self, *maps: jax.Array, columns: int | None = None) -> jax.Array:
        """Return maps [K, ...] side by side as float32 [tokens, sum of K], filled up to so many ``columns``."""
        flat = jnp.concatenate([m.reshape(-1, math.prod(self.lead)) for m in maps]).astype(jnp.float32)
        rows = self._filled(flat.T, 0)
        return rows if columns is None else jnp.pad(rows, ((0, 0), (0, columns - rows.shape[1])))

    def out_streams(self, x: jax.Array) -> jax.Array:
        """Undo ``streams``."""
        x = x[:, : math.prod(self.lead)]
        return jnp.moveaxis(x.reshape(x.shape[0], *self.lead, x.shape[2]), 0, -2)

    def out_rows(self, y: jax.Array) -> jax.Array:
        """Undo ``rows``."""
        return y[: math.prod(self.lead)].reshape(*self.lead, y.shape[1])

    def out_maps(self, maps: jax.Array, columns: int) -> jax.Array:
        """Return the first columns of [tokens, K] with the tokens last, [columns, ...]."""
        return maps[: math.prod(self.lead), :columns].T.reshape(columns, *self.lead)

    def _filled(self, array: jax.Array, axis: int) -> jax.Array:
        missing = self.tokens - array.shape[axis]
        return jnp.pad(array, [(0, missing if i == axis else 0) for i in range(array.ndim)]) if missing else array


def _cut(x: jax.Array, arrays: int) -> _Cut:
    """Return how a kernel that reads and writes so many arrays like the streams ``x`` [..., N, D] sees them."""
    lead, (n, width) = x.shape[:-2], x.shape[-2:]
    tokens = math.prod(lead)
    # Blocks lie twice in the chip, one computed on and one on its way, and three times in float32.
    token = n * width * (2 * arrays * x.dtype.itemsize + 3 * 4)
    tile = 512
    while tile > SUBLANES and (tile * token > BUDGET or tile >= 2 * tokens):
        tile //= 2
    return _Cut(lead, -(-tokens // tile) * tile, tile)


def _call(kernel: Callable[..., None], cut: _Cut, inputs: Sequence[Input], outputs: Sequence[Output]) -> Any:
    """Run a kernel over tiles of tokens, and return its results in their order."""

    def spec(shape: tuple[int, ...], how: str, mode: Any = None) -> pl.BlockSpec:
        if how == "streams":
            return pl.BlockSpec((shape[0], cut.tile, shape[2]), lambda i: (0, i, 0))
        if how == "tokens":
            return pl.BlockSpec((cut.tile, shape[1]), lambda i: (i, 0))
        return pl.BlockSpec(shape, lambda i: (0,) * len(shape), pipeline_mode=mode)

    once = pl.Buffered(1)  # what every tile reads is not fetched again
    summed = any(how == "whole" for _, _, how in outputs)
    call = functools.partial(
        pl.pallas_call,
        kernel,
        grid=(cut.tokens // cut.tile,),
        in_specs=[spec(array.shape, how, once) for array, how in inputs],
        out_specs=[spec(shape, how) for shape, _, how in outputs],
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in outputs],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary" if summed else "parallel",), vmem_limit_bytes=LIMIT
        ),
    )
    # Decided where the program is lowered: it may be compiled for a TPU by a process that has none.
    return jax.lax.platform_dependent(*(array for array, _ in inputs), tpu=call(), default=call(interpret=True))


class _Projection(NamedTuple):
    """Holds a projection as kernels take it, float32: phi [N, C', D], gain and bias [1, C'].

    C' is C filled up to a multiple of eight.
    """

    phi: jax.Array
    gain: jax.Array
    bias: jax.Array

    @property
    def columns(self) -> int:
        """Return C'."""
        return self.phi.shape[1]

    @property
    def inputs(self) -> list[Input]:
        """Return the arrays as inputs of a kernel."""
        return [(array, "whole") for array in self]


def _projection(phi: jax.Array, gain: jax.Array, bias: jax.Array) -> _Projection:
    missing = -phi.shape[-1] % 8
    across = jnp.pad(jnp.swapaxes(phi, 1, 2), ((0, 0), (0, missing), (0, 0))).astype(jnp.float32)
    gain, bias = (jnp.pad(row.astype(jnp.float32), (0, missing))[None] for row in (gain, bias))
    return _Projection(across, gain, bias)


def _like_streams(x: jax.Array, cut: _Cut) -> Output:
    return (x.shape[-2], cut.tokens, x.shape[-1]), x.dtype, "streams"


def _read_outputs(x: jax.Array, cut: _Cut, columns: int) -> list[Output]:
    """Return the outputs raw and u."""
    return [((cut.tokens, columns), jnp.float32, "tokens"), ((cut.tokens, x.shape[-1]), x.dtype, "tokens")]


def _read_gradients(x: jax.Array, cut: _Cut, columns: int) -> list[Output]:
    """Return the outputs that are the gradients of pre and of phi."""
    n, width = x.shape[-2:]
    return [((cut.tokens, columns), jnp.float32, "tokens"), ((n, columns, width), jnp.float32, "whole")]


def _write_gradients(x: jax.Array, y: jax.Array, maps: jax.Array, cut: _Cut) -> list[Output]:
    """Return the outputs that are the gradients of the streams, of y, and of post and res."""
    rows = (cut.tokens, x.shape[-1])
    return [_like_streams(x, cut), (rows, y.dtype, "tokens"), (maps.shape, jnp.float32, "tokens")]


def _of_parameters(
    form: Form, raw: jax.Array, d_pre: jax.Array, d_phi: jax.Array, phi: jax.Array, gain: jax.Array, bias: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of phi, gain and bias from what a kernel gave: d_pre [tokens, C'], d_phi [N, C', D]."""
    n, _, columns = phi.shape

    def pre(gain: jax.Array, bias: jax.Array) -> jax.Array:
        return tiles.weights(raw[:, :columns], gain[None], bias[None], form)[2][:, :n]

    to_gain, to_bias = jax.vjp(pre, gain, bias)[1](d_pre[:, :n])
    return jnp.swapaxes(d_phi[:, :columns], 1, 2).astype(phi.dtype), to_gain, to_bias


def _of_maps(cut: _Cut, d_maps: jax.Array, post: jax.Array, res: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of post and res from those that lie side by side."""
    n = post.shape[0]
    both = cut.out_maps(d_maps, n + n * n)
    return both[:n].astype(post.dtype), both[n:].reshape(res.shape).astype(res.dtype)


# ----------------------------------------------------------------------------------------------------------- the passes


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def enter(
    form: Form, x: jax.Array, phi: jax.Array, gain: jax.Array, bias: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Read streams: return (x as it is, raw, u). The gradient of the x that is returned joins that of the others.

    x [..., N, D], phi [N, D, C], gain and bias [C] float32 -> x, raw [C, ...] float32, u [..., D] in the dtype of x.
    raw is m phi with m the streams over their root mean square; u = sum_j pre[j] x_j, with pre of ``form``.
    """
    return _enter_forward(form, x, phi, gain, bias)[0]


def _enter_forward(form: Form, x: jax.Array, phi: jax.Array, gain: jax.Array, bias: jax.Array) -> tuple[Any, Any]:
    cut, projection = _cut(x, 1), _projection(phi, gain, bias)
    inputs = [(cut.streams(x), "streams"), *projection.inputs]
    kernel = functools.partial(tiles.enter_kernel, form)
    rows, u = _call(kernel, cut, inputs, _read_outputs(x, cut, projection.columns))
    raw = cut.out_maps(rows, phi.shape[-1])
    return (x, raw, cut.out_rows(u)), (x, phi, gain, bias, raw)


def _enter_backward(form: Form, kept: Any, cotangents: Any) -> tuple[jax.Array, ...]:
    x, phi, gain, bias, raw = kept
    g, d_raw, du = cotangents
    cut, projection = _cut(x, 3), _projection(phi, gain, bias)
    raw = cut.maps(raw, columns=projection.columns)
    inputs = [
        (cut.streams(x), "streams"),
        (cut.streams(g), "streams"),
        (cut.rows(du), "tokens"),
        (raw, "tokens"),
        (cut.maps(d_raw, columns=projection.columns), "tokens"),
        *projection.inputs,
    ]
    outputs = [_like_streams(x, cut), *_read_gradients(x, cut, projection.columns)]
    d_x, d_pre, d_phi = _call(functools.partial(tiles.enter_backward_kernel, form), cut, inputs, outputs)
    return cut.out_streams(d_x), *_of_parameters(form, raw, d_pre, d_phi, phi, gain, bias)


enter.defvjp(_enter_forward, _enter_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def follow(
    form: Form,
    x: jax.Array,
    y: jax.Array,
    post: jax.Array,
    res: jax.Array,
    phi: jax.Array,
    gain: jax.Array,
    bias: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Write y to streams and read what was written: return (x', raw, u), as ``write`` and then ``enter`` do.

    x [..., N, D], y [..., D], post [N, ...], res [N, N, ...]; phi, gain and bias are those of the read.
    """
    return _follow_forward(form, x, y, post, res, phi, gain, bias)[0]


def _follow_forward(
    form: Form,
    x: jax.Array,
    y: jax.Array,
    post: jax.Array,
    res: jax.Array,
    phi: jax.Array,
    gain: jax.Array,
    bias: jax.Array,
) -> tuple[Any, Any]:
    cut, projection = _cut(x, 2), _projection(phi, gain, bias)
    inputs = [
        (cut.streams(x), "streams"),
        (cut.rows(y), "tokens"),
        (cut.maps(post, res), "tokens"),
        *projection.inputs,
    ]
    outputs = [_like_streams(x, cut), *_read_outputs(x, cut, projection.columns)]
    after, rows, u = _call(functools.partial(tiles.follow_kernel, form), cut, inputs, outputs)
    raw = cut.out_maps(rows, phi.shape[-1])
    return (cut.out_streams(after), raw, cut.out_rows(u)), (x, y, post, res, phi, gain, bias, raw)


def _follow_backward(form: Form, kept: Any, cotangents: Any) -> tuple[jax.Array, ...]:
    x, y, post, res, phi, gain, bias, raw = kept
    g, d_raw, du = cotangents
    cut, projection = _cut(x, 3), _projection(phi, gain, bias)
    raw, maps = cut.maps(raw, columns=projection.columns), cut.maps(post, res)
    inputs = [
        (cut.streams(x), "streams"),
        (cut.rows(y), "tokens"),
        (maps, "tokens"),
        (cut.streams(g), "streams"),
        (cut.rows(du), "tokens"),
        (raw, "tokens"),
        (cut.maps(d_raw, columns=projection.columns), "tokens"),
        *projection.inputs,
    ]
    outputs = [*_write_gradients(x, y, maps, cut), *_read_gradients(x, cut, projection.columns)]
    kernel = functools.partial(tiles.follow_backward_kernel, form)
    d_x, d_y, d_maps, d_pre, d_phi = _call(kernel, cut, inputs, outputs)
    written = _of_maps(cut, d_maps, post, res)
    parameters = _of_parameters(form, raw, d_pre, d_phi, phi, gain, bias)
    return cut.out_streams(d_x), cut.out_rows(d_y), *written, *parameters


follow.defvjp(_follow_forward, _follow_backward)


@jax.custom_vjp
def write(x: jax.Array, y: jax.Array, post: jax.Array, res: jax.Array) -> jax.Array:
    """Return x'_i = sum_j res[i, j] x_j + post[i] y, in the dtype of x.

    x [..., N, D], y [..., D], post [N, ...], res [N, N, ...] -> x' [..., N, D].
    """
    return _write_forward(x, y, post, res)[0]


def _write_forward(x: jax.Array, y: jax.Array, post: jax.Array, res: jax.Array) -> tuple[jax.Array, Any]:
    cut = _cut(x, 2)
    inputs = [(cut.streams(x), "streams"), (cut.rows(y), "tokens"), (cut.maps(post, res), "tokens")]
    (after,) = _call(tiles.write_kernel, cut, inputs, [_like_streams(x, cut)])
    return cut.out_streams(after), (x, y, post, res)


def _write_backward(kept: Any, g: jax.Array) -> tuple[jax.Array, ...]:
    x, y, post, res = kept
    cut = _cut(x, 3)
    maps = cut.maps(post, res)
    inputs = [
        (cut.streams(x), "streams"),
        (cut.rows(y), "tokens"),
        (maps, "tokens"),
        (cut.streams(g), "streams"),
    ]
    d_x, d_y, d_maps = _call(tiles.write_backward_kernel, cut, inputs, _write_gradients(x, y, maps, cut))
    return cut.out_streams(d_x), cut.out_rows(d_y), *_of_maps(cut, d_maps, post, res)


write.defvjp(_write_forward, _write_backward)
