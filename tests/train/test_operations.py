"""Test what a run reports of itself while it runs: where its time goes, what it printed, and that it hangs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mhc.data.rows import encoding
from mhc.data.tokenizers import load
from mhc.files import read_json, read_jsonl
from mhc.monitor.phases import STALLED
from mhc.monitor.progress import Progress
from mhc.train.record import Record
from tests.small_runs import assert_equal_runs, config, run, tiny

ROOT = Path(__file__).parents[2]
STALL = 2.0  # seconds


pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture(scope="module")
def reference(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an undisturbed run of 12 steps, which tests must not change."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    assert run(config(corpus, "plain"), folder) == 0
    return folder


# Where the time goes --------------------------------------------------------------------------------------------------


def test_every_line_says_where_the_time_went(reference):
    metrics = read_jsonl(reference / "metrics.jsonl")
    for name, at in {"validation": {6, 12}, "probe": {3, 6, 9, 12}, "checkpoint": {5, 9}}.items():
        assert {record["step"] for record in metrics if record[f"{name}_seconds"] > 0} == at, name
    wall = [record["wall_seconds"] for record in metrics]
    assert wall == sorted(wall)
    parts = ("seconds", "checkpoint_seconds", "validation_seconds", "probe_seconds")
    assert sum(record[name] for record in metrics for name in parts) < wall[-1]
    assert metrics[0]["compile_seconds"] > 0 and not any(record["recompilations"] for record in metrics)
    assert all(record["memory_bytes"] is None for record in metrics)  # a CPU does not tell
    assert all(0 <= record["data_wait"] + record["compile_seconds"] <= record["seconds"] for record in metrics)


def test_goodput_and_spread_are_those_of_the_steps_alone(reference):
    metrics = read_jsonl(reference / "metrics.jsonl")
    alone = [record["seconds"] - record["compile_seconds"] for record in metrics]
    assert metrics[-1]["goodput"] == pytest.approx(sum(alone) / metrics[-1]["wall_seconds"])
    assert read_json(reference / "summary.json")["goodput"] == metrics[-1]["goodput"]
    assert min(alone) <= metrics[-1]["seconds_p50"] <= metrics[-1]["seconds_p95"] <= max(alone)
    assert metrics[0]["seconds_p50"] == metrics[0]["seconds_p95"] == pytest.approx(alone[0])


def test_steps_that_a_crash_undid_are_time_without_progress(corpus, reference, tmp_path, monkeypatch):
    """A run that dies after step 7 goes on from step 4: what it spent on 5 to 7 stays in the wall time."""
    folder, write = tmp_path / "run", Record.step

    class Crash(Exception):
        pass

    def step_or_crash(self: Record, at: int, *args: Any, **kwargs: Any) -> Any:
        if at == 8:
            raise Crash
        return write(self, at, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Record, "step", step_or_crash)
        with pytest.raises(Crash):
            run(config(corpus, "plain"), folder)
    spent = read_jsonl(folder / "metrics.jsonl")[-1]["wall_seconds"]
    assert "Crash" in (folder / "train.log").read_text()
    assert run(config(corpus, "plain"), folder) == 0
    metrics = read_jsonl(folder / "metrics.jsonl")
    assert metrics[4]["wall_seconds"] > spent > metrics[3]["wall_seconds"]
    standing = sum(record["seconds"] - record["compile_seconds"] for record in metrics)
    assert metrics[-1]["goodput"] == pytest.approx(standing / metrics[-1]["wall_seconds"])
    assert_equal_runs(folder, reference)
    log = (folder / "train.log").read_text().splitlines()
    assert sum("resuming after step 4" in line for line in log) == 1 and log[-1].split(" ")[1] == "finished"


def test_the_first_line_says_what_runs(corpus, reference):
    summary = read_json(reference / "summary.json")
    first = (reference / "train.log").read_text().splitlines()[0].partition(" ")[2]
    assert first == (
        f"{reference}: {summary['params']:,} parameters, corpus {corpus}, tokeniser bytes, 128 tokens a step, 1 × cpu, "
        "float32"
    )


def test_an_update_left_out_is_no_progress(corpus, tmp_path):
    made = config(corpus, "plain")
    fields: dict[str, Any] = {"tokens": 0, "seconds": 2.0, "mfu": None, "sources": {}, "validation": None}
    values = dict.fromkeys(("loss", "grad_norm", "update_norm", "param_norm", "lr", "logit_max", "log_z"), 1.0)

    class Norms:
        sublayers = (1.0, 1.0)

    def line(record: Record, step: int, skipped: int, wall: float) -> float:
        given = {**values, "skipped": skipped, "nonfinite": 0, "grad": Norms}
        spent = {"compile_seconds": 0.5, "wall_seconds": wall}
        record.step(step, given, spent=spent, **fields)
        return float(read_jsonl(tmp_path / "metrics.jsonl")[-1]["goodput"])

    record = Record(tmp_path, made, -1, Progress(9, every=0))
    assert line(record, 1, 0, 3.0) == 1.5 / 3.0
    assert line(record, 2, 1, 6.0) == 1.5 / 6.0  # left out
    assert line(record, 3, 1, 9.0) == 3.0 / 9.0
    record.close()
    again = Record(tmp_path, made, 3, Progress(9, every=0))
    assert line(again, 4, 1, 12.0) == 4.5 / 12.0
    again.close()


def test_a_run_of_an_older_version_goes_on(corpus, reference, tmp_path):
    """Its lines do not say where the time went."""
    folder = Path(shutil.copytree(reference, tmp_path / "run"))
    names = ("data_wait", "compile_seconds", "wall_seconds", "goodput", "seconds_p50", "recompilations")
    old = [{k: v for k, v in r.items() if k not in names} for r in read_jsonl(folder / "metrics.jsonl")]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in old))
    for name in ("run.json", "train.log"):
        (folder / name).unlink()
    stored = read_json(folder / "config.json")
    del stored["watchdog"]
    (folder / "config.json").write_text(json.dumps(stored))
    assert run(config(corpus, "plain", train={"steps": 13}), folder) == 0
    last = read_jsonl(folder / "metrics.jsonl")[-1]
    assert last["step"] == 13 and last["wall_seconds"] > sum(record["seconds"] for record in old)


# A run that hangs -----------------------------------------------------------------------------------------------------


def test_a_source_that_stalls_is_reported_in_time_and_accounted_for(corpus, reference, tmp_path, monkeypatch, capfd):
    """A document's text comes late, and no batches are made ahead, which would shorten the wait."""
    made = config(corpus, "plain", watchdog={"seconds": 0.5}, data={"prefetch": 0})
    source = type(encoding.open_corpus(made.data, load("bytes"), "train"))
    read, write, folder = source.__getitem__, Record.step, tmp_path / "run"
    armed, began, took = [False], [0.0], [0.0]

    def step(self: Record, at: int, *arguments: Any, **named: Any) -> Any:
        armed[0] |= at == 7  # the next validation, which reads documents too, is after step 12
        return write(self, at, *arguments, **named)

    def late(self: Any, index: int) -> Any:
        if armed[0]:
            armed[0], began[0] = False, time.time()
            time.sleep(STALL)
            took[0] = time.time() - began[0]
        return read(self, index)

    monkeypatch.setattr(Record, "step", step)
    monkeypatch.setattr(source, "__getitem__", late)
    assert run(made, folder) == 0
    assert took[0] >= STALL
    metrics = read_jsonl(folder / "metrics.jsonl")
    waited = [record["data_wait"] for record in metrics]
    assert max(waited[7:]) == pytest.approx(took[0], rel=0.1)
    assert all(record["data_wait"] <= record["seconds"] for record in metrics)  # of the same stretch of time
    # A busy machine may be slow at a checkpoint too.
    events = [event for event in read_jsonl(folder / "events.jsonl") if event.get("phase") == "data"]
    assert [event["event"] for event in events] == ["stall", "stall_over"]
    assert 0.5 <= events[0]["seconds"] < 1.0 and events[0]["time"] - began[0] < 1.0
    assert events[1]["seconds"] == pytest.approx(took[0], rel=0.1)
    for said in (capfd.readouterr().err, (folder / "train.log").read_text()):
        assert re.search(r"no progress for 0\.\d+ s: waiting for data, after step \d", said)
        assert "in late\n" in said and "MainThread" in said  # the stack of the thread that reads
        assert re.search(r"going on after \d[.\d]* s waiting for data, after step \d", said)
    assert read_json(folder / "summary.json")["stalls"] >= 1
    assert [r["loss"] for r in metrics] == [r["loss"] for r in read_jsonl(reference / "metrics.jsonl")]


@pytest.mark.process
def test_a_run_that_hangs_is_ended_where_that_is_wanted(corpus, reference, tmp_path):
    """In a process of its own the validation never ends; the same command goes on from the last checkpoint."""
    fields = tiny(corpus, "plain", watchdog={"seconds": 1.0, "compile_seconds": 60.0, "abort": True})
    program = (
        "import sys, time; from pathlib import Path; from mhc.train import run as runs\n"
        "from mhc.train.opened import Opened\n"
        "from mhc.config import from_config_dict\n"
        "real = Opened.validate\n"
        "def hang(self):\n"
        "    if self.standing.step == 12:\n"
        "        with self.phases('validation'):\n"
        "            time.sleep(600)\n"
        "    return real(self)\n"
        "Opened.validate = hang\n"
        f"sys.exit(runs.run(from_config_dict({fields!r}), {str(tmp_path / 'run')!r}))\n"
    )
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags},
    )
    assert done.returncode == STALLED, done.stderr
    assert "no progress for 1 s: in a validation, after step 12" in done.stderr and "in hang" in done.stderr
    assert "given up (watchdog.abort)" in (tmp_path / "run" / "train.log").read_text()
    assert run(config(corpus, "plain"), tmp_path / "run") == 0
    assert_equal_runs(tmp_path / "run", reference)
