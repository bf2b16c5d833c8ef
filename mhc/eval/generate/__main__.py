"""Generate text with a trained model.

    python -m eval.generate --checkpoint RUN --prompt "def main" [--max_new_tokens 200] [--temperature 0.8] [--seed 1]
    python -m eval.generate --checkpoint RUN/checkpoints/1000 --prompts prompts.txt --json out.json

The text of one prompt appears as it is made. The prompts of a file are completed in batches of rows of different
lengths; a prompt's text is the one that it gets alone with the same seed, and the same at every call.

A prompt opens with the tokeniser's bos, as documents do in training; the text ends at its eos, at a ``--stop_token``,
before a ``--stop`` string, or after ``--max_new_tokens``. Prompts are read in chunks, so that their length costs no
memory but the cache's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mhc import cli
from mhc.errors import UserError, did_you_mean
from mhc.eval.common import checkpoints
from mhc.eval.common.generator import Completion, Generator
from mhc.eval.common.prior_check import CANDIDATES, PriorCheck, of_file, of_regex
from mhc.eval.common.prompts import check_stops, check_text, read_prompts
from mhc.eval.common.terminal import Progress

if TYPE_CHECKING:
    from mhc.model.sampling import Sampling


def _parser() -> cli.Parser:
    parser = cli.Parser(
        description="Generate text with a trained model.",
        example='{prog} --checkpoint runs/a --prompt "def main" --max_new_tokens 200',
    )
    parser.add_argument("--checkpoint", required=True, metavar="RUN", help="run folder, or RUN/checkpoints/STEP")
    parser.add_argument("--step", type=int, help="the checkpoint's step; without: the last")
    parser.add_argument("--prompt", help="text to go on from; may be empty")
    parser.add_argument("--prompts", metavar="FILE", help="one prompt a line, or .jsonl")
    parser.add_argument("--field", default="prompt", help="of a .jsonl line, that holds the prompt (prompt)")
    parser.add_argument("--max_new_tokens", type=int, default=128, metavar="N", help="at most, of each prompt (128)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: greedy (1)")
    parser.add_argument("--top_k", type=int, metavar="K", help="sample from the K most probable tokens")
    parser.add_argument("--top_p", type=float, metavar="P", help="from the most probable that make up P")
    parser.add_argument("--min_p", type=float, metavar="P", help="from those at least P times as probable as the first")
    parser.add_argument("--entropy_low", type=float, metavar="H", help="threshold below which --below holds")
    parser.add_argument("--entropy_high", type=float, metavar="H", help="threshold above which --above holds")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds give equal texts (0)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends before it; may be repeated")
    parser.add_argument(
        "--stop_token", action="append", default=[], type=int, metavar="ID", help="ends at it; likewise"
    )
    parser.add_argument("--batch_size", type=int, default=8, help="prompts of a file at once (8)")
    parser.add_argument("--json", metavar="OUT", help="file for prompts, texts, tokens and reasons")
    parser.add_argument("--trace", action="store_true", help="with --json: also the values of each token")
    guided = parser.add_argument_group("what the thresholds do")
    guided.add_argument(
        "--guide",
        default="output",
        help="whose entropy they are for. output (bits): the model's distribution; hidden (0 to 1): the last block's "
        "feed-forward activations; lens (bits): what the head makes of --lens_block (output)",
    )
    guided.add_argument("--lens_block", type=int, metavar="L", help="block of the logit lens, from 0")
    how = "greedy, or temperature=, top_k=, top_p=, min_p= with commas"
    guided.add_argument("--above", metavar="DRAW", help=f"{how} (temperature=1.2,top_p=0.95)")
    guided.add_argument("--below", metavar="DRAW", help="likewise (greedy)")
    prior = parser.add_argument_group("check of candidates where the state before the last norm is small")
    prior.add_argument(
        "--prior_norm", type=float, metavar="X", help="Euclidean norm below which candidates are checked"
    )
    prior.add_argument("--prior_regex", metavar="REGEX", help="that a candidate's whole text must match")
    prior.add_argument("--prior_file", metavar="FILE.py", help="whose get_filter() returns allows(text, candidate)")
    prior.add_argument("--prior_candidates", type=int, metavar="N", help=f"the N most probable ({CANDIDATES})")
    return parser


def _check_of(options: argparse.Namespace) -> PriorCheck | None:
    """Return the check that the options ask for. Raises UserError where they do not go together."""
    given = {name: getattr(options, f"prior_{name}") for name in ("norm", "regex", "file", "candidates")}
    filters = [name for name in ("regex", "file") if given[name] is not None]
    if given["norm"] is None:
        for name, value in given.items():
            if value is not None:
                raise UserError(f"--prior_{name}: needs --prior_norm, the threshold below which it holds")
        return None
    if len(filters) != 1:
        raise UserError("--prior_norm: needs one of --prior_regex and --prior_file, the filter of candidates")
    if not given["norm"] >= 0:
        raise UserError(f"--prior_norm: given {given['norm']}, allowed: 0 or more")
    candidates = CANDIDATES if given["candidates"] is None else given["candidates"]
    if candidates < 1:
        raise UserError(f"--prior_candidates: given {candidates}, allowed: 1 or more")
    allows = of_regex(given["regex"]) if filters == ["regex"] else of_file(given["file"])
    return PriorCheck(given["norm"], allows, candidates)


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit code. Raises UserError for a mistake."""
    options = _parser().parse_args(arguments)
    if (options.prompt is None) == (options.prompts is None):
        raise UserError("--prompt or --prompts: one of the two is needed")
    for name, least in (("max_new_tokens", 1), ("batch_size", 1), ("seed", 0)):
        if not least <= getattr(options, name) < 2**32:
            raise UserError(f"--{name}: given {getattr(options, name)}, allowed: {least} or more, below 2^32")
    check_stops(options.stop)
    run, step = checkpoints.locate(options.checkpoint, options.step)
    prompts = [options.prompt] if options.prompts is None else read_prompts(options.prompts, options.field)
    if options.prompt is not None:
        check_text(options.prompt, "--prompt")
    out = None if options.json is None else cli.check_file(options.json, "--json")
    if options.trace and out is None:
        raise UserError("--trace: needs --json, the file that the values go to")
    check = _check_of(options)

    # jax takes seconds to import: only a command without mistakes waits for it.
    from mhc.data import tokenizers
    from mhc.train.checkpoint import load_run

    sampling = _sampling_of(options)
    loaded = load_run(run, step)
    tokenizer = tokenizers.load(loaded.config.data.tokenizer)
    for token in options.stop_token:
        if not 0 <= token < tokenizer.vocab_size:
            raise UserError(f"--stop_token: given {token}, allowed: 0 to {tokenizer.vocab_size - 1}")
    inside: dict[str, Any] = {"trace": options.trace, "check": check} if options.trace or check else {}
    generator = Generator(loaded.config, loaded.params, tokenizer, sampling, batch_size=options.batch_size, **inside)
    _note_length(generator, prompts, options.max_new_tokens)

    print(f"{run}, step {loaded.step}: compiling, then reading", file=sys.stderr)
    started = time.monotonic()
    streams = len(prompts) == 1
    progress = Progress("prompts", len(prompts))
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    completions = generator.complete(
        prompts,
        options.max_new_tokens,
        seed=options.seed,
        stop=options.stop,
        stop_tokens=options.stop_token,
        tell=(lambda _, text: print(text, end="", flush=True)) if streams else (lambda _, text: None),
        progress=(lambda done, tokens: None)
        if streams
        else (lambda done, tokens: progress(done, note=f"{tokens:,} tokens")),
    )
    if streams:
        print()
    else:
        for number, completion in enumerate(completions, start=1):
            print(f"== {number}: {completion.prompt}\n{completion.text}")
    seconds, count = time.monotonic() - started, sum(len(completion.tokens) for completion in completions)
    ends = {"length": "--max_new_tokens", "token": "a stop token", "stop": "a stop string"}
    why = f", ended by {ends[completions[0].reason]}" if streams else ""
    print(f"{count} tokens in {seconds:.1f} s, compilation included{why}", file=sys.stderr)
    if check is not None:
        print(
            f"prior check: {generator.checks['filtered']} tokens filtered; {generator.checks['empty']} times nothing "
            "passed, and the token was drawn without the filter",
            file=sys.stderr,
        )
    if out is not None:
        record = {
            "checkpoint": str(run),
            "step": loaded.step,
            "seed": options.seed,
            "max_new_tokens": options.max_new_tokens,
            "sampling": dataclasses.asdict(sampling),
            **_check_record(options),
            "stop": options.stop,
            "stop_tokens": options.stop_token,
            "completions": [_record(completion) for completion in completions],
        }
        temporary = out.with_name(f"{out.name}.part")
        temporary.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", "utf-8")
        temporary.replace(out)
    return 0


def _sampling_of(options: argparse.Namespace) -> Sampling:
    """Return how tokens are drawn. Raises UserError for a value that is not allowed."""
    from mhc.model.sampling import GUIDES, Sampling, parse_draw

    if options.guide not in GUIDES:
        hint = did_you_mean(options.guide, GUIDES)
        raise UserError(f"--guide: given {options.guide}, allowed: {', '.join(GUIDES)}{hint}")
    draws: dict[str, Any] = {}
    for name, threshold in (("above", "entropy_high"), ("below", "entropy_low")):
        text = getattr(options, name)
        if text is None:
            continue
        if getattr(options, threshold) is None:
            raise UserError(f"--{name}: needs --{threshold}, the threshold that it is for")
        try:
            draws[name] = parse_draw(text)
        except ValueError as error:
            raise UserError(f"--{name}: {error}") from None
    if options.guide != "output" and options.entropy_low is None and options.entropy_high is None:
        raise UserError(f"--guide {options.guide}: needs --entropy_low or --entropy_high, its thresholds")
    names = [field.name for field in dataclasses.fields(Sampling) if field.name not in ("above", "below")]
    try:
        return Sampling(**{name: getattr(options, name) for name in names}, **draws)
    except ValueError as error:
        raise UserError(f"--{error}") from None


def _record(completion: Completion) -> dict[str, Any]:
    """Return what --json says of a completion; a trace only where one was asked for."""
    return {name: value for name, value in dataclasses.asdict(completion).items() if (name, value) != ("trace", None)}


def _check_record(options: argparse.Namespace) -> dict[str, Any]:
    """Return what --json says of the check of candidates, if there is one."""
    if options.prior_norm is None:
        return {}
    names = ("prior_norm", "prior_regex", "prior_file", "prior_candidates")
    return {"prior_check": {name.removeprefix("prior_"): getattr(options, name) for name in names}}


def _note_length(generator: Generator, prompts: Sequence[str], new: int) -> None:
    longest = max(map(len, generator.encode(prompts, new))) + new
    trained = generator.config.data.sequence_length
    if longest > trained and generator.config.positions.kind != "learned":
        print(f"note: up to {longest} tokens a text; the model was trained on {trained}", file=sys.stderr)


if __name__ == "__main__":
    cli.run_main(main)
