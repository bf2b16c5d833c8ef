"""The table of kinds, which the configuration reads without jax, against what mhc.residual builds."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from flax import nnx

from mhc import config as config_lib
from mhc import kinds, residual, sharding
from mhc.config import ResidualConfig
from mhc.errors import UserError
from mhc.model import decoder
from mhc.residual import protocol
from mhc.rng import path_key
from mhc.train import optimizer

OWN = (kinds.PLAIN, kinds.HC, kinds.MHC, kinds.MHC_LITE, kinds.KROMHC, kinds.IDENTITY)
by_name = pytest.mark.parametrize("kind", OWN, ids=lambda kind: kind.name)


def config(kind: str, **fields: object) -> ResidualConfig:
    """The configuration's residual group, its combinations checked."""
    return config_lib.from_config_dict({"residual": {"kind": kind, **fields}}).residual


def leaves(topology: nnx.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of a module's parameters by path."""
    tree = nnx.to_pure_dict(nnx.state(topology))
    return {sharding.path_of(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def test_every_kind_is_registered() -> None:
    assert {kind.name for kind in OWN} <= set(residual.kinds())
    assert set(kinds.names()) == set(residual.kinds())


@by_name
def test_every_preset_collapse_and_size_builds_and_no_other(kind: kinds.Kind) -> None:
    n = kind.default_streams
    offered = {"n": tuple(range(1, 9)), "init": kinds.inits(), "collapse": kinds.collapses()}
    has = {"n": kind.streams, "init": kind.inits, "collapse": kind.collapses}
    for field, values in offered.items():
        for value in values:
            options = {"n": n, field: value}
            if value in has[field]:
                assert getattr(config(kind.name, **options), field) == value
                nnx.eval_shape(lambda options=options: residual.build(kind.name, 8, rngs=nnx.Rngs(0), **options))
            else:
                with pytest.raises(UserError, match=rf"^residual\.{field}: given {value!r}, allowed: .*{kind.name}"):
                    config(kind.name, **options)
                with pytest.raises(ValueError, match=rf"^{field}: given {value!r}, allowed: .*{kind.name}"):
                    residual.build(kind.name, 8, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize(
    ("kind", "n", "reason"),
    [
        ("plain", 2, "allowed: 1 with residual.kind=plain: it has one stream"),
        ("mhc_lite", 6, "allowed: from 1 to 5 with residual.kind=mhc_lite: it mixes all N! permutation matrices"),
        ("kromhc", 6, "allowed: 1 or 2 or 4 or 8 with residual.kind=kromhc: its H_res is a Kronecker product"),
    ],
)
def test_a_wrong_size_is_refused_with_the_reason(kind: str, n: int, reason: str) -> None:
    with pytest.raises(UserError) as caught:
        config(kind, n=n)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@by_name
def test_an_option_is_taken_or_refused_as_declared(kind: kinds.Kind) -> None:
    other = {"scale": 0.5, "alpha": 0.5, "sinkhorn": "deepseek", "dynamic": False, "tanh": False, "decay_dynamic": True}
    takes = protocol.options(kind.name)
    for name, value in other.items():
        if name in kind.options:
            config(kind.name, **{name: value})
            assert name in takes or name == "decay_dynamic"  # the optimiser's
        else:
            with pytest.raises(UserError, match=rf"residual\.{name}: .*it is a choice of "):
                config(kind.name, **{name: value})
            assert name not in takes


@by_name
def test_every_parameter_is_declared_with_its_axes(kind: kinds.Kind) -> None:
    def make() -> list[nnx.Module]:
        options = {"collapse": "head"} if "head" in kind.collapses else {}
        topology = residual.build(kind.name, 8, rngs=nnx.Rngs(0), **options)
        return [topology, topology.connection(0, rngs=nnx.Rngs(0))]

    topology, connection = nnx.eval_shape(make)
    found = {f"residual/{path}": shape for path, shape in leaves(topology).items()}
    found |= {f"x_residual/{path}": shape for path, shape in leaves(connection).items()}
    assert {path.removeprefix("x_residual/") for path in found if path[0] == "x"} == set(kind.parameters)
    for path, shape in found.items():
        assert len(sharding.logical_axes(path, len(shape))) == len(shape)
        assert optimizer.group_of(path)[:2] == ("maps", False)


@by_name
def test_every_field_reaches_the_topology(kind: kinds.Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module class shows the signature (*args, **kwargs): options once went missing there without a word."""
    fields = {field.name for field in dataclasses.fields(ResidualConfig)} - {"kind", "decay_dynamic"}
    given: dict[str, object] = {}
    monkeypatch.setattr(residual, "build", lambda name, width, *, rngs, **options: given.update(options))
    decoder.build_topology(ResidualConfig(kind=kind.name), 8, path_key(jax.random.key(0)))
    shared, manifold = {"n", "collapse"}, {"init", "alpha", "rms_eps", "map_eps"}
    expected = {
        "plain": shared | {"scale"},
        "hc": shared | manifold | {"dynamic", "tanh"},
    }.get(kind.name, shared | manifold | {"res_gap", "sinkhorn", "iters", "sinkhorn_eps"})
    assert set(given) == expected <= fields


def test_options_of_the_configuration_change_the_topology() -> None:
    def topology(kind: str, **fields: object) -> Any:
        return nnx.eval_shape(lambda: decoder.build_topology(config(kind, **fields), 8, path_key(jax.random.key(0))))

    assert topology("plain", scale=0.5).scale == 0.5
    assert topology("hc", n=3, tanh=False).n == 3
    assert not topology("hc", tanh=False).tanh
    made = topology("mhc", n=2, init="v4", sinkhorn="deepseek", iters=7, alpha=0.3, collapse="sum", res_gap=1.0)
    assert (made.n, made.init, made.preset, made.iters, made.alpha) == (2, "v4", "deepseek", 7, 0.3)
    assert (made.mode, made.res_gap) == ("sum", 1.0)


def test_a_builder_that_hides_its_options_is_refused() -> None:
    def hides(width: int, *, rngs: object, **options: object) -> None: ...

    with pytest.raises(ValueError, match="must name its options"):
        residual.register(kinds.Kind("hides"), hides)  # type: ignore[arg-type]
    assert "hides" not in kinds.names()


def test_an_undeclared_parameter_is_an_error() -> None:
    for rule in (lambda path: sharding.logical_axes(path, 1), optimizer.group_of):
        with pytest.raises(ValueError, match="no residual kind declares a parameter 'gain'"):
            rule("blocks/mlp_residual/gain")


def test_a_name_or_a_parameter_cannot_be_declared_twice_in_different_ways() -> None:
    kinds.declare(kinds.MHC)
    before = kinds.names()
    with pytest.raises(ValueError, match="'mhc' is already declared"):
        kinds.declare(kinds.Kind("mhc"))
    with pytest.raises(ValueError, match="parameter 'phi' of kind 'other' is declared in another way"):
        kinds.declare(kinds.Kind("other", parameters={"phi": kinds.Parameter(("embed",))}))
    assert kinds.names() == before


def test_the_table_needs_no_jax() -> None:
    code = "import sys, mhc.kinds; print('jax' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["False"]
