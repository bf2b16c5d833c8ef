"""The kinds that tests register are known to every contract test, and the number of cases is printed at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mhc import residual
from tests.contracts.topologies import BUILDERS, registry_restored


@pytest.fixture(scope="module", autouse=True)
def test_kinds() -> Iterator[None]:
    """Registers them for a module's tests."""
    with registry_restored():
        for kind, builder in BUILDERS.values():
            residual.register(kind, builder)
        yield


_checked: set[str] = set()
_checks = 0


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Counts the checks that passed, and the cases that they were about."""
    global _checks
    name = report.nodeid
    if report.when == "call" and report.passed and "tests/contracts/" in name and "[" in name:
        _checks += 1
        _checked.add(name.partition("[")[2].rstrip("]"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line: how much of the product was checked."""
    if _checked:
        terminalreporter.write_line(
            f"contracts: {_checks} checks passed over {len(_checked)} cases (kind × preset × N)"
        )
