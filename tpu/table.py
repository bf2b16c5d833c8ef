"""Print reports of `tpu.compile_ahead --json` as a Markdown table.

python -m tpu.table paper_3b-mhc.json paper_3b-hc.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mhc import cli
from mhc.chips import GIB
from mhc.errors import UserError
from tpu.hlo import KINDS

COLUMNS = (
    "report",
    "slice",
    "mesh",
    "micro-batches x rows",
    "parameters",
    "optimizer",
    "temporaries",
    "peak",
    *KINDS,
    "CPU s",
)


def row(name: str, report: dict[str, Any]) -> list[str]:
    """Return the cells of one report: GiB of a chip, and for each kind of collective GiB and how many a step has."""
    sizes = report["per_device_bytes"]
    held = [sizes[part] for part in ("parameters", "optimizer", "temporaries", "peak")]
    moved = [report["collectives"].get(kind) for kind in KINDS]
    mesh = ", ".join(f"{axis} {size}" for axis, size in report["mesh"].items() if size > 1)
    return [
        name,
        report["topology"],
        mesh or "one device",
        f"{report['accumulation']} x {report['rows_per_device']}",
        *("" if size is None else f"{size / GIB:.1f}" for size in held),
        *("" if total is None else f"{total['bytes'] / GIB:.1f} in {total['count']}" for total in moved),
        f"{report['cpu_seconds']:.0f}",
    ]


def table(reports: dict[str, dict[str, Any]]) -> str:
    """Return the Markdown table, without the kinds of collectives that no report has."""
    rows = [row(name, report) for name, report in reports.items()]
    kept = [column for column in range(len(COLUMNS)) if any(cells[column] for cells in rows)]
    lines = [[COLUMNS[column] for column in kept], ["---"] * len(kept)]
    lines += [[cells[column] for column in kept] for cells in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main(arguments: Sequence[str]) -> int:
    """Print the table of the named files; return the exit code.

    Raises:
      UserError: a file is no report.
    """
    parser = cli.Parser(
        description="Print reports of tpu.compile_ahead as a Markdown table.",
        example="{prog} paper_3b-mhc.json paper_3b-hc.json",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="what tpu.compile_ahead --json wrote")
    reports = {}
    for name in parser.parse_args(arguments).files:
        try:
            content = json.loads(Path(name).read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{name}: {error}") from None
        last = content[-1] if isinstance(content, list) and content else content  # a list: those of --smallest
        if not isinstance(last, dict) or "per_device_bytes" not in last:
            raise UserError(f"{name}: no report of tpu.compile_ahead")
        reports[Path(name).stem] = last
    print(table(reports))
    return 0


if __name__ == "__main__":
    cli.run_main(main, sys.argv[1:])
