"""Compare runs: a report, figures, and a summary.

    python -m eval.compare RUN_OR_FOLDER [...] [--out DIR] [--no_recompute]

A folder that holds config.json is a run; in any other folder all runs below it are taken. report.html, summary.json,
figures/*.png and data/*.csv (what each figure draws, and the tables) go to the folder that the runs have in common, or
to --out.
"""

from __future__ import annotations

from collections.abc import Sequence

from mhc import cli
from mhc.eval.compare.write import compare


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit code. Raises UserError for a mistake, DiskFull where the disk is full."""
    parser = cli.Parser(
        description="Compare runs: report.html, summary.json, figures/*.png, data/*.csv.",
        example="{prog} runs/demo",
    )
    parser.add_argument("paths", nargs="+", metavar="RUN_OR_FOLDER", help="a run, or a folder with runs below it")
    parser.add_argument(
        "--out", metavar="DIR", help="where the results go (default: the folder the runs have in common)"
    )
    parser.add_argument(
        "--no_recompute", action="store_true", help="do not recompute the gains from the final checkpoints"
    )
    options = parser.parse_args(arguments)
    print(compare(options.paths, options.out, recompute_gains=not options.no_recompute))
    return 0


if __name__ == "__main__":
    cli.run_main(main)
