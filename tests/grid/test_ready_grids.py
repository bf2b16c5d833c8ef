"""Test the grids of configs/grids: valid in both sizes, paired by seed, each with the arms that it is there for."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from mhc import kinds
from mhc.errors import UserError
from mhc.files import write_json
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
    known = {
        "topologies",
        "lr",
        "init",
        "streams",
        "iterations",
        "depth",
        "controls",
        "wsd",
        "windtunnel",
        "zoo",
        "belief",
    }
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
    """It takes 30 minutes on two cores (docs/grids.md: what an arm takes); the arms of three grids are smaller."""
    assert len(load(grid).arms) <= {"windtunnel": 60, "zoo": 60, "belief": 54}.get(grid, 21)


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
def test_the_zoo_has_every_kind_of_the_project_at_three_rates(size: str) -> None:
    planned = load("zoo", size)
    known = {name for name, kind in kinds.known().items() if kind.builder}
    assert values(planned, "residual.kind") == known
    assert len(values(planned, "optimizer.lr")) == 3 and values(planned, "seed.init") == {0}
    for option, changed in (("residual.single_pass", True), ("residual.block", 2), ("residual.value_residual", True)):
        assert changed in values(planned, option)
    sizes = {(planned.config(arm).train, planned.config(arm).model, planned.config(arm).data) for arm in planned.arms}
    assert len(sizes) == 1  # equal data


def rates_half(folder: Path, losses: Callable[[str, float], float | None]) -> Plan:
    """Write the first half of the zoo as it is after it ended; ``losses`` gives an arm's loss, None where it halted."""
    planned = load("zoo")
    plan.store(planned, folder)
    for arm in planned.arms:
        config = planned.config(arm)
        (folder / arm).mkdir()
        loss = losses(arm, config.optimizer.lr)
        if loss is None:
            write_json(folder / arm / "arm.json", {"state": "halted"})
        else:
            ended = {"exit_reason": "finished", "steps": config.train.steps, "val_loss": loss}
            write_json(folder / arm / "summary.json", ended)
    return planned


def test_the_second_half_of_the_zoo_takes_the_best_rate_of_each_topology(tmp_path: Path) -> None:
    """The least loss wins, a tie goes to the lower rate, and neither a halted arm nor a loss that is NaN counts."""
    low, middle, high = sorted(values(load("zoo"), "optimizer.lr"))  # type: ignore[type-var]

    def losses(arm: str, rate: float) -> float | None:
        if arm.startswith("hc,"):
            return {low: 2.0, middle: math.nan, high: None}[rate]
        if arm.startswith("mhc,"):
            return {low: 2.0, middle: 1.5, high: 1.4}[rate] if "single_pass" in arm else 2.0
        return {low: 3.0, middle: 2.0, high: 2.5}[rate]

    first = rates_half(tmp_path, losses)
    second = plan.load(f"{FOLDER / 'zoo.py'}:seeds={tmp_path}", ())
    assert values(second, "seed.init") == {1, 2, 3} and len(second.arms) == len(first.arms)
    assert second.base == first.base
    for arm in second.arms:
        config = second.config(arm)
        by_kind = {"hc": low, "mhc": high if config.residual.single_pass else low}
        assert config.optimizer.lr == by_kind.get(config.residual.kind, middle), arm


def test_the_second_half_of_the_zoo_refuses_a_first_half_that_is_not_done(tmp_path: Path) -> None:
    zoo, half = FOLDER / "zoo.py", tmp_path / "rates"
    planned = rates_half(half, lambda arm, rate: None if arm.startswith("iso,") else 2.0)
    with pytest.raises(UserError, match=r"no rate of residual\.kind=iso finished"):
        plan.load(f"{zoo}:seeds={half}", ())
    arm = next(iter(planned.arms))
    (half / arm / "summary.json").unlink()
    with pytest.raises(UserError, match=f"1 arms have not ended, such as {arm}; run them first"):
        plan.load(f"{zoo}:seeds={half}", ())
    with pytest.raises(UserError, match="no grid here"):
        plan.load(f"{zoo}:seeds={tmp_path / 'elsewhere'}", ())
    plan.store(load("lr"), tmp_path / "lr")
    with pytest.raises(UserError, match="it holds the grid lr:laptop, allowed: the first half of zoo"):
        plan.load(f"{zoo}:seeds={tmp_path / 'lr'}", ())


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
        assert one.data.tokenizer == (one.data.source if tunnel else "bytes") and one.monitor.gamma
