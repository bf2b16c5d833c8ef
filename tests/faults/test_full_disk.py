"""Test a disk that fills up while a run goes on: one line, nothing lost, and with room again the same bits."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mhc import cli, full_disk
from mhc.config import Config
from mhc.monitor.train_log import TrainLog
from mhc.train.checkpoint import Checkpoints, committed_steps
from mhc.train.record import Record
from mhc.train.standing import Standing
from mhc.train.step import TrainState
from tests.small_runs import assert_equal_runs, config, run, small_disk, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


@pytest.fixture(scope="module")
def reference(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the undisturbed run."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    assert run(config(corpus, "plain"), folder) == 0
    return folder


def code_of(main: Callable[[], int]) -> Any:
    """Return the exit code of a program."""
    with pytest.raises(SystemExit) as left:
        cli.run_main(lambda arguments: main(), [])
    return left.value.code


@pytest.mark.parametrize(
    ("at", "last"),
    [pytest.param(4, None, marks=pytest.mark.product), (8, 4), pytest.param(12, 8, marks=pytest.mark.product)],
)
def test_a_full_disk_during_a_checkpoint(
    at: int,
    last: int | None,
    corpus: str,
    reference: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = config(corpus, "plain", monitor={"progress_every": 1})
    save, full = Checkpoints.save, contextlib.ExitStack()

    def filling(self: Checkpoints, state: TrainState, standing: Standing, config: Config) -> None:
        if standing.step == at:
            self.wait()  # the one before is whole
            full.enter_context(small_disk(1000))
        save(self, state, standing, config)

    monkeypatch.setattr(Checkpoints, "save", filling)
    with full:
        assert code_of(lambda: run(made, tmp_path / "run")) == full_disk.EXIT_CODE
    said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith(("run  step", str(tmp_path)))]
    then = "there is no good checkpoint" if last is None else f"the last good checkpoint is {last}"
    (line,) = [line for line in said if line.startswith("error: ")]
    assert re.fullmatch(
        rf"error: {tmp_path}/run: checkpoint {at}: cannot be written: File too large; .* free in .*; {then}; "
        "with room again the same command goes on from there",
        line,
    )
    assert all(other.startswith("warning: ") for other in said if other != line)
    assert committed_steps(tmp_path / "run") == [step for step in (4, 8) if last is not None and step <= last]
    monkeypatch.undo()
    assert run(made, tmp_path / "run") == 0
    assert_equal_runs(tmp_path / "run", reference)


def test_training_goes_on_where_log_files_alone_find_no_room(
    corpus: str, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is no room from before the first step until the first checkpoint, which must not be ahead of the lines."""
    full, written, flushed = contextlib.ExitStack(), TrainLog.line, Record.flush

    def filling(self: TrainLog, text: str) -> None:
        written(self, text)
        if "compiling, then training" in text:
            full.enter_context(small_disk(1))

    def emptied(self: Record, then: str) -> None:
        full.close()
        flushed(self, then)

    monkeypatch.setattr(TrainLog, "line", filling)
    monkeypatch.setattr(Record, "flush", emptied)
    made = config(corpus, "plain", monitor={"tensorboard": True, "progress_every": 1})
    with full:
        assert code_of(lambda: run(made, tmp_path / "run")) == 0
    said = capsys.readouterr().err
    for file in ("metrics.jsonl", "probes.jsonl"):
        assert len(re.findall(rf"warning: {tmp_path}/run/{file}: cannot be written: File too large", said)) == 1
    assert_equal_runs(tmp_path / "run", reference)
    log = (tmp_path / "run" / "train.log").read_text().splitlines()
    assert not any(" step  1/12" in line for line in log) and any(" step 12/12" in line for line in log)


def test_a_log_goes_on_where_there_is_room_again(tmp_path: Path) -> None:
    log = TrainLog(tmp_path / "train.log", clock=lambda: "now")
    log.line("one")
    with small_disk(11):
        log.line("two")
        log.line("three")
    log.line("four")
    log.close()
    assert (tmp_path / "train.log").read_text() == "now one\nnow\nnow four\n"
