"""Test replay on a tiny run that was rewound: its numbers bit for bit, its batches under another topology, mistakes."""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from mhc import cli
from mhc.config import Config, from_config_dict, resolve
from mhc.errors import UserError
from mhc.eval import replay as replays
from mhc.eval.replay import batches_left_out, change, render
from mhc.files import read_json, read_jsonl, write_json
from mhc.train import opened
from mhc.train import run as runs
from mhc.train import step as steps
from mhc.train.checkpoint import committed_steps

replay = functools.partial(replays.replay, devices=jax.devices()[:1])


@pytest.fixture(scope="module", autouse=True)
def _one_device() -> Iterator[None]:
    """Let replays take one device, as the run does; those of one config share their programs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replays, "replay", replay)
        cached = functools.cache(steps.Trainer)
        for module in (opened, steps):
            patch.setattr(module, "Trainer", cached)
        yield


@pytest.fixture(scope="module")
def rewound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that calls any rise of the loss or the gradient norm a spike: it is rewound once, then it halts."""
    root = tmp_path_factory.mktemp("replay")
    draw = random.Random(0)
    (root / "corpus").mkdir()
    for number in range(40):
        words = (draw.choice(["stream", "width", "of", "the", "norm"]) for _ in range(draw.randint(5, 60)))
        (root / "corpus" / f"{number:02d}.txt").write_text(" ".join(words))
    config = from_config_dict(
        {
            "model": {"layers": 2, "width": 8},
            "attention": {"heads": 2, "impl": "xla"},
            "mlp": {"width": 16},
            "residual": {"kind": "hc"},
            "data": {
                "source": f"text:{root}/corpus/*.txt",
                "sequence_length": 16,
                "cache_dir": str(root / "cache"),
                "holdout": 0.2,
            },
            "optimizer": {"lr": 1e-2},
            "schedule": {"kind": "constant"},
            "train": {"steps": 40, "batch_size": 8},
            "validation": {"every": 0, "batches": 1},
            "checkpoint": {"every": 3, "keep": 2},
            "monitor": {
                "probe_every": 20,
                "probe_sequences": 2,
                "tensorboard": False,
                "progress_every": 0,
                "zscore_window": 8,
                "zscore_min_history": 6,
                "zscore_threshold": 0.5,
            },
            "guard": {"on_spike": "rewind", "rewind_steps": 2, "skip_batches": 2, "max_rewinds": 1},
        }
    )
    assert runs.Run(config, root / "run", devices=jax.devices()[:1]).execute() == 3
    return root / "run"


def test_every_step_left_is_reproduced_bit_for_bit(rewound: Path) -> None:
    """It is, before and after the rewind, from a checkpoint and from the seed; batches that it left out stay out."""
    events = read_jsonl(rewound / "events.jsonl")
    (back,) = [event for event in events if event["event"] == "rewind"]
    metrics = {row["step"]: row for row in read_jsonl(rewound / "metrics.jsonl")}
    flagged = events[-2]["step"]  # what halted the run
    assert events[-1]["event"] == "halt" and back["to"] < flagged and back["skipped_batches"] == 2
    checkpoints = committed_steps(rewound)
    for step, first in ((flagged, None), (flagged, 1)):
        result = replay(rewound, step, first=first)
        assert result.differences == {}
        assert result.metrics["loss"] == metrics[step]["loss"]
        assert result.metrics["grad_norm"] == metrics[step]["grad_norm"]
        assert result.start == (max(done for done in checkpoints if done < step) if first is None else None)
        assert result.event is not None and result.event["batch"]["hash"] == result.batch_hash
        assert result.documents == result.event["batch"]["documents"]
        assert all(values.shape == (4,) for values in result.profile.values())
        assert "equal to the run's log, bit for bit" in render(result)


def test_a_log_that_is_not_reproduced_is_said(
    rewound: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = (rewound / "metrics.jsonl").read_text().splitlines()
    for name in ("config.json", "events.jsonl"):
        (tmp_path / name).write_bytes((rewound / name).read_bytes())
    row = read_jsonl(rewound / "metrics.jsonl")[0]
    (tmp_path / "metrics.jsonl").write_text(
        lines[0].replace(f'"loss":{row["loss"]}', f'"loss":{row["loss"] + 1}') + "\n"
    )
    assert replays.main([str(tmp_path), "--step", "1"]) == 1
    out = capsys.readouterr().out
    assert "initialised afresh from seed 0: there is no checkpoint before it" in out
    assert "DIFFERS from the run's log in loss" in out and f"logged {row['loss'] + 1}" in out


def test_another_topology_sees_the_same_batches(rewound: Path) -> None:
    *_, flagged, _ = read_jsonl(rewound / "events.jsonl")
    last = flagged["step"]
    said: list[str] = []
    first = last - 1
    other = replay(rewound, last, first=first, overrides={"residual.kind": "plain"}, say=said.append)
    assert other.batch_hash == flagged["batch"]["hash"]
    assert other.differences is None and other.start is None and other.first == first
    assert "initialised afresh from seed 0" in said[0] and "'hc' -> 'plain'" in said[0]
    np.testing.assert_array_equal(other.profile["forward_gain"], 1.0)


@pytest.mark.long
def test_another_rate_goes_on_from_the_checkpoint(rewound: Path) -> None:
    step = max(committed_steps(rewound)[0] + 1, 2)
    logged = {row["step"]: row for row in read_jsonl(rewound / "metrics.jsonl")}[step]
    result = replay(rewound, step, overrides={"optimizer.lr": 1.0})
    assert result.start == step - 1
    assert result.metrics["loss"] == logged["loss"] and result.metrics["lr"] == 1.0


@pytest.mark.long
def test_the_first_nan_is_named(rewound: Path) -> None:
    """The rate is so high that the step after it overflows."""
    step = max(committed_steps(rewound)[0], 1) + 2
    result = replay(rewound, step, first=step - 1, overrides={"optimizer.lr": 1e20}, nan=True)
    assert result.nan is not None and np.isnan(result.metrics["loss"])
    head, text, *calls, first = result.nan
    assert first == "the first output that is not finite: sublayer 0 (attention of block 0)"
    assert head.startswith("forward pass: ") and re.search(r" at \S*mhc/\w+/\w+\.py:\d+ in \w+$", head)
    assert text.strip() and calls and all(" called at " in line for line in calls)
    assert f"  first NaN    {head}\n" in render(result)
    assert "  first NaN    none, in the loss and the gradient\n" in render(dataclasses.replace(result, nan=[]))


def test_rewinds_that_a_later_one_undid_do_not_count() -> None:
    def rewind(to: int, skipped: int) -> dict[str, object]:
        return {"step": to + 9, "event": "rewind", "to": to, "skipped_batches": skipped}

    assert batches_left_out([]) == {}
    assert batches_left_out([rewind(4, 2), {"event": "spike", "step": 5}, rewind(4, 4)]) == {4: 4}
    assert batches_left_out([rewind(4, 2), rewind(8, 2)]) == {4: 2, 8: 2}
    assert batches_left_out([rewind(8, 2), rewind(4, 3), rewind(6, 1)]) == {4: 3, 6: 1}


def stored(**residual: object) -> Config:
    return resolve(from_config_dict({"residual": residual, "model": {"layers": 1}}), 258)


def test_derived_fields_follow_an_override_and_chosen_ones_stay() -> None:
    plain = change(stored(kind="mhc", sinkhorn="deepseek"), {"residual.kind": "plain"})
    assert plain == stored(kind="plain")
    assert change(stored(kind="mhc", n=2), {"residual.kind": "hc"}).residual.n == 2
    wider = change(stored(kind="hc"), {"model.width": 512})
    assert (wider.head_dim, wider.mlp.width) == (
        128,
        resolve(from_config_dict({"model": {"width": 512}}), 258).mlp.width,
    )
    assert change(stored(kind="hc"), {}) == stored(kind="hc")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda run: [str(run.parent / "nowhere"), "--step", "1"], "not a run folder"),
        (lambda run: [str(run), "--step", "0"], "--step: given 0, allowed: 1 to"),
        (lambda run: [str(run), "--step", "999"], "the steps that"),
        (lambda run: [str(run)], "--step"),
        (lambda run: [str(run), "--step", "2", "--from", "3"], "--from: given 3"),
        (lambda run: [str(run), "--step", "2", "--rows", "-1"], "--rows: given -1"),
        (lambda run: [str(run), "--step", "2", "--config.residual.kin=hc"], "did you mean residual.kind"),
        (lambda run: [str(run), "--step", "2", "--config.residual.kind=hcc"], "did you mean hc"),
        (lambda run: [str(run), "--step", "2", "--config.train.batch_size=4"], "decides the batches"),
        (lambda run: [str(run), "--step", "2", "--config.seed.data=4"], "decides the batches"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(
    rewound: Path, capsys: pytest.CaptureFixture[str], arguments: Callable[[Path], list[str]], message: str
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.run_main(replays.main, arguments(rewound))
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line


def test_a_replay_takes_no_more_cores_than_the_run_had(
    rewound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_json(rewound / "summary.json")["cores"] == len(os.sched_getaffinity(0))
    bound: list[list[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append(cores))
    write_json(tmp_path / "summary.json", {"cores": 2})
    replays.take_cores_of(tmp_path)
    assert not bound  # jax is loaded
    monkeypatch.delitem(sys.modules, "jax")
    for summary in ({"cores": 2}, {"cores": 3}, {"cores": 9}, {"cores": None}, {}):
        write_json(tmp_path / "summary.json", summary)
        replays.take_cores_of(tmp_path)
    replays.take_cores_of(tmp_path / "elsewhere")
    assert bound == [[3, 5]]


@pytest.mark.long
def test_a_run_without_a_step(tmp_path: Path, rewound: Path) -> None:
    (tmp_path / "config.json").write_bytes((rewound / "config.json").read_bytes())
    with pytest.raises(UserError, match="has not logged a step"):
        replay(tmp_path, 1)
