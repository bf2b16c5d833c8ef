"""Dispatch each kernel, under one signature, to the implementation that is chosen where a function is traced.

Shapes: ``N`` streams, ``D`` model width, ``R`` outputs; ``...`` the axes of the tokens. Maps are **tokens last**
(``pre [N, ...]``, ``res [N, N, ...]``), streams are ``x [..., N, D]``. Every kernel accumulates in
``promote_types(input, float32)`` and is tested against ``mhc.residual.functional``.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import jax

from mhc.errors import did_you_mean
from mhc.kernels.checks import check_float
from mhc.kernels.form import Form

TARGETS = {
    "xla": "mhc.kernels.xla",
    "reference": "mhc.residual.reference",
    "pallas_tpu": "mhc.kernels.pallas_tpu",
}
"""Implementations by name: the module with a function for each kernel. A kernel that it lacks is that of ``xla``."""

# Part of the key of jax's caches: a function that is compiled already is traced again under another choice.
_CHOICE = jax.make_user_context(default_value="xla")


@contextlib.contextmanager
def target(name: str) -> Iterator[None]:
    """Choose the implementation of the kernels in all that is traced or computed within::

        with kernels.target("reference"):
            value, tangent = jax.jvp(f, (x,), (dx,))

    ``xla``, the default, has hand-written backward passes: fast, and differentiable in reverse mode and then once more
    in either mode (``jax.grad``, ``jax.hessian``). ``reference`` runs ``mhc.residual.functional``: slower, and
    differentiable in every mode any number of times (``jax.jvp``, ``jax.linearize``, ``jax.jacfwd``). ``pallas_tpu``
    has kernels for TPU that pass over the streams fewer times (``enter``, ``follow``), for one device and reverse mode.
    XLA plans them for TPUs, but they were never run on one; elsewhere they are interpreted, slowly.

    Raises:
      ValueError: no implementation has this name.
    """
    if name not in TARGETS:
        near = did_you_mean(name, TARGETS) if isinstance(name, str) else ""
        raise ValueError(f"unknown target of the kernels {name!r}; allowed: {', '.join(TARGETS)}{near}")
    with _CHOICE(name):
        yield


def current_target() -> str:
    """Return the name of the implementation that is chosen here."""
    name: str = _CHOICE.value
    return name


def fuses() -> bool:
    """Return whether the implementation that is chosen here has ``enter`` and ``follow``."""
    return hasattr(importlib.import_module(TARGETS[current_target()]), "follow")


def enter(
    form: Form, x: jax.Array, phi: jax.Array, gain: jax.Array, bias: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Project and read streams in one pass; return (x as it is, raw, u). Only where ``fuses``.

    x [..., N, D], phi [N, D, C], gain and bias [C] float32 -> x, raw [C, ...] float32, u [..., D] in the dtype of x.
    raw is m phi with m the normalised streams, u = sum_j pre[j] x_j, and pre what ``form`` makes of raw. Give the x
    that is returned to the write: its gradient joins those of raw and u in one pass.

    Raises:
      TypeError: x is not of floating point.
    """
    check_float("x", x)
    return _three("enter", form, x, phi, gain, bias)


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
    """Return (x', raw, u): what ``write`` gives, and what ``enter`` reads of it, in one pass. Only where ``fuses``.

    x [..., N, D], y [..., D], post [N, ...] and res [N, N, ...] of the write; phi [N, D, C], gain and bias [C] of the
    read.

    Raises:
      TypeError: x is not of floating point.
    """
    check_float("x", x)
    return _three("follow", form, x, y, post, res, phi, gain, bias)


def add(x: jax.Array, y: jax.Array, post: jax.Array) -> jax.Array:
    """Return x'_i = x_i + post[i] y, ``write`` under the identity map, in the dtype of x.

    x [..., N, D], y [..., D], post [N, ...] -> x' [..., N, D].

    Raises:
      TypeError: x is not of floating point.
    """
    check_float("x", x)
    return _single("add", x, y, post)


def project(x: jax.Array, phi: jax.Array, eps: float) -> jax.Array:
    """Return m phi, tokens last, with m = vec(x) rsqrt(mean(vec(x)^2) + eps) (arXiv:2512.24880).

    x [..., N, D], phi [N, D, R] -> [R, ...], float32 or wider.
    """
    return _single("project", x, phi, eps)


def read(x: jax.Array, pre: jax.Array) -> jax.Array:
    """Return u = sum_j pre[j] x_j: x [..., N, D], pre [N, ...] -> u [..., D] in the dtype of x.

    Raises:
      TypeError: x is not of floating point.
    """
    check_float("x", x)
    return _single("read", x, pre)


def sinkhorn(logits: jax.Array, iters: int, preset: str, eps: float) -> jax.Array:
    """Return H_res [N, N, ...] of logits [N, N, ...], float32 or wider; see ``functional.sinkhorn``.

    Raises:
      ValueError: ``iters`` < 1, a negative ``eps`` or an unknown preset.
    """
    return _single("sinkhorn", logits, iters, preset, eps)


def write(x: jax.Array, y: jax.Array, post: jax.Array, res: jax.Array) -> jax.Array:
    """Return x'_i = sum_j res[i, j] x_j + post[i] y, in the dtype of x.

    x [..., N, D], y [..., D], post [N, ...], res [N, N, ...] -> x' [..., N, D].

    Raises:
      TypeError: x is not of floating point.
    """
    check_float("x", x)
    return _single("write", x, y, post, res)


def _single(kernel: str, *arguments: Any) -> jax.Array:
    """Run a kernel that returns one array. Raises TypeError as `_run`."""
    result: jax.Array = _run(kernel, *arguments)
    return result


def _three(kernel: str, *arguments: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Run a kernel that returns three arrays. Raises TypeError as `_run`."""
    result: tuple[jax.Array, jax.Array, jax.Array] = _run(kernel, *arguments)
    return result


def _run(kernel: str, *arguments: Any) -> Any:
    """Run a kernel of the chosen implementation.

    Raises:
      TypeError: forward-mode differentiation of a kernel that has a backward pass alone.
    """
    chosen = importlib.import_module(TARGETS[current_target()])
    function = getattr(chosen, kernel, None) or getattr(importlib.import_module(TARGETS["xla"]), kernel)
    try:
        return function(*arguments)
    except TypeError as error:
        if "forward-mode" not in str(error) or "custom_vjp" not in str(error):
            raise
        # Under jit or scan jax raises its own words later, out of reach.
        raise TypeError(
            f"mhc.kernels.{kernel} has a backward pass alone: take jax.jvp, jax.linearize or jax.jacfwd "
            'within `with mhc.kernels.target("reference"):`'
        ) from error
