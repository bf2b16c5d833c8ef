"""Look inside a checkpoint: profiles, ablations, activation patching, attention, maps of prior and likelihood.

    python -m eval.inspect profile --checkpoint runs/a --out report
    python -m eval.inspect ablate --checkpoint runs/a --how mean --rows 256 --json result.json
    python -m eval.inspect ablate --checkpoint runs/a --heads 3.1 5.0          # together, against random pairs
    python -m eval.inspect patch --checkpoint runs/a --clean "Paris is in" --corrupted "Tokyo is in" --answer " France"
    python -m eval.inspect attention --checkpoint runs/a --prompt "def main():" --layers 0 3 --out report
    python -m eval.inspect belief --checkpoint runs/a --prompt "def main():" --out report

profile and ablate read validation rows; their intervals (95 %) are percentiles over rows drawn with replacement. The
others read prompts, which open with the tokeniser's bos. Layers and heads are counted from 0; 3.1 is head 1 of layer 3.
Only activations of the pass are edited; the checkpoint is only read.
"""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections.abc import Sequence
from typing import Any

from mhc import cli
from mhc.config import Config
from mhc.errors import UserError, did_you_mean
from mhc.eval.common import checkpoints
from mhc.eval.inspect.prompts import ids_of, tokenizer_of

MOST_PATTERNS, MOST_TOKENS = 64, 256  # more cannot be seen in pictures
VIEWS = ("profile", "ablate", "patch", "attention", "belief")  # each a module of mhc.eval.inspect.views
# Options of single views, and what they are where they are not given.
_DEFAULTS: dict[str, tuple[tuple[str, ...], Any]] = {
    "split": (("profile", "ablate"), "validation"),
    "rows": (("profile", "ablate"), 64),
    "batch_size": (("profile", "ablate", "patch"), 8),
    "how": (("ablate",), "zero"),
    "factor": (("ablate",), 0.5),
    "units": (("ablate",), ["heads", "layers"]),
    "heads": (("ablate", "attention"), []),
    "draws": (("ablate",), 20),
    "seed": (("ablate",), 0),
    "reference": (("ablate",), 64),
    "top": (("ablate", "patch"), 20),
    "clean": (("patch",), None),
    "corrupted": (("patch",), None),
    "answer": (("patch",), None),
    "other": (("patch",), None),
    "activation": (("patch",), "state"),
    "prompt": (("attention", "belief"), None),
    "layers": (("attention", "belief"), None),
    "weak": (("belief",), 0.25),
    "sure": (("belief",), 0.75),
}
_LEAST = {"rows": 0, "batch_size": 1, "draws": 0, "seed": 0, "reference": 0, "top": 1}


def _parser() -> cli.Parser:
    parser = cli.Parser(
        description="Profiles, ablations, activation patching, attention patterns, maps of prior and likelihood.",
        example="{prog} profile --checkpoint runs/a --out report",
        fields=checkpoints.FIELDS,
    )
    parser.add_argument("view", help=", ".join(VIEWS))
    checkpoints.add_arguments(parser)
    parser.add_argument("--json", metavar="FILE", help="write what was found there")
    parser.add_argument("--out", metavar="DIR", help="write pictures and their numbers there")
    parser.add_argument("--batch_size", type=int, help="rows at once (8); changes nothing but speed")
    rows = parser.add_argument_group("profile, ablate")
    rows.add_argument("--split", choices=("validation", "train"), help="of the corpus (validation)")
    rows.add_argument("--rows", type=int, help="of the split, 0: all (64)")
    cut = parser.add_argument_group("ablate")
    cut.add_argument("--how", choices=("zero", "mean", "scale"), help="what takes an activation's place (zero)")
    cut.add_argument("--factor", type=float, help="of --how scale (0.5)")
    cut.add_argument("--units", nargs="+", choices=("heads", "layers"), help="what is ablated one by one (both)")
    cut.add_argument("--heads", nargs="+", metavar="L.H", help="a set that is ablated together; attention: those drawn")
    cut.add_argument("--draws", type=int, help="of as many random heads as the set or a layer has (20)")
    cut.add_argument("--seed", type=int, help="of the draws (0)")
    cut.add_argument("--reference", type=int, metavar="ROWS", help="of the train split, for the means (64)")
    cut.add_argument("--top", type=int, help="lines of the table; also of patch (20)")
    pair = parser.add_argument_group("patch")
    pair.add_argument("--clean", metavar="TEXT", help="prompt that activations are taken from")
    pair.add_argument("--corrupted", metavar="TEXT", help="prompt that they are put into, of as many tokens")
    pair.add_argument("--answer", metavar="TEXT", help="next token after --clean; without: the most probable one")
    pair.add_argument("--other", metavar="TEXT", help="next token after --corrupted; likewise")
    pair.add_argument(
        "--activation", choices=("state", "attention", "feed-forward", "head"), help="what is taken (state)"
    )
    text = parser.add_argument_group("attention, belief")
    text.add_argument("--prompt", metavar="TEXT", help="text to be read")
    text.add_argument("--layers", nargs="+", type=int, help="whose heads are drawn (first, middle, last); belief: all")
    text.add_argument("--weak", type=float, metavar="Q", help="belief: quantile up to which a prior is weak (0.25)")
    text.add_argument("--sure", type=float, metavar="Q", help="belief: quantile from which a likelihood is sure (0.75)")
    return parser


def _checked(options: Any) -> None:
    """Check the arguments as far as that needs no checkpoint, and fill in defaults. Raises UserError."""
    if options.view not in VIEWS:
        raise UserError(f"{options.view}: allowed: {', '.join(VIEWS)}{did_you_mean(options.view, VIEWS)}")
    given = {name for name in _DEFAULTS if getattr(options, name) is not None}
    for name, (views, default) in _DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
        elif options.view not in views:
            raise UserError(f"--{name}: not an option of {options.view}, allowed with {', '.join(views)}")
    for name, least in _LEAST.items():
        if getattr(options, name) < least:
            raise UserError(f"--{name}: given {getattr(options, name)}, allowed: {least} or more")
    needed = {"patch": ("clean", "corrupted"), "attention": ("prompt",), "belief": ("prompt",)}.get(options.view, ())
    for name in needed:
        if getattr(options, name) is None:
            raise UserError(f"{options.view}: --{name} TEXT is needed")
    for name, how in (("factor", "scale"), ("reference", "mean")):
        if name in given and options.how != how:
            raise UserError(f"--{name}: given {getattr(options, name)}, allowed with --how {how}")
    if options.view == "ablate" and {"heads", "units"} <= given:
        raise UserError("--units and --heads: one of the two, --heads is a set that is ablated together")
    for name in ("weak", "sure"):
        if not 0 <= getattr(options, name) <= 1:
            raise UserError(f"--{name}: given {getattr(options, name)}, allowed: from 0 to 1")
    if not math.isfinite(options.factor):
        raise UserError(f"--factor: given {options.factor}, allowed: a finite number")
    heads = []
    for text in options.heads:
        match = re.fullmatch(r"(\d+)\.(\d+)", text)
        if match is None:
            raise UserError(f"--heads: given {text}, allowed: LAYER.HEAD, e.g. 3.1")
        heads.append((int(match[1]), int(match[2])))
    options.heads = list(dict.fromkeys(heads))
    options.json = cli.check_file(options.json, "--json") if options.json else None
    options.out = cli.check_writable(options.out, "--out") if options.out else None


def _checked_with(config: Config, options: Any) -> None:
    """Check the arguments against the run's config, and find the ids of answers. Raises UserError."""
    layers, heads = config.model.layers, config.attention.heads
    for layer, head in options.heads:
        if layer >= layers or head >= heads:
            raise UserError(f"--heads: given {layer}.{head}, allowed: layers 0 to {layers - 1}, heads 0 to {heads - 1}")
    for layer in options.layers or []:
        if not 0 <= layer < layers:
            raise UserError(f"--layers: given {layer}, allowed: 0 to {layers - 1}")
    if options.view == "belief":
        if config.attention.kind == "tokenwise":
            raise UserError("belief: attention.kind=tokenwise has no keys, allowed: a model with attention")
        options.layers = list(range(layers)) if options.layers is None else list(dict.fromkeys(options.layers))
    if options.view == "attention":
        if options.layers is not None or not options.heads:
            chosen = options.layers if options.layers is not None else [0, layers // 2, layers - 1]
            options.heads += [(layer, head) for layer in chosen for head in range(heads)]
            options.heads = list(dict.fromkeys(options.heads))
        if len(options.heads) > MOST_PATTERNS:
            raise UserError(
                f"attention: {len(options.heads)} patterns, allowed: {MOST_PATTERNS}; choose by --heads or --layers"
            )
    texts = {name: getattr(options, name) for name in ("clean", "corrupted", "prompt")}
    ids = {name: ids_of(tokenizer_of(config), text, f"--{name}") for name, text in texts.items() if text is not None}
    for name, tokens in ids.items():
        if config.positions.kind == "learned" and len(tokens) > config.max_length:
            raise UserError(
                f"--{name}: {len(tokens)} tokens, allowed: {config.max_length}, the model's learned positions"
            )
        if name == "prompt" and options.view == "belief" and len(tokens) < 3:
            raise UserError(f"--prompt: {len(tokens)} tokens (bos included), allowed: 3 or more, to be compared")
        if name == "prompt" and len(tokens) > MOST_TOKENS:
            raise UserError(f"--prompt: {len(tokens)} tokens, allowed: {MOST_TOKENS}; more cannot be seen in a picture")
    if options.view == "patch":
        if len(ids["clean"]) != len(ids["corrupted"]):
            raise UserError(
                f"--clean has {len(ids['clean'])} tokens and --corrupted {len(ids['corrupted'])} (bos included), "
                "allowed: equally many, so that each position has its counterpart"
            )
        if ids["clean"] == ids["corrupted"]:
            raise UserError("--clean and --corrupted: the same tokens, allowed: two prompts that differ")
        options.answer_id = _next_token(config, options.clean, options.answer, "--answer")
        options.other_id = _next_token(config, options.corrupted, options.other, "--other")


def _next_token(config: Config, prompt: str, text: str | None, option: str) -> int | None:
    """Return the id of ``text``, which must continue the prompt by one token; None without a text."""
    if text is None:
        return None
    tokenizer = tokenizer_of(config)
    before = ids_of(tokenizer, prompt, option)
    whole = ids_of(tokenizer, prompt + text, option)
    if whole[:-1] == before:
        return whole[-1]
    if whole[: len(before)] == before:
        raise UserError(f"{option}: {text!r} is {len(whole) - len(before)} tokens after the prompt, allowed: one")
    raise UserError(f"{option}: {text!r} joins the prompt's last token, allowed: a text that begins a token of its own")


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit code. Raises UserError for a mistake."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    changes = checkpoints.parse_changes(rest, parser)
    _checked(options)

    _checked_with(checkpoints.config_of(options.checkpoint, options.step, changes), options)
    checkpoint = checkpoints.load(options.checkpoint, options.step, average=options.average, changes=changes)
    print(f"{checkpoint.name}: compiling, then measuring", file=sys.stderr, flush=True)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    # The views load jax and matplotlib: only a command without mistakes waits for them.
    view = importlib.import_module(f"mhc.eval.inspect.views.{options.view}").view
    result: dict[str, Any] = view(checkpoint, options)
    if options.json is not None:
        from mhc.files import write_json

        about = {"checkpoint": checkpoint.name, "kind": checkpoint.config.residual.kind, "steps": checkpoint.steps}
        write_json(options.json, {"view": options.view, **about, **result})
    return 0


if __name__ == "__main__":
    cli.run_main(main)
