"""Tell whether a change changed the model, and where first: logits and hidden states are saved and compared.

    python -m eval.regression --checkpoint runs/a --save golden.npz --activations
    python -m eval.regression --checkpoint runs/a --against golden.npz
    python -m eval.regression --checkpoint runs/a --against golden.npz --dtype bfloat16 --tolerance 0.05
    python -m eval.regression --checkpoint runs/a --against runs/a --config.attention.impl=sdpa
    python -m eval.regression --checkpoint runs/b/checkpoints/0 --against runs/a      # what was converted, its source

A golden file holds tokens, the logits that a checkpoint gives for them and, with ``--activations``, its hidden states:
the embedding, the collapsed stream after every sublayer (one of width D, whatever the topology), and what the head
reads. Against it, or against another run, a checkpoint is run on the same tokens.

Exit codes: 0 the logits agree, 1 one differs by more than ``--tolerance`` times the largest, 2 a user's mistake.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mhc import cli
from mhc.config import Config
from mhc.errors import UserError
from mhc.eval.common import checkpoints
from mhc.eval.common.terminal import Progress
from mhc.eval.regression.comparison import compare, text
from mhc.eval.regression.golden import read, save
from mhc.eval.regression.outputs import Outputs, compute
from mhc.eval.regression.rows import PROMPTS, Rows, make_rows

WHOLE = 8192  # a vocabulary up to this is kept whole without --top_k
# Fields that say how a model is computed, not what: they may be changed, beside those that any program may change.
COMPUTED = ("model.dtype", "model.scan", "attention.impl")


def _parser() -> cli.Parser:
    parser = cli.Parser(
        description="Save the logits of fixed tokens, or compare a checkpoint's.",
        example="{prog} --checkpoint runs/a --against golden.npz",
        fields=(*checkpoints.FIELDS, *COMPUTED),
    )
    checkpoints.add_arguments(parser)
    parser.add_argument("--save", metavar="FILE", help="write a golden file")
    parser.add_argument("--against", metavar="FILE|RUN", help="compare with a golden file, or with another checkpoint")
    parser.add_argument(
        "--tolerance", type=float, default=1e-5, help="largest difference over the largest logit that counts as equal"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="short for --config.model.dtype")
    parser.add_argument("--activations", action="store_true", help="--save: keep hidden states after every sublayer")
    parser.add_argument("--prompts", metavar="FILE", help="one prompt a line, or .jsonl; without: some of our own")
    parser.add_argument("--field", help="of a .jsonl line, that holds the prompt (prompt)")
    parser.add_argument("--rows", type=int, help="rows of the validation set beside the prompts (4; with --prompts 0)")
    parser.add_argument("--length", type=int, help="tokens of a row at most (256, or fewer where the run's are)")
    parser.add_argument(
        "--top_k", type=int, metavar="K", help=f"logits kept a token, 0: all (all of up to {WHOLE}, else 256)"
    )
    parser.add_argument("--batch_size", type=int, default=4, help="rows at once (4)")
    parser.add_argument("--json", metavar="FILE", help="write what was found there")
    return parser


_OF_ROWS = ("prompts", "field", "rows", "length", "top_k")  # a golden file has settled these


def _check(options: argparse.Namespace) -> None:
    """Refuse arguments that do not go together, or are out of range. Raises UserError."""
    if (options.save is None) == (options.against is None):
        raise UserError("--save FILE or --against FILE|RUN: one of the two is needed")
    if not 0 <= options.tolerance < math.inf:
        raise UserError(f"--tolerance: given {options.tolerance}, allowed: 0 or more")
    for name, least in (("rows", 0), ("length", 1), ("top_k", 0), ("batch_size", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise UserError(f"--{name}: given {value}, allowed: {least} or more")
    if options.save is not None:
        cli.check_file(options.save, "--save")
        if options.json is not None:
            raise UserError("--json: only with --against")
        return
    if options.activations:
        raise UserError("--activations: only with --save; what there is by layer is always compared")
    if options.json is not None:
        cli.check_file(options.json, "--json")
    if Path(options.against).is_file():
        for name in _OF_ROWS:
            if getattr(options, name) is not None:
                raise UserError(f"--{name}: the golden file has settled it; allowed: with --save, or against a run")


def _rows(options: argparse.Namespace, config: Config) -> Rows:
    """Return the rows that the options ask for. Raises UserError where they cannot be read, or are too long."""
    from mhc.eval.common.prompts import read_prompts

    most = config.data.sequence_length
    if options.length is not None and options.length > most:
        raise UserError(f"--length: given {options.length}, allowed: 1 to data.sequence_length={most}")
    given = options.prompts is not None
    prompts = read_prompts(options.prompts, options.field or "prompt") if given else PROMPTS
    count = (0 if given else 4) if options.rows is None else options.rows
    return make_rows(config, prompts, count, options.length or min(most, 256))


def _top_k(options: argparse.Namespace, config: Config) -> int:
    return options.top_k if options.top_k is not None else 0 if config.vocab_size <= WHOLE else 256


def _check_comparable(config: Config, against: str, vocabulary: int, tokenizer: str, longest: int) -> None:
    """Refuse a model that cannot read the reference's rows, or has logits for other tokens. Raises UserError."""
    from mhc.data import tokenizers

    if vocabulary != config.vocab_size:
        raise UserError(
            f"--against {against}: a vocabulary of {vocabulary}, --checkpoint has one of {config.vocab_size}: their "
            "logits are of other tokens"
        )
    ours = tokenizers.load(config.data.tokenizer).content_hash
    if tokenizer != ours:
        raise UserError(
            f"--against {against}: tokeniser {tokenizer}, --checkpoint has {ours} ({config.data.tokenizer}); allowed: "
            "the same (--config.data.tokenizer)"
        )
    if config.positions.kind == "learned" and longest > config.max_length:
        raise UserError(
            f"--against {against}: rows of {longest} tokens, --checkpoint has learned positions for {config.max_length}"
        )


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit code. Raises UserError for a mistake."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    changes = checkpoints.parse_changes(rest, parser)
    _check(options)
    if options.dtype is not None:
        changes["model.dtype"] = options.dtype
    reference = read(Path(options.against)) if options.against and Path(options.against).is_file() else None

    # jax takes seconds to import: only a command without mistakes waits for it.
    from mhc.data import tokenizers

    config = checkpoints.config_of(options.checkpoint, options.step, changes)

    def run(checkpoint: checkpoints.Checkpoint, rows: Rows, **given: Any) -> Outputs:
        print(f"{checkpoint.name}: compiling, then running", file=sys.stderr, flush=True)
        tell = Progress("rows", len(rows.tokens), name=checkpoint.name)
        return compute(checkpoint, rows, batch_size=options.batch_size, tell=tell, **given)

    def model() -> checkpoints.Checkpoint:
        return checkpoints.load(options.checkpoint, options.step, average=options.average, changes=changes)

    if options.save is not None:
        rows = _rows(options, config)
        outputs = run(model(), rows, top_k=_top_k(options, config), activations=options.activations)
        save(Path(options.save), outputs)
        print(_saved(Path(options.save), outputs))
        return 0
    if reference is None:
        # How the checkpoint is computed leaves its reference as it is.
        shared = {name: value for name, value in changes.items() if name not in COMPUTED}
        try:
            other = checkpoints.config_of(options.against, None, shared)
        except UserError as error:
            raise UserError(f"--against: no golden file, and as a run: {error}") from None
        rows = _rows(options, other)
        tokenizer = tokenizers.load(other.data.tokenizer).content_hash
        _check_comparable(config, options.against, other.vocab_size, tokenizer, rows.tokens.shape[1])
        reference = run(checkpoints.load(options.against, changes=shared), rows, top_k=_top_k(options, other))
    else:
        about, longest = reference.about, reference.rows.tokens.shape[1]
        _check_comparable(config, options.against, about["vocabulary"], about["tokenizer"], longest)
    layers = reference.hidden is not None
    outputs = run(model(), reference.rows, ids=reference.logits.ids, activations=layers)
    result = compare(outputs, reference, options.tolerance)
    if options.json is not None:
        from mhc.files import write_json

        write_json(options.json, result)
    print(text(result))
    return 0 if result["within"] else 1


def _saved(file: Path, outputs: Outputs) -> str:
    tokens, kept = outputs.logits.values.shape
    layers = "no hidden states" if outputs.hidden is None else f"hidden states at {len(outputs.hidden)} points"
    return (
        f"{file}: {outputs.about['checkpoint']}, {len(outputs.rows.tokens)} rows, {tokens:,} tokens, {kept:,} logits a "
        f"token, {layers}, {file.stat().st_size / 2**20:.1f} MiB"
    )


if __name__ == "__main__":
    cli.run_main(main)
