"""Test runs in an object store: equal to local ones, killed and resumed, locked, read by programs, and mistakes.

The store is a server on loopback that speaks Google Cloud Storage's JSON API: gcsfs, orbax and TensorStore are the real
ones, the service is not.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import train
from mhc import cli, remote, run_folder
from mhc.config import Config
from mhc.errors import UserError
from mhc.eval.compare import runs as reading
from mhc.eval.compare.__main__ import compare
from mhc.files import read_json
from mhc.interop.export import card, export
from mhc.monitor.probes import compile_probe
from mhc.train import start
from mhc.train.checkpoint import Checkpoints, committed_steps, find_checkpoint, load_run
from mhc.train.record import Record
from tests import small_runs
from tests.object_store import ObjectStore, serving
from tests.small import assert_identical, trainer
from tests.small_runs import final_state, lines, resolved, run

# Not imported here: it reads its settings once.
pytestmark = pytest.mark.skipif(find_spec("gcsfs") is None, reason="pip install 'mhc-jax[gcs]'")

CONFIG = Path(__file__).parents[1] / "configs" / "demo.py"


@pytest.fixture(scope="module", autouse=True)
def _programs_are_compiled_once() -> Iterator[None]:
    """Share a Trainer and its programs, since the runs of this module have one config."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mhc.train.opened.Trainer", lambda run_config, mesh, faults: trainer(run_config))
        patch.setattr("mhc.monitor.probes.compile_probe", functools.cache(compile_probe))
        yield


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    """Return a store with two buckets, to which every client of this process talks."""
    with serving("bucket", "private") as server:
        yield server


def config(corpus: str, **groups: dict[str, Any]) -> Config:
    """Return the config of these runs, which is small to compile."""
    return small_runs.config(corpus, "plain", **groups)


@pytest.fixture(scope="module")
def reference(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run in a local folder."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    assert run(config(corpus), folder) == 0
    return folder


@pytest.fixture(scope="module")
def finished(store: ObjectStore, corpus: str) -> str:
    """Return the same run in the store, never interrupted; no checkpoint was committed before its lines."""
    ahead = []

    def watch(method: str, bucket: str, name: str | None) -> None:
        if method in ("POST", "PUT") and name and name.endswith("/commit_success.txt") and "/state/" not in name:
            written = store.buckets[bucket]["runs/whole/metrics.jsonl"].content.splitlines()
            ahead.append((int(name.split("/")[3]), json.loads(written[-1])["step"]))

    store.failing = watch
    try:
        assert run(config(corpus), "gs://bucket/runs/whole") == 0
    finally:
        store.failing = lambda method, bucket, name: None
    assert {step for step, _ in ahead} == {4, 8, 12}
    assert all(logged >= step for step, logged in ahead)
    return "gs://bucket/runs/whole"


def assert_equal_runs(place: str, reference: Path) -> None:
    """Compare a run in the store with the local one, as `tests.small_runs.assert_equal_runs` does."""
    copy = remote.local_copy(place)
    assert [record["step"] for record in lines(copy, "metrics")] == list(range(1, 13))
    for name in ("metrics", "probes"):
        assert lines(copy, name) == lines(reference, name)
    assert (copy / "config.json").read_bytes() == (reference / "config.json").read_bytes()
    ours, theirs = (read_json(folder / "summary.json") for folder in (copy, reference))
    clock = dict.fromkeys(("seconds", "tokens_per_second", "goodput"), 0)
    assert {**ours, **clock} == {**theirs, **clock}
    step, state, host = final_state(remote.path(place))
    expected_step, expected_state, expected_host = final_state(reference)
    assert (step, host) == (expected_step, expected_host)
    assert_identical(state, expected_state)


def spools() -> list[Path]:
    """Return the files of runs in this machine's spool."""
    base = Path(tempfile.gettempdir()) / f"mhc-{os.getuid()}"
    return [path for path in base.glob("*/*") if path.name != ".lock"]


@pytest.fixture(autouse=True)
def _own_spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


# Training -------------------------------------------------------------------------------------------------------------


def test_a_run_in_a_store_equals_a_local_one(store, finished, reference):
    assert_equal_runs(finished, reference)
    top = {name.split("/")[2] for name in store.names("bucket", "runs/whole/")}
    lines = {"metrics.jsonl", "probes.jsonl", "events.jsonl"}
    assert top == {"checkpoints", "config.json", "corpus.json", "run.json", "summary.json", "train.log", *lines}


def test_nothing_is_done_where_the_run_is_finished(store, finished, corpus):
    before = dict(store.buckets["bucket"])
    assert run(config(corpus), finished) == 0
    after = {name: stored for name, stored in store.buckets["bucket"].items() if not name.endswith(run_folder.OWNER)}
    assert after == before


class Killed(Exception):
    """Stands for SIGKILL."""


def killed_at(step: int, store: ObjectStore, run_config: Any, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave in the store exactly what a machine leaves that vanishes once the line of a step is written."""
    left: dict[str, Any] = {}
    write = Record.step

    def dies(self: Record, number: int, *args: Any, **named: Any) -> Any:
        alarm = write(self, number, *args, **named)
        if number == step:
            with store.lock:
                left.update(store.buckets["bucket"])
            raise Killed
        return alarm

    with monkeypatch.context() as patch:
        patch.setattr(Record, "step", dies)
        with pytest.raises(Killed):
            run(run_config, folder)
    name = f"{folder.removeprefix('gs://bucket/')}/{run_folder.OWNER}"
    owner = {**json.loads(left[name].content), "machine": "another", "time": time.time() - run_folder.STALE_SECONDS - 1}
    with store.lock:
        store.buckets["bucket"] = left
        store.put("bucket", name, json.dumps(owner).encode())
    shutil.rmtree(Path(tempfile.gettempdir()) / f"mhc-{os.getuid()}")


@pytest.mark.parametrize("steps", [(10,), pytest.param((3, 6, 12), marks=pytest.mark.process)])
def test_a_killed_run_is_resumed_on_another_machine_and_equals_the_undisturbed_one(
    store, corpus, reference, monkeypatch, steps
):
    folder = "gs://bucket/runs/killed"
    with store.lock:
        for name in [name for name in store.buckets["bucket"] if name.startswith("runs/killed/")]:
            del store.buckets["bucket"][name]
    for step in steps:
        killed_at(step, store, config(corpus), folder, monkeypatch)
        committed = committed_steps(remote.path(folder))
        assert committed if step > 8 else step > 4 or not committed
    assert run(config(corpus), folder) == 0
    assert_equal_runs(folder, reference)
    assert not spools()
    assert not [name for name in store.names("bucket", "runs/killed") if name.endswith(run_folder.OWNER)]


def test_an_uncommitted_checkpoint_is_not_seen_and_its_remains_go(store, finished, corpus):
    copied(store, "runs/whole", "runs/torn")
    with store.lock:
        del store.buckets["bucket"]["runs/torn/checkpoints/12/commit_success.txt"]
    torn = remote.path("gs://bucket/runs/torn")
    assert committed_steps(torn) == [8]
    assert find_checkpoint("gs://bucket/runs/torn")[1] == 8
    with store.lock:
        store.put("bucket", "runs/torn/checkpoints/11/remains", b"of another save that did not end")
    Checkpoints(torn, config(corpus).checkpoint, read_only=True).close()
    assert store.names("bucket", "runs/torn/checkpoints/11")
    checkpoints = Checkpoints(torn, config(corpus).checkpoint)
    assert checkpoints.latest() == 8 and checkpoints.steps() == [8]
    checkpoints.close()
    end = time.monotonic() + 20  # orbax deletes in a thread, and waits for it before it saves
    while len(steps := {name.split("/")[3] for name in store.names("bucket", "runs/torn/checkpoints/")}) > 1:
        assert time.monotonic() < end, steps
        time.sleep(0.02)
    assert steps == {"8"}


def copied(store: ObjectStore, source: str, target: str) -> None:
    """Copy objects within the bucket."""
    with store.lock:
        for name in [name for name in store.buckets["bucket"] if name.startswith(f"{source}/")]:
            store.put("bucket", target + name.removeprefix(source), store.buckets["bucket"][name].content)


def test_another_config_is_refused_and_nothing_is_written(store, finished, corpus):
    before = dict(store.buckets["bucket"])
    with pytest.raises(UserError, match=r"model\.width"):
        run(config(corpus, model={"width": 16}), finished)
    assert store.buckets["bucket"] == before


# Reading --------------------------------------------------------------------------------------------------------------


def test_programs_read_a_run_in_a_store_and_write_nothing_there(store, finished, reference, corpus, tmp_path):
    before = dict(store.buckets["bucket"])
    assert_identical(load_run(finished, 8).params, load_run(reference, 8).params)
    with pytest.raises(UserError, match="no checkpoint of step 9; there are 8, 12"):
        load_run(finished, 9)

    run_config = resolved(config(corpus, train={"init_from": f"{finished}@8"}))
    assert_identical(start.initial_state(trainer(run_config)).params, load_run(reference, 8).params)
    run_config = resolved(config(corpus, train={"init_from": f"{finished}@eight"}))
    with pytest.raises(UserError, match=r"train\.init_from: .*@eight: given step 'eight'"):
        start.source(run_config)

    text = (export(finished, tmp_path / "exported", names="ours") / "README.md").read_text()
    assert text == card(reference, 12, find_checkpoint(reference)[0], None).replace("# run\n", "# whole\n", 1)
    assert store.buckets["bucket"] == before


def test_a_comparison_takes_runs_from_a_store_and_from_a_disk(store, finished, reference, tmp_path):
    copied(store, "runs/whole", "more/group/arm")
    _, arms, _ = reading.load(["gs://bucket/more"])
    assert [(arm.name, str(arm.source)) for arm in arms] == [("group/arm", "gs://bucket/more/group/arm")]
    _, arms, _ = reading.load([finished, reference])
    assert [arm.name for arm in arms] == ["gs/bucket/runs/whole", str(reference).lstrip("/")]
    assert arms[0].metrics[-1]["loss"] == arms[1].metrics[-1]["loss"]
    with pytest.raises(UserError, match="--out is needed"):
        compare([finished], recompute_gains=False)
    with pytest.raises(UserError, match="--out: given gs://bucket/report, allowed: a local folder"):
        compare([finished], "gs://bucket/report", recompute_gains=False)
    with pytest.raises(UserError, match="gs://bucket/none: no such folder"):
        compare(["gs://bucket/none"], tmp_path)


# The lock -------------------------------------------------------------------------------------------------------------

ELSEWHERE = {"id": "theirs", "host": "vm-1", "process": 7, "machine": "another", "started": "today", "beat": 3}


class Clock:
    """Replaces the clock: only sleep advances it, and calls `meanwhile`."""

    def __init__(self, meanwhile: Any = lambda: None):
        self.now, self.meanwhile = 1000.0, meanwhile

    def time(self) -> float:
        return self.now

    monotonic = time

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.meanwhile()


@pytest.fixture
def owned(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that writes a folder's owner, whose last heartbeat has a given age; it returns the clock."""

    def make(age: float, **fields: Any) -> Clock:
        clock = Clock()
        monkeypatch.setattr(run_folder, "time", clock)
        with store.lock:
            owner = {**ELSEWHERE, "time": clock.now - age, **fields}
            store.put("bucket", f"owned/{run_folder.OWNER}", json.dumps(owner).encode())
        return clock

    yield make
    store.buckets["bucket"].pop(f"owned/{run_folder.OWNER}", None)


def wait() -> None:
    run_folder.open_folder("gs://bucket/owned").wait_until_free()


def test_a_run_that_gives_signs_of_life_is_left_alone(store, owned):
    clock = owned(5.0)
    clock.meanwhile = lambda: owned(0.0, beat=4)
    with pytest.raises(UserError, match=r"process 7 of vm-1, started today, is training in this folder.*owner.json"):
        wait()


def test_a_run_that_gives_none_counts_as_gone_after_two_minutes(owned, caplog):
    clock = owned(50.0)
    wait()
    assert clock.now == pytest.approx(1000.0 + run_folder.STALE_SECONDS - 50.0)
    assert "waiting up to 70 s" in caplog.text
    clock = owned(run_folder.STALE_SECONDS + 1)
    wait()
    assert clock.now == 1000.0
    clock = owned(-1e6)  # its clock is ahead
    wait()
    assert clock.now == pytest.approx(1000.0 + run_folder.STALE_SECONDS)


def test_a_process_of_this_machine_is_asked_whether_it_lives(owned):
    clock = owned(1.0, machine=run_folder._machine(), process=os.getpid())
    with pytest.raises(UserError, match="is training in this folder"):
        wait()
    clock = owned(1.0, machine=run_folder._machine(), process=2**22 + 1)  # above what Linux gives out
    wait()
    assert clock.now == 1000.0


def test_of_two_runs_the_one_whose_folder_was_taken_stops_and_writes_no_more(store):
    first, second = (run_folder.open_folder("gs://bucket/taken", number) for number in (0, 1))

    def lose() -> None:
        with first.held(writes=True):
            (first.files / "metrics.jsonl").write_text("ours\n")
            first.push()
            with second.held(writes=True):
                (first.files / "metrics.jsonl").write_text("ours\nand more\n")
                first.push()

    with pytest.raises(UserError, match=r"it lost its folder: process .* took it"):
        lose()
    assert store.read("bucket", "taken/metrics.jsonl") == b"ours\n"


def test_a_folder_in_a_store_has_one_process_of_this_machine_at_a_time(store):
    first, second = (run_folder.open_folder("gs://bucket/taken") for _ in range(2))
    with first.held(writes=True):
        with pytest.raises(UserError, match="gs://bucket/taken: another process is training"), second.held(writes=True):
            pass
        first.push()
    assert not store.names("bucket", "taken/owner")


# The mirror -----------------------------------------------------------------------------------------------------------


def test_files_that_changed_are_copied_whole_and_the_summary_last(store, monkeypatch):
    order: list[str] = []

    def watch(method: str, bucket: str, name: str | None) -> None:
        name = (name or "").removeprefix("mirror/")
        if method == "POST" and name != run_folder.OWNER and order[-1:] != [name]:  # one upload may take two requests
            order.append(name)

    home = run_folder.open_folder("gs://bucket/mirror")
    with home.held(writes=True):
        monkeypatch.setattr(store, "failing", watch)
        for name in ("summary.json", "tensorboard/events", "wandb/.hidden/x", ".metrics.jsonl.1.tmp", "metrics.jsonl"):
            (home.files / name).parent.mkdir(parents=True, exist_ok=True)
            (home.files / name).write_text(name)
        (home.files / "link").symlink_to("summary.json")
        home.push()
        assert order == ["metrics.jsonl", "tensorboard/events", "summary.json"]
        with (home.files / "metrics.jsonl").open("a") as file:
            file.write(" and more")
        home.push()
        order.append("once more")
        home.push()
        assert order[3:] == ["metrics.jsonl", "once more"]
        (home.files / "metrics.jsonl").write_text("the end")
    assert order[5:] == ["metrics.jsonl"]
    with home.held(writes=True):
        assert (home.files / "metrics.jsonl").read_text() == "the end"
        assert not (home.files / "tensorboard").exists()
    assert len(order) == 6


def test_a_thread_copies_now_and_then_but_takes_no_large_share_of_the_time(store, monkeypatch):
    monkeypatch.setattr(run_folder, "HEARTBEAT_SECONDS", 0.01)
    monkeypatch.setattr(run_folder, "COPY_SECONDS", 0.0)
    home = run_folder.open_folder("gs://bucket/thread")
    assert isinstance(home, run_folder.MirroredFolder)
    with home.held(writes=True):
        (home.files / "metrics.jsonl").write_text("a line\n")
        end = time.monotonic() + 20
        while not store.names("bucket", "thread/metrics") and time.monotonic() < end:
            time.sleep(0.01)
        assert store.read("bucket", "thread/metrics.jsonl") == b"a line\n"
        slow = 0.05  # seconds that each write takes now
        monkeypatch.setattr(store, "failing", lambda method, *_: time.sleep(slow) if method == "POST" else None)
        (home.files / "metrics.jsonl").write_text("two lines\n\n")
        home.push()
        assert home.due > time.monotonic() + 0.9 * slow / run_folder.COPY_SHARE


def test_what_cannot_be_copied_at_a_run_s_end_stays_on_the_disk(store, monkeypatch, caplog):
    home = run_folder.open_folder("gs://bucket/kept")

    def fail() -> None:
        with home.held(writes=True):
            (home.files / "metrics.jsonl").write_text("a line\n")
            monkeypatch.setattr(store, "failing", lambda method, bucket, name: 403 if method == "POST" else None)
            raise Killed

    with pytest.raises(Killed):
        fail()
    assert (home.files / "metrics.jsonl").read_text() == "a line\n" and str(home.files) in caplog.text


# Mistakes -------------------------------------------------------------------------------------------------------------


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the line with which train.py refuses a command, with code 2."""
    with pytest.raises(SystemExit) as left:
        cli.run_main(train.main, ["--config", str(CONFIG), *arguments])
    message = capsys.readouterr().err
    assert left.value.code == 2 and message.startswith("error: ") and message.count("\n") == 1
    return message


@pytest.mark.parametrize(
    ("workdir", "message"),
    [
        ("s3://bucket/a", "allowed: a local path, or gs://BUCKET/PATH"),
        ("gs:/bucket/a", "did you mean gs://"),
        ("gs://Bucket/a", "no name of a bucket"),
        ("gs://bucket", "allowed: gs://BUCKET/PATH"),
        ("gs://no-such-bucket/a", "gs://no-such-bucket: no such bucket"),
    ],
)
def test_a_workdir_that_cannot_be_is_refused(store, capsys, workdir, message):
    assert message in refusal(["--workdir", workdir], capsys)


def test_a_missing_package_is_named(store, capsys, monkeypatch):
    monkeypatch.setattr(remote, "_installed", lambda package: False)
    assert "pip install 'mhc-jax[gcs]'" in refusal(["--workdir", "gs://bucket/a"], capsys)


def test_a_bucket_that_is_another_s_is_refused(store, capsys, monkeypatch):
    monkeypatch.setattr(store, "failing", lambda method, bucket, name: 403 if bucket == "private" else None)
    assert "gs://private: no permission" in refusal(["--workdir", "gs://private/a"], capsys)


def test_a_bucket_that_must_not_be_written_is_refused(store, corpus, monkeypatch):
    monkeypatch.setattr(store, "failing", lambda method, bucket, name: 403 if method == "POST" else None)
    with pytest.raises(UserError, match="gs://bucket/readonly: no permission"):
        run(config(corpus), "gs://bucket/readonly")
    assert not store.names("bucket", "readonly")


def test_a_store_that_does_not_answer_is_not_waited_for_long(store, capsys, monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{closed.getsockname()[1]}")
    monkeypatch.setattr(remote, "PATIENCE", 1.0)
    began = time.monotonic()
    assert "gs://silent: no answer within 1 s" in refusal(["--workdir", "gs://silent/a"], capsys)
    assert time.monotonic() - began < 10


def test_programs_that_write_want_a_local_folder():
    with pytest.raises(UserError, match="--to gs://bucket/x: a URL, allowed: the path of a folder"):
        cli.check_writable("gs://bucket/x", "--to")
