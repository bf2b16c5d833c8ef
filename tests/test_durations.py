"""Test the page that says which tests take the time."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import durations
from tests.durations import Durations, Seconds, table


def test_the_slowest_come_first_and_files_are_summed() -> None:
    tests = {f"tests/a.py::test_{i}": Seconds(float(i), 2.0 * i) for i in range(60)}
    lines = table(tests | {"tests/b.py::test_x": Seconds(59.5, 60.0)}, 700.0, "here, today").splitlines()
    assert lines[0] == "61 tests, 1830 CPU seconds in tests, 700 s on the clock; here, today"
    assert [line.split() for line in lines[2:4]] == [
        ["59.5", "60.0", "tests/b.py::test_x"],
        ["59.0", "118.0", "tests/a.py::test_59"],
    ]
    assert [line.split() for line in lines[-2:]] == [
        ["1770.0", "3540.0", "60", "tests/a.py"],
        ["59.5", "60.0", "1", "tests/b.py"],
    ]
    assert len(lines) == 2 + durations.COUNT + 1 + 2


def phase(measured: Durations, work: float, **fields: Any) -> None:
    """Let a test's phase use the processor for a while, and report it as pytest does."""
    end = time.process_time() + work
    while time.process_time() < end:
        pass
    hook = measured.pytest_runtest_makereport()
    next(hook)
    report = SimpleNamespace(nodeid="a.py::test", duration=work, **{"keywords": {}} | fields)
    with pytest.raises(StopIteration):
        hook.send(report)
    measured.pytest_runtest_logreport(report)  # type: ignore[arg-type]


def test_phases_of_a_test_are_added_and_an_unmarked_long_test_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durations, "LONG", 0.1)
    measured, said = Durations(tmp_path / "new" / "slowest.txt"), list[str]()
    measured.pytest_runtestloop()
    terminal: Any = SimpleNamespace(write_line=said.append)
    phase(measured, 0.06)
    measured.pytest_terminal_summary(terminal)
    assert not said
    phase(measured, 0.06)
    measured.pytest_terminal_summary(terminal)
    assert said == ["a.py::test took 0 CPU seconds: mark it long, or make it shorter"]
    phase(measured, 0.0, keywords={"slow": 1})
    measured.pytest_terminal_summary(terminal)
    assert len(said) == 1
    measured.pytest_sessionfinish()
    assert (tmp_path / "new" / "slowest.txt").read_text("utf-8").startswith("1 tests, 0 CPU seconds in tests")
    assert measured.tests["a.py::test"].cpu == pytest.approx(0.12, abs=0.05)


def test_no_value_of_an_option_can_be_taken_for_a_test() -> None:
    """The commands of Makefile are read: a file that the last run left must not change what the next one collects.

    A value that stands apart from an option of tests/conftest.py is a path to pytest, if there is one of that name: it
    then looks for a conftest.py beside that.
    """
    makefile = Path(__file__).parents[1] / "Makefile"
    commands = [
        line.partition("-m pytest ")[2] for line in makefile.read_text("utf-8").splitlines() if "-m pytest" in line
    ]
    assert len(commands) >= 4
    for command in commands:
        words = shlex.split(command)
        takes_a_word = {"-m", "--numprocesses", "--dist"}  # known before any conftest.py is read
        apart = [
            w for before, w in zip(["", *words], words, strict=False) if w[0] != "-" and before not in takes_a_word
        ]
        assert all(word == "$(SMOKE)" for word in apart), command
