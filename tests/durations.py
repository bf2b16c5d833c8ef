"""Report which tests take the time: `make test` writes the slowest forty, and each file's sum, to build/slowest.txt."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import time
from collections import defaultdict
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

COUNT = 40
LONG = 10.0  # CPU seconds from which a test is to be marked


class Seconds(NamedTuple):
    """Holds seconds on a processor, of a test and of the programs that it waited for, and seconds on the clock."""

    cpu: float
    wall: float


def cpu_seconds() -> float:
    """Return what this process and its children that ended have used so far, in user and system mode."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def table(tests: Mapping[str, Seconds], wall: float, where: str) -> str:
    """Return the page: totals, the slowest tests, and the files, the slowest first.

    Args:
      tests: seconds by node id, setup and teardown included. wall: of the whole session. where: machine and date.
    """
    files: dict[str, list[Seconds]] = defaultdict(list)
    for test, seconds in tests.items():
        files[test.partition("::")[0]].append(seconds)
    sums = {file: Seconds(*map(sum, zip(*each, strict=True))) for file, each in files.items()}

    def slowest(rows: Mapping[str, Seconds]) -> list[tuple[str, Seconds]]:
        return sorted(rows.items(), key=lambda row: (-row[1].cpu, row[0]))

    total = sum(seconds.cpu for seconds in tests.values())
    return "\n".join(
        [
            f"{len(tests)} tests, {total:.0f} CPU seconds in tests, {wall:.0f} s on the clock; {where}",
            f"The slowest {COUNT} tests: CPU seconds, seconds on the clock. The first test of a fixture pays for it.",
            *(f"{s.cpu:7.1f} {s.wall:7.1f}  {test}" for test, s in slowest(tests)[:COUNT]),
            "Files: CPU seconds, seconds on the clock, tests.",
            *(f"{s.cpu:7.1f} {s.wall:7.1f} {len(files[file]):5}  {file}" for file, s in slowest(sums)),
            "",
        ]
    )


def machine() -> str:
    """Return the date and what the figures depend on."""
    versions = f"Python {platform.python_version()}, jax {importlib.metadata.version('jax')}"
    return f"{datetime.date.today()}, {os.cpu_count()} cores, {versions}"


class Durations:
    """Adds up each test's seconds, in workers too, and writes the page when the session ends."""

    def __init__(self, path: Path | None):
        self.path = path
        self.tests: dict[str, Seconds] = {}
        self.marked: set[str] = set()
        self.begun, self.cpu = time.perf_counter(), 0.0

    def pytest_runtestloop(self) -> None:
        self.cpu = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, Any]:
        report = yield
        before, self.cpu = self.cpu, cpu_seconds()
        report.cpu = self.cpu - before
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        so_far = self.tests.get(report.nodeid, Seconds(0.0, 0.0))
        cpu = getattr(report, "cpu", 0.0)
        self.tests[report.nodeid] = Seconds(so_far.cpu + cpu, so_far.wall + report.duration)
        if "slow" in report.keywords:
            self.marked.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for test, seconds in self.tests.items():
            if seconds.cpu > LONG and test not in self.marked:
                terminalreporter.write_line(
                    f"{test} took {seconds.cpu:.0f} CPU seconds: mark it long, or make it shorter"
                )

    def pytest_sessionfinish(self) -> None:
        if self.path is not None and self.tests:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(table(self.tests, time.perf_counter() - self.begun, machine()), encoding="utf-8")
