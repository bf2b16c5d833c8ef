"""Did a change change the model, and where first? Logits and hidden states of fixed tokens, saved and compared.

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

import dataclasses
import json
import math
import sys
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mhc import cli
from mhc import config as configs
from mhc.config import Config
from mhc.errors import UserError
from mhc.eval.common import checkpoints
from mhc.eval.common.statistics import Bounds, ratio
from mhc.eval.common.terminal import Progress, aligned

if TYPE_CHECKING:
    import argparse

    import jax

    from mhc.model.decoder import Decoder, SublayerView

FORMAT = 1  # of golden files
WHOLE = 8192  # a vocabulary up to this is kept whole without --top_k
# How a model is computed, not what: what the checkpoint may be run under here, beside what any program may change.
COMPUTED = ("model.dtype", "model.scan", "attention.impl")
# Groups that say what the model is, for the list of what differs.
_MODEL = ("model", "attention", "positions", "mlp", "moe", "norm", "head", "residual")
PROMPTS = (
    "The residual stream carries what every layer has written so far, and",
    "In 1905, 3 of the 17 papers were about light; 2 + 2 = 4, 10 / 4 = 2.5.",
    "def mean(values: list[float]) -> float:\n    return sum(values) / len(values)\n",
    'Zoë asked: "Où est la gare?" – Über die Brücke, dann links. 東京の天気は晴れです。 Привет, мир!',
    "a a a a a a a a a a a a a a a a b",
    "",
)


class Rows(NamedTuple):
    """What the model reads, int32 [R, T] each; padding has segment 0."""

    tokens: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray

    @property
    def valid(self) -> np.ndarray:
        """The M places that are no padding: bool [R, T]."""
        return self.segment_ids > 0


class Logits(NamedTuple):
    """Of the M tokens of some rows, in their order."""

    values: np.ndarray  # float32 [M, K], K = V where all are kept
    ids: np.ndarray | None  # int32 [M, K]: of which tokens, the most probable first; None: of all
    log_z: np.ndarray  # float32 [M]: log-sum-exp over the whole vocabulary
    best: np.ndarray  # int32 [M]: the most probable token


class Outputs(NamedTuple):
    """What a model made of some rows: the content of a golden file."""

    about: dict[str, Any]  # format, checkpoint, steps, config, tokenizer (hash), vocabulary, points, versions, device
    rows: Rows
    logits: Logits
    hidden: np.ndarray | None  # float32 [P, M, D] of the points in ``about``


def points(layers: int) -> list[str]:
    """Where hidden states are taken, in the order of the computation."""
    sublayers = [f"block {k}, {name}" for k in range(layers) for name in ("attention", "feed-forward")]
    return ["embedding", *sublayers, "head input"]


# What is read ---------------------------------------------------------------------------------------------------------


def make_rows(config: Config, prompts: Sequence[str], validation: int, length: int) -> Rows:
    """Rows of prompts, bos before each, then the first rows of the run's validation set, all cut at ``length``.

    Where the tokeniser has more ids than the model (one imported without its own), they are taken modulo the model's.

    Raises:
      UserError: the validation set cannot be read, or has no text.
    """
    from mhc.data import pipeline, tokenizers
    from mhc.eval.common.prompts import place_of

    tokenizer = tokenizers.load(config.data.tokenizer)
    found = []
    for number, prompt in enumerate(prompts, start=1):
        try:
            ids = [tokenizer.bos_id, *tokenizer.encode(prompt).tolist()][:length]
        except UserError as error:
            raise UserError(f"{place_of(prompt, number)}: {error}") from None
        found.append((ids, [1] * len(ids), range(len(ids))))
    if validation:
        batches = pipeline.validation_batches(config.data, tokenizer, batch_size=validation, batches=1)
        batch = next(iter(batches), None)
        if batch is None:
            raise UserError("--rows: the validation set is empty; allowed: 0, or another --config.data.validation")
        for row in range(validation):
            found.append(tuple(batch[name][row, :length].tolist() for name in Rows._fields))
    longest = max(len(ids) for ids, _, _ in found)
    arrays = np.zeros((3, len(found), longest), np.int32)
    for row, fields in enumerate(found):
        for array, values in zip(arrays, fields, strict=True):
            array[row, : len(values)] = values
    arrays[0] %= config.vocab_size
    return Rows(*arrays[:, (arrays[1] > 0).any(axis=1)])  # a small validation set leaves rows empty


# What it is made of ---------------------------------------------------------------------------------------------------


def compute(
    checkpoint: checkpoints.Checkpoint,
    rows: Rows,
    *,
    ids: np.ndarray | None = None,
    top_k: int = 0,
    activations: bool = True,
    batch_size: int = 4,
    tell: Callable[[int], None] = lambda rows: None,
) -> Outputs:
    """Logits of every token, and hidden states at ``points``.

    Args:
      ids: int32 [M, K], the tokens whose logits are kept. Without: the ``top_k`` most probable, all for 0.
      activations: whether hidden states are kept, 4 (S + 2) D bytes a token.
      batch_size: rows at once, filled up to the mesh's shards; changes the last bits at most.
      tell: called after each batch with the rows done.
    """
    import jax

    from mhc.data import tokenizers
    from mhc.eval.common.program import Program, filled, multiple

    config, mesh = checkpoint.config, checkpoint.mesh
    program = Program(checkpoint, _Forward(0 if ids is not None else min(top_k, config.vocab_size), activations))
    size = multiple(batch_size, mesh)
    inputs = rows._asdict()
    if ids is not None:
        inputs["ids"] = np.zeros((*rows.tokens.shape, ids.shape[-1]), np.int32)
        inputs["ids"][rows.valid] = ids
    batches = (
        filled({name: array[start : start + size] for name, array in inputs.items()}, size)
        for start in range(0, len(rows.tokens), size)
    )
    parts: list[dict[str, np.ndarray]] = []
    for batch, outputs in program.each(batches, list(inputs)):
        valid = batch["segment_ids"] > 0
        parts.append({name: array[valid] for name, array in outputs.items()})
        tell(min(len(parts) * size, len(rows.tokens)))
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    device = jax.devices()[0]
    about = {
        "format": FORMAT,
        "checkpoint": checkpoint.name,
        "steps": list(checkpoint.steps),
        "config": configs.to_dict(config),
        "tokenizer": tokenizers.load(config.data.tokenizer).content_hash,
        "vocabulary": config.vocab_size,
        "points": points(config.model.layers),
        "versions": _versions(),
        "device": f"{mesh.size} × {device.device_kind}",
    }
    logits = Logits(joined["values"], joined.get("ids"), joined["log_z"], joined["best"])
    return Outputs(about, rows, logits, np.moveaxis(joined["hidden"], 1, 0) if activations else None)


@dataclasses.dataclass(frozen=True)
class _Forward:
    """Computes the fields of `Logits` [B, T, ...], and hidden states [B, T, P, D], of rows [B, T]."""

    top_k: int  # logits kept a token, where the batch does not name them by its ids; 0: all
    activations: bool

    def __call__(self, decoder: Decoder, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        import jax
        import jax.numpy as jnp

        def observe(view: SublayerView) -> dict[str, jax.Array]:
            return {"h": view.topology.collapse(view.state).astype(jnp.float32)}

        tokens, segments, positions = (batch[name] for name in Rows._fields)
        out = decoder.forward(tokens, segments, positions, observe if self.activations else None)
        logits = decoder.logits(out.h).astype(jnp.float32)
        outputs = {"log_z": jax.nn.logsumexp(logits, axis=-1), "best": jnp.argmax(logits, axis=-1)}
        if "ids" in batch or self.top_k:
            chosen = batch["ids"] if "ids" in batch else jax.lax.top_k(logits, self.top_k)[1]
            outputs |= {"ids": chosen, "values": jnp.take_along_axis(logits, chosen, axis=-1)}
        else:
            outputs["values"] = logits
        if self.activations:
            topology = decoder.residual
            first = topology.collapse(topology.expand(decoder.embed_tokens(tokens, positions)))
            every = [first[None], out.observed["h"], out.h[None]]
            stacked = jnp.concatenate([h.astype(jnp.float32) for h in every])
            outputs["hidden"] = jnp.moveaxis(stacked, 0, 2)
        return outputs


def _versions() -> dict[str, str]:
    from importlib import metadata

    return {name: metadata.version(name) for name in ("mhc-jax", "jax", "flax", "numpy")}


# Golden files ---------------------------------------------------------------------------------------------------------


def save(file: Path, made: Outputs) -> None:
    """Write a golden file, whole or not at all."""
    arrays = {**made.rows._asdict(), **{name: a for name, a in made.logits._asdict().items() if a is not None}}
    if made.hidden is not None:
        arrays["hidden"] = made.hidden
    about = np.frombuffer(json.dumps(made.about).encode(), np.uint8)
    part = file.with_name(f"{file.name}.part")
    try:
        with part.open("wb") as stream:
            np.savez(stream, about=about, **arrays)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


_MALFORMED = (ValueError, EOFError, LookupError, TypeError, AttributeError)  # of a file of another form


def read(file: Path) -> Outputs:
    """A golden file. Raises UserError where it is none, is damaged, or is of another format."""
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as opened:
            arrays = {name: opened[name] for name in opened.files}
        about = json.loads(arrays["about"].tobytes())
        rows = Rows(*(arrays[name] for name in Rows._fields))
        logits = Logits(arrays["values"], arrays.get("ids"), arrays["log_z"], arrays["best"])
        known = int(about["format"])
        about["vocabulary"], about["tokenizer"], about["points"], about["config"]["residual"]["collapse"]
    except OSError as error:
        raise UserError(f"--against {file}: cannot be read ({error.strerror or error})") from None
    except (
        zipfile.BadZipFile,
        zlib.error,
        ValueError,
        EOFError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        said = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"--against {file}: no golden file, or not whole ({said})") from None
    if known != FORMAT:
        raise UserError(f"--against {file}: of format {known}, allowed: {FORMAT}; save it again")
    found = Outputs(about, rows, logits, arrays.get("hidden"))
    if wrong := _inconsistent(found):
        raise UserError(f"--against {file}: no golden file, or not whole ({wrong})")
    return found


def _inconsistent(found: Outputs) -> str:
    """What of a golden file does not go with the rest, in words; "" where all does."""
    rows, logits, vocabulary = found.rows, found.logits, found.about["vocabulary"]
    if rows.tokens.ndim != 2 or len({part.shape for part in rows}) > 1:
        return "tokens, segments and positions differ in shape"
    if rows.tokens.size and not (rows.tokens.min() >= 0 and rows.tokens.max() < vocabulary):
        return f"a token is not among its {vocabulary}"
    count = int(rows.valid.sum())
    lengths = {"values": logits.values, "log_z": logits.log_z, "best": logits.best}
    if logits.ids is not None:
        lengths["ids"] = logits.ids
    for name, array in lengths.items():
        if array.shape[:1] != (count,):
            return f"{name} is of another number of tokens than {count}"
    if logits.ids is None and logits.values.shape[1:] != (vocabulary,):
        return f"values is of another vocabulary than {vocabulary}"
    if logits.ids is not None and logits.ids.shape != logits.values.shape:
        return "values and ids differ in shape"
    if found.hidden is not None and found.hidden.shape[:2] != (len(found.about["points"]), count):
        return "hidden is of another number of points or tokens"
    return ""


# The comparison -------------------------------------------------------------------------------------------------------


def divergence(logits: Logits, reference: Logits) -> np.ndarray:
    """KL(reference || other) of each token in nats, float64 [M].

    Of logits that are not all kept, the tokens left out count as one: a lower bound.
    """
    step = max(2**22 // reference.values.shape[-1], 1)  # tokens at once, as float64
    parts = (slice(start, start + step) for start in range(0, len(reference.values), step))
    return np.concatenate([_divergence(_part(logits, part), _part(reference, part)) for part in parts])


def _part(logits: Logits, tokens: slice) -> Logits:
    ids = None if logits.ids is None else logits.ids[tokens]
    return Logits(logits.values[tokens], ids, logits.log_z[tokens], logits.best[tokens])


def _divergence(logits: Logits, reference: Logits) -> np.ndarray:
    whole = reference.ids is None
    log_p, log_q = (_log_probabilities(one, whole) for one in (reference, logits))
    kl = np.sum(np.exp(log_p) * (log_p - log_q), axis=-1)
    if not whole:
        left, other = (np.maximum(1.0 - np.exp(log).sum(axis=-1), 1e-9) for log in (log_p, log_q))
        kl += np.where(left > 1e-6, left * np.log(left / other), 0.0)  # below it is rounding
    return np.maximum(kl, 0.0)


def _log_probabilities(logits: Logits, whole: bool) -> np.ndarray:
    values = logits.values.astype(np.float64)
    if not whole:
        return values - logits.log_z[:, None]
    shifted = values - values.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def mean_by_row(values: np.ndarray, row: np.ndarray) -> Bounds:
    """Return the mean over tokens [M], with the interval (95 %) over rows drawn with replacement; none for one row."""
    _, row = np.unique(row, return_inverse=True)
    return ratio(np.bincount(row, values), np.bincount(row)).at()


def _apart(where: str, one: np.ndarray, other: np.ndarray) -> dict[str, Any]:
    """Largest and mean absolute difference of two arrays, the largest magnitude of the second, and their ratio."""
    gap = np.abs(one - other)
    largest, scale = float(gap.max()), float(np.abs(other).max())
    relative = largest / scale if scale else 0.0 if largest == 0 else math.inf
    mean = float(gap.mean(dtype=np.float64))
    return {"where": where, "largest": largest, "mean": mean, "scale": scale, "relative": relative}


@np.errstate(invalid="ignore")  # what is not finite differs, and is no error here
def compare(made: Outputs, reference: Outputs, tolerance: float) -> dict[str, Any]:
    """What differs, and from where on; JSON but for arrays. Both of the same rows, logits of the same tokens."""
    ours, theirs = made.about["config"], reference.about["config"]
    notes, layers = [], []
    if made.hidden is None or reference.hidden is None:
        notes.append("no hidden states were kept (--save with --activations): nothing by layer")
    elif made.hidden.shape[-1] != reference.hidden.shape[-1]:
        widths = (made.hidden.shape[-1], reference.hidden.shape[-1])
        notes.append(f"widths {widths[0]} and {widths[1]}: hidden states cannot be compared, logits are")
    else:
        at = {name: k for k, name in enumerate(reference.about["points"])}
        for k, name in enumerate(made.about["points"]):
            if name in at:
                layers.append(_apart(name, made.hidden[k], reference.hidden[at[name]]))
        depths = (ours["model"]["layers"], theirs["model"]["layers"])
        if depths[0] != depths[1]:
            notes.append(f"{depths[0]} and {depths[1]} blocks: those after the first {min(depths)} have no counterpart")
        if "sum" in (ours["residual"]["collapse"], theirs["residual"]["collapse"]) and (
            ours["residual"]["collapse"] != theirs["residual"]["collapse"]
        ):
            notes.append("one sums its streams, one does not: hidden states before the head's norm differ by a factor")
    for field in ("device", "versions"):
        if made.about[field] != reference.about[field]:
            here, there = (_words(about[field]) for about in (made.about, reference.about))
            notes.append(f"{field}: {here} and {there}")
    logits = _apart("logits", made.logits.values, reference.logits.values)
    layers.append(logits)
    above = [one["where"] for one in layers if not one["relative"] <= tolerance]  # NaN is above
    kl = divergence(made.logits, reference.logits)
    changed = (made.logits.best != reference.logits.best).astype(np.float64)
    gap = np.abs(made.logits.values - reference.logits.values)
    row, place = np.nonzero(reference.rows.valid)
    worst = int(np.argmax(np.nan_to_num(gap.max(axis=-1), nan=np.inf)))
    return {
        "checkpoint": made.about["checkpoint"],
        "against": reference.about["checkpoint"],
        "tolerance": tolerance,
        "within": logits["relative"] <= tolerance,
        "rows": len(reference.rows.tokens),
        "tokens": len(row),
        "vocabulary": reference.about["vocabulary"],
        "logits_a_token": reference.logits.values.shape[-1],
        "largest": logits["largest"],
        "largest_logit": logits["scale"],
        "relative": logits["relative"],
        "largest_at": {"row": int(row[worst]), "place": int(place[worst])},
        "mean": mean_by_row(gap.mean(axis=-1, dtype=np.float64), row),
        "top1_changed": {**mean_by_row(changed, row), "tokens": int(changed.sum())},
        "kl": {**mean_by_row(kl, row), "largest": float(kl.max())},
        "layers": layers,
        "first_above": above[0] if above else None,
        "config": {
            f"{group}.{name}": [theirs.get(group, {}).get(name), value]
            for group in _MODEL
            for name, value in ours[group].items()
            if theirs.get(group, {}).get(name) != value
        },
        "notes": notes,
    }


def _words(value: object) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, Mapping) else str(value)


def text(found: dict[str, Any]) -> str:
    """What is printed of a comparison."""

    def interval(one: dict[str, Any], shown: str) -> str:
        if one["low"] is None:
            return "one row"
        return f"95 % over rows: {one['low']:{shown}} to {one['high']:{shown}}"

    mean, changed, kl = found["mean"], found["top1_changed"], found["kl"]
    kept, vocabulary = found["logits_a_token"], found["vocabulary"]
    which = f"all {vocabulary:,}" if kept == vocabulary else f"the reference's {kept:,} most probable of {vocabulary:,}"
    bound = "" if kept == vocabulary else " (at least)"
    at = found["largest_at"]
    lines = [f"{found['checkpoint']}, against {found['against']}"]
    lines += [f"  {name}: {there} there, {here} here" for name, (there, here) in found["config"].items()]
    lines.append(f"{found['rows']} rows, {found['tokens']:,} tokens; logits of {which} tokens")
    lines.append(
        aligned(
            [
                (
                    "logits, abs difference",
                    f"largest {found['largest']:.3g} = {found['relative']:.3g} of the largest logit "
                    f"{found['largest_logit']:.4g}, at row {at['row']}, place {at['place']}",
                ),
                ("", f"mean {mean['value']:.3g} ({interval(mean, '.3g')})"),
                (
                    "top-1 changed",
                    f"{changed['value']:.2%} of tokens, {changed['tokens']:,} ({interval(changed, '.2%')})",
                ),
                (
                    "KL in nats a token" + bound,
                    f"mean {kl['value']:.3g} ({interval(kl, '.3g')}), largest {kl['largest']:.3g}",
                ),
            ]
        )
    )
    if len(found["layers"]) > 1:
        table = [("where", "largest", "mean", "of the largest there", "× before")]
        before = None
        for one in found["layers"]:
            grown = "" if not before else f"{one['relative'] / before:.3g}"
            table.append((one["where"], *(f"{one[key]:.3g}" for key in ("largest", "mean", "relative")), grown))
            before = one["relative"]
        lines += ["", aligned(table), ""]
    lines += [f"note: {note}" for note in found["notes"]]
    tolerance, first = found["tolerance"], found["first_above"]
    verdict = "within" if found["within"] else "not within"
    lines.append(f"logits {verdict} {tolerance:g} of the largest")
    lines.append(f"first above {tolerance:g}: {first or 'nothing'}")
    return "\n".join(lines)


# The command line -----------------------------------------------------------------------------------------------------


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


_OF_ROWS = ("prompts", "field", "rows", "length", "top_k")  # what a golden file has settled


def _check(options: argparse.Namespace) -> None:
    """Raises UserError for arguments that do not go together, or are out of range."""
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
    """What the options ask for. Raises UserError where that cannot be read, or is longer than the run's rows."""
    from mhc.eval.common.prompts import read_prompts

    most = config.data.sequence_length
    if options.length is not None and options.length > most:
        raise UserError(f"--length: given {options.length}, allowed: 1 to data.sequence_length={most}")
    own = options.prompts is None
    prompts = PROMPTS if own else read_prompts(options.prompts, options.field or "prompt")
    count = (4 if own else 0) if options.rows is None else options.rows
    return make_rows(config, prompts, count, options.length or min(most, 256))


def _top_k(options: argparse.Namespace, config: Config) -> int:
    return options.top_k if options.top_k is not None else 0 if config.vocab_size <= WHOLE else 256


def _check_comparable(config: Config, against: str, vocabulary: int, tokenizer: str, longest: int) -> None:
    """Raises UserError where the model cannot read what the reference read, or its logits are of other tokens."""
    from mhc.data import tokenizers

    if vocabulary != config.vocab_size:
        raise UserError(
            f"--against {against}: a vocabulary of {vocabulary}, --checkpoint has one of {config.vocab_size}: their "
            "logits are of other tokens"
        )
    own = tokenizers.load(config.data.tokenizer).content_hash
    if tokenizer != own:
        raise UserError(
            f"--against {against}: tokeniser {tokenizer}, --checkpoint has {own} ({config.data.tokenizer}); allowed: "
            "the same (--config.data.tokenizer)"
        )
    if config.positions.kind == "learned" and longest > config.max_length:
        raise UserError(
            f"--against {against}: rows of {longest} tokens, --checkpoint has learned positions for {config.max_length}"
        )


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code. Raises UserError for a mistake."""
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
        made = run(model(), rows, top_k=_top_k(options, config), activations=options.activations)
        save(Path(options.save), made)
        print(_saved(Path(options.save), made))
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
    made = run(model(), reference.rows, ids=reference.logits.ids, activations=layers)
    found = compare(made, reference, options.tolerance)
    if options.json is not None:
        from mhc.files import write_json

        write_json(options.json, found)
    print(text(found))
    return 0 if found["within"] else 1


def _saved(file: Path, made: Outputs) -> str:
    tokens, kept = made.logits.values.shape
    layers = "no hidden states" if made.hidden is None else f"hidden states at {len(made.hidden)} points"
    return (
        f"{file}: {made.about['checkpoint']}, {len(made.rows.tokens)} rows, {tokens:,} tokens, {kept:,} logits a "
        f"token, {layers}, {file.stat().st_size / 2**20:.1f} MiB"
    )


if __name__ == "__main__":
    cli.run_main(main)
