"""Test loss events of made-up runs: what led them, false alarms, and what a rewind takes away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mhc.eval.compare.runs import Arm, load
from mhc.eval.compare.spikes import GAP, GRADIENT, NAMES, history, monitors, window_of
from tests.eval.synthetic_runs import config, crossed, rewound, spike, write_run


def arm_with(tmp_path: Path, *events: dict[str, Any], **options: Any) -> Arm:
    settings = config("hc", steps=options.pop("steps", 400), layers=1, monitor__probe_every=20)
    write_run(tmp_path / "hc", settings, events=events, **options)
    return load([tmp_path / "hc"])[1][0]


def test_the_window_is_two_probes_and_at_least_32_steps(tmp_path: Path) -> None:
    assert window_of(arm_with(tmp_path)) == 40
    write_run(tmp_path / "b", config("hc", steps=4, layers=1, monitor__probe_every=0))
    assert window_of(load([tmp_path / "b"])[1][0]) == 32


def test_flagged_steps_near_each_other_are_one_event_and_monitors_lead_it(tmp_path: Path) -> None:
    arm = arm_with(
        tmp_path,
        crossed(20, "residual_rms"),  # too early: standing
        crossed(80, "forward_gain"),
        spike(95, flagged=["grad_norm"], cause="gradient_explosion"),
        spike(100, flagged=["loss", "grad_norm"], cause="signal_explosion", monitors={"residual_rms": 20}),
        spike(100 + GAP, flagged=["loss"]),
        spike(200, flagged=["grad_norm"], cause="gradient_explosion"),
    )
    first, second = history(arm).episodes
    assert (first.first, first.last, first.count, first.loss_step) == (95, 100 + GAP, 3, 100)
    assert first.leads == {"forward_gain": 20, GRADIENT: 5} and first.leader == "forward_gain"
    assert first.standing == {"residual_rms": 20}
    assert first.cause == "signal_explosion" and first.batch == f"{100:016x}"
    assert second.loss_step is None and second.step == 200 and not second.leads
    by_name = {record.monitor: record for record in monitors([history(arm)])}
    assert (by_name["residual_rms"].false_alarms, by_name["residual_rms"].missed) == (1, 1)
    assert (by_name["forward_gain"].led, by_name["forward_gain"].lead) == (1, 20)
    assert (by_name[GRADIENT].crossings, by_name[GRADIENT].led, by_name[GRADIENT].false_alarms) == (2, 1, 1)


def test_a_crossing_after_the_loss_is_late_and_one_at_the_end_undecided(tmp_path: Path) -> None:
    arm = arm_with(tmp_path, spike(100), crossed(120, "residual_rms"), crossed(380, "attention_logit"))
    by_name = {record.monitor: record for record in monitors([history(arm)])}
    assert (by_name["residual_rms"].late, by_name["residual_rms"].false_alarms) == (1, 0)
    assert (by_name["attention_logit"].undecided, by_name["attention_logit"].false_alarms) == (1, 0)


def test_a_rewind_takes_crossings_away_but_not_what_happened(tmp_path: Path) -> None:
    arm = arm_with(
        tmp_path,
        crossed(80, "forward_gain"),
        crossed(100, "backward_gain"),
        spike(105, action="rewind"),
        rewound(105, 90),
        spike(110),
    )
    one = history(arm)
    undone, kept = one.episodes
    assert undone.undone and undone.leads == {"forward_gain": 25, "backward_gain": 5}
    assert not kept.undone and kept.leads == {"forward_gain": 30}
    assert one.rewinds == ((105, 90, 5),)


def test_a_halt_and_a_non_finite_tensor_are_kept(tmp_path: Path) -> None:
    where = "gradient of sublayer 1 (feed-forward of block 0)"
    arm = arm_with(
        tmp_path,
        spike(50, event="nonfinite", cause="nonfinite", flagged=["grad_norm"], tensor=where, grad_norm="NaN"),
        {"step": 50, "event": "halt", "reason": "nonfinite at step 50"},
        until=50,
        exit_reason="halted",
    )
    (episode,) = history(arm).episodes
    assert episode.loss_step == 50 and not episode.finite and episode.tensor == where
    assert episode.leads == {GRADIENT: 0} and history(arm).halted == "nonfinite at step 50"


def test_an_older_run_is_read_off_its_metrics_and_probes(tmp_path: Path) -> None:
    """Without events.jsonl the flagged step is found, and the probes' thresholds are applied again."""
    settings = config("hc", steps=400, layers=16, monitor__probe_every=40, guard__forward_gain=50.0)
    write_run(tmp_path / "hc", settings, spike_at=300, old=True)
    (arm,) = load([tmp_path / "hc"])[1]
    one = history(arm)
    (episode,) = one.episodes
    assert episode.loss_step is None and episode.first == 300 and episode.cause == "not recorded"
    assert {crossing.monitor for crossing in one.crossings} == {"forward_gain", "backward_gain"}


@given(
    st.lists(
        st.tuples(st.integers(1, 400), st.sampled_from([*NAMES[1:], "loss", "grad", "both"])), max_size=12, unique=True
    )
)
def test_every_crossing_is_counted_once(tmp_path_factory: pytest.TempPathFactory, raw: list[tuple[int, str]]) -> None:
    flags = {"loss": ["loss"], "grad": ["grad_norm"], "both": ["loss", "grad_norm"]}
    steps = {step: what for step, what in raw if what in flags}
    events = [crossed(step, what) for step, what in raw if what not in flags]
    events += [spike(step, flagged=flags[what]) for step, what in steps.items()]
    events.sort(key=lambda event: (event["step"], event["event"] != "monitor"))
    one = history(EMPTY.with_events(tmp_path_factory, events))
    records = monitors([one])
    assert sum(record.crossings for record in records) == len(one.crossings)
    for record in records:
        assert record.crossings == record.led + record.late + record.false_alarms + record.undecided
        assert min(record.led, record.late, record.false_alarms, record.undecided, record.missed) >= 0
    assert sum(episode.count for episode in one.episodes) == len(steps)
    for episode in one.loss_events:
        assert all(0 <= lead <= one.window for lead in episode.leads.values())
    assert all(a.last + GAP < b.first for a, b in zip(one.episodes, one.episodes[1:], strict=False))


class EMPTY:
    """A run written once, for examples that differ in their events alone."""

    arm: Arm | None = None

    @classmethod
    def with_events(cls, factory: pytest.TempPathFactory, events: list[dict[str, Any]]) -> Arm:
        import dataclasses

        if cls.arm is None:
            cls.arm = arm_with(factory.mktemp("empty"), probes=False)
        return dataclasses.replace(cls.arm, events=events)
