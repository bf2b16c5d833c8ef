"""Test that signals end a preparation as any error does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mhc import cli
from mhc.config import DataConfig
from mhc.data.prepare import __main__ as program
from mhc.data.prepare import shards
from mhc.data.shards.manifest import MANIFEST
from tests.data.prepare.samples import ROOT, content, copied, write_lines


@pytest.mark.parametrize(
    ("number", "complete"),
    [
        (signal.SIGTERM, 0),
        (signal.SIGINT, 3),
        pytest.param(signal.SIGTERM, 3, marks=pytest.mark.process),
        pytest.param(signal.SIGINT, 0, marks=pytest.mark.process),
    ],
)
def test_a_signal_ends_it_as_any_error_does(
    tmp_path: Path,
    small: tuple[DataConfig, DataConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
    complete: int,
) -> None:
    """A signal leaves one line, its exit code, and whole shards or nothing; then the same command goes on."""
    text, made = copied(small, tmp_path)
    out = tmp_path / "new"
    arguments = ["--source", text.source, "--out", str(out), "--tokenizer", text.tokenizer, "--sequence_length", "16"]
    arguments += ["--holdout", "0.2", "--shard_size", "9000", "--workers", "1", "--cache_dir", str(text.cache_dir)]
    make = shards._make_files

    def make_and_signal(job: Any, paths: dict[str, Path]) -> Any:
        if job.name == f"shard-{complete:05d}":
            os.kill(os.getpid(), number)
        return make(job, paths)

    class Left(Exception):
        pass

    def leave(code: int) -> None:
        raise Left(code)

    monkeypatch.setattr(cli, "_leave", leave)
    handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    with monkeypatch.context() as patch:
        patch.setattr(shards, "_make_files", make_and_signal)
        with pytest.raises(Left, match=f"^{128 + number}$"):
            cli.run_main(program.main, arguments)
    assert handlers == {each: signal.getsignal(each) for each in handlers}
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"
    # The signal comes to the main thread while another makes the shard: whether it is still finished is a race.
    finished = {f"shard-{number:05d}.array_record" for number in range(complete)}
    if complete or out.exists():
        left = content(out)
        assert {"plan.json", "origin.json"} | finished < set(left)
        assert not [name for name in left if name.startswith(".part-")]
    assert program.main(arguments) == 0
    assert {**content(out), "origin.json": b""} == {**content(made), "origin.json": b""}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_held_back_whichever_thread_takes_it(number: signal.Signals) -> None:
    """Other threads of the process do not block the signal; Python's handler runs in the main thread."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    reached = []

    def held() -> None:
        with shards._held_back():
            os.kill(os.getpid(), number)
            time.sleep(0.1)
            reached.append("the end of the block")

    try:
        with cli.interrupted_by_sigterm():
            handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                held()
            assert handlers == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
    finally:
        done.set()
        thread.join()
    assert reached


def test_what_is_ignored_stays_ignored_while_signals_are_held_back() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with shards._held_back():
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.process
@pytest.mark.parametrize("after", [0.0, 0.7, 1.5, 2.5, 3.5])  # seconds; imports, processes that begin, shards
def test_sigterm_to_it_and_its_processes_at_any_time_is_one_line(tmp_path: Path, bpe: str, after: float) -> None:
    write_lines(tmp_path / "corpus" / "0.jsonl", 3000, 0)
    out = tmp_path / "out"
    command = [sys.executable, "-W", "error", "-m", "mhc.data.prepare", "--source", f"text:{tmp_path}/corpus/*.jsonl"]
    command += ["--tokenizer", bpe, "--out", str(out), "--shard_size", "8KB", "--workers", "2"]
    running = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert running.stderr is not None
    said = [running.stderr.readline()]  # it hashes: the program is there
    time.sleep(after)
    os.killpg(running.pid, signal.SIGTERM)
    with running:
        said += running.stderr.readlines()
    if running.returncode == 0:  # a fast machine was done by then
        assert (out / MANIFEST).is_file() and after >= 2.5
        return
    assert running.returncode == 128 + signal.SIGTERM
    assert said[-1] == "interrupted\n" and not [
        each for each in said[:-1] if "MB" not in each and "finding" not in each
    ]
    left = [path.name for path in out.iterdir()] if out.exists() else []
    assert not left or any(name.endswith(".array_record") for name in left)
    assert not [name for name in left if name.startswith(".part-")]
