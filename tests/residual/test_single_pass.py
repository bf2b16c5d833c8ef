"""Test single_pass: golden values of its step and of a stack, in functions and in modules, and its refusals."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mhc import kinds, residual
from mhc.config import from_config_dict, resolve
from mhc.errors import UserError
from mhc.residual import functional as F
from mhc.rng import PathKey
from tests.residual.test_golden import (  # noqa: F401 (precision is a fixture)
    Case,
    assert_close,
    dtype_of,
    load,
    precision,
    tolerance,
)
from tests.residual.test_golden_relatives import KINDS, maps_of, parameters

PRESETS = ("paper", "deepseek")


def made(x: jax.Array, params: dict[str, jax.Array], preset: str) -> F.Maps:
    return F.mhc_maps(x, params, preset=preset, rms_eps=1e-6, map_eps=1e-6, sinkhorn_eps=1e-6)


@pytest.mark.parametrize("preset", PRESETS)
def test_step(preset: str, precision: bool) -> None:  # noqa: F811
    dtype = dtype_of(precision)

    def step(x: jax.Array, y: jax.Array, pre_prev: jax.Array, params: dict[str, jax.Array]) -> Any:
        maps = made(x, params, preset)
        return (F.read(x, pre_prev), F.write(x, y, maps.post, maps.res), maps.pre), maps._asdict()

    @jax.jit
    def both(inputs: Any, weights: Any) -> Any:
        (u, following, _), pull, maps = jax.vjp(step, *inputs, has_aux=True)
        dx, dy, dpre, dp = pull(weights)
        return {"u": u, "next": following, **maps}, {"x": dx, "y": dy, "pre_prev": dpre, **dp}

    for name, case in load(f"step_single_pass_{preset}").items():
        x, y, pre_prev, w_u, w_next, w_pre = (
            jnp.asarray(case[key], dtype) for key in ("x", "y", "pre_prev", "w_u", "w_next", "w_pre")
        )
        values, grads = both((x, y, pre_prev, parameters(case, dtype)), (w_u, w_next, w_pre))
        for key, value in values.items():
            assert_close(value, case[key], tolerance(precision, 2e-5), f"{name} {key}")
        for key, value in grads.items():
            allowed = tolerance(precision, 5e-4 if "std5" in name else 2e-4)
            assert_close(value, case[f"d_{key}"], allowed, f"{name} d_{key}")


def topology_of(kind: str, case: Case) -> residual.ResidualTopology:
    """Return the topology of a golden stack."""
    n, width = case["states"].shape[-2:]
    options: dict[str, Any] = {"n": n, "sublayers": 6}
    if "option_s" in case:
        options["s"] = int(case["option_s"])
    if "option_gamma" in case:
        options["sublayers"] = round(2 / float(case["option_gamma"]))
    if kind.startswith("single_pass"):
        options |= {"single_pass": True, "sinkhorn": kind.removeprefix("single_pass_")}
        kind = "mhc"
    return residual.build(kind, width, rngs=PathKey(jax.random.key(0)), **options)


@pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(kind, marks=() if kind in ("go_mhc", "shc") else pytest.mark.product) for kind in KINDS),
        *(f"single_pass_{preset}" for preset in PRESETS),
    ],
)
def test_the_modules_hold_the_stack(kind: str, precision: bool) -> None:  # noqa: F811
    """Six connections with the golden parameters; circulant has the depth whose share, 4 / (2 S), is the golden one."""
    dtype = dtype_of(precision)
    for name, case in load(f"stack_{kind}").items():
        topology = topology_of(kind, case)
        graph, state = nnx.split(topology.connection(0, rngs=PathKey(jax.random.key(0))))

        def run(
            h: jax.Array,
            params: dict[str, jax.Array],
            topology: residual.ResidualTopology = topology,
            graph: Any = graph,
            state: Any = state,
        ) -> Any:
            carried, reads = topology.expand(h), []
            for k in range(len(params["phi"])):
                one = {key: leaf[k] for key, leaf in params.items()}
                given = {key: one[key].reshape(leaf.shape) for key, leaf in nnx.to_pure_dict(state).items()}
                values = jax.tree.map(lambda leaf: leaf, state)
                nnx.replace_by_pure_dict(values, given)
                connection = nnx.merge(graph, values)
                u, context = connection.read(carried)
                shift, scale = (jax.lax.broadcast_to_rank(one[key], u.ndim) for key in ("f_shift", "f_scale"))
                carried = connection.write(carried, scale * jnp.tanh(u + shift), context)
                reads.append(u)
            return topology.collapse(carried), (jnp.stack(reads), topology.streams(carried))

        @jax.jit
        def both(h: jax.Array, params: dict[str, jax.Array], w: jax.Array, run: Any = run) -> Any:
            out, pull, seen = jax.vjp(run, h, params, has_aux=True)
            return out, seen, pull(w)

        h, w = (jnp.asarray(case[key], dtype) for key in ("h", "w_out"))
        out, (reads, streams), (dh, dp) = both(h, parameters(case, dtype), w)
        assert out.dtype == streams.dtype == dtype
        for key, value in {"out": out, "u": reads}.items():
            assert_close(value, case[key], tolerance(precision, 2e-5), f"{name} {key}")
        assert_close(streams, case["states"][-1], tolerance(precision, 2e-5), f"{name} states")
        for key, value in {"h": dh, **dp}.items():
            assert_close(value, case[f"d_{key}"], tolerance(precision, 2e-4), f"{name} d_{key}")


def test_the_functions_hold_the_stack() -> None:
    """The golden pre is what a sublayer makes, and the next one reads with; float64."""
    with jax.enable_x64(True):
        for preset in PRESETS:
            for name, case in load(f"stack_single_pass_{preset}").items():
                params = {key: leaf for key, leaf in parameters(case, jnp.float64).items() if key[:2] != "f_"}
                x = jnp.asarray(case["states"][:-1])
                maps = jax.vmap(lambda x, p, preset=preset: made(x, p, preset))(x, params)
                assert_close(maps.pre, case["pre"], 1e-10, f"{name} pre")
                assert_close(F.read(x[1:], maps.pre[:-1]), case["u"][1:], 1e-10, f"{name} u")


HAVE = [name for name, kind in kinds.known().items() if "single_pass" in kind.options]


def test_every_relative_of_mhc_has_it_and_no_other_kind() -> None:
    assert set(HAVE) == {name for name, kind in kinds.known().items() if kind.mixing}
    for name in set(kinds.names()) - set(HAVE):
        with pytest.raises(UserError, match=r"^residual\.single_pass: given True, allowed: False with residual\.kind="):
            from_config_dict({"residual": {"kind": name, "single_pass": True}})
        with pytest.raises(ValueError, match="no option 'single_pass'"):
            residual.build(name, 8, rngs=PathKey(jax.random.key(0)), single_pass=True)


@pytest.mark.parametrize("kind", HAVE)
def test_the_collapse_is_fixed(kind: str) -> None:
    """None is the only choice, given or resolved, and a resolved config can be read again."""
    config = resolve(from_config_dict({"residual": {"kind": kind, "single_pass": True}}), 8)
    assert config.residual.collapse is None
    assert from_config_dict({"residual": config.residual.flat()}).residual == config.residual
    for collapse in kinds.known()[kind].collapses:
        with pytest.raises(UserError, match=rf"^residual\.collapse: given '{collapse}', allowed: None with residual\."):
            from_config_dict({"residual": {"kind": kind, "single_pass": True, "collapse": collapse}})
        with pytest.raises(ValueError, match=rf"^collapse: given '{collapse}', allowed: None with single_pass=True"):
            residual.build(kind, 8, rngs=PathKey(jax.random.key(0)), sublayers=4, single_pass=True, collapse=collapse)


def test_go_mhc_rotates_32_axes_at_most() -> None:
    with pytest.raises(UserError, match=r"^residual\.s: given 9, allowed: at most 8 with residual\.n=4"):
        from_config_dict({"residual": {"kind": "go_mhc", "s": 9}})
    with pytest.raises(ValueError, match="N s <= 32, got 4 \\* 9"):
        residual.build("go_mhc", 8, rngs=PathKey(jax.random.key(0)), s=9)


def test_circulant_needs_the_depth() -> None:
    with pytest.raises(ValueError, match="circulant needs sublayers"):
        residual.HyperConnection(8, 0, kind="circulant", rngs=nnx.Rngs(0))
    case = load("step_circulant")["n4_C16_std2"]
    with pytest.raises(ValueError, match="or gamma"):
        F.mhc_maps(case["x"], parameters(case, jnp.float32), kind="circulant")
    x = jnp.asarray(case["x"], jnp.float32)
    assert maps_of("circulant", case, x, parameters(case, jnp.float32)).res.shape == (5, 4, 4)
