"""Test lead times: planted series come out as they were planted, and a small grid goes through the whole program."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mhc.config import from_config_dict
from mhc.data.windtunnel import fields
from mhc.errors import UserError
from mhc.eval.windtunnel.__main__ import main
from mhc.eval.windtunnel.leads import reading
from mhc.eval.windtunnel.leads.bands import (
    Measure,
    Series,
    Trace,
    band,
    healthy,
    judging,
    leaves,
    outcome,
    outcomes,
    record,
    series,
)
from mhc.eval.windtunnel.leads.reading import MEASURES
from tests.small_runs import run

STEPS = np.arange(10.0, 201.0, 10.0)
R2 = Measure("r2", "R²", -1, 0.05)


def trace(
    values: np.ndarray, *, seed: int = 0, rate: float = 1e-3, loss: int | None = None, kind: str = "hc", last: int = 300
) -> Trace:
    """Return the trace of an arm of one measure."""
    return Trace(
        f"{kind},{rate},{seed}", kind, rate, (seed, seed), STEPS, {"r2": values}, {"spike": loss}, last=last, window=32
    )


def steady(offset: float = 0.0) -> np.ndarray:
    return np.full(len(STEPS), 0.9 + offset)


def falling(start: float) -> np.ndarray:
    """Return values that fall far outside from a step on."""
    return np.where(start <= STEPS, 0.2, 0.9)


HEALTHY = [trace(steady(0.002 * seed), seed=seed) for seed in range(3)]


def levels(arms: Sequence[Trace]) -> list[Series]:
    return [Series(arm.steps, arm.values["r2"]) for arm in arms]


def verdict(arm: Trace) -> tuple[str, int | None]:
    found = outcome(R2, arm, [*HEALTHY, arm], "spike")
    assert found is not None
    return found.verdict, found.lead


def test_a_measure_that_leaves_forty_steps_before_the_loss_leads_by_forty() -> None:
    assert verdict(trace(falling(100), rate=0.1, loss=140)) == ("led", 40)
    assert verdict(trace(falling(140), rate=0.1, loss=140)) == ("led", 0)


def test_a_wobble_does_not_count() -> None:
    wobble = steady()
    wobble[5] = 0.1
    assert verdict(trace(wobble, rate=0.1)) == ("quiet", None)
    assert verdict(trace(wobble, rate=0.1, loss=140)) == ("missed", None)
    wobble[-1] = 0.1  # nothing follows that would confirm it
    assert verdict(trace(wobble, rate=0.1)) == ("quiet", None)
    wobble[6] = 0.1
    found = outcome(R2, trace(wobble, rate=0.1, loss=140), HEALTHY, "spike")
    assert found is not None and found.left == (60, 70) and found.lead == 80


def test_a_healthy_arm_that_leaves_is_a_false_alarm() -> None:
    """It is compared with the other healthy arms, not with itself."""
    sick = trace(falling(100), seed=3)
    assert verdict(sick) == ("false alarm", None)
    assert sick not in healthy(sick, [*HEALTHY, sick])
    found = outcomes([R2], [*HEALTHY, sick], "spike")
    assert record(R2, found).false_alarms == 1


def test_an_arm_whose_loss_says_nothing() -> None:
    assert verdict(trace(falling(100), rate=0.1)) == ("false alarm", None)
    assert verdict(trace(falling(190), rate=0.1, last=200)) == ("undecided", None)  # the end is within the window
    assert verdict(trace(steady(), rate=0.1)) == ("quiet", None)


def test_the_loss_may_be_first() -> None:
    assert verdict(trace(falling(150), rate=0.1, loss=140)) == ("late", None)


def test_the_better_side_is_never_left_and_what_is_not_finite_is_outside() -> None:
    assert verdict(trace(steady(0.5), rate=0.1)) == ("quiet", None)
    broken = np.where(STEPS >= 100, np.nan, 0.9)
    assert verdict(trace(broken, rate=0.1, loss=140)) == ("led", 40)
    larger_is_worse = Measure("r2", "KL", 1, 0.05)
    limits = band(larger_is_worse, levels(HEALTHY))
    assert limits is not None
    assert leaves(larger_is_worse, Series(STEPS, falling(100)), limits) is None
    assert leaves(larger_is_worse, Series(STEPS, 1.8 - falling(100)), limits) == (100, 110)


def test_a_band_follows_the_step_and_is_as_wide_as_seeds_differ() -> None:
    growing = np.linspace(0.1, 0.9, len(STEPS))
    spread = [trace(growing + offset, seed=seed) for seed, offset in enumerate((-0.1, 0.0, 0.1))]
    limits = band(R2, levels(spread))
    assert limits is not None
    np.testing.assert_allclose(limits.centre, growing)
    assert limits.width == pytest.approx(0.4)  # four standard deviations of 0.1
    assert band(R2, levels(HEALTHY[:1])).width == 0.05  # type: ignore[union-attr]
    spread[0].values["r2"][3] = np.nan
    assert STEPS[3] not in band(R2, levels(spread)).steps  # type: ignore[union-attr]
    assert band(R2, []) is None


def test_seeds_of_different_levels_are_judged_by_their_change() -> None:
    """A seed that settles elsewhere raises no alarm, and an arm that moves from its own seed's level does."""
    change = dataclasses.replace(R2, by_change=True)
    seeds = [trace(steady(-0.2 * seed), seed=seed) for seed in range(3)]
    late = STEPS[9:]

    def branch(values: np.ndarray, seed: int) -> Trace:
        return dataclasses.replace(trace(steady(), rate=0.1, seed=seed, loss=190), steps=late, values={"r2": values})

    calm, moved = branch(np.full(len(late), 0.5), 2), branch(np.where(late < 150, 0.7, 0.55), 1)
    arms = [*seeds, calm, moved]
    judged_by = series(change, calm, arms)
    assert judged_by is not None
    np.testing.assert_array_equal(judged_by.steps, late)
    np.testing.assert_allclose(judged_by.values, 0.0, atol=1e-12)
    healthy_change = series(change, seeds[0], arms)
    assert healthy_change is not None and healthy_change.steps[0] == late[0] - 10  # the last before the rates part
    by_change = {each.arm: (each.verdict, each.lead) for each in outcomes([change], arms, "spike")}
    assert by_change[calm.arm] == ("missed", None) and by_change[moved.arm] == ("led", 40)
    assert all(by_change[arm.arm] == ("quiet", None) for arm in seeds)
    assert outcome(R2, moved, arms, "spike").verdict == "missed"  # type: ignore[union-attr]
    stranger = dataclasses.replace(calm, seed=(7, 7))
    assert outcome(change, stranger, [*arms, stranger], "spike") is None  # no healthy arm has its seed


def test_a_topology_is_held_against_itself_at_the_lowest_rate() -> None:
    other = trace(steady(-0.5), kind="plain")
    high = trace(steady(-0.5), rate=0.1)
    arms = [*HEALTHY, other, high]
    assert healthy(high, arms) == HEALTHY and healthy(other, arms) == []
    assert outcome(R2, other, arms, "spike") is None  # nothing tells its band


def test_a_measure_may_judge_in_the_loss_place() -> None:
    """The held-out loss does so, by its own band."""
    arm = trace(falling(100), rate=0.1)
    judged = judging(R2, "held_out", [*HEALTHY, arm])
    assert [one.loss["held_out"] for one in judged] == [None, None, None, 100]
    assert all(one.loss["spike"] is None for one in judged)


def test_the_record_counts_every_arm_once() -> None:
    arms = [
        *HEALTHY,
        trace(falling(100), rate=0.1, loss=140, seed=0),
        trace(falling(60), rate=0.1, loss=140, seed=1),
        trace(steady(), rate=0.1, loss=140, seed=2),
        trace(falling(160), rate=0.3, loss=140, seed=0),
        trace(falling(100), rate=0.3, seed=1),
    ]
    row = record(R2, outcomes([R2], arms, "spike"))
    assert (row.arms, row.crossings, row.led, row.late, row.false_alarms, row.missed) == (8, 4, 2, 1, 1, 1)
    assert row.leads == (40, 80) and row.lead == 60.0
    assert row.crossings == row.led + row.late + row.false_alarms + row.undecided


# ------------------------------------------------------------------------------------------------------- the program


def arm(folder: Path, rate: float, seed: int, steps: int, **train: Any) -> Path:
    """Train an arm of a small grid."""
    groups: dict[str, dict[str, Any]] = {
        "model": {"layers": 1, "width": 8},
        "attention": {"heads": 2},
        "residual": {"kind": "hc"},
        "optimizer": {"lr": rate},
        "schedule": {"kind": "constant"},
        "seed": {"init": seed, "data": seed},
        "train": {"steps": steps, "batch_size": 8, **train},
        "checkpoint": {"every": 5, "keep_every": 5, "keep": 1},
        "validation": {"rows": 8, "every": 0},
        "monitor": {"tensorboard": False, "progress_every": 0, "probe_every": 0},
    }
    for field, value in fields("windtunnel:bijection,symbols=4").items():
        group, _, name = field.partition(".")
        groups.setdefault(group, {})[name] = value
    assert run(from_config_dict(groups), folder) == 0
    return folder


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a trunk of twenty steps, and a branch that goes on from its tenth at a higher rate."""
    root = tmp_path_factory.mktemp("leads") / "grid"
    trunk = arm(root / "low", 1e-3, 0, 20)
    arm(root / "high", 0.3, 0, 10, init_from=f"{trunk}@10")
    return root


@pytest.mark.long
def test_a_small_grid_goes_through_the_whole_program(
    grid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with (grid / "high/events.jsonl").open("a") as events:  # as a run writes it
        events.write(json.dumps({"step": 9, "event": "spike", "flagged": ["loss"]}) + "\n")
    assert main(["--leads", str(grid), "--out", str(out), "--sequences", "8"]) == 0
    table = capsys.readouterr().out
    assert "1 of 2 arms" in table and "KL(Bayes ‖ model), bits" in table
    found = json.loads((out / "leads.json").read_text())
    arms = {one["arm"]: one for one in found["arms"]}
    assert arms["low"]["steps"] == [10, 15, 20]  # from the step of the branch on
    assert arms["high"]["steps"] == [10, 15, 20] and arms["high"]["loss"]["spike"] == 19
    for name in (measure.name for measure in MEASURES):
        low, high = (arms[one]["values"][name] for one in ("low", "high"))
        assert low[0] == pytest.approx(high[0], abs=1e-6)  # the branch begins with the trunk's weights
        assert low[-1] != high[-1]
    assert {row["measure"] for row in found["records"]["spike"]} == {measure.name for measure in MEASURES}
    assert "Lead times" in (out / "leads.html").read_text() and (out / "leads.csv").exists()
    # What was measured is not measured again, also where the last line was torn.
    lines = (out / "readings.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 6
    (out / "readings.jsonl").write_text("".join(lines[:-1]) + lines[-1][:20])
    again: list[tuple[Path, int]] = []

    def fake(folder: Path, step: int, sequences: int) -> Mapping[str, float]:
        again.append((folder, step))
        return {"kl_bits": 1.0}

    monkeypatch.setattr(reading, "measure", fake)
    assert main(["--leads", str(grid), "--out", str(out), "--sequences", "8"]) == 0
    assert len(again) == 1


def test_its_help_needs_no_folder(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--leads", "--help"])
    assert end.value.code == 0 and "readings.jsonl" in capsys.readouterr().out


def test_what_is_no_grid_of_wind_tunnels_is_refused(tmp_path: Path, grid: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        main(["--leads", str(tmp_path / "nowhere"), "--out", str(tmp_path)])
    with pytest.raises(UserError, match="no run with a checkpoint"):
        main(["--leads", str(tmp_path), "--out", str(tmp_path)])
    text = tmp_path / "text/run"
    shutil.copytree(grid / "low", text, ignore=shutil.ignore_patterns("checkpoints"))
    config = json.loads((text / "config.json").read_text())
    config["data"] |= {"source": "stdlib", "tokenizer": "bytes"}
    (text / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="is no wind tunnel"):
        main(["--leads", str(tmp_path / "text"), "--out", str(tmp_path)])
