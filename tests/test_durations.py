"""The page that says which tests take the time."""

from __future__ import annotations

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
