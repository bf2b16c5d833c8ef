"""Prints how many cases the tests went through that go through many each."""

from __future__ import annotations

import pytest

_cases: dict[tuple[str, str], int] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Adds up what passed tests recorded as ``record_property("cases of …", count)``, by file."""
    path = report.nodeid.partition("::")[0]
    for name, count in report.user_properties:
        if report.when == "call" and report.passed and "tests/model/" in path and name.startswith("cases of "):
            _cases[path, name] = _cases.get((path, name), 0) + int(str(count))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A line for each kind of cases."""
    for (path, name), count in _cases.items():
        terminalreporter.write_line(f"{path}: {count} {name} passed")
