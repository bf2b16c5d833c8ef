"""Test branches of a stable run: they begin with its weights, optimiser and place in the data, at another rate."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mhc.config import resolve
from mhc.errors import UserError
from mhc.train import start
from mhc.train.checkpoint import load_run, standing_of
from mhc.train.setup import Setup
from mhc.train.standing import Standing
from tests import small_runs
from tests.small import assert_identical, random_params
from tests.small_runs import lines, untrained
from tests.train.test_start import config, opened

STABLE = {"schedule": {"kind": "constant", "warmup_steps": 1}}


# The rest of it from its checkpoint of step 2, but for what an arm changes.
BRANCH: dict[str, Any] = {"init_from": "@2", "init_optimizer": True, "init_data": True, "steps": 2}


def with_source(made: Any, run: Path) -> Any:
    """Return ``made`` with a folder before its @step."""
    return dataclasses.replace(made, train=dataclasses.replace(made.train, init_from=f"{run}{made.train.init_from}"))


@pytest.fixture(scope="module")
def stable(corpus: str) -> Path:
    """Return a plain run of four steps at a constant rate, with checkpoints at 2 and 4."""
    run = Path(corpus.removeprefix("text:")).parent.parent / "stable"
    assert small_runs.run(config(corpus, "plain", **STABLE), run) == 0
    return run


def test_a_branch_begins_as_the_stable_run_went_on_but_for_the_rate(corpus: str, stable: Path, tmp_path: Path) -> None:
    """Loss and gradient of its first step are equal bit for bit, while the rate is on its way down."""
    decay = {"kind": "wsd", "wsd_steps": 2, "final_ratio": 0.0, "decay_steps": None}
    made = config(corpus, "plain", schedule=STABLE["schedule"] | decay, train=BRANCH)
    assert small_runs.run(with_source(made, stable), tmp_path / "x") == 0
    trunk, branch = (lines(run, "metrics") for run in (stable, tmp_path / "x"))
    for name in ("loss", "grad_norm", "log_z"):
        assert branch[0][name] == trunk[2][name]
    assert branch[1]["loss"] != trunk[3]["loss"]
    np.testing.assert_allclose([row["lr"] for row in branch], [trunk[0]["lr"] / 2, 0.0], atol=1e-9)


@pytest.mark.long
def test_under_the_same_schedule_a_branch_is_the_stable_run(corpus: str, stable: Path, tmp_path: Path) -> None:
    made = config(corpus, "plain", **STABLE, train=BRANCH)
    assert small_runs.run(with_source(made, stable), tmp_path / "x") == 0
    for theirs, ours in zip(lines(stable, "metrics")[2:], lines(tmp_path / "x", "metrics"), strict=True):
        assert all(theirs[name] == ours[name] for name in ("loss", "grad_norm", "log_z", "update_norm", "lr"))
    assert_identical(load_run(tmp_path / "x").params, load_run(stable).params)


def test_what_may_not_be_meant_is_said(corpus: str, stable: Path, tmp_path: Path) -> None:
    """A line tells of a decay that began before the branch, and of ids that the weights were not learned for."""

    def notes(tokenizer: str, positions: dict[str, Any] | None = None, **train: Any) -> list[str]:
        schedule = {"kind": "wsd", "wsd_steps": train["steps"] + 1, "decay_steps": None}
        made = with_source(
            config(
                corpus,
                "plain",
                **{**STABLE, "schedule": schedule, "train": {**BRANCH, **train}, "positions": positions or {}},
            ),
            stable,
        )
        made = resolve(made, 258)
        found = start.source(made)
        assert found is not None
        return list(start.notes(made, found, tokenizer))

    positions = {"scaling": "ntk"}
    (unscaled, _) = notes("bytes-258", positions=positions, steps=1)
    assert unscaled == "positions.scaling=ntk: positions.factor=1.0 leaves the angles as they are"
    assert len(notes("bytes-258", positions={**positions, "factor": 2.0}, steps=1)) == 1
    (early,) = notes("bytes-258", steps=1)
    assert early.startswith("schedule.wsd_steps: the decay has begun 1 steps before step 2")
    (other, _) = notes("bpe", steps=1)
    assert "gives other ids than that of" in other


def test_without_its_place_a_branch_reads_the_data_from_the_start(corpus: str, stable: Path, tmp_path: Path) -> None:
    def place(made: Any) -> Any:
        setup = Setup(made, tmp_path / "x", devices=jax.devices()[:1])
        with contextlib.closing(setup.data):
            return setup.data.get_state()

    there = standing_of(stable, 2).data
    first = place(config(corpus, "plain", **STABLE))
    assert first != there
    assert place(with_source(config(corpus, "plain", **STABLE, train=BRANCH), stable)) == there
    assert place(with_source(config(corpus, "plain", **STABLE, train={**BRANCH, "init_data": False}), stable)) == first


@pytest.mark.long
def test_a_branch_that_is_stopped_goes_on_and_needs_its_source_no_more(
    corpus: str, stable: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(stable, source)

    def run(name: str, steps: int) -> None:
        fields: dict[str, Any] = {**STABLE, "validation": {"every": 2}, "train": {**BRANCH, "steps": steps}}
        assert small_runs.run(with_source(config(corpus, "plain", **fields), source), tmp_path / name) == 0

    run("whole", 4)
    run("halves", 2)
    shutil.rmtree(source)
    run("halves", 4)
    small_runs.assert_equal_runs(tmp_path / "halves", tmp_path / "whole")


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (
            {"data": {"sequence_length": 8}},
            r"train\.init_data: .* reads other batches: .*another data\.sequence_length",
        ),
        ({"train": {"batch_size": 4}}, r"another train\.batch_size; .*saved 8, now 4"),
        ({"seed": {"data": 3}}, r"another seed\.data; .*set train\.init_data=False to .*\(saved 0, now 3\)"),
        (
            {"data": {"holdout": 0.4}},
            r"another data\.holdout; .*set train\.init_data=False to .*\(saved 0\.\d+, now 0\.4",
        ),
    ],
)
def test_a_place_in_other_data_is_refused(
    groups: dict[str, Any], words: str, corpus: str, stable: Path, tmp_path: Path
) -> None:
    train = {"init_from": f"{stable}@2", "init_data": True, **groups.get("train", {})}
    with pytest.raises(UserError, match=words):
        opened(config(corpus, "plain", **{**STABLE, **groups, "train": train}), tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_place_saved_before_it_had_the_share_held_out_is_compared_by_the_config(
    corpus: str, stable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def old(run: Any, step: int) -> Standing:
        standing = standing_of(run, step)
        assert standing.data is not None
        return dataclasses.replace(standing, data={k: v for k, v in standing.data.items() if k != "holdout"})

    monkeypatch.setattr(start, "standing_of", old)
    train: dict[str, Any] = {"init_from": f"{stable}@2", "init_data": True}
    opened(config(corpus, "plain", **{**STABLE, "train": train}), tmp_path / "x")
    with pytest.raises(UserError, match=r"another data\.holdout; .*, now 0\.4\)"):
        opened(config(corpus, "plain", **{**STABLE, "train": train, "data": {"holdout": 0.4}}), tmp_path / "x")


def test_weights_alone_have_no_place_in_the_data(corpus: str, tmp_path: Path) -> None:
    source = small_runs.resolved(config(corpus, "plain"))
    untrained(source, random_params(source), tmp_path / "a")
    with pytest.raises(UserError, match=r"train\.init_data: .* holds weights alone"):
        opened(config(corpus, "plain", train={"init_from": str(tmp_path / "a"), "init_data": True}), tmp_path / "b")


def test_a_schedule_that_is_over_where_it_is_entered_is_refused(corpus: str, stable: Path, tmp_path: Path) -> None:
    """Without @STEP nothing says where a decay that is not given would end."""
    train = {"init_from": str(stable), "init_optimizer": True, "steps": 4}
    falling = {"kind": "cosine", "decay_steps": None}
    with pytest.raises(UserError, match=r"schedule\.decay_steps: given 4, allowed: above 4, where .*RUN@STEP"):
        opened(config(corpus, "plain", schedule=falling, train=train), tmp_path / "x")
    named = config(corpus, "plain", schedule=falling, train={**train, "init_from": f"{stable}@4"})
    assert opened(named, tmp_path / "x").config.schedule.decay_steps == 8
