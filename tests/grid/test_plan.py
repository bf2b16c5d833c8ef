"""Test a grid file as its user mistypes it, and the plan in a folder: what may be added, what is refused."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mhc import cli
from mhc.config import describe, to_json
from mhc.errors import UserError
from mhc.grid import arms, estimate, plan
from mhc.grid.__main__ import main

BASE = """from ml_collections import ConfigDict
def get_config(width='16'):
    return ConfigDict({'model': {'layers': 2, 'width': int(width)}, 'attention': {'heads': 2}, 'train': {'steps': 10}})
"""
HEAD = "from mhc.grid import *\n"
Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes a grid file with these arms, beside its base, and returns its path."""
    (tmp_path / "base.py").write_text(BASE)

    def grid(arms: str, name: str = "grid", base: str = "base.py") -> str:
        file = tmp_path / f"{name}.py"
        file.write_text(f"{HEAD}def get_grid(text='{base}'):\n    return Grid(text, {arms})\n")
        return str(file)

    return grid


def load(path: str, *overrides: str) -> plan.Plan:
    """Return the plan of a file."""
    return plan.load(path, overrides)


KINDS = "product(seeds(0), axis('residual.kind', 'plain', 'hc'))"


def test_arms_change_the_base_and_overrides_every_arm(write: Write) -> None:
    planned = load(write(KINDS), "--config.model.layers=3", "--config.optimizer.lr", "0.5")
    assert list(planned.arms) == ["plain,seed=0", "hc,seed=0"]
    for arm, kind in zip(planned.arms, ("plain", "hc"), strict=True):
        config = planned.config(arm)
        assert (config.residual.kind, config.model.layers, config.optimizer.lr) == (kind, 3, 0.5)
        assert (config.model.width, config.train.steps) == (16, 10)
    assert planned.overrides == {"model.layers": 3, "optimizer.lr": 0.5}


def test_a_text_after_the_file_goes_to_get_grid(write: Write) -> None:
    planned = load(write(KINDS) + ":base.py:32")
    assert planned.config("hc,seed=0").model.width == 32
    assert planned.name == "grid:base.py:32"


def test_a_name_does_not_depend_on_other_arms(write: Write) -> None:
    few = load(write("axis('optimizer.lr', 0.1)"))
    many = load(
        write("chain(product(axis('model.layers', 3, 4), axis('residual.kind', 'hc')), axis('optimizer.lr', 0.2, 0.1))")
    )
    assert set(few.arms) < set(many.arms)


def test_a_value_is_named_as_the_config_holds_it(write: Write) -> None:
    assert list(load(write("axis('optimizer.lr', 1)")).arms) == list(load(write("axis('optimizer.lr', 1.0)")).arms)


@pytest.mark.parametrize(
    ("arms", "overrides", "said"),
    [
        ("axis('residual.kidn', 'hc')", (), "grid.py, line 3: residual.kidn: unknown field (did you mean residual."),
        ("axis('residual.kind', 'mhcc')", (), "arm mhcc: residual.kind: given 'mhcc'"),
        ("product(axis('residual.kind', 'plain'), axis('residual.n', 2))", (), "arm plain,n=2: residual.n: given 2"),
        ("({'modle.width': 8},)", (), "unknown group modle (did you mean model?)"),
        ("axis('optimizer.lr', 1, 1.0)", (), "two arms are named lr=1; their fields are the same: optimizer.lr=1.0"),
        ("()", (), "gives no arm"),
        ("1 / 0", (), "grid.py, line 3: ZeroDivisionError: division by zero"),
        (KINDS, ("--config.residual.kind=mhc",), "--config.residual.kind: the arms of"),
        (KINDS, ("--config.residual.sinkhorn=deepseek",), "arm plain,seed=0: residual.sinkhorn"),
        (KINDS, ("--config.modle.layers=2",), "unknown group modle (did you mean model?)"),
        (KINDS, ("runs/a",), "unknown argument runs/a"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(
    write: Write, arms: str, overrides: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.run_main(main, ["run", write(arms), *overrides, "--workdir", str(tmp_path / "out")])
    out, error = capsys.readouterr()
    assert left.value.code == 2
    assert error.count("\n") == 1
    assert said in error
    assert not out and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rnu"], "unknown command rnu (did you mean run?)"),
        (["run"], "file"),
        (["run", "configs/grids/topologeis.py", "--dry_run"], "(did you mean configs/grids/topologies.py?)"),
        (["run", "GRID"], "--workdir is required"),
        (["run", "GRID", "--workdir", "GRID/a"], "is a file"),
        (["run", "GRID", "--workdir", "w", "--launcher", "slrum"], "one of local, slurm, gke (did you mean slurm?)"),
        (["run", "GRID", "--workdir", "w", "--jobs", "0"], "--jobs: given '0', allowed: an int >= 1"),
        (["run", "GRID", "--workdir", "w", "--launcher", "slurm", "--jobs", "2"], "--jobs: allowed: only with"),
        (["run", "GRID", "--workdir", "w", "--slurm_gpus", "2"], "--slurm_gpus: allowed: only with --launcher slurm"),
        (["run", "GRID", "--workdir", "w", "--mfu", "0.5"], "--mfu: allowed: only with --dry_run"),
        (["run", "GRID", "--workdir", "w", "--launcher", "gke"], "--gke_image is required"),
        (["run", "GRID", "--dry_run", "--chip", "H100"], "(did you mean NVIDIA H100?)"),
        (["run", "GRID", "--dry_run", "--mfu", "0"], "--mfu: given 0.0, allowed"),
        (["status"], "--workdir"),
        (["status", "--workdir", "nowhere"], "nowhere: no grid here"),
        (["collect", "--workdir", "nowhere"], "nowhere: no grid here"),
        (["retry", "--workdir", "nowhere"], "nowhere: no grid here"),
        (["status", "--workdri", "w"], "did you mean --workdir?"),
    ],
)  # fmt: skip
def test_a_mistyped_command_is_one_line(
    write: Write, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = write(KINDS)
    with pytest.raises(SystemExit) as left:
        cli.run_main(main, [argument.replace("GRID", grid) for argument in arguments])
    error = capsys.readouterr().err
    assert (left.value.code, error.count("\n")) == (2, 1)
    assert said in error


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def get_grid(:\n", "mine.py, line 1: invalid syntax"),
        ("x = 1\n", "it defines no get_grid()"),
        ("def get_grid():\n    return {}\n", "get_grid() gives dict, allowed: mhc.grid.Grid"),
        (f"{HEAD}def get_grid():\n    return Grid('bsae.py', arm({{}}))\n", "bsae.py: no such file (did you mean"),
    ],
)
def test_a_grid_file_that_does_not_load_is_told(write: Write, tmp_path: Path, text: str, said: str) -> None:
    write(KINDS)
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UserError, match=re.escape(said)):
        load(str(tmp_path / "mine.py"))


# The folder -----------------------------------------------------------------------------------------------------------


def begin(workdir: Path, arm: str) -> None:
    """Leave an arm's folder as if the arm had started."""
    (workdir / arm).mkdir()
    (workdir / arm / "config.json").write_text("{}")


def test_a_stored_plan_gives_the_same_configs(write: Write, tmp_path: Path) -> None:
    planned = load(write("axis('schedule.step_ratios', (0.5, 0.25), (0.5, 0.1))"), "--config.schedule.kind=step")
    plan.store(planned, tmp_path / "w")
    again = plan.read(tmp_path / "w")
    assert [again.config(arm) for arm in again.arms] == [planned.config(arm) for arm in planned.arms]


def test_added_arms_keep_the_old_ones(write: Write, tmp_path: Path) -> None:
    first = plan.store(load(write("axis('optimizer.lr', 0.1, 0.2)")), tmp_path / "w")
    begin(tmp_path / "w", "lr=0.1")
    second = plan.store(load(write("axis('optimizer.lr', 0.3, 0.1)")), tmp_path / "w")
    assert set(second.arms) == {*first.arms, "lr=0.3"}
    assert plan.read(tmp_path / "w").arms == second.arms


def test_a_base_that_changed_under_a_begun_arm_is_refused_by_name(write: Write, tmp_path: Path) -> None:
    workdir, grid = tmp_path / "w", write("axis('optimizer.lr', 0.1, 0.2)")
    plan.store(load(grid), workdir)
    plan.store(load(grid, "--config.model.width=32"), workdir)  # nothing has begun
    begin(workdir, "lr=0.1")
    plan.store(load(grid, "--config.model.width=32", "--config.train.steps=20"), workdir)  # may change on resume
    before = (workdir / plan.FILE).read_bytes()
    with pytest.raises(UserError, match=re.escape("model.width: stored 32, given 16")):
        plan.store(load(grid), workdir)
    assert (workdir / plan.FILE).read_bytes() == before


def test_a_grid_of_an_older_version_keeps_its_validation_rows(write: Write, tmp_path: Path) -> None:
    """Arms that are still to run are validated on the same rows as those that have run."""
    workdir, grid = tmp_path / "w", write("axis('optimizer.lr', 0.1, 0.2)")
    plan.store(load(grid), workdir)
    begin(workdir, "lr=0.1")
    stored = json.loads((workdir / plan.FILE).read_text())
    stored["base"]["validation"] = {"every": 100, "batches": 16}
    (workdir / plan.FILE).write_text(json.dumps(stored))
    with pytest.raises(UserError, match=re.escape("validation.batches: stored 16, given 3")):
        plan.store(load(grid, "--config.validation.batches=3"), workdir)
    kept = plan.store(load(grid), workdir).config("lr=0.2").validation
    assert (kept.rule, kept.batches) == ("first", 16)
    again = plan.store(load(grid), workdir).config("lr=0.1").validation
    assert (again.rule, again.batches) == ("first", 16)
    new = plan.store(load(grid), tmp_path / "new").config("lr=0.2").validation
    assert (new.rule, new.batches) == (None, None)


def test_a_folder_of_something_else_is_refused(write: Write, tmp_path: Path) -> None:
    workdir = tmp_path / "w"
    plan.store(load(write(KINDS)), workdir)
    begin(workdir, "hc,seed=0")
    with pytest.raises(UserError, match="it holds the grid grid, given: other; name another folder"):
        plan.store(load(write(KINDS, name="other")), workdir)
    with pytest.raises(UserError, match="it holds a run, not a grid"):
        plan.store(load(write(KINDS)), workdir / "hc,seed=0")


# Branches -------------------------------------------------------------------------------------------------------------

DECAYS = "arm({'schedule.kind': 'wsd', 'schedule.wsd_steps': 2, 'train.steps': 2})"
BRANCHED = "(lambda trunks: chain(trunks, branches(trunks, {step}, {decays})))(axis('residual.kind', 'plain', 'hc'))"


def branched(step: int = 4) -> str:
    return BRANCHED.format(step=step, decays=DECAYS)


KEPT = ("--config.checkpoint.every=2", "--config.checkpoint.keep_every=4")


def test_a_branch_starts_from_its_trunk_in_the_grid_s_folder(write: Write, tmp_path: Path) -> None:
    planned = load(write(branched()), *KEPT)
    assert list(planned.arms) == ["plain", "hc", "plain,from=4,decay=2", "hc,from=4,decay=2"]
    arm = "hc,from=4,decay=2"
    assert (planned.source(arm), planned.source("hc")) == (("hc", 4), None)
    stored = plan.store(planned, tmp_path / "w")
    config = stored.placed(arm, tmp_path / "w")
    assert config.train.init_from == f"{tmp_path}/w/hc@4"
    assert (config.train.steps, config.schedule.kind, config.decay_steps) == (2, "wsd", 6)
    assert stored.placed("hc", tmp_path / "w") == stored.config("hc")
    # One that has begun keeps its path when the folder moves: another would be another config.
    (tmp_path / "w" / arm).mkdir()
    (tmp_path / "w" / arm / "config.json").write_text(to_json(config))
    (tmp_path / "w").rename(tmp_path / "moved")
    assert plan.read(tmp_path / "moved").placed(arm, tmp_path / "moved") == config


@pytest.mark.parametrize(
    ("step", "overrides", "said"),
    [
        (3, KEPT, "plain has no checkpoint of step 3 with train.steps=10, checkpoint.every=2"),
        (12, KEPT, "plain has no checkpoint of step 12"),
        (6, KEPT, "plain does not keep its checkpoint of step 6 with .*checkpoint.keep=2, checkpoint.keep_every=4"),
        (8, ("--config.checkpoint.every=4", "--config.checkpoint.keep=1"), "plain does not keep .* of step 8"),
    ],
)
def test_a_checkpoint_that_a_trunk_will_not_have_is_refused(
    write: Write, step: int, overrides: tuple[str, ...], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        load(write(branched(step)), *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        KEPT,
        ("--config.checkpoint.every=4", "--config.checkpoint.keep=3"),
        ("--config.checkpoint.every=2", "--config.checkpoint.keep=4"),
    ],
)
def test_a_checkpoint_that_a_trunk_keeps_is_taken(write: Write, overrides: tuple[str, ...]) -> None:
    assert len(load(write(branched(4)), *overrides).arms) == 4


def test_a_trunk_that_the_grid_lacks_is_told_with_the_nearest(write: Write) -> None:
    arms = (
        "chain(axis('residual.kind', 'plain'), branches(axis('residual.kind', 'plian'), 10, arm({'train.steps': 2})))"
    )
    with pytest.raises(UserError, match=r"no arm plian in this grid \(did you mean plain\?\)|residual\.kind"):
        load(write(arms))
    other = "chain(arm({'residual.kind': 'plain'}), arm({'train.init_from': 'arm:plane@10', 'train.steps': 2}))"
    with pytest.raises(UserError, match=r"train\.init_from: no arm plane in this grid \(did you mean plain\?\)"):
        load(write(other))


def test_short_names_and_fields_without_shapes_are_those_of_the_config() -> None:
    """A name that no field has would never be used, and nobody would see it."""
    named = {*arms._SHORT, *arms._DECAY, *arms._USUAL, *arms._SEEDS}
    shapeless = {f"{group}.{field}" for group, fields in estimate._SHAPELESS.items() for field in fields}
    for field in named | shapeless:
        describe(field)


def no_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_a_plan_is_stored_on_a_file_system_without_locks(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = load(write(KINDS))
    monkeypatch.setattr(plan.fcntl, "flock", no_locks)
    assert plan.store(planned, tmp_path / "grid").arms == plan.read(tmp_path / "grid").arms == planned.arms


def test_an_error_while_a_plan_is_written_is_not_passed_over(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(plan, "write_json", denied)
    with pytest.raises(PermissionError):
        plan.store(load(write(KINDS)), tmp_path / "grid")
