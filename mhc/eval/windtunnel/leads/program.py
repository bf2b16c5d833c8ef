"""Find how many steps before the loss each measure of a belief leaves its healthy band, over the runs of a grid.

    python -m mhc.grid run configs/grids/windtunnel.py --workdir runs/windtunnel
    python -m eval.windtunnel --leads runs/windtunnel --out runs/windtunnel

writes leads.html, its figure with the numbers, leads.json, and readings.jsonl, from which an interrupted program goes
on. Every kept checkpoint is measured once.
"""

from __future__ import annotations

from collections.abc import Sequence

from mhc import cli
from mhc.errors import UserError

OPTION = "--leads"
SEQUENCES = 128


def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit code. Raises UserError for a mistake."""
    parser = cli.Parser(
        description="Tell which measure of a belief leaves its healthy band before the loss says something.",
        example="{prog} --leads runs/windtunnel --out runs/windtunnel",
    )
    parser.add_argument(OPTION, required=True, nargs="+", metavar="DIR", help="runs, or folders with runs below them")
    parser.add_argument(
        "--sequences", type=int, default=SEQUENCES, metavar="N", help=f"held-out sequences ({SEQUENCES})"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="where the page, leads.json and readings.jsonl go")
    asks = {"-h", "--help"} & set(arguments)  # argparse would miss the folders of a bare --leads first
    options = parser.parse_args(["--help"] if asks else arguments)
    if options.sequences < 2:
        raise UserError(f"--sequences: given {options.sequences}, allowed: 2 or more")
    out = cli.check_writable(options.out, "--out")

    from mhc.eval.windtunnel.leads import reading, show

    found = reading.traces(reading.runs(options.leads), options.sequences, out)
    report = show.report(found)
    print(show.text_table(report))
    print(show.write(found, report, out))
    return 0
