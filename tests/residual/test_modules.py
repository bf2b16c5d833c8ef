"""Test the modules, which run the kernels, against the golden values of the functions: maps, steps and gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mhc import residual
from mhc.residual import functional as F
from mhc.rng import PathKey
from tests.residual.test_golden import assert_close, load

# Golden file -> how the module is built.
MODULES: dict[str, dict[str, Any]] = {
    "hc_dynamic": {"kind": "hc"},
    "hc_static": {"kind": "hc", "dynamic": False},
    "mhc_paper": {"kind": "mhc"},
    "mhc_deepseek": {"kind": "mhc", "sinkhorn": "deepseek"},
    "mhc_lite": {"kind": "mhc_lite"},
    "kromhc": {"kind": "kromhc"},
    "identity": {"kind": "identity"},
}


def connection_of(width: int, n: int, kind: str, **options: Any) -> tuple[Any, Any]:
    """Return (graph, state without values) of a connection."""
    key = PathKey(jax.random.key(0))
    topology = residual.build(kind, width, rngs=key, n=n, **options)
    return nnx.split(nnx.eval_shape(lambda: topology.connection(0, rngs=key)))


def random_params(state: Any) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    return {
        name: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype) for name, leaf in nnx.to_pure_dict(state).items()
    }


def bound(graph: Any, state: Any, params: dict[str, jax.Array]) -> residual.Connection:
    state = jax.tree.map(lambda leaf: leaf, state)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


@pytest.mark.parametrize("name", MODULES)
def test_a_connection_gives_the_golden_step(name: str) -> None:
    cases = load(f"step_{name}")
    for case in sorted({"n2_C8_std1", "n4_C16_std2"} & set(cases)):
        arrays = cases[case]
        x, y, w_u, w_next = (jnp.asarray(arrays[key], jnp.float32) for key in ("x", "y", "w_u", "w_next"))
        n, width = x.shape[-2:]
        graph, state = connection_of(width, n, **MODULES[name])
        params = {
            key.removeprefix("param_"): jnp.asarray(array, jnp.float32)
            for key, array in arrays.items()
            if key.startswith("param_")
        }
        if "phi" in params:  # the module keeps (N, D) apart
            params["phi"] = params["phi"].reshape(n, width, -1)
        assert set(params) == set(nnx.to_pure_dict(state))

        module: Any = (graph, state)
        w = (w_u, w_next)

        def objective(x: jax.Array, y: jax.Array, params: Any, module: Any = module, w: Any = w) -> Any:
            connection = bound(module[0], module[1], params)
            u, context = connection.read(x)
            following = connection.write(x, y, context)
            total = jnp.sum(w[0] * u) + jnp.sum(w[1] * following)
            maps = connection.maps(context)
            assert maps is not None
            return total, {"u": u, "next": following, **maps._asdict()}

        run = jax.jit(jax.grad(objective, argnums=(0, 1, 2), has_aux=True))
        (dx, dy, dp), values = run(x, y, params)
        for key, value in values.items():
            assert value.dtype == jnp.float32
            assert_close(value, arrays[key], 2e-5, f"{case} {key}")
        for key, value in {"x": dx, "y": dy, **dp}.items():
            if f"d_{key}" in arrays:
                assert_close(value.reshape(arrays[f"d_{key}"].shape), arrays[f"d_{key}"], 1e-4, f"{case} d_{key}")


@pytest.mark.parametrize("tanh", [True, False])
def test_hc_with_and_without_tanh(tanh: bool) -> None:
    graph, state = connection_of(6, 3, "hc", tanh=tanh)
    params = random_params(state)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(5, 3, 6)), jnp.float32)
    connection = bound(graph, state, params)
    maps = connection.maps(connection.read(x)[1])
    assert maps is not None
    for actual, expected in zip(maps, F.hc_maps(x, params, tanh=tanh), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 0.0, 0.5])
def test_the_plain_residual_scales_the_stream(scale: float) -> None:
    rng = np.random.default_rng(0)
    h, y = (jnp.asarray(rng.normal(size=(2, 5)), jnp.float32) for _ in range(2))
    connection = residual.HyperConnection(5, 0, kind="plain", scale=scale, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(connection(h, lambda u: y), scale * h + y, rtol=1e-6)
    u, context = connection.read(h)
    np.testing.assert_array_equal(u, h)
    maps = connection.maps(context)
    assert maps is not None
    assert float(maps.res.max()) == scale


@pytest.mark.parametrize("kind", ["hc", "mhc", "mhc_lite", "kromhc"])
def test_another_residual_map_gives_another_output(kind: str) -> None:
    """No mixed residual is computed and dropped."""
    graph, state = connection_of(4, 2, kind)
    params = random_params(state)
    name = "b_res" if kind == "hc" else "bias"
    other = params | {name: params[name].at[..., -1].add(2.0)}  # the last entry belongs to H_res
    x = jnp.asarray(np.random.default_rng(1).normal(size=(3, 2, 4)), jnp.float32)

    @jax.jit
    def following(params: dict[str, jax.Array]) -> jax.Array:
        return bound(graph, state, params)(x, jnp.zeros_like)

    assert np.abs(following(params) - following(other)).max() > 1e-2
