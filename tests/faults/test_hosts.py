"""Test two processes of four devices each, as two hosts: one run, equal to one process with eight; one of them lost."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mhc.config import from_config_dict
from mhc.distributed import LOST
from mhc.files import read_json, read_jsonl
from mhc.train import run as runs
from mhc.train.checkpoint import committed_steps
from tests.faults.faulty_host import NOT_FINITE
from tests.small_runs import final_state, lines, run, tiny, write_corpus

ROOT = Path(__file__).parents[2]
START = 300.0  # seconds that processes may take to their first step on a busy machine
TIMEOUT = 10  # distributed.timeout
STEPS = 12

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def fields(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return fields of a run of 12 steps: parameters in four shards, a replica each process, checkpoints every 4."""
    corpus = write_corpus(tmp_path_factory.mktemp("corpus") / "texts")
    return tiny(corpus, "mhc", train={"steps": STEPS}, mesh={"data": 2, "fsdp": 4})


def start(
    fields: dict[str, Any],
    folder: Path,
    program: Sequence[str] = ("train.py",),
    second: dict[str, dict[str, Any]] | None = None,
    workdir: str | None = None,
) -> list[subprocess.Popen[str]]:
    """Start the run on two processes of four devices each.

    Args:
      second: fields that only the second process has.
      workdir: where the run goes if not to the folder.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = re.sub(r"(device_count)=\d+", r"\1=4", os.environ["XLA_FLAGS"])
    started = []
    for number in range(2):
        cluster = {"cluster": "address", "coordinator": address, "processes": 2, "process_id": number}
        file = folder.parent / f"config{number}.py"
        given = {**fields, "distributed": {**cluster, "timeout": TIMEOUT, "start_timeout": int(START)}}
        for group, changes in (second or {}).items() if number else ():
            given[group] = {**given[group], **changes}
        file.write_text(
            "import json\nfrom ml_collections import ConfigDict\n\n\n"
            f"def get_config():\n    return ConfigDict(json.loads({json.dumps(given)!r}))\n"
        )
        with (folder.parent / f"stderr{number}").open("w") as stderr:
            started.append(
                subprocess.Popen(
                    [sys.executable, *program, "--config", str(file), "--workdir", workdir or str(folder)],
                    cwd=ROOT,
                    text=True,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    env={**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags},
                )
            )
    return started


def said(folder: Path, number: int) -> str:
    """Return what a process wrote to stderr, without the runtime's messages about itself."""
    text = (folder.parent / f"stderr{number}").read_text()
    runtime = r"\[Gloo\]|[WI]\d{4} |process \d of 2: joining"
    return "\n".join(line for line in text.splitlines() if not re.match(runtime, line))


def ends(processes: Sequence[subprocess.Popen[str]], seconds: float = START) -> list[int]:
    return [process.wait(timeout=seconds) for process in processes]


def written(folder: Path) -> int:
    """Return the last step whose line is whole."""
    file = folder / "metrics.jsonl"
    records = read_jsonl(file) if file.is_file() else []
    return records[-1]["step"] if records else 0


def reach(folder: Path, step: int, processes: Sequence[subprocess.Popen[str]]) -> None:
    """Wait until the line of a step is written."""
    end = time.monotonic() + START
    while written(folder) < step:
        assert all(process.poll() is None for process in processes) and time.monotonic() < end
        time.sleep(0.002)


def longer(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields of so many steps that a signal comes in time."""
    return {**fields, "train": {**fields["train"], "steps": 20_000}, "schedule": {"kind": "constant", "decay_steps": 1}}


@pytest.fixture(scope="module")
def two(fields: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the undisturbed run of two processes."""
    folder = tmp_path_factory.mktemp("two") / "run"
    assert ends(start(fields, folder)) == [0, 0], said(folder, 0) + said(folder, 1)
    return folder


def assert_alike(folder: Path, other: Path) -> None:
    """Check for equal curves and parameters, up to the order of sums over devices, and the same place in the data."""
    exact = ("step", "tokens", "skipped", "nonfinite")
    mine, theirs = lines(folder, "metrics"), lines(other, "metrics")
    assert len(mine) == len(theirs) == STEPS
    for a, b in zip(mine, theirs, strict=True):
        assert [a[name] for name in exact] == [b[name] for name in exact]
        for name in (
            "loss",
            "grad_norm",
            "param_norm",
            *(("val_loss", "val_bits_per_byte") if "val_loss" in b else ()),
        ):
            np.testing.assert_allclose(a[name], b[name], rtol=2e-6)
    states = [final_state(run_, devices) for run_, devices in ((folder, 8), (other, 8))]
    assert states[0][2] == states[1][2]
    for a, b in zip(jax.tree.leaves(states[0][1].params), jax.tree.leaves(states[1][1].params), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5)


def test_two_processes_equal_one(fields, two, tmp_path):
    folder = tmp_path / "run"
    assert run(from_config_dict(fields), folder, 8) == 0
    assert_alike(two, folder)
    assert said(two, 1) == ""  # the first process speaks for all
    starts = ("parameters", "validation", "compiling")  # what a run says before its first step
    assert [start in line for start, line in zip(starts, said(two, 0).splitlines(), strict=True)] == [True] * 3


@pytest.mark.parametrize("lost", [0, 1])
def test_one_process_is_killed_and_the_run_goes_on_exactly(lost, fields, two, tmp_path):
    folder, other = tmp_path / "run", 1 - lost
    many = longer(fields)
    processes = start(many, folder)
    reach(folder, 6, processes)
    processes[lost].kill()
    began = time.monotonic()
    code = processes[other].wait(timeout=START)
    assert time.monotonic() - began < TIMEOUT + 20
    assert processes[lost].wait() == -signal.SIGKILL
    if code == LOST:
        assert "another process is lost" in said(folder, other) and "start all of them again" in said(folder, other)
    else:  # the runtime's own end, with its own words
        assert code == -signal.SIGABRT and "another task died" in (folder.parent / f"stderr{other}").read_text()
    assert "Traceback" not in said(folder, other)
    processes = start(many, folder)
    reach(folder, 30, processes)
    processes[other].send_signal(signal.SIGTERM)
    assert ends(processes) == [0, 0]
    metrics, expected = lines(folder, "metrics"), lines(two, "metrics")
    assert [record["step"] for record in metrics] == list(range(1, len(metrics) + 1))
    assert metrics[:STEPS] == expected
    assert lines(folder, "probes")[:4] == lines(two, "probes")[:4]


@pytest.mark.parametrize("hung", [0, 1])
def test_a_process_that_hangs_ends_the_other_within_the_timeout(hung, fields, tmp_path):
    folder = tmp_path / "run"
    processes = start(longer(fields), folder)
    reach(folder, 2, processes)
    processes[hung].send_signal(signal.SIGSTOP)
    began = time.monotonic()
    try:
        assert processes[1 - hung].wait(timeout=TIMEOUT + 20) != 0
        assert time.monotonic() - began < TIMEOUT + 20
    finally:
        for process in processes:
            process.kill()
            process.wait()
    text = (folder.parent / f"stderr{1 - hung}").read_text()
    assert "another process is lost" in text or "another task died" in text


@pytest.mark.parametrize(("number", "to"), [(signal.SIGTERM, 1), (signal.SIGTERM, 0), (signal.SIGINT, 0)])
def test_a_signal_to_one_process_stops_both_after_the_same_step(number, to, fields, two, tmp_path):
    folder = tmp_path / "run"
    many = longer(fields)
    processes = start(many, folder)
    reach(folder, 3, processes)
    processes[to].send_signal(number)
    assert ends(processes) == [0, 0]
    assert "Traceback" not in said(folder, 0) + said(folder, 1)
    stopped = committed_steps(folder)[-1]
    assert written(folder) == stopped and read_json(folder / "summary.json")["exit_reason"] == "stopped"
    assert [(e["event"], e["step"]) for e in read_jsonl(folder / "events.jsonl")] == [("stopped", stopped)]
    assert all(a == b for a, b in zip(lines(folder, "metrics"), lines(two, "metrics"), strict=False))


@pytest.mark.parametrize("devices", [8, 1])
def test_a_checkpoint_of_two_processes_goes_on_in_one(devices, fields, two, tmp_path):
    """It goes on, on eight devices and on one, with the order of the data kept."""
    folder = tmp_path / "run"
    processes = start({**fields, "train": {**fields["train"], "steps": 8}}, folder)
    assert ends(processes) == [0, 0]
    mesh = {"data": 2, "fsdp": 4} if devices == 8 else {"data": 1, "fsdp": 1}
    assert run(from_config_dict({**fields, "mesh": mesh}), folder, devices) == 0
    mine, theirs = lines(folder, "metrics"), lines(two, "metrics")
    assert [line["step"] for line in mine] == list(range(1, STEPS + 1))
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-5)
    host = final_state(folder, devices)[2]
    assert host["data"] == final_state(two, 8)[2]["data"]


def test_a_checkpoint_of_one_process_goes_on_in_two(fields, two, tmp_path):
    folder = tmp_path / "run"
    assert run(from_config_dict({**fields, "train": {**fields["train"], "steps": 8}}), folder, 8) == 0
    assert ends(start(fields, folder)) == [0, 0], said(folder, 0)
    for a, b in zip(lines(folder, "metrics"), lines(two, "metrics"), strict=True):
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-5)


def test_an_alarm_and_a_rewind_are_those_of_one_process(fields, tmp_path):
    """A loss that is not finite at step 7, and again after the rewind, gives the same events of the whole batch."""
    guard = {"on_nonfinite": "rewind", "rewind_steps": 1, "skip_batches": 1, "max_rewinds": 1}
    fields = {**fields, "guard": guard}
    program = ("-m", "tests.faults.faulty_host")
    assert ends(start(fields, tmp_path / "two", program)) == [3, 3], said(tmp_path / "two", 0)
    made = from_config_dict(fields)
    assert runs.Run(made, tmp_path / "one", faults=NOT_FINITE, devices=jax.devices()[:8]).execute() == 3
    mine, theirs = (lines(tmp_path / name, "events", ("time",)) for name in ("two", "one"))
    assert [e["event"] for e in mine] == ["nonfinite", "rewind", "nonfinite", "halt"]
    for a, b in zip(mine, theirs, strict=True):
        for name in ("event", "step", "batch", "to", "tensor", "reason", "skipped_batches"):
            assert a.get(name) == b.get(name)
    assert len(mine[0]["batch"]["documents"]) == 8
    assert committed_steps(tmp_path / "two") == committed_steps(tmp_path / "one")


def test_a_mistake_of_one_process_is_said_by_both(fields, tmp_path):
    """Each writes one line and exits with code 2; nothing is written to disk."""
    folder = tmp_path / "run"
    assert ends(start(fields, folder, second={"optimizer": {"lr": 0.5}})) == [2, 2]
    assert said(folder, 1) == "error: optimizer.lr: given 0.5, allowed: what process 0 has, 0.01"
    assert said(folder, 0) == "error: process 1: optimizer.lr: given 0.5, allowed: what process 0 has, 0.01"
    assert not folder.exists()
