"""Make tables of a grid's folder: the state of each arm, and the results of those that have ended."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mhc import config as configs
from mhc import full_disk, kinds
from mhc.grid import folder as folders
from mhc.grid.folder import STATES
from mhc.grid.plan import Plan
from mhc.monitor.progress import duration


def collect(plan: Plan, workdir: Path, out: Path) -> Counter[str]:
    """Write a row for each arm: name, state, the fields in which arms differ, summary.json, a failure's last line.

    A field that an arm does not set holds the base's value, so that the table stands alone. An option of a residual
    kind that the base does not have holds its default in arms of the kind, and nothing in others.

    Returns:
        The number of arms in each state.
    """
    varied = list(dict.fromkeys(field for fields in plan.arms.values() for field in fields))
    rows = []
    for arm, fields in plan.arms.items():
        folder = workdir / arm
        state = folders.state(folder, plan.config(arm).train.steps)
        summary = folders.summary(folder)
        lines = folders.record(folder).get("last_lines") if state in ("failed", "halted") else None
        values = {field: fields[field] if field in fields else _value(plan, arm, field) for field in varied}
        rows.append(
            {"arm": arm, "state": state, **values}
            | {f"summary.{key}" if key in values else key: value for key, value in summary.items()}
            | {"error": lines[-1] if lines else None}
        )
    head = ["arm", "state", *varied]
    measured = dict.fromkeys(key for row in rows for key in row if key not in (*head, "error"))
    out.parent.mkdir(parents=True, exist_ok=True)
    with full_disk.reporting(out), out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*head, *measured, "error"], restval="")
        writer.writeheader()
        writer.writerows(rows)
    return Counter(str(row["state"]) for row in rows)


def _value(plan: Plan, arm: str, field: str) -> Any:
    group, _, leaf = field.partition(".")
    if leaf in plan.base[group]:
        return plan.base[group][leaf]
    config = plan.config(arm)
    foreign = leaf in kinds.options() and leaf not in config.residual.spec.options
    return None if foreign else configs.value_of(config, field)


def status(plan: Plan, workdir: Path) -> tuple[list[str], Counter[str]]:
    """Return (lines of a table with a row for each arm, the number of arms in each state)."""
    rows = [("arm", "state", "step", "loss", "tries", "time", "")]
    states: Counter[str] = Counter()
    for arm in plan.arms:
        folder, steps = workdir / arm, plan.config(arm).train.steps
        state = folders.state(folder, steps)
        states[state] += 1
        note, last = folders.record(folder), folders.last_metrics(folder)
        remark = ""
        if state == "running":
            remark = f"on {note.get('host', '?')}, pid {note.get('pid', '?')}"
        elif state == "submitted":
            remark = f"job {note.get('job', '?')}"
        elif state in ("failed", "halted"):
            remark = (note.get("last_lines") or ["no output"])[-1]
        rows.append(
            (
                arm,
                state,
                f"{last.get('step', 0)}/{steps}",
                f"{last['loss']:.4f}" if isinstance(last.get("loss"), float) else str(last.get("loss", "")),
                str(note.get("attempts", "")),
                duration(note["seconds"]) if "seconds" in note else "",
                remark,
            )
        )
    return table(rows), states


def table(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """Return rows as lines of aligned columns; columns whose number is in ``right`` are set flush right."""
    right = set(right)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        cells = zip(range(len(row)), row, widths, strict=True)
        return "  ".join(cell.rjust(width) if n in right else cell.ljust(width) for n, cell, width in cells).rstrip()

    return [line(row) for row in rows]


def count_words(states: Mapping[str, int]) -> str:
    """Return the numbers of arms as in ``7 finished, 2 failed``, in the order of STATES."""
    return ", ".join(f"{states[state]} {state}" for state in STATES if states.get(state))
