"""A Markdown table of what `tpu.compile_ahead --json` wrote: python -m tpu.table paper_3b-mhc.json paper_3b-hc.json"""

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


def row(name: str, found: dict[str, Any]) -> list[str]:
    """The cells of one report: GiB of a chip, and GiB in so many collectives of a step."""
    sizes = found["per_device_bytes"]
    held = [sizes[part] for part in ("parameters", "optimizer", "temporaries", "peak")]
    moved = [found["collectives"].get(kind) for kind in KINDS]
    mesh = ", ".join(f"{axis} {size}" for axis, size in found["mesh"].items() if size > 1)
    return [
        name,
        found["topology"],
        mesh or "one device",
        f"{found['accumulation']} x {found['rows_per_device']}",
        *("" if size is None else f"{size / GIB:.1f}" for size in held),
        *("" if one is None else f"{one['bytes'] / GIB:.1f} in {one['count']}" for one in moved),
        f"{found['cpu_seconds']:.0f}",
    ]


def table(reports: dict[str, dict[str, Any]]) -> str:
    """Markdown, without the kinds of collectives that no report has."""
    rows = [row(name, found) for name, found in reports.items()]
    kept = [column for column in range(len(COLUMNS)) if any(cells[column] for cells in rows)]
    lines = [[COLUMNS[column] for column in kept], ["---"] * len(kept)]
    lines += [[cells[column] for column in kept] for cells in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main(arguments: Sequence[str]) -> int:
    """Print the table of the named files. Raises UserError for a file that is not the report of a slice that fits."""
    parser = cli.Parser(
        description="Print reports of tpu.compile_ahead as a Markdown table.",
        example="{prog} paper_3b-mhc.json paper_3b-hc.json",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="what tpu.compile_ahead --json wrote")
    reports = {}
    for name in parser.parse_args(arguments).files:
        try:
            found = json.loads(Path(name).read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{name}: {error}") from None
        last = found[-1] if isinstance(found, list) and found else found
        if not isinstance(last, dict) or "per_device_bytes" not in last:
            raise UserError(f"{name}: no report of tpu.compile_ahead")
        reports[Path(name).stem] = last
    print(table(reports))
    return 0


if __name__ == "__main__":
    cli.run_main(main, sys.argv[1:])
