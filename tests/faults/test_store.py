"""Test runs in an object store as processes: killed, and as two hosts that share one run."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import pytest

from mhc import remote
from mhc.config import from_config_dict
from mhc.eval import replay
from mhc.eval.compare.recompute import recompute
from mhc.eval.compare.runs import load
from mhc.eval.generate import __main__ as generate
from mhc.train.checkpoint import committed_steps
from tests.faults import test_hosts as hosts
from tests.faults import test_processes as processes
from tests.object_store import ObjectStore, serving
from tests.small import assert_identical
from tests.small_runs import final_state, lines, run, tiny, write_corpus

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(find_spec("gcsfs") is None, reason="pip install 'mhc-jax[gcs]'"),
]

STEPS = 12


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with serving("bucket") as made:
        yield made


@pytest.fixture(scope="module")
def fields(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return fields of a run of 12 steps, parameters in four shards, checkpoints every 4."""
    corpus = write_corpus(tmp_path_factory.mktemp("corpus") / "texts")
    return tiny(corpus, "plain", train={"steps": STEPS}, mesh={"data": 2, "fsdp": 4})


@pytest.fixture(scope="module")
def reference(fields: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the local run of two processes."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    assert hosts.ends(hosts.start(fields, folder)) == [0, 0], hosts.said(folder, 0)
    return folder


def reach(store: ObjectStore, name: str, started: Sequence[subprocess.Popen[str]]) -> None:
    """Wait until an object is there."""
    end = time.monotonic() + hosts.START
    while not store.names("bucket", name):
        assert all(process.poll() is None for process in started) and time.monotonic() < end
        time.sleep(0.05)


def test_two_processes_share_a_run_and_one_is_killed(store, fields, reference, tmp_path):
    """What both leave is no obstacle to the two that follow, since on this machine they are known to be dead."""
    place, folder = "gs://bucket/two", tmp_path / "two"
    many = {**fields, "train": {**fields["train"], "steps": 20_000}}
    many["schedule"] = {"kind": "constant", "decay_steps": 1}
    started = hosts.start(many, folder, workdir=place)
    reach(store, "two/checkpoints/8/commit_success.txt", started)
    started[1].kill()
    assert started[0].wait(timeout=hosts.START) != 0
    started[1].wait()
    committed = committed_steps(remote.path(place))
    began = time.monotonic()
    started = hosts.start(many, folder, workdir=place)
    reach(store, f"two/checkpoints/{committed[-1] + 8}/commit_success.txt", started)
    started[0].send_signal(signal.SIGTERM)
    assert hosts.ends(started) == [0, 0]
    assert "Traceback" not in hosts.said(folder, 0) + hosts.said(folder, 1)
    assert time.monotonic() - began < hosts.START
    copy = remote.local_copy(place)
    assert lines(copy, "metrics")[:STEPS] == lines(reference, "metrics")
    assert json.loads((copy / "summary.json").read_text())["exit_reason"] == "stopped"
    assert not store.names("bucket", "two/owner")


def test_a_process_killed_and_started_again_equals_the_undisturbed_one(store, fields, tmp_path):
    fields = {**fields, "mesh": {}, "train": {**fields["train"], "steps": 40}}
    place = "gs://bucket/killed"
    assert run(from_config_dict(fields), tmp_path / "reference", processes.DEVICES) == 0
    process = processes.start(fields, tmp_path / "killed", workdir=place)
    reach(store, "killed/checkpoints/8/commit_success.txt", [process])
    process.kill()
    process.communicate()
    assert store.names("bucket", "killed/owner")
    process = processes.start(fields, tmp_path / "killed", workdir=place)
    _, said = process.communicate(timeout=hosts.START)
    assert process.returncode == 0 and "Traceback" not in said, said
    copy = remote.local_copy(place)
    for name in ("metrics", "probes"):
        assert lines(copy, name) == lines(tmp_path / "reference", name)
    ours, theirs = (final_state(folder, 2) for folder in (remote.path(place), tmp_path / "reference"))
    assert ours[::2] == theirs[::2]
    assert_identical(ours[1], theirs[1])

    arms = load([place])[1]
    again = recompute(arms[0])
    assert again.step == 40 and again.difference is not None and again.difference < 1e-3
    assert replay.replay(place, 39, devices=jax.devices()[: processes.DEVICES]).differences == {}
    assert generate.main(["--checkpoint", f"{place}/checkpoints/40", "--prompt", "the", "--max_new_tokens", "4"]) == 0
