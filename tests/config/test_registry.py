"""Test the table of kinds, which the configuration reads without jax, against what mhc.residual builds."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mhc import config as config_lib
from mhc import kinds, residual, sharding
from mhc.config import ResidualConfig
from mhc.errors import UserError
from mhc.model.block import build_topology
from mhc.model.parameters import parameter
from mhc.residual import protocol
from mhc.rng import path_key
from tests.contracts import topologies

OWN = tuple(kinds.known().values())
WIDTH = 840  # which every number of slots to 8 divides
by_name = pytest.mark.parametrize("kind", OWN, ids=lambda kind: kind.name)


def config(kind: str, **fields: object) -> ResidualConfig:
    """Return the configuration's residual group, its combinations checked."""
    return config_lib.from_config_dict({"model": {"width": WIDTH}, "residual": {"kind": kind, **fields}}).residual


def leaves(topology: nnx.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a module's parameters by path."""
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
            options: dict[str, Any] = {"n": n, field: value}
            if value in has[field]:
                assert getattr(config(kind.name, **options), field) == value
                made = {"sublayers": 4, **options}
                nnx.eval_shape(lambda made=made: residual.build(kind.name, WIDTH, rngs=nnx.Rngs(0), **made))
            else:
                with pytest.raises(UserError, match=rf"^residual\.{field}: given {value!r}, allowed: .*{kind.name}"):
                    config(kind.name, **options)
                with pytest.raises(ValueError, match=rf"^{field}: given {value!r}, allowed: .*{kind.name}"):
                    residual.build(kind.name, 8, rngs=nnx.Rngs(0), sublayers=4, **options)


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


OTHER: dict[str, Any] = {
    "scale": 0.5,
    "alpha": 0.5,
    "sinkhorn": "deepseek",
    "dynamic": False,
    "tanh": False,
    "decay_dynamic": True,
    "iters": 3,
    "res_gap": 1.0,
    "rms_eps": 1e-3,
    "map_eps": 1e-3,
    "sinkhorn_eps": 1e-3,
    "rank": 3,
    "block": 2,
    "dilation": 2,
    "variant": "rw",
    "single_pass": True,
    "s": 3,
    "minorize": False,
    "beta": 2.0,
}


@by_name
def test_an_option_is_taken_or_refused_as_declared(kind: kinds.Kind) -> None:
    assert set(OTHER) == {name for own in OWN for name in own.options}
    takes = protocol.options(kind.name)
    for name, value in OTHER.items():
        assert kinds.options()[name].default != value
        if name in kind.options:
            assert getattr(config(kind.name, **{name: value}), name) == value
            decays = {parameter.decayed_by for parameter in kind.parameters.values()}
            assert name in takes or name in decays  # the optimiser's
            continue
        assert name not in takes
        if kinds.options()[name].anywhere:  # a base config of several kinds may hold it
            assert getattr(config(kind.name, **{name: value}), name) == value
            kept = config_lib.from_config_dict({"residual": config(kind.name, **{name: value}).flat()}).residual
            assert kept == config(kind.name, **{name: value}) != config(kind.name)
        else:
            with pytest.raises(UserError, match=rf"residual\.{name}: .*it is a choice of "):
                config(kind.name, **{name: value})
            assert config(kind.name, **{name: kinds.options()[name].default}) == config(kind.name)


def test_an_unknown_option_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"residual\.sinkorn: unknown field \(did you mean residual\.sinkhorn\?\)"):
        config("mhc", sinkorn="paper")
    with pytest.raises(UserError, match=r"residual\.sinkorn: unknown field"):
        ResidualConfig(kind="mhc", sinkorn="paper")
    with pytest.raises(ValueError, match=r"kind 'mhc' has no option 'sinkorn' \(did you mean sinkhorn\?\)"):
        residual.HyperConnection(8, 0, kind="mhc", rngs=nnx.Rngs(0), sinkorn="paper")
    with pytest.raises(ValueError, match=r"kind 'plain' has no option 'iters'; allowed: n, collapse, scale"):
        residual.build("plain", 8, rngs=nnx.Rngs(0), iters=3)
    for kind, wrong in (
        ("mhc", {"iters": 2.5}),
        ("mhc", {"rms_eps": -1.0}),
        ("hc", {"tanh": "no"}),
        ("plain", {"scale": "x"}),
        ("mhc", {"alpha": "x"}),
        ("mhc", {"n": 4.0}),
        ("mhc", {"n": True}),
        ("mhc", {"sublayers": 0}),
    ):
        with pytest.raises(ValueError, match=rf"{next(iter(wrong))}: given .*, allowed: "):
            residual.HyperConnection(8, 0, kind=kind, rngs=nnx.Rngs(0), **wrong)
    with pytest.raises(ValueError, match=r"unknown residual kind 'mch'; .*\(did you mean mhc\?\)"):
        residual.build("mch", 8, rngs=nnx.Rngs(0))


def test_a_config_is_one_value_however_it_is_made_or_sent() -> None:
    built = ResidualConfig(kind="plain", scale=0.5, iters=3, rms_eps=1e-3)
    assert built == ResidualConfig(kind="plain", rms_eps=1e-3, iters=3, scale=0.5)
    assert hash(built) == hash(pickle.loads(pickle.dumps(built)))
    assert built == pickle.loads(pickle.dumps(built)) == copy.deepcopy(built) == dataclasses.replace(built)
    assert built.flat() == {
        **{"kind": "plain", "n": None, "init": None, "collapse": None},
        **{"scale": 0.5, "iters": 3, "rms_eps": 1e-3},
    }
    with pytest.raises(AttributeError, match="no residual kind has an option 'speed'"):
        _ = built.speed


@pytest.mark.parametrize(("streams", "n"), [((16,), 16), ((1,), 1), ((2, 8), 2), ((8, 16), 8), (tuple(range(1, 9)), 4)])
def test_a_kind_has_a_default_number_of_streams(streams: tuple[int, ...], n: int) -> None:
    assert kinds.Kind("some", streams=streams).default_streams == n
    assert kinds.Kind("some", streams=streams, default_n=streams[-1]).default_streams == streams[-1]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (kinds.Kind("some", streams=(2, 4), default_n=3), "default_n=3 is not among its streams"),
        (kinds.Kind("some", streams=()), "streams must be a tuple of ints from 1"),
        (kinds.Kind("some", streams=(0, 2)), "streams must be a tuple of ints from 1"),
        (kinds.Kind("some", streams=4), "streams must be a tuple of ints from 1"),  # type: ignore[arg-type]
        (kinds.Kind("some.kind"), "its name must be letters, digits"),
        (kinds.Kind(""), "its name must be letters, digits"),
        (kinds.Kind("some", options={"a-b": kinds.Option("a", default=1)}), "must be a Python identifier"),
        (kinds.Kind("some", options={"init": kinds.Option("a preset", default="a")}), "every kind has a field"),
        (kinds.Kind("some", options={"iters": kinds.Option("rounds", default=3)}), "declared differently"),
        (
            kinds.Kind("some", parameters={"turn": kinds.Parameter(("maps",), decayed_by="x")}),
            "no option 'x' decays it",
        ),
        (kinds.Kind("some", preserving={"speed": 1}), "preserving names 'speed'"),
        (kinds.Kind("some", convention="speed"), "convention names 'speed'"),
    ],
)
def test_a_kind_that_contradicts_itself_or_others_is_refused(kind: kinds.Kind, why: str) -> None:
    before = kinds.names()
    with pytest.raises(ValueError, match=why):
        kinds.declare(kind)
    assert kinds.names() == before
    with pytest.raises(ValueError, match="needs a type"):
        kinds.Option("none of any type")
    for fields in ({"default": 0, "low": 1}, {"default": "a", "choices": ("b",)}, {"default": 2.0, "type": int}):
        with pytest.raises(ValueError, match=r"option 'odd': default: given .*, allowed: "):
            kinds.Option("odd", **fields)


@by_name
def test_what_preserves_a_function_is_a_config_of_the_kind(kind: kinds.Kind) -> None:
    built = config(kind.name, **kind.preserving)
    assert not built.apart_from_plain
    assert built.is_plain == (kind.name == "plain")


@by_name
def test_every_parameter_is_declared_with_its_axes(kind: kinds.Kind) -> None:
    def make() -> list[nnx.Module]:
        options: dict[str, Any] = {"collapse": "head"} if "head" in kind.collapses else {}
        topology = residual.build(kind.name, 8, rngs=nnx.Rngs(0), sublayers=4, **options)
        return [topology, topology.connection(0, rngs=nnx.Rngs(0))]

    topology, connection = nnx.eval_shape(make)
    shapes = {f"residual/{path}": shape for path, shape in leaves(topology).items()}
    shapes |= {f"x_residual/{path}": shape for path, shape in leaves(connection).items()}
    own = {path.partition("residual/")[2] for path in shapes if not path.startswith("residual/head/")}
    assert own == set(kind.parameters)
    for path, shape in shapes.items():
        assert len(sharding.logical_axes(path, len(shape))) == len(shape)
        assert parameter(path).group == "maps" and not parameter(path).decay


@by_name
def test_every_field_reaches_the_topology(kind: kinds.Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every field arrives, although a module class shows the signature (*args, **kwargs), which once hid options."""
    given: dict[str, object] = {}
    monkeypatch.setattr(residual, "build", lambda name, width, *, rngs, **options: given.update(options))
    whole = config_lib.from_config_dict({"residual": {"kind": kind.name}, "model": {"layers": 7}})
    build_topology(whole, path_key(jax.random.key(0)))
    assert given["sublayers"] == 14
    presets = ({"init"} if kind.inits else set()) | ({"collapse"} if kind.collapses else set())
    assert set(given) == {"n", "sublayers"} | presets | set(kind.options) - {"decay_dynamic"}


def test_options_of_the_configuration_change_the_topology() -> None:
    def topology(kind: str, **fields: object) -> Any:
        whole = config_lib.from_config_dict({"residual": {"kind": kind, **fields}, "model": {"width": 8}})
        return nnx.eval_shape(lambda: build_topology(whole, path_key(jax.random.key(0))))

    assert topology("plain", scale=0.5).scale == 0.5
    assert topology("hc", n=3, tanh=False).n == 3
    assert not topology("hc", tanh=False).tanh
    built = topology("mhc", n=2, init="v4", sinkhorn="deepseek", iters=7, alpha=0.3, collapse="sum", res_gap=1.0)
    assert (built.n, built.init, built.preset, built.mixing.iters, built.alpha) == (2, "v4", "deepseek", 7, 0.3)
    assert (built.mode, built.res_gap) == ("sum", 1.0)


def test_a_builder_that_does_not_take_a_declared_option_is_refused() -> None:
    def deaf(width: int, *, rngs: object, n: int | None = None) -> None: ...

    kind = kinds.Kind("deaf", options={"speed": kinds.Option("how fast", default=1.0)})
    with pytest.raises(ValueError, match="option 'speed' of kind 'deaf': its builder does not take it"):
        residual.register(kind, deaf)  # type: ignore[arg-type]
    assert "deaf" not in kinds.names() and "speed" not in kinds.options()


def test_a_row_is_all_that_a_file_of_the_package_needs() -> None:
    """The row's builder, and the mixing of a relative of mhc, are imported when the kind is first built."""
    here = "tests.contracts.topologies"
    rows = (
        dataclasses.replace(topologies.NORMED, name="row", builder=f"{here}:Normed"),
        dataclasses.replace(
            topologies.SIXTEEN,
            name="row_of_mhc",
            builder="mhc.residual.manifold:ManifoldHyperConnections",
            mixing=f"{here}:Turning",
        ),
    )
    with topologies.registry_restored():
        for row in rows:
            kinds.declare(row)
            assert row.name in residual.kinds() and row.name not in protocol._REGISTRY
            built = from_config(row.name)
            assert type(built).__name__ in ("Normed", "ManifoldHyperConnections")
        turning = from_config("row_of_mhc", places=3)
        assert isinstance(turning.mixing, topologies.Turning) and turning.mixing.places == 3
        maps = residual.functional.mhc_maps(
            jnp.ones((2, 16, 4)),
            {"phi": jnp.zeros((64, 33)), "alpha": jnp.zeros(3), "bias": jnp.zeros(33)},
            kind="row_of_mhc",
        )
        assert float(maps.res[0, 0, 1]) == 0.5
        assert residual.functional.residual_logits("row_of_mhc", 16) == 1
    assert "row" not in residual.kinds()


def from_config(kind: str, **fields: object) -> Any:
    """Return the topology of a decoder of this kind."""
    whole = config_lib.from_config_dict({"residual": {"kind": kind, **fields}, "model": {"width": 8}})
    return nnx.eval_shape(lambda: build_topology(whole, path_key(jax.random.key(0))))


def test_an_undeclared_parameter_is_an_error() -> None:
    for rule in (lambda path: sharding.logical_axes(path, 1), parameter):
        with pytest.raises(ValueError, match="no residual kind declares a parameter 'gain'"):
            rule("blocks/mlp_residual/gain")


def test_a_name_or_a_parameter_cannot_be_declared_twice_in_different_ways() -> None:
    kinds.declare(kinds.MHC)
    before = kinds.names()
    with pytest.raises(ValueError, match="'mhc' is already declared"):
        kinds.declare(kinds.Kind("mhc"))
    with pytest.raises(ValueError, match="parameter 'phi' of kind 'other' is declared differently"):
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


def test_the_page_on_topologies_has_two_rows_for_every_kind() -> None:
    """It has one row of what the kind is, with every column, and one of what to know before choosing it."""
    lines = (Path(__file__).parents[2] / "docs" / "topologies.md").read_text(encoding="utf-8").splitlines()
    (head,) = (line for line in lines if line.startswith("| kind | equation |"))
    for kind in OWN:
        first, second = (line for line in lines if line.startswith(f"| `{kind.name}` |"))
        assert first.count(" | ") == head.count(" | ") and len(second) > len(kind.name) + 20, kind.name
