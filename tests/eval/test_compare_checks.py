"""Test that a comparison refuses values that are not what a run writes, in one line with file, place and name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mhc.errors import UserError
from mhc.eval.compare import checks
from mhc.monitor.guard import COLLAPSING, MONITORS


@pytest.mark.parametrize("name", ["seconds", "steps", "params", "exit_reason"])
@pytest.mark.parametrize("value", [None, [], {}, True])
def test_a_value_of_another_type_in_a_summary_is_named(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"summary\.json: {name}: given {re.escape(repr(value))}, allowed: "):
        checks.check_summary({name: value}, tmp_path / "summary.json")


@pytest.mark.parametrize("name", [*(key for key, _ in MONITORS.values()), *COLLAPSING.values()])
def test_a_watched_measure_is_no_table(name: str, tmp_path: Path) -> None:
    """Other measures may have values by name; the alarms compute with an array."""
    file = tmp_path / "probes.jsonl"
    checks.check_probes(
        [{"step": 1, name: 1.0}, {"step": 2, name: [1.0, None]}, {"step": 3, "other": {"a": 1.0}}], file
    )
    with pytest.raises(UserError, match=rf"line 2: {name}: given \{{.*allowed: a number, or an array"):
        checks.check_probes([{"step": 1}, {"step": 2, name: {}}], file)
