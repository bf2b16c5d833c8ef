"""Test the grids of configs/grids: valid in both sizes, paired by seed, each with the arms that it is there for."""

from __future__ import annotations

import functools
from collections import defaultdict
from pathlib import Path

import pytest

from mhc.errors import UserError
from mhc.grid import plan
from mhc.grid.plan import Plan
from mhc.train.optimizer import learning_rate

FOLDER = Path(__file__).parents[2] / "configs" / "grids"
GRIDS = sorted(file.stem for file in FOLDER.glob("*.py") if file.stem not in ("__init__", "base"))


@functools.cache
def load(grid: str, size: str = "laptop") -> Plan:
    """Return the plan of a ready grid."""
    return plan.load(f"{FOLDER / grid}.py:{size}", ())


def values(planned: Plan, field: str) -> set[object]:
    """Return the values of a field in the arms."""
    group, _, leaf = field.partition(".")
    return {getattr(getattr(planned.config(arm), group), leaf) for arm in planned.arms}


def test_all_are_here() -> None:
    known = {"topologies", "lr", "init", "streams", "iterations", "depth", "controls", "wsd", "windtunnel", "belief"}
    assert set(GRIDS) == known


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("size", ["laptop", "cluster"])
def test_arms_are_paired_by_seed_and_have_their_plain(grid: str, size: str) -> None:
    """Seeds cross everything else, initial weights and data share them, and each sits beside a plain arm."""
    planned = load(grid, size)
    by_seed = defaultdict(set)
    for arm, fields in planned.arms.items():
        config = planned.config(arm)
        assert config.seed.init == config.seed.data
        # What a branch starts from has its seed.
        rest = {field: value for field, value in fields.items() if not field.startswith(("seed.", "train.init_from"))}
        trunk, step = planned.source(arm) or (arm, 0)
        rest["from"] = step
        assert planned.config(trunk).seed == config.seed
        by_seed[config.seed.init].add(tuple(sorted(rest.items())))
    assert len({frozenset(arms) for arms in by_seed.values()}) == 1
    assert "plain" in values(planned, "residual.kind")


@pytest.mark.parametrize("grid", GRIDS)
def test_without_a_size_it_is_the_laptop(grid: str) -> None:
    bare = plan.load(f"{FOLDER / grid}.py", ())
    assert bare.arms == load(grid).arms and bare.base == load(grid).base
    assert bare.base != load(grid, "cluster").base


@pytest.mark.parametrize("grid", GRIDS)
def test_a_laptop_grid_is_small(grid: str) -> None:
    """It takes 30 minutes on two cores (docs/grids.md: what an arm takes); wind tunnels take a third of that an arm."""
    assert len(load(grid).arms) <= {"windtunnel": 60, "belief": 54}.get(grid, 21)


@pytest.mark.parametrize("size", ["laptop", "cluster"])
def test_each_varies_what_it_is_there_for(size: str) -> None:
    assert values(load("topologies", size), "residual.kind") >= {"plain", "hc", "mhc", "mhc_lite", "kromhc", "identity"}
    assert len(values(load("topologies", size), "seed.init")) >= 3
    assert len(values(load("lr", size), "optimizer.lr")) == 7
    assert values(load("init", size), "residual.init") >= {"home", "equivalent", "fanin", "v4"}
    assert values(load("streams", size), "residual.n") >= {1, 2, 4, 8}
    assert values(load("iterations", size), "residual.iters") >= {1, 2, 5, 20}
    assert len(values(load("depth", size), "model.layers")) == 4
    controls = load("controls", size)
    assert {0.0, 1.0} < values(controls, "residual.scale")
    assert values(controls, "init.scale_residual") == {True, False}


@pytest.mark.parametrize("size", ["laptop", "cluster"])
def test_decays_start_from_one_stable_run_and_end_at_zero(size: str) -> None:
    """A decay takes the last fifth of the steps up to its end."""
    planned = load("wsd", size)
    for arm in planned.arms:
        config = planned.config(arm)
        if (source := planned.source(arm)) is None:
            assert config.schedule.kind == "constant" and config.schedule.warmup_steps > 0
            continue
        trunk, step = source
        assert planned.config(trunk).residual == config.residual and planned.config(trunk).data == config.data
        assert config.train.init_optimizer and config.train.init_data
        assert config.decay_steps == step + config.train.steps and config.train.steps * 5 == config.decay_steps
        assert (config.schedule.kind, config.schedule.final_ratio) == ("wsd", 0.0)
        rates = [float(learning_rate(config, done)) for done in (step - 1, step, config.decay_steps - 1)]
        assert rates[0] == pytest.approx(config.optimizer.lr) and rates[0] > rates[1] > rates[2] == 0.0
    assert len(values(planned, "train.steps")) == (3 if size == "laptop" else 4)


def test_an_unknown_size_is_told_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"size: given 'labtop', allowed: laptop or cluster \(did you mean laptop\?\)"):
        load("lr", "labtop")


@pytest.mark.parametrize("size", ["laptop", "cluster"])
def test_the_wind_tunnel_has_every_rate_of_every_kind_and_seed_and_keeps_checkpoints(size: str) -> None:
    planned = load("windtunnel", size)
    configs = {arm: planned.config(arm) for arm in planned.arms}
    cells = {(one.residual.kind, one.optimizer.lr, one.seed.init) for one in configs.values()}
    assert len(cells) == len(configs) == 60 and len({rate for _, rate, _ in cells}) == 4
    lowest = min(rate for _, rate, _ in cells)
    for arm, config in configs.items():
        assert config.schedule.kind == "constant" and config.data.source.startswith("windtunnel:bijection")
        assert config.train.steps % config.checkpoint.keep_every == 0
        assert (planned.source(arm) is None) == (config.optimizer.lr == lowest)
        if (source := planned.source(arm)) is not None:
            trunk, step = configs[source[0]], source[1]
            assert step % trunk.checkpoint.keep_every == 0
            assert step + config.train.steps == trunk.train.steps  # the trunk is there at every step to compare with


@pytest.mark.parametrize("size", ["laptop", "cluster"])
def test_the_belief_grid_crosses_gamma_and_update_scale_on_both_tasks(size: str) -> None:
    planned = load("belief", size)
    configs = [planned.config(arm) for arm in planned.arms]
    cells = {(one.data.source, one.residual.kind, one.norm, one.update, one.seed.init) for one in configs}
    assert len(cells) == len(configs) == 54 * (1 if size == "laptop" else 3)
    for size_of in (lambda one: one.data.source, lambda one: one.residual.kind):
        assert len(set(map(size_of, configs))) in (2, 3)
    assert {(one.norm.gamma_frozen, one.norm.gamma_schedule) for one in configs} == {
        (False, None),
        (True, None),
        (False, 0.25),
    }
    assert {(one.update.scale, one.update.trained) for one in configs} == {(1.0, False), (0.5, False), (1.0, True)}
    for one in configs:
        tunnel = one.data.source.startswith("windtunnel:")
        assert (one.head.classes is not None) == tunnel and one.monitor.gamma
