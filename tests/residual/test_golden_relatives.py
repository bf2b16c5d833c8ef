"""Test golden values of the relatives of mhc that differ in H_res: one step, and a stack of six sublayers.

``tests/golden/README.md`` says how the files were made.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhc.residual import functional as F
from tests.residual.test_golden import (  # noqa: F401 (precision is a fixture)
    EPS,
    Case,
    assert_close,
    dtype_of,
    load,
    precision,
    tolerance,
)

KINDS = ("go_mhc", "tbp_mhc", "shc", "iso", "ortho", "circulant")


def maps_of(kind: str, case: Case, x: jax.Array, params: dict[str, jax.Array]) -> F.Maps:
    options = {name.removeprefix("option_"): value.item() for name, value in case.items() if name.startswith("option_")}
    return F.mhc_maps(x, params, kind=kind, s=options.get("s", 2), gamma=options.get("gamma"), **EPS)  # type: ignore[arg-type]


def parameters(case: Case, dtype: Any) -> dict[str, jax.Array]:
    return {name.removeprefix("param_"): jnp.asarray(a, dtype) for name, a in case.items() if name.startswith("param_")}


@pytest.mark.parametrize("kind", KINDS)
def test_step(kind: str, precision: bool) -> None:  # noqa: F811
    dtype = dtype_of(precision)
    for name, case in load(f"step_{kind}").items():

        def step(x: jax.Array, y: jax.Array, params: dict[str, jax.Array]) -> Any:
            maps = maps_of(kind, case, x, params)  # noqa: B023 (traced before the next case)
            return (F.read(x, maps.pre), F.write(x, y, maps.post, maps.res)), maps._asdict()

        @jax.jit
        def both(x: jax.Array, y: jax.Array, params: dict[str, jax.Array], w: Any) -> Any:
            (u, following), pull, maps = jax.vjp(step, x, y, params, has_aux=True)
            dx, dy, dp = pull(w)
            return {"u": u, "next": following, **maps}, {"x": dx, "y": dy, **dp}

        x, y, w_u, w_next = (jnp.asarray(case[key], dtype) for key in ("x", "y", "w_u", "w_next"))
        values, grads = both(x, y, parameters(case, dtype), (w_u, w_next))
        for key, value in values.items():
            assert value.dtype == dtype
            assert_close(value, case[key], tolerance(precision, 2e-5), f"{name} {key}")
        golden = {key.removeprefix("d_") for key in case if key.startswith("d_")}
        assert golden <= set(grads)
        for key in golden:
            allowed = tolerance(precision, 5e-4 if "std5" in name else 2e-4)
            assert_close(grads[key], case[f"d_{key}"], allowed, f"{name} d_{key}")


@pytest.mark.parametrize("kind", KINDS)
def test_stack(kind: str, precision: bool) -> None:  # noqa: F811
    """The stack has six sublayers F_k(u) = scale_k tanh(u + shift_k), and is collapsed by the mean."""
    dtype = dtype_of(precision)
    for name, case in load(f"stack_{kind}").items():
        n = case["states"].shape[-2]

        def run(h: jax.Array, params: dict[str, jax.Array], case: Case = case, n: int = n) -> Any:
            x = jnp.broadcast_to(h[..., None, :], (*h.shape[:-1], n, h.shape[-1]))
            seen: dict[str, list[jax.Array]] = {"states": [x], "u": [], "res": [], "pre": []}
            for k in range(len(case["u"])):
                one = {key: leaf[k] for key, leaf in params.items()}
                maps = maps_of(kind, case, x, {key: leaf for key, leaf in one.items() if not key.startswith("f_")})
                u = F.read(x, maps.pre)
                shift = jax.lax.broadcast_to_rank(one["f_shift"], u.ndim)
                y = jax.lax.broadcast_to_rank(one["f_scale"], u.ndim) * jnp.tanh(u + shift)
                x = F.write(x, y, maps.post, maps.res)
                for key, leaf in {"states": x, "u": u, "res": maps.res, "pre": maps.pre}.items():
                    seen[key].append(leaf)
            return jnp.mean(x, axis=-2), {key: jnp.stack(leaves) for key, leaves in seen.items()}

        @jax.jit
        def both(h: jax.Array, params: dict[str, jax.Array], w: jax.Array) -> Any:
            out, pull, seen = jax.vjp(run, h, params, has_aux=True)
            dh, dp = pull(w)
            gains, products = F.composite_gains(seen["res"]), F.composite_maps(seen["res"])
            singular = jnp.linalg.svd(products, compute_uv=False)
            composites = {"composite_fwd": gains.forward, "composite_bwd": gains.backward}
            return {"out": out, **seen, **composites, "composite_singular": singular}, {"h": dh, **dp}

        h, w = (jnp.asarray(case[key], dtype) for key in ("h", "w_out"))
        values, grads = both(h, parameters(case, dtype), w)
        for key, value in values.items():
            assert_close(value, case[key], tolerance(precision, 2e-5), f"{name} {key}")
        for key, value in grads.items():
            assert_close(value, case[f"d_{key}"], tolerance(precision, 2e-4), f"{name} d_{key}")


@pytest.mark.parametrize(
    ("m", "scale"),
    [
        pytest.param(m, scale, marks=() if scale == 1e4 or m == 8 else pytest.mark.product)
        for m in (3, 8, 32)
        for scale in (5.0, 100.0, 1e4)
    ],
)
def test_rotations_stay_orthogonal_and_differentiable(m: int, scale: float) -> None:
    """For logits anywhere in +-1e4, alike or far apart, |Q^T Q - I| <= 1e-5 holds and every gradient is finite."""
    from mhc.residual.mixing.cayley import angles, rotation

    rng = np.random.default_rng(m)
    logits = rng.uniform(-scale, scale, (40, angles(m)))
    logits[0], logits[1] = 0.0, scale  # the critical point, and all at the bound
    logits[2, 1:] = 0.0  # one large pair
    logits[3] *= 10.0 ** rng.uniform(-8, 0, angles(m))  # every size at once
    weight = jnp.asarray(rng.normal(size=(40, m, m)), jnp.float32)

    @jax.jit
    def both(logits: jax.Array) -> Any:
        q, pull = jax.vjp(lambda logits: jax.vmap(lambda row: rotation(row, m))(logits), logits)
        return q, pull(weight)[0]

    q, grad = both(jnp.asarray(logits, jnp.float32))
    q = np.asarray(q, np.float64)
    assert np.abs(np.swapaxes(q, -1, -2) @ q - np.eye(m)).max() <= 1e-5
    assert np.isfinite(grad).all()
    np.testing.assert_array_equal(q[0], np.eye(m))
