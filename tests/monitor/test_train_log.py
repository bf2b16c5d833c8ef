"""Test train.log: whole lines with their time, over restarts, threads, terminals and crashes."""

from __future__ import annotations

import io
import itertools
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mhc.errors import UserError
from mhc.monitor.progress import Progress
from mhc.monitor.train_log import TrainLog


def made(folder: Path) -> TrainLog:
    """Return a log whose clock counts its calls."""
    counter = itertools.count()
    return TrainLog(folder / "train.log", clock=lambda: f"t{next(counter)}")


def test_lines_have_their_time_and_restarts_go_on(tmp_path):
    for text in ("one", "two\nthree"):
        log = made(tmp_path)
        log.line(text)
        log.close()
    assert (tmp_path / "train.log").read_text() == "t0 one\nt0 two\nt1 three\n"


def test_a_torn_line_is_ended(tmp_path):
    (tmp_path / "train.log").write_text("t0 whole\nt1 torn by a cra")
    log = made(tmp_path)
    log.line("next")
    log.close()
    assert (tmp_path / "train.log").read_text() == "t0 whole\nt1 torn by a cra\nt0 next\n"


@given(st.lists(st.text("ab \n", max_size=5), max_size=12))
def test_pieces_make_the_lines_of_their_whole(tmp_path_factory, pieces):
    folder = tmp_path_factory.mktemp("log")
    log = TrainLog(folder / "train.log", clock=lambda: "t")
    for piece in pieces:
        assert log.write(piece) == len(piece)
    log.close()
    whole = "".join(pieces)
    lines = whole.split("\n")[: None if not whole.endswith("\n") and whole else -1]
    assert (folder / "train.log").read_text() == "".join(f"t {line}\n" for line in lines)


def test_a_line_that_a_terminal_shows_anew_is_kept_as_it_ended(tmp_path):
    log = made(tmp_path)
    for text in ("\rstep 1\x1b[K", "\rstep 2\x1b[K", "\n", "windows\r\n"):
        log.write(text)
    log.close()
    assert (tmp_path / "train.log").read_text() == "t0 step 2\nt1 windows\n"


def test_stderr_is_kept_and_still_seen(tmp_path, capsys):
    log, before = made(tmp_path), sys.stderr
    with log.keeping_stderr():
        sys.stderr.write("said\n")
        sys.stderr.writelines(["a ", "b\n"])
        sys.stderr.flush()
        assert sys.stderr.isatty() is before.isatty() and sys.stderr.encoding == before.encoding
    assert sys.stderr is before
    log.close()
    seen = capsys.readouterr().err
    assert seen == "said\na b\n"
    kept = (tmp_path / "train.log").read_text().splitlines()
    assert [line.partition(" ")[2] for line in kept] == seen.splitlines()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (UserError("the mesh does not fit"), "error: the mesh does not fit"),
        (KeyboardInterrupt(), "interrupted"),
        (ZeroDivisionError("a bug"), "Traceback (most recent call last):"),
    ],
    ids=["a mistake", "interrupt", "bug"],
)
def test_what_ends_a_run_is_kept(error, said, tmp_path):
    log, before = made(tmp_path), sys.stderr
    with pytest.raises(type(error)), log.keeping_stderr():
        raise error
    log.close()
    assert sys.stderr is before
    lines = (tmp_path / "train.log").read_text().splitlines()
    assert lines[0] == f"t0 {said}"
    assert (len(lines) > 1) == (said.startswith("Traceback")) and (len(lines) == 1 or lines[-1].endswith("a bug"))


def test_threads_do_not_mix_their_lines(tmp_path):
    log = TrainLog(tmp_path / "train.log", clock=lambda: "t")

    def write(number: int) -> None:
        for _ in range(100):
            log.line(str(number) * 50)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    lines = (tmp_path / "train.log").read_text().splitlines()
    assert sorted(lines) == sorted(f"t {str(n) * 50}" for n in range(4) for _ in range(100))


@pytest.mark.parametrize("terminal", [False, True])
def test_the_log_has_the_lines_of_the_progress_wherever_it_is_shown(terminal):
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    kept: list[str] = []
    line = Progress(5, every=2, stream=Stream(), clock=lambda: 0.0)
    line.log = kept.append
    for step in range(1, 6):
        line.write({"step": step, "loss": 1.0, "tokens_per_second": 10.0})
    line.note("a note")
    line.close()
    assert [one.split("/")[0] for one in kept] == ["step 2", "step 4", "step 5", "a note"]
