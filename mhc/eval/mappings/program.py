"""Draw what a checkpoint's residual maps do: single sublayers, their products over depth, gains, distances.

    python -m eval.mappings --checkpoint runs/mhc --out report
    python -m eval.mappings --checkpoint runs/hc runs/mhc --out report      # side by side
    python -m eval.mappings --hf DeepSeek-V4-Flash --out report             # a published model

writes mappings.html (self-contained), its figures (.png), their numbers (.csv) and mappings.json into the folder. The
maps are taken on the run's own probe batch and averaged over its tokens, so that the gains are those of its probes
(figures 3, 7 and 8 of arXiv:2512.24880 show the same of the paper's models).

Of a published model only the tensors of its hyper-connections are read. Its maps are the static ones, of ``base``
alone; the part that depends on the token is described by its scales, norms and the size of the logits that it gives.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from mhc import cli
from mhc.errors import UserError
from mhc.eval.common import checkpoints
from mhc.eval.mappings.figures import draw
from mhc.eval.mappings.maps import measure
from mhc.eval.mappings.published import measure_published
from mhc.eval.mappings.report import number_rows, page, summary

MOST = 8  # checkpoints, or published models, side by side


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit code. Raises UserError for a mistake."""
    parser = cli.Parser(
        description="Pictures of the residual maps of checkpoints, or of published models with hyper-connections.",
        example=["{prog} --checkpoint runs/hc runs/mhc --out report", "{prog} --hf DeepSeek-V4-Flash --out report"],
        fields=checkpoints.FIELDS,
    )
    checkpoints.add_arguments(parser, several=True, required=False)
    parser.add_argument("--sequences", type=int, help="of the validation set; without: monitor.probe_sequences")
    parser.add_argument(
        "--hf",
        nargs="+",
        metavar="FOLDER",
        help="instead of checkpoints: folders of deepseek_v4, config.json with safetensors, as published or as "
        "transformers saved them; only the tensors of hyper-connections are read",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the page, the figures and the numbers")
    options, rest = parser.parse_known_args(arguments)
    changes = checkpoints.parse_changes(rest, parser)
    _check_source(options, changes)
    out = cli.check_writable(options.out, "--out")
    if options.sequences is not None and options.sequences < 1:
        raise UserError(f"--sequences: given {options.sequences}, allowed: 1 or more")
    option, given = ("--hf", options.hf) if options.hf else ("--checkpoint", options.checkpoint)
    if len(given) > MOST:
        raise UserError(f"{option}: given {len(given)}, allowed: at most {MOST} side by side")
    every = []
    for name in given:
        if options.hf:
            print(f"{name}: reading", file=sys.stderr, flush=True)
            every.append(measure_published(name))
            continue
        checkpoint = checkpoints.load(name, options.step, average=options.average, changes=changes)
        print(f"{checkpoint.name}: compiling, then measuring", file=sys.stderr, flush=True)
        every.append(measure(checkpoint, options.sequences))
    out.mkdir(parents=True, exist_ok=True)
    names = checkpoints.short_names([maps.name for maps in every])
    drawn = draw([maps._replace(name=name) for maps, name in zip(every, names, strict=True)], out)
    from mhc.files import write_json

    write_json(out / "mappings.json", {"checkpoints": [summary(maps) for maps in every]})
    file = out / "mappings.html"
    file.write_text(page(every, drawn), encoding="utf-8")
    for maps in every:
        values = summary(maps)
        print(
            f"{maps.name} ({maps.kind}): "
            + ", ".join(f"{text} {values[key]:.4g}" for key, text in number_rows(maps)[1:])
        )
    print(file)
    return 0


def _check_source(options: argparse.Namespace, changes: Mapping[str, Any]) -> None:
    """Check that one of --checkpoint and --hf is given, and --hf without options of checkpoints.

    Raises:
      UserError: it is not so.
    """
    if not options.checkpoint and not options.hf:
        raise UserError("required: --checkpoint RUN, or --hf FOLDER (--help lists the arguments)")
    if not options.hf:
        return
    if "" in options.hf:
        raise UserError("--hf: given '', allowed: the path of a folder of deepseek_v4")
    if options.checkpoint:
        raise UserError("--hf and --checkpoint: both given, allowed: one of them")
    of_runs = {
        "--step": options.step is not None,
        "--average": options.average != 1,
        "--sequences": options.sequences is not None,
        **{f"--config.{name}": True for name in changes},
    }
    for name, given in of_runs.items():
        if given:
            raise UserError(f"{name}: given with --hf, allowed: with --checkpoint")
