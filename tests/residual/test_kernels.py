"""Test the kernels of the training path against the functional reference: values and gradients, N from 1 to 8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhc import kernels
from mhc.kernels.xla import LINEAR_SPREAD
from mhc.residual import functional as F

SIZES = tuple(range(1, 9))
B, T, D, R = 2, 3, 5, 7
EPS = 1e-6


def last(maps: jax.Array, axes: int) -> jax.Array:
    """Return maps with the ``axes`` leading axes moved to the end: from the kernels' layout to the functional one."""
    return jnp.moveaxis(maps, tuple(range(axes)), tuple(range(-axes, 0)))


REFERENCE: dict[str, Callable[..., jax.Array]] = {
    "project": lambda x, phi: jnp.moveaxis(
        jnp.einsum("...nd,ndr->...r", x, phi) * jax.lax.rsqrt(jnp.mean(x * x, axis=(-2, -1)) + EPS)[..., None], -1, 0
    ),
    "read": lambda x, pre: F.read(x, last(pre, 1)),
    "write": lambda x, y, post, res: F.write(x, y, last(post, 1), last(res, 2)),
    "add": lambda x, y, post: F.write(x, y, last(post, 1), identity(x)),
}
KERNEL: dict[str, Callable[..., jax.Array]] = {
    "project": lambda x, phi: kernels.project(x, phi, EPS),
    "read": kernels.read,
    "write": kernels.write,
    "add": kernels.add,
}


def identity(x: jax.Array) -> jax.Array:
    """Return H_res = I for every token of x [B, T, N, D]."""
    n = x.shape[-2]
    return jnp.broadcast_to(jnp.eye(n, dtype=x.dtype), (B, T, n, n))


def arguments(n: int) -> dict[str, tuple[np.ndarray, ...]]:
    """Return float64 arguments of every kernel: streams [B, T, N, D] and what goes with them."""
    rng = np.random.default_rng(n)
    x, y = rng.normal(size=(B, T, n, D)), rng.normal(size=(B, T, D))
    pre, post, res = rng.normal(size=(n, B, T)), rng.normal(size=(n, B, T)), rng.normal(size=(n, n, B, T))
    return {
        "project": (x, rng.normal(size=(n, D, R))),
        "read": (x, pre),
        "write": (x, y, post, res),
        "add": (x, y, post),
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_values_and_gradients(dtype: str) -> None:
    """They agree; with bfloat16 streams, maps and parameters stay float32, and so do the reference's results."""
    streams, maps = (jnp.dtype(dtype), jnp.dtype("float32" if dtype == "bfloat16" else dtype))
    sizes = SIZES if dtype == "float32" else (1, 3, 8)
    allowed = {"float32": 2e-6, "bfloat16": 2**-8, "float64": 1e-14}[dtype]
    with jax.enable_x64(dtype == "float64"):
        given: dict[int, dict[str, tuple[jax.Array, ...]]] = {}
        pulled: dict[int, dict[str, jax.Array]] = {}
        for n in sizes:
            given[n], pulled[n] = {}, {}
            for name, arrays in arguments(n).items():
                # The streams x and the sublayer's output y are what may be narrow.
                narrow = 2 if name in ("write", "add") else 1
                cast = [jnp.asarray(a, streams if i < narrow else maps) for i, a in enumerate(arrays)]
                given[n][name] = tuple(cast)
                shape = jax.eval_shape(KERNEL[name], *cast).shape
                pulled[n][name] = jnp.asarray(np.random.default_rng(0).normal(size=shape), streams).astype(maps)

        def everything(functions: dict[str, Any], wide: bool) -> Any:
            def one(name: str, args: tuple[jax.Array, ...], g: jax.Array) -> Any:
                if wide:
                    args = tuple(a.astype(maps) for a in args)
                value, pull = jax.vjp(functions[name], *args)
                return value, pull(g.astype(value.dtype))

            return jax.jit(
                lambda given, pulled: {
                    n: {name: one(name, args, pulled[n][name]) for name, args in by_name.items()}
                    for n, by_name in given.items()
                }
            )(given, pulled)

        actual, expected = everything(KERNEL, wide=False), everything(REFERENCE, wide=True)
        for n in sizes:
            for name in KERNEL:
                (value, grads), (golden, golden_grads) = actual[n][name], expected[n][name]
                assert value.dtype == (maps if name == "project" else streams)
                for grad, arg in zip(grads, given[n][name], strict=True):
                    assert grad.dtype == arg.dtype
                for what, a, b in (("value", value, golden), *zip("xyzw", grads, golden_grads, strict=False)):
                    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
                    error = np.max(np.abs(a - b)) / np.max(np.abs(b))
                    assert error <= allowed, f"{name}, N={n}, {what}: {error:.2e}"


# Sinkhorn -------------------------------------------------------------------------------------------------------------

TOKENS = 6


def logits_of(kind: str, n: int) -> np.ndarray:
    """Return logits [TOKENS, N, N] of a kind."""
    rng = np.random.default_rng(n)
    normal = rng.normal(size=(TOKENS, n, n))
    if kind == "narrow":
        return 2.0 * normal
    if kind == "wide":
        return 12.0 * normal
    if kind in ("below the border", "above the border"):
        # One token spreads from 0 to just about the largest spread that stays linear, the others are ordinary.
        spread = LINEAR_SPREAD + (-1e-3 if kind.startswith("below") else 1e-3)
        normal[0] = np.linspace(0.0, spread, n * n).reshape(n, n)
        return normal
    if kind == "uniform":
        return rng.uniform(-1e4, 1e4, size=(TOKENS, n, n))
    if kind == "equal":
        return np.full((TOKENS, n, n), 1e4)
    one = np.full((TOKENS, n, n), -1e4)
    one[:, 0, n - 1] = 1e4
    return one


ORDINARY = ("narrow", "wide", "below the border", "above the border")
EXTREME = ("uniform", "equal", "one high")


@pytest.fixture(
    scope="module",
    params=[("paper", 0.0), pytest.param(("deepseek", 1e-6), marks=pytest.mark.product), ("deepseek", 0.0)],
    ids=str,
)
def sinkhorns(request: pytest.FixtureRequest) -> Any:
    """Return (sizes, kernel, reference), each logits -> (H_res, gradient of sum(weight * H_res)), in one program."""
    preset, eps = request.param
    sizes = (2, 5) if (preset, eps) == ("deepseek", 0.0) else SIZES

    def both(function: Any) -> Any:
        def one(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
            weight = jnp.asarray(np.random.default_rng(1).normal(size=logits.shape), logits.dtype)
            h, pull = jax.vjp(function, logits)
            return h, pull(weight)[0]

        return jax.jit(lambda logits: {n: one(value) for n, value in logits.items()})

    def kernel(logits: jax.Array) -> jax.Array:
        return last(kernels.sinkhorn(jnp.moveaxis(logits, 0, -1), 20, preset, eps), 2)

    return sizes, both(kernel), both(lambda logits: F.sinkhorn(logits, preset=preset, eps=eps))


@pytest.mark.parametrize("kind", ORDINARY + EXTREME)
def test_sinkhorn(sinkhorns: Any, kind: str) -> None:
    sizes, kernel, reference = sinkhorns
    logits = {n: jnp.asarray(logits_of(kind, n), jnp.float32) for n in sizes}
    actual, expected = kernel(logits), reference(logits)
    for n in sizes:
        for what, a, b in zip(("value", "gradient"), actual[n], expected[n], strict=True):
            a, b = np.asarray(a), np.asarray(b)
            assert np.isfinite(a).all()
            assert np.isfinite(b).all()
            if kind in EXTREME:
                continue  # at a magnitude of 1e4 the logits themselves are known to 1e-3 only: see the next test
            # A token's error relative to its largest magnitude; where every gradient cancels, to that of its terms.
            size = np.maximum(np.max(np.abs(b), axis=(-2, -1), keepdims=True), 1e-2)
            error = np.max(np.abs(a - b) / size)
            assert error <= (2e-5 if what == "value" else 1e-3 if kind == "wide" else 1e-4), (
                f"N={n}, {what}: {error:.2e}"
            )


def test_extreme_logits_give_the_matrix_of_float64(sinkhorns: Any) -> None:
    sizes, kernel, reference = sinkhorns
    for kind in EXTREME:
        narrow = {n: jnp.asarray(logits_of(kind, n), jnp.float32) for n in sizes}
        actual = kernel(narrow)
        checked = {n: value for n, value in narrow.items() if n in (2, 4, 8)}
        with jax.enable_x64(True):
            expected = reference({n: jnp.asarray(np.asarray(value), jnp.float64) for n, value in checked.items()})
            for n in checked:
                error = np.max(np.abs(np.asarray(actual[n][0], np.float64) - np.asarray(expected[n][0])))
                assert error <= 5e-3, f"{kind}, N={n}: {error:.2e}"


def test_a_mistake_is_an_error() -> None:
    logits = jnp.zeros((2, 2, 3))
    with pytest.raises(ValueError, match="iters must be at least 1"):
        kernels.sinkhorn(logits, 0, "paper", 0.0)
    with pytest.raises(ValueError, match="unknown Sinkhorn preset 'papre'"):
        kernels.sinkhorn(logits, 20, "papre", 0.0)
