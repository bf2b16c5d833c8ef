"""Golden values: float64 arrays made by an independent reference that shares no code with this project.

``tests/golden/{sinkhorn_*,step_*,head_deepseek,gains}.npz``; keys ``<case>/<array>``; ``d_<array>`` is the gradient of
sum(w_u * u) + sum(w_next * next). They may change only with the mathematics they state, never to make a test pass.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhc.residual import functional as F

GOLDEN = Path(__file__).parent.parent / "golden"
EPS = {"rms_eps": 1e-6, "map_eps": 1e-6, "sinkhorn_eps": 1e-6}
STEPS = ["hc_dynamic", "hc_static", "mhc_paper", "mhc_deepseek", "mhc_lite", "kromhc", "identity"]


def load(name: str) -> dict[str, dict[str, np.ndarray]]:
    cases: dict[str, dict[str, np.ndarray]] = {}
    with np.load(GOLDEN / f"{name}.npz") as archive:
        for key in archive.files:
            case, array = key.split("/", 1)
            cases.setdefault(case, {})[array] = archive[key]
    return cases


def assert_close(actual: jax.Array, expected: np.ndarray, tolerance: float, what: str) -> None:
    """Error relative to the largest magnitude of the array."""
    actual = np.asarray(actual, np.float64)
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    if expected.size:
        error = np.max(np.abs(actual - expected)) / max(np.max(np.abs(expected)), 1e-30)
        assert error <= tolerance, f"{what}: relative error {error:.2e} > {tolerance:.0e}"


@pytest.fixture(params=[False, True], ids=["float32", "float64"])
def precision(request):
    with jax.enable_x64(request.param):
        yield request.param


def tolerance(x64: bool, float32: float) -> float:
    return 1e-10 if x64 else float32


@pytest.mark.parametrize("preset", F.SINKHORN_PRESETS)
def test_sinkhorn(preset, precision):
    dtype = jnp.float64 if precision else jnp.float32
    for case, a in load(f"sinkhorn_{preset}").items():
        iters = int(case.rsplit("it", 1)[1])
        weight = jnp.asarray(a["weight"], dtype)

        def objective(logits, iters=iters, weight=weight):
            h = F.sinkhorn(logits, iters=iters, preset=preset, eps=1e-6)
            return jnp.sum(weight * h), h

        grad, h = jax.jit(jax.grad(objective, has_aux=True))(jnp.asarray(a["logits"], dtype))
        assert h.dtype == dtype
        assert_close(h, a["H"], tolerance(precision, 2e-5), f"{case} H")
        assert_close(grad, a["dlogits"], tolerance(precision, 1e-3 if "std20" in case else 1e-4), f"{case} gradient")


@pytest.mark.parametrize("kind", STEPS)
def test_step(kind, precision):
    dtype = jnp.float64 if precision else jnp.float32
    for case, a in load(f"step_{kind}").items():
        params = {k.removeprefix("param_"): jnp.asarray(v, dtype) for k, v in a.items() if k.startswith("param_")}

        def step(x, y, params, a=a):
            if kind.startswith("hc"):
                maps = F.hc_maps(x, params, dynamic=kind == "hc_dynamic", rms_eps=1e-6)
            else:
                name, _, preset = kind.partition("_") if kind.startswith("mhc_") and kind != "mhc_lite" else (kind, "", "")
                maps = F.mhc_maps(x, params, kind=name, preset=preset or "paper", iters=20, **EPS)
            u, following = F.read(x, maps.pre), F.write(x, y, maps.post, maps.res)
            objective = jnp.sum(jnp.asarray(a["w_u"], dtype) * u) + jnp.sum(jnp.asarray(a["w_next"], dtype) * following)
            return objective, (maps, u, following)

        grads, (maps, u, following) = jax.jit(jax.grad(step, argnums=(0, 1, 2), has_aux=True))(
            jnp.asarray(a["x"], dtype), jnp.asarray(a["y"], dtype), params
        )
        values = {"pre": maps.pre, "post": maps.post, "res": maps.res, "u": u, "next": following}
        for name, value in values.items():
            assert_close(value, a[name], tolerance(precision, 2e-5), f"{case} {name}")
        checked = 0
        for name, value in {"x": grads[0], "y": grads[1], **grads[2]}.items():
            if f"d_{name}" in a:
                assert_close(value, a[f"d_{name}"], tolerance(precision, 1e-4), f"{case} d_{name}")
                checked += 1
        assert checked == sum(k.startswith("d_") for k in a)


def test_collapse_head(precision):
    dtype = jnp.float64 if precision else jnp.float32
    for case, a in load("head_deepseek").items():
        x, fn, base, scale = (jnp.asarray(a[k], dtype) for k in ("x", "fn", "base", "scale"))
        assert_close(F.collapse_head(x, fn, base, scale), a["out"], tolerance(precision, 2e-5), case)
        assert_close(F.collapse_head(x, fn, base, scale[0]), a["out"], tolerance(precision, 2e-5), f"{case} scalar scale")


def test_gains(precision):
    dtype = jnp.float64 if precision else jnp.float32
    for case, a in load("gains").items():
        h = jnp.asarray(a["H"], dtype)
        single, composite = F.single_gains(h), F.composite_gains(h)
        for name, value in {
            "single_fwd": single.forward,
            "single_bwd": single.backward,
            "composite_fwd": composite.forward,
            "composite_bwd": composite.backward,
        }.items():
            assert_close(value, a[name], tolerance(precision, 2e-5), f"{case} {name}")
