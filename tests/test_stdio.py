"""Test what programs print: failing log lines end nothing, and a result without a reader ends a program quietly."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

from mhc import cli, full_disk, stdio
from mhc.errors import UserError
from tests import small_runs

ROOT = Path(__file__).parents[1]


def _closed_pipe() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w", buffering=1)


def _full() -> TextIO:
    return open("/dev/full", "w", buffering=1)


def _closed() -> TextIO:
    stream = io.StringIO()
    stream.close()
    return stream


BROKEN: dict[str, Callable[[], TextIO | None]] = {
    "pipe": _closed_pipe,
    "full": _full,
    "closed": _closed,
    "none": lambda: None,
}


@pytest.fixture(params=BROKEN)
def broken(request: pytest.FixtureRequest) -> Iterator[TextIO | None]:
    """Return a stream that takes nothing."""
    stream = BROKEN[request.param]()
    yield stream
    with contextlib.suppress(OSError, ValueError):
        if stream is not None:
            stdio.flush_or_discard(stream)
            stream.close()


@pytest.fixture
def pipe() -> Iterator[TextIO]:
    """Return a stream whose reader has gone."""
    stream = _closed_pipe()
    yield stream
    stdio.flush_or_discard(stream)
    stream.close()


def test_what_is_said_beside_the_result_fails_nothing(broken: TextIO | None) -> None:
    stream = stdio.lossy(broken)
    for _ in range(3):
        print("a line", file=stream, flush=True)
        stream.writelines(["x\n", "y" * 100_000])
    assert stream.isatty() is False
    assert stdio.lossy(stream) is stream


def test_a_line_of_a_grid_fails_nothing(broken: TextIO | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", broken)
    with stdio.guarded() as result:
        stdio.write_line("a line")
        result.end()
    stdio.write_line("a line")


def test_training_goes_on_without_its_lines(
    broken: TextIO | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    corpus = small_runs.write_corpus(tmp_path / "texts")
    monkeypatch.setattr(sys, "stderr", broken)
    config = small_runs.config(corpus, "plain", train={"steps": 2}, monitor={"progress_every": 1})
    assert small_runs.run(config, tmp_path / "run") == 0
    log = (tmp_path / "run" / "train.log").read_text()
    assert "step 1/2" in log and "finished after step 2" in log
    assert [line["step"] for line in small_runs.lines(tmp_path / "run", "metrics")] == [1, 2]


def test_a_result_without_a_reader_ends_the_program(pipe: TextIO) -> None:
    stream = stdio.ResultStream(pipe)
    with pytest.raises(stdio.ClosedPipe) as left:
        stream.write("a line\n")
    assert left.value.code == 128 + 13
    stream.write("what a handler says on the way out")


def test_a_program_with_files_to_write_goes_on_without_a_reader(
    pipe: TextIO, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "stdout", pipe)
    file = tmp_path / "result.json"

    def main(arguments: Any) -> int:
        out = cli.check_file(str(file), "--json")
        sys.stdout.write("a table\n")
        sys.stdout.flush()
        out.write_text("{}")
        return 0

    with pytest.raises(SystemExit) as left:
        cli.run_main(main, [])
    assert (left.value.code, file.read_text()) == (stdio.CLOSED_PIPE, "{}")


# Whole programs -------------------------------------------------------------------------------------------------------

PROGRAM = """
import os, sys
from mhc import cli

def main(arguments):
    file = open(arguments[0], "w")
    assert file.fileno() > 2  # a descriptor that was closed is not given to a file
    for number in range(5000):
        print("beside", number, file=sys.stderr)
    print("warned", file=sys.stderr)
    for number in range(5000):
        print("result", number)
    file.write("whole")
    file.close()
    return 7

cli.run_main(main)
"""


def shell(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a shell command in which $PROGRAM starts the program above."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PROGRAM": PROGRAM, "PYTHON": sys.executable}
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}", "-", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("ends", "code", "lines"),
    [
        ('2>&1 >"$1.out" | head -3', 7, 3),
        ('2>/dev/full >"$1.out"', 7, 0),
        ('2>&- >"$1.out"', 7, 0),
        ("2>/dev/null >&-", 7, 0),
        ("2>/dev/null | head -3", stdio.CLOSED_PIPE, 3),
        ("<&- >&- 2>&-", 7, 0),
    ],
)
def test_a_program_ends_as_its_streams_allow(ends: str, code: int, lines: int, tmp_path: Path) -> None:
    file = tmp_path / "file"
    done = shell(f'"$PYTHON" -c "$PROGRAM" "$1" {ends}', str(file))
    assert (done.returncode, done.stderr) == (code, "")
    assert len(done.stdout.splitlines()) == lines
    if code == 7:
        assert file.read_text() == "whole"
    results = Path(f"{file}.out")
    if results.exists():
        assert len(results.read_text().splitlines()) == 5000


def test_a_result_that_finds_no_room_is_a_line_with_a_code_of_its_own(tmp_path: Path) -> None:
    done = shell('"$PYTHON" -c "$PROGRAM" "$1" 2>&1 >/dev/full | grep -v beside', str(tmp_path / "file"))
    assert done.returncode == full_disk.EXIT_CODE
    assert done.stdout.splitlines() == ["warned", "error: stdout: cannot be written: No space left on device"]


@pytest.mark.process
@pytest.mark.parametrize(
    "program",
    ["train.py --config configs/demo.py --dry_run", "-m mhc.data.inspect --config configs/demo.py", "train.py --help"],
)
def test_real_programs_end_quietly_on_a_closed_pipe(program: str) -> None:
    done = shell(f'"$PYTHON" {program} | true')
    assert (done.stdout, done.stderr.splitlines()[1:]) == ("", [])
    assert done.returncode in (0, stdio.CLOSED_PIPE)


# No room --------------------------------------------------------------------------------------------------------------


def ended(error: BaseException, capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    """Return the exit code and the stderr of a program that raises an error."""

    def main(arguments: Any) -> int:
        raise error

    with pytest.raises(SystemExit) as left:
        cli.run_main(main, [])
    return left.value.code, capsys.readouterr().err


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_one_line_wherever_it_shows(
    number: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = os.strerror(number)
    named, bare = OSError(number, words, str(tmp_path / "x")), OSError(number, words)
    led = ValueError("of a library")
    led.__cause__ = bare
    for error, start in (
        (named, f"error: {tmp_path}/x: cannot be written: {words}; "),
        (bare, f"error: not all output could be written: {words}\n"),
        (led, f"error: not all output could be written: {words}\n"),
        (RuntimeError(f"RESOURCE_EXHAUSTED: Failed writing: {words} [source …]"), words),
        (full_disk.DiskFull("checkpoint 4: cannot be written"), "error: checkpoint 4: cannot be written\n"),
    ):
        code, line = ended(error, capsys)
        assert code == full_disk.EXIT_CODE and start in line and line.count("\n") == 1
    assert ended(UserError(words), capsys)[0] == 2


def test_what_a_program_was_to_write_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def main(arguments: Any) -> int:
        with cli.naming_options(["source"]):
            cli.check_file(f"{tmp_path}/x.json", "--json")
            cli.check_writable(f"{tmp_path}/report", "--out")
            raise OSError(errno.ENOSPC, "full")

    with pytest.raises(SystemExit):
        cli.run_main(main, [])
    message = capsys.readouterr().err
    assert message.startswith(
        f"error: {tmp_path}/x.json or {tmp_path}/report: cannot be written: No space left on device; "
    )
    with pytest.raises(full_disk.DiskFull, match="--source: full"), cli.naming_options(["source"]):
        raise full_disk.DiskFull("data.source: full")


def test_numpy_s_words_for_a_full_disk(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(OSError("1024 requested and 0 written"), capsys)[0] == full_disk.EXIT_CODE


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    for error in (OSError(errno.EACCES, "no", "x"), KeyError("ours")):
        with pytest.raises(type(error)), full_disk.reporting(tmp_path):
            raise error
    words = r"/x: cannot be written: No space left on device; .* free in .*; so what$"
    with pytest.raises(full_disk.DiskFull, match=words), full_disk.reporting(tmp_path / "x", then="so what"):
        raise OSError(errno.ENOSPC, "x")
