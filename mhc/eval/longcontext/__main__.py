"""Measure how far a checkpoint's context reaches and what it costs: needles, loss by position, time, memory.

    python -m eval.longcontext --checkpoint runs/a --out report
    python -m eval.longcontext --checkpoint runs/plain runs/mhc --parts needles distractors joined --samples 50
    python -m eval.longcontext --checkpoint runs/a --parts loss --lengths 4096 --scalings none ntk yarn
    python -m eval.longcontext --checkpoint runs/a --parts cost --lengths 512 2048 8192 --new 64

A needle is a sentence that gives an invented name a random number; it is hidden at a depth of the run's own validation
text, whose documents are laid end to end, and the text closes with the beginning of the same sentence. Three measures:
*exact*, greedy decoding gives the number; *first*, it is the most probable of K numbers (chance 1/K); *gain*, the nats
per token by which it is more probable than with the needle replaced by further text. Gain shows how much
small models take from a needle long before they get it right.

Lengths are of whole rows in tokens, by default 1/4 to 4 times the trained length. Samples are the same at every depth
and length, and for all checkpoints that share a tokeniser and a corpus. Intervals are 95 %. Shares
have Wilson's; nats have bootstrap intervals over samples, losses over rows, and times over passes and steps.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from mhc import cli
from mhc.errors import UserError
from mhc.eval.common import checkpoints
from mhc.eval.longcontext.lengths import most_positions
from mhc.eval.longcontext.positions import SCALINGS
from mhc.eval.longcontext.sentences import LINK, STATEMENT, check_sentence
from mhc.eval.longcontext.tables import text

PARTS = ("needles", "distractors", "joined", "loss", "cost")


def _parser() -> cli.Parser:
    parser = cli.Parser(
        description="How far the context reaches, and its cost.",
        example="{prog} --checkpoint runs/a --out report",
        fields=checkpoints.FIELDS,
    )
    checkpoints.add_arguments(parser, several=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what is measured; without: all")
    parser.add_argument(
        "--lengths", nargs="+", type=int, metavar="T", help="of rows; without: 1/4 to 4 times as trained"
    )
    parser.add_argument("--split", choices=("validation", "train"), default="validation", help="of the corpus")
    parser.add_argument("--seed", type=int, default=0, help="of the samples (0)")
    parser.add_argument(
        "--batch_size", type=int, default=8, help="rows of the trained length at once, longer: fewer (8)"
    )
    needle = parser.add_argument_group("needles, distractors, joined")
    needle.add_argument("--depths", nargs="+", type=float, default=[0, 0.25, 0.5, 0.75, 1], help="0 to 1")
    needle.add_argument("--samples", type=int, default=20, metavar="N", help="a cell (20)")
    needle.add_argument("--candidates", type=int, default=10, metavar="K", help="values to choose from (10)")
    needle.add_argument("--statement", default=STATEMENT, metavar="TEXT", help=f"({STATEMENT})")
    needle.add_argument("--link", default=LINK, metavar="TEXT", help=f"of joined needles ({LINK})")
    needle.add_argument("--ids", action="store_true", help="needles of random ids, as for a corpus of ids")
    needle.add_argument("--at", type=int, metavar="T", help="length for distractors and joined; without: as trained")
    loss = parser.add_argument_group("loss")
    loss.add_argument("--rows", type=int, default=64, help="of the longest length (64)")
    loss.add_argument("--scalings", nargs="*", choices=SCALINGS, default=list(SCALINGS), help="beside the run's own")
    cost = parser.add_argument_group("cost")
    cost.add_argument("--new", type=int, default=32, metavar="N", help="tokens decoded, at most half a row (32)")
    cost.add_argument("--repeats", type=int, default=5, help="timed passes (5)")
    parser.add_argument("--json", metavar="FILE", help="write what was found there")
    parser.add_argument("--out", metavar="DIR", help="write figures and their numbers there")
    return parser


def _check(options: argparse.Namespace) -> None:
    """Refuse options out of range, and sort lengths and depths. Raises UserError."""
    least = {"samples": 1, "candidates": 2, "rows": 1, "new": 1, "repeats": 1, "batch_size": 1, "seed": 0}
    for name, low in least.items():
        if getattr(options, name) < low:
            raise UserError(f"--{name}: given {getattr(options, name)}, allowed: {low} or more")
    if options.candidates > 1000:  # every one is scored in every cell
        raise UserError(f"--candidates: given {options.candidates}, allowed: 2 to 1000")
    for option, lengths in (("--lengths", options.lengths or []), ("--at", [] if options.at is None else [options.at])):
        for length in lengths:
            if length < 2:
                raise UserError(f"{option}: given {length}, allowed: 2 tokens or more")
    for depth in options.depths:
        if not 0 <= depth <= 1:
            raise UserError(f"--depths: given {depth:g}, allowed: 0 (before the text) to 1 (just before the question)")
    check_sentence(options.statement, "--statement")
    check_sentence(options.link, "--link")
    options.depths = sorted(set(options.depths))
    options.lengths = sorted(set(options.lengths or []))


def _check_positions(options: argparse.Namespace) -> None:
    """Refuse a length that a checkpoint has no positions for, before any weights are read. Raises UserError."""
    for name in options.checkpoint:
        most = most_positions(checkpoints.config_of(name, options.step, {}))
        for option, length in (("--lengths", max(options.lengths, default=0)), ("--at", options.at or 0)):
            if most is not None and length > most:
                raise UserError(f"{option}: given {length}, allowed: at most {most}, the learned positions of {name}")


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit code. Raises UserError for a mistake."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    changes = checkpoints.parse_changes(rest, parser)
    _check(options)
    out = cli.check_writable(options.out, "--out") if options.out else None
    if options.json:
        cli.check_file(options.json, "--json")
    _check_positions(options)

    # jax takes seconds to import: only a command without mistakes waits for it.
    from mhc.eval.longcontext.evaluate import Evaluated, difference, evaluate

    every: list[dict[str, Any]] = []
    first: Evaluated | None = None
    for name in options.checkpoint:
        checkpoint = checkpoints.load(name, options.step, average=options.average, changes=changes)
        print(f"{checkpoint.name}: compiling, then reading", file=sys.stderr, flush=True)
        evaluated = evaluate(checkpoint, options)
        if first is None:
            first = evaluated
        else:
            evaluated.report["first"] = first.report["checkpoint"]
            evaluated.report["minus_first"] = difference(evaluated, first)
            if not evaluated.report["minus_first"]:
                evaluated.report["notes"].append(
                    "not compared with the first checkpoint: other text, or nothing to pair"
                )
        every.append(evaluated.report)
        print(text(every[-1]), end="\n\n" if name != options.checkpoint[-1] else "\n", flush=True)
        del checkpoint
    if options.json:
        from mhc.files import write_json

        write_json(options.json, {"split": options.split, "checkpoints": every})
    if out is not None:
        from mhc.eval.longcontext.drawing import draw

        out.mkdir(parents=True, exist_ok=True)
        for path in draw(every, out):
            print(path, file=sys.stderr)
    return 0


if __name__ == "__main__":
    cli.run_main(main)
