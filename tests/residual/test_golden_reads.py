"""Test golden values of the kinds of other forms: one step each, as the functional API computes it.

Their stacks of six sublayers are in ``test_golden_stacks.py``. ``tests/golden/README.md`` says how they were made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhc.residual import functional as F
from mhc.residual.reads import depth_read_parts
from tests.residual.test_golden import Case, assert_close, dtype_of, load, precision, tolerance

__all__ = ["precision"]  # the fixture
FORWARD, GRADIENT = 2e-5, 2e-4

Arrays = dict[str, jax.Array]


def frac(arrays: Arrays, params: Arrays) -> Arrays:
    x, lead = arrays["x"], arrays["x"].shape[:-2]
    maps = F.frac_maps(x, params, dynamic="alpha" in params)
    u = jnp.einsum("...ij,...jc->...ic", maps.pre, x)
    following = jnp.einsum("...ij,...jc->...ic", maps.res, x)
    following = following + maps.post[..., None] * arrays["y"].reshape(x.shape)
    return {"u": u.reshape(*lead, -1), "next": following, **maps._asdict()}


def gated(arrays: Arrays, params: Arrays) -> Arrays:
    u, post = F.gated_read(arrays["x"], params)
    assert (post is None) == ("w_inject" not in params)
    if post is None:
        return {"u": u}
    return {"u": u, "post": post, "next": arrays["x"] + post[..., None] * arrays["y"][..., None, :]}


def attn_res(arrays: Arrays, params: Arrays) -> Arrays:
    u, weights = F.depth_read(arrays["sources"], arrays["query"], arrays["scale"])
    return {"u": u, "weights": weights}


def laurel(arrays: Arrays, params: Arrays) -> Arrays:
    return {"next": F.laurel_write(arrays["x"], arrays["y"], params)}


def value_residual(arrays: Arrays, params: Arrays) -> Arrays:
    return {"out": F.value_mix(arrays["v"], arrays["v_first"], params["lam"])}


STEPS: dict[str, Callable[[Arrays, Arrays], Arrays]] = {
    "frac": frac,
    "gated_residual": gated,
    "attn_res": attn_res,
    "laurel": laurel,
    "value_residual": value_residual,
}


def check_case(name: str, case: Case, step: Callable[[Arrays, Arrays], Arrays], x64: bool) -> None:
    """Hold values, and gradients of the sum of each output with its weight w_*, to a case's arrays."""
    dtype: Any = dtype_of(x64)
    weights = {key.removeprefix("w_"): jnp.asarray(leaf, dtype) for key, leaf in case.items() if key.startswith("w_")}
    wanted = {key.removeprefix("d_") for key in case if key.startswith("d_")}
    inputs = {key: jnp.asarray(case[key], dtype) for key in wanted if key in case}
    params = {key: jnp.asarray(case[f"param_{key}"], dtype) for key in wanted - set(inputs)}

    def objective(inputs: Arrays, params: Arrays) -> tuple[jax.Array, Arrays]:
        out = step(inputs, params)
        return sum((jnp.sum(out[key] * weight) for key, weight in weights.items()), jnp.zeros((), dtype)), out

    (_, values), grads = jax.jit(jax.value_and_grad(objective, argnums=(0, 1), has_aux=True))(inputs, params)
    for key, value in values.items():
        assert value.dtype == dtype
        assert_close(value, case[key], tolerance(x64, FORWARD), f"{name} {key}")
    for key, grad in (grads[0] | grads[1]).items():
        assert_close(grad, case[f"d_{key}"], tolerance(x64, GRADIENT), f"{name} d_{key}")


@pytest.mark.parametrize("kind", STEPS)
def test_a_step(kind: str, precision: bool) -> None:
    for name, case in load(f"step_{kind}").items():
        check_case(f"{kind} {name}", case, STEPS[kind], precision)


def test_rows_that_are_not_written_yet_do_not_count() -> None:
    """Nothing in them affects value or gradient, and sources in parts give what sources in one array give."""
    case = {key: jnp.asarray(leaf, jnp.float32) for key, leaf in load("step_attn_res")["J5_C16_std1"].items()}
    sources, weight = case["sources"], case["query"] * case["scale"]
    expected = F.depth_read(sources[:3], case["query"], case["scale"])

    def read(sources: jax.Array, junk: jax.Array) -> tuple[jax.Array, jax.Array]:
        parts = (jnp.concatenate([sources[:2], junk]), sources[2:3])
        return depth_read_parts(parts, (jnp.arange(5) < 2, jnp.ones(1, bool)), weight, 1e-6)

    for junk in (jnp.zeros((3, 5, 16)), jnp.full((3, 5, 16), 1e3)):
        u, weights = read(sources, junk)
        assert_close(u, np.asarray(expected[0]), 1e-6, "u")
        assert not weights[2:5].any()
        grad = jax.grad(lambda junk: jnp.sum(read(sources, junk)[0]))(junk)
        assert not grad.any()
