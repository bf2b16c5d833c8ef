"""Test golden values: float64 arrays made by an independent reference that shares no code with this project.

``tests/golden/README.md`` says what each file holds. They may change only with the mathematics that they state, never
to make a test pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhc.residual import functional as F

GOLDEN = Path(__file__).parents[1] / "golden"
EPS = {"rms_eps": 1e-6, "map_eps": 1e-6, "sinkhorn_eps": 1e-6}
MANIFOLD = {
    "mhc_paper": {"kind": "mhc", "preset": "paper"},
    "mhc_deepseek": {"kind": "mhc", "preset": "deepseek"},
    "mhc_lite": {"kind": "mhc_lite"},
    "kromhc": {"kind": "kromhc"},
    "identity": {"kind": "identity"},
}

Case = dict[str, np.ndarray]


def load(name: str) -> dict[str, Case]:
    """Return the cases of a file, each as arrays by name."""
    cases: dict[str, Case] = {}
    with np.load(GOLDEN / f"{name}.npz") as archive:
        for key in archive.files:
            case, array = key.split("/", 1)
            cases.setdefault(case, {})[array] = archive[key]
    return cases


def grouped(cases: dict[str, Case]) -> list[list[str]]:
    """Return the names of cases whose arrays have the same shapes; each group is one batch."""
    groups: dict[Any, list[str]] = {}
    for name, arrays in cases.items():
        groups.setdefault(tuple(sorted((key, array.shape) for key, array in arrays.items())), []).append(name)
    return list(groups.values())


def stacked(cases: dict[str, Case], names: list[str], array: str, dtype: Any) -> jax.Array:
    return jnp.asarray(np.stack([cases[name][array] for name in names]), dtype)


def assert_close(actual: Any, expected: np.ndarray, tolerance: float, what: str) -> None:
    """Check the error relative to the largest magnitude of the array."""
    actual = np.asarray(actual, np.float64)
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    if expected.size:
        error = np.max(np.abs(actual - expected)) / max(np.max(np.abs(expected)), 1e-30)
        assert error <= tolerance, f"{what}: relative error {error:.2e} > {tolerance:.0e}"


# Float32 is held by the kernels and the modules too, which train in it: tests/residual/test_{kernels,modules}.py.
@pytest.fixture(params=[pytest.param(False, marks=pytest.mark.product), True], ids=["float32", "float64"])
def precision(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Turn float64 on or off, and return which."""
    with jax.enable_x64(request.param):
        yield request.param


def dtype_of(x64: bool) -> Any:
    return jnp.float64 if x64 else jnp.float32


def tolerance(x64: bool, float32: float) -> float:
    return 1e-10 if x64 else float32


@pytest.mark.parametrize("preset", F.SINKHORN_PRESETS)
def test_sinkhorn(preset: str, precision: bool) -> None:
    dtype = dtype_of(precision)
    cases = load(f"sinkhorn_{preset}")
    # A case is `n<N>_std<std>_it<iterations>`: those of one N and number of iterations are one batch.
    by_iterations = {int(name.rsplit("it", 1)[1]) for name in cases}
    batches = [
        (names, iters)
        for iters in sorted(by_iterations)
        for names in grouped({name: arrays for name, arrays in cases.items() if name.endswith(f"it{iters}")})
    ]
    logits = [stacked(cases, names, "logits", dtype) for names, _ in batches]
    weights = [stacked(cases, names, "weight", dtype) for names, _ in batches]

    @jax.jit
    def run(logits: list[jax.Array], weights: list[jax.Array]) -> Any:
        def one(x: jax.Array, w: jax.Array, iters: int) -> Any:
            h, pull = jax.vjp(lambda x: F.sinkhorn(x, iters=iters, preset=preset, eps=1e-6), x)
            return h, pull(w)[0]

        return [one(x, w, iters) for x, w, (_, iters) in zip(logits, weights, batches, strict=True)]

    checked = 0
    for (names, _), (h, grad) in zip(batches, run(logits, weights), strict=True):
        assert h.dtype == grad.dtype == dtype
        for i, case in enumerate(names):
            assert_close(h[i], cases[case]["H"], tolerance(precision, 2e-5), f"{case} H")
            allowed = tolerance(precision, 1e-3 if "std20" in case else 1e-4)
            assert_close(grad[i], cases[case]["dlogits"], allowed, f"{case} gradient")
            checked += 1
    assert checked == len(cases)


@pytest.mark.parametrize("kind", ["hc_dynamic", "hc_static", *MANIFOLD])
def test_step(kind: str, precision: bool) -> None:
    dtype = dtype_of(precision)

    @jax.jit  # compiled once for each set of shapes
    def step(arrays: dict[str, jax.Array]) -> Any:
        params = {name.removeprefix("param_"): a for name, a in arrays.items() if name.startswith("param_")}

        def values(x: jax.Array, y: jax.Array, params: dict[str, jax.Array]) -> Any:
            if kind in MANIFOLD:
                maps = F.mhc_maps(x, params, iters=20, **EPS, **MANIFOLD[kind])  # type: ignore[arg-type]
            else:
                maps = F.hc_maps(x, params, dynamic=kind == "hc_dynamic", rms_eps=1e-6)
            return (F.read(x, maps.pre), F.write(x, y, maps.post, maps.res)), maps._asdict()

        (u, following), pull, maps = jax.vjp(values, arrays["x"], arrays["y"], params, has_aux=True)
        dx, dy, dp = pull((arrays["w_u"], arrays["w_next"]))
        return {"u": u, "next": following, **maps}, {"x": dx, "y": dy, **dp}

    for case, arrays in load(f"step_{kind}").items():
        inputs = {
            name: jnp.asarray(array, dtype)
            for name, array in arrays.items()
            if name in ("x", "y", "w_u", "w_next") or name.startswith("param_")
        }
        values, grads = step(inputs)
        for name, value in values.items():
            assert value.dtype == dtype
            assert_close(value, arrays[name], tolerance(precision, 2e-5), f"{case} {name}")
        golden = {name.removeprefix("d_") for name in arrays if name.startswith("d_")}
        assert golden <= set(grads)
        for name in golden:
            assert_close(grads[name], arrays[f"d_{name}"], tolerance(precision, 1e-4), f"{case} d_{name}")


def test_collapse_head(precision: bool) -> None:
    dtype = dtype_of(precision)
    for case, a in load("head_deepseek").items():
        x, fn, base, scale = (jnp.asarray(a[k], dtype) for k in ("x", "fn", "base", "scale"))
        both = jax.jit(lambda x, fn, base, s: (F.collapse_head(x, fn, base, s), F.collapse_head(x, fn, base, s[0])))
        for out, what in zip(both(x, fn, base, scale), ("scale [1]", "scale ()"), strict=True):
            assert_close(out, a["out"], tolerance(precision, 2e-5), f"{case} {what}")


def test_gains(precision: bool) -> None:
    dtype = dtype_of(precision)
    both = jax.jit(lambda h: (F.single_gains(h), F.composite_gains(h)))
    for case, a in load("gains").items():
        single, composite = both(jnp.asarray(a["H"], dtype))
        for name, value in {
            "single_fwd": single.forward,
            "single_bwd": single.backward,
            "composite_fwd": composite.forward,
            "composite_bwd": composite.backward,
        }.items():
            assert_close(value, a[name], tolerance(precision, 2e-5), f"{case} {name}")
