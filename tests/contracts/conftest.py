"""Make the tests' kinds known to every contract test, and print the number of cases at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mhc import residual
from tests.contracts.cases import Case, cases
from tests.contracts.topologies import BUILDERS, registry_restored


@pytest.fixture(scope="module", autouse=True)
def test_kinds() -> Iterator[None]:
    """Register the tests' kinds for the tests of a module."""
    with registry_restored():
        for kind, builder in BUILDERS.values():
            residual.register(kind, builder)
        yield


# What a test's brackets name: a case, or a group, which stands for its cases.
_about: dict[str, set[Case]] = {}
for _case in cases():
    _about.setdefault(str(_case), set()).add(_case)
    _about.setdefault(str(_case.group), set()).add(_case)
_checks: dict[str, int] = {}
_checked: dict[str, set[Case]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count the checks that passed, and the cases that they were about, by file."""
    path, _, test = report.nodeid.partition("::")
    named = _about.get(test.partition("[")[2].removesuffix("]"))
    if report.when == "call" and report.passed and "contracts/" in path and named:
        _checks[path] = _checks.get(path, 0) + 1
        _checked.setdefault(path, set()).update(named)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print for each file how much of the product was checked."""
    for path, count in _checks.items():
        covered = f"{len(_checked[path])} of {len(cases())} cases (kind × Sinkhorn × init preset × N)"
        terminalreporter.write_line(f"{path}: {count} checks passed over {covered}")
