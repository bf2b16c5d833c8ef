"""Test runs as processes on two devices: killed at random steps, stopped by SIGTERM, continued by the same command."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mhc.config import from_config_dict
from mhc.files import read_json, read_jsonl
from mhc.train.checkpoint import committed_steps
from tests.small_runs import BACKGROUND, assert_equal_runs, run, tiny, write_corpus
from tests.state_forms import state_forms

ROOT = Path(__file__).parents[2]
STEPS, DEVICES = 60, 2
START = 240.0  # seconds that a process may take to its first step on a busy machine


@pytest.fixture(scope="module")
def fields(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return fields of a run of 60 steps, checkpoints every 14."""
    corpus = write_corpus(tmp_path_factory.mktemp("corpus") / "texts")
    return tiny(
        corpus,
        "plain",
        train={"steps": STEPS},
        validation={"every": 30, "batches": 1},
        checkpoint={"every": 14},
        monitor={"probe_every": 20},
    )


@pytest.fixture(scope="module")
def reference(fields: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the undisturbed run, made in this process."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    assert run(from_config_dict(fields), folder, DEVICES) == 0
    return folder


def start(
    fields: dict[str, Any], folder: Path, workdir: str | None = None, *, through: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Start train.py on a config file of these fields.

    Args:
      workdir: where the run goes if not to the folder. through: the command that starts it.
    """
    file = folder.parent / "config.py"
    file.write_text(
        "import json\nfrom ml_collections import ConfigDict\n\n\n"
        f"def get_config():\n    return ConfigDict(json.loads({json.dumps(fields)!r}))\n"
    )
    flags = re.sub(r"(device_count)=\d+", rf"\1={DEVICES}", os.environ["XLA_FLAGS"])
    return subprocess.Popen(
        [*through, sys.executable, "train.py", "--config", str(file), "--workdir", workdir or str(folder)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags},
    )


def written(folder: Path) -> int:
    """Return the last step whose line is whole."""
    file = folder / "metrics.jsonl"
    records = read_jsonl(file) if file.is_file() else []
    return records[-1]["step"] if records else 0


def wait_for(process: subprocess.Popen[str], folder: Path, step: int) -> None:
    """Wait until the line of `step` is written, or the process ends."""
    end = time.monotonic() + START
    while written(folder) < step and process.poll() is None and time.monotonic() < end:
        time.sleep(0.002)


def strike(process: subprocess.Popen[str], folder: Path, step: int, number: signal.Signals) -> tuple[int, str]:
    """Send the signal once the line of `step` is written; return the exit code and stderr."""
    wait_for(process, folder, step)
    process.send_signal(number)
    _, said = process.communicate(timeout=START)
    return process.returncode, said


@pytest.mark.process
def test_a_run_killed_and_then_stopped_equals_the_undisturbed_one(fields, reference, tmp_path):
    """SIGKILL leaves the run as it is; SIGTERM saves and exits with 0."""
    folder = tmp_path / "run"
    code, _ = strike(start(fields, folder), folder, 3, signal.SIGKILL)
    assert code == -signal.SIGKILL and written(folder) < STEPS
    code, said = strike(start(fields, folder), folder, 10, signal.SIGTERM)
    assert code == 0 and "stopped and saved after step" in said and "Traceback" not in said
    stopped = committed_steps(folder)[-1]
    assert 10 <= stopped < STEPS and written(folder) == stopped
    assert [(e["event"], e["step"]) for e in read_jsonl(folder / "events.jsonl")][-1] == ("stopped", stopped)
    assert read_json(folder / "summary.json")["exit_reason"] == "stopped"
    assert run(from_config_dict(fields), folder, DEVICES) == 0
    assert_equal_runs(folder, reference, devices=DEVICES)


@pytest.mark.process
def test_a_run_killed_three_times_equals_the_undisturbed_one(fields, reference, tmp_path):
    """kill -9 comes at a random step of the first, second and third part; in the end no step is twice or missing."""
    folder, steps = tmp_path / "run", random.Random(time.time_ns())
    for third in range(3):
        at = steps.randint(third * 18 + 2, third * 18 + 16)
        code, said = strike(start(fields, folder), folder, at, signal.SIGKILL)
        assert code == -signal.SIGKILL, f"to be killed at {at}: exit {code}: {said}"
        assert written(folder) < STEPS
    process = start(fields, folder)
    _, said = process.communicate(timeout=START)
    assert process.returncode == 0, said
    assert "Traceback" not in said
    assert_equal_runs(folder, reference, devices=DEVICES)


@pytest.mark.process
@pytest.mark.parametrize("form", state_forms())
def test_every_form_of_state_goes_on_bit_for_bit_after_a_kill(form, fields, tmp_path):
    """The run is killed once its first checkpoint is there, with most steps to go."""
    folder = tmp_path / "run"
    made = {**fields, "train": {**fields["train"], "steps": 2 * STEPS}, "residual": state_forms()[form]}
    assert run(from_config_dict(made), tmp_path / "calm", DEVICES) == 0
    process, end = start(made, folder), time.monotonic() + START
    while not committed_steps(folder) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.002)
    process.kill()
    _, said = process.communicate(timeout=START)
    assert process.returncode == -signal.SIGKILL, said
    assert committed_steps(folder) and written(folder) < 2 * STEPS
    process = start(made, folder)
    _, said = process.communicate(timeout=START)
    assert process.returncode == 0 and "Traceback" not in said, said
    assert_equal_runs(folder, tmp_path / "calm", devices=DEVICES)


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_in_the_background_ignores_interrupts_and_saves_on_sigterm(fields, reference, tmp_path, workers):
    """A script starts it so by ``nohup … &``; every process gets the signals."""
    folder = tmp_path / "run"
    fields = {**fields, "data": {**fields["data"], "workers": workers}}
    process = start(fields, folder, through=BACKGROUND)
    wait_for(process, folder, 3)
    for number in (signal.SIGINT, signal.SIGHUP):
        os.killpg(process.pid, number)
    at = written(folder)
    wait_for(process, folder, at + 3)
    assert process.poll() is None and written(folder) >= at + 3
    os.killpg(process.pid, signal.SIGTERM)
    _, said = process.communicate(timeout=START)
    assert process.returncode == 0 and "stopped and saved after step" in said and "Traceback" not in said, said
    assert at + 3 <= committed_steps(folder)[-1] < STEPS
    assert run(from_config_dict(fields), folder, DEVICES) == 0
    assert_equal_runs(folder, reference, devices=DEVICES)


@pytest.mark.process
def test_worker_processes_leave_signals_to_the_run_and_end_with_it(fields, reference, tmp_path):
    """As from a terminal or a scheduler, every process gets the signal; then the run alone is killed."""
    folder = tmp_path / "run"
    fields = {**fields, "data": {**fields["data"], "workers": 2}}
    process = start(fields, folder)
    wait_for(process, folder, 3)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=START)
    assert process.returncode == 0 and "stopped and saved after step" in said and "Traceback" not in said, said
    process = start(fields, folder)
    wait_for(process, folder, committed_steps(folder)[-1] + 2)
    process.kill()
    process.communicate(timeout=30.0)  # to the end of stderr, which every process holds that is left
    assert written(folder) < STEPS
    assert run(from_config_dict(fields), folder, DEVICES) == 0
    assert_equal_runs(folder, reference, devices=DEVICES)
