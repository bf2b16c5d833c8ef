"""Measure how exactly a model holds the posterior of its wind tunnel: entropy error, divergence, variation, in bits.

    python -m eval.windtunnel --checkpoint runs/plain runs/hc runs/mhc --out report

writes windtunnel.html with its figure, and windtunnel.json. Runs of several seeds are compared topology by topology,
paired by seed. ``--leads`` is a program of its own: `mhc.eval.windtunnel.leads.program`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from mhc import cli
from mhc.errors import UserError
from mhc.eval.common import checkpoints
from mhc.eval.windtunnel import sections
from mhc.eval.windtunnel.leads import program

MOST = 48  # checkpoints of one comparison


def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit code. Raises UserError for a mistake."""
    if any(argument.partition("=")[0] == program.OPTION for argument in arguments):
        return program.main(arguments)
    parser = cli.Parser(
        description="Compare models' beliefs with the exact posterior of their task. --leads DIR --out DIR asks "
        "instead which measure leaves its band before the loss, over the runs of a grid (see --leads --help).",
        example="{prog} --checkpoint runs/plain runs/mhc --out report",
        fields=checkpoints.FIELDS,
    )
    checkpoints.add_arguments(parser, several=True)
    parser.add_argument("--sequences", type=int, default=512, metavar="N", help="held-out sequences (512)")
    parser.add_argument(
        "--observations", type=int, metavar="K", help="windtunnel:hmm: observations of a sequence; without: as trained"
    )
    parser.add_argument(
        "--measures",
        nargs="+",
        metavar="NAME",
        help="what is measured beside the belief: "
        + ", ".join(section.name for section in sections.SECTIONS)
        + "; all takes every one; without: "
        + (", ".join(section.name for section in sections.chosen(None)) or "the belief alone"),
    )
    parser.add_argument("--json", metavar="FILE", help="write what was measured there")
    parser.add_argument("--out", metavar="DIR", help="write windtunnel.html, its figure and windtunnel.json there")
    options, rest = parser.parse_known_args(arguments)
    changes = checkpoints.parse_changes(rest, parser)
    if options.sequences < 2:
        raise UserError(f"--sequences: given {options.sequences}, allowed: 2 or more")
    if len(options.checkpoint) > MOST:
        raise UserError(f"--checkpoint: given {len(options.checkpoint)}, allowed: at most {MOST}")
    chosen = sections.chosen(options.measures)
    out = cli.check_writable(options.out, "--out") if options.out else None
    if options.json:
        cli.check_file(options.json, "--json")

    from mhc.eval.windtunnel import belief, page
    from mhc.files import write_json

    measures = {section.name: section.load() for section in chosen}
    runs: list[page.Measured] = []
    for name in options.checkpoint:
        checkpoint = checkpoints.load(name, options.step, average=options.average, changes=changes)
        source = None
        if options.observations is not None:
            source = belief.longer(checkpoint.config.data.source, options.observations)
        task = belief.fitting(checkpoint, source)
        print(f"{checkpoint.name}: compiling, then measuring", file=sys.stderr)
        results = {}
        measured = belief.measure(checkpoint, options.sequences, source)
        for measure, module in measures.items():
            print(f"{checkpoint.name}: {measure}", file=sys.stderr)
            results[measure] = module.measure(checkpoint, task, options.sequences)
        runs.append(page.Measured(measured, results))
        del checkpoint
    report: dict[str, Any] = {
        "checkpoints": [
            belief.as_json(one.belief) | {name: result.json for name, result in one.results.items()} for one in runs
        ],
        "topologies": page.topologies(runs),
    }
    print(page.text_table(report))
    if options.json:
        write_json(options.json, report)
    if out is not None:
        print(page.write(runs, report, chosen, out))
    return 0


if __name__ == "__main__":
    cli.run_main(main)
