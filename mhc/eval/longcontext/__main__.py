"""How far a checkpoint's context reaches, and what it costs: needles, position bias, loss by position, time, memory.

    python -m eval.longcontext --checkpoint runs/a --out report
    python -m eval.longcontext --checkpoint runs/plain runs/mhc --parts needles distractors joined --samples 50
    python -m eval.longcontext --checkpoint runs/a --parts loss --lengths 4096 --scalings none ntk yarn
    python -m eval.longcontext --checkpoint runs/a --parts cost --lengths 512 2048 8192 --new 64

A needle is a sentence that gives an invented name a random number; it is hidden at a depth of the run's own validation
text, whose documents are laid end to end, and the text closes with the beginning of the same sentence. Three measures:
*exact*, greedy decoding gives the number; *first*, it is the most probable of K numbers (chance 1/K); *gain*, the nats
per token by which it is more probable than with the needle replaced by further text. Gain shows what small models have
of a needle long before they get it right.

Lengths are of whole rows in tokens, by default 1/4 to 4 times the trained length. Samples are the same at every depth
and length, and for all checkpoints that share a tokeniser and a corpus. Intervals are 95 %: Wilson's of shares,
bootstrap over samples of nats, over rows of losses, over passes and steps of times.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mhc import cli
from mhc.config import Config
from mhc.errors import UserError
from mhc.eval.common import checkpoints
from mhc.eval.common.statistics import mean
from mhc.eval.common.terminal import Progress, aligned
from mhc.eval.longcontext import needles, reach

if TYPE_CHECKING:
    import argparse

PARTS = ("needles", "distractors", "joined", "loss", "cost")
COUNTS = (0, 1, 4, 16)  # distractors
TIMES = (0.25, 0.5, 1, 2, 4)  # the trained length


# Values under a model -------------------------------------------------------------------------------------------------


class ModelScore:
    """``needles.Score`` of a checkpoint; one program for each length of row."""

    def __init__(self, checkpoint: checkpoints.Checkpoint, batch_size: int, tell: Callable[[int], None] | None = None):
        """``batch_size``: rows of the trained length at once; of longer ones fewer. ``tell``: told the rows so far."""
        from mhc.eval.common.scoring import Scorer

        self._scorer = Scorer(checkpoint)
        self._tokens = batch_size * checkpoint.config.data.sequence_length
        self._tell, self._done = tell or (lambda rows: None), 0

    def __call__(self, rows: Iterable[needles.Row]) -> list[needles.ValueScore]:
        found = []
        for batch, scores in self._scorer.each(self._batches(iter(rows))):
            for row, (start, end) in enumerate(batch["places"]):
                if end:  # otherwise it fills up the batch
                    nll = float(scores.nll[row, start:end].sum(dtype=np.float64))
                    found.append(needles.ValueScore(-nll, bool(scores.greedy[row, start:end].all())))
            self._done += len(batch["places"])
            self._tell(self._done)
        return found

    def _batches(self, rows: Iterator[needles.Row]) -> Iterator[dict[str, np.ndarray]]:
        from mhc.data.rows.packing import empty_batch

        first = next(rows)
        length = len(first.context) + len(first.value)
        every = itertools.chain([first], rows)
        count = reach.rows_at_once(self._tokens, length)
        while group := list(itertools.islice(every, count)):
            batch = empty_batch(count, length) | {"places": np.zeros((count, 2), np.int32)}
            for row, (context, value) in enumerate(group):
                ids = np.concatenate([context, value])
                reach.fill_row(batch, row, ids)
                batch["places"][row] = len(context) - 1, len(ids) - 1
            yield batch


# A checkpoint ---------------------------------------------------------------------------------------------------------


def default_lengths(config: Config) -> tuple[list[int], str | None]:
    """(lengths of rows, what limits them): 1/4 to 4 times the trained length, as far as there are positions."""
    trained = config.data.sequence_length
    wanted = [max(int(trained * times), 1) for times in TIMES]
    most = most_positions(config)
    if most is None or wanted[-1] <= most:
        return wanted, None
    left = [length for length in wanted if length > most]
    return [length for length in wanted if length <= most], (
        f"no rows of {', '.join(map(str, left))} tokens: the learned positions end at {most}"
    )


def most_positions(config: Config) -> int | None:
    """The longest row that a model can read; None: any."""
    return config.max_length if config.positions.kind == "learned" else None


class Found(NamedTuple):
    """What is found of a checkpoint."""

    report: dict[str, Any]  # for JSON
    samples: dict[str, np.ndarray]  # by measure, one value a sample or document: what pairs checkpoints
    identity: tuple[str, str]  # of the corpus


def evaluate(checkpoint: checkpoints.Checkpoint, options: argparse.Namespace) -> Found:
    """All parts that are asked for. Raises UserError for a corpus that cannot be read."""
    config = checkpoint.config
    corpus = reach.open_corpus(config, options.split)
    lengths, limit = (options.lengths, None) if options.lengths else default_lengths(config)
    notes = [limit] if limit else []
    samples: dict[str, np.ndarray] = {}
    found: dict[str, Any] = {
        "checkpoint": checkpoint.name,
        "kind": config.residual.kind,
        "steps": list(checkpoint.steps),
        "trained_length": config.data.sequence_length,
        "lengths": lengths,
        "documents": corpus.size,
        "notes": notes,
    }
    if set(options.parts) & {"needles", "distractors", "joined"}:
        score = ModelScore(checkpoint, options.batch_size, Progress("rows of needles", name=checkpoint.name))
        exam = _exam(corpus, options, score, config.attention.prefix)
        found["needle"] = {
            "of": "ids" if isinstance(exam.language, needles.RandomIds) else "text",
            "candidates": options.candidates,
            "samples": options.samples,
            "seed": options.seed,
        }
        found |= _needle_parts(exam, config, lengths, options, notes, samples)
    if "loss" in options.parts:
        progress = Progress("tokens of the loss by position", name=checkpoint.name)
        part = _loss_part(checkpoint, corpus, max(lengths), options, progress, samples)
        if part is None:
            notes.append(f"no loss by position: the split has fewer than {max(lengths)} tokens")
        else:
            found["loss"] = part
    if "cost" in options.parts:
        clock, found["cost"] = reach.Clock(checkpoint), []
        progress = Progress("lengths timed", len(lengths), name=checkpoint.name)
        for number, length in enumerate(lengths):
            progress(number)
            if length < 2:
                continue
            ids = corpus.haystack.read((0, 0), length)
            found["cost"].append(clock.measure(ids, min(options.new, length // 2), options.repeats))
    return Found(found, samples, corpus.identity)


def difference(found: Found, first: Found) -> list[dict[str, Any]]:
    """Less the first one's, paired by sample (of the mean over depths) or document; none of other text."""
    if found.identity != first.identity:
        return []
    return [
        {
            "measure": measure,
            "samples": len(values),
            **mean(values - first.samples[measure]).at(),
        }
        for measure, values in found.samples.items()
        if measure in first.samples
    ]


def _exam(corpus: reach.Corpus, options: argparse.Namespace, score: needles.Score, prefix: int) -> needles.Exam:
    tokenizer = corpus.tokenizer
    language: needles.Language
    if options.ids or not corpus.is_text:
        seen = np.unique(corpus.haystack.read((0, 0), 20_000))
        language = needles.RandomIds(np.setdiff1d(seen, [tokenizer.bos_id, tokenizer.eos_id]))
    else:
        language = needles.Text(tokenizer, options.statement, options.link)
    samples, candidates = options.samples, options.candidates
    return needles.Exam(
        language, corpus.haystack, score, tokenizer.bos_id, samples, candidates, options.seed, prefix or 0
    )


def _needle_parts(
    exam: needles.Exam,
    config: Config,
    lengths: Sequence[int],
    options: argparse.Namespace,
    notes: list[str],
    samples: dict[str, np.ndarray],
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "needles" in options.parts:
        found["retrieval"], found["position_bias"] = [], []
        for length in lengths:
            try:
                answers = needles.retrieval(exam, length, options.depths)
            except needles.TooShort as short:
                notes.append(f"no needle in {length} tokens: needle and question alone take up to {short.needed}")
                continue
            for measure in ("gain", "first"):
                samples[f"{measure}, {length} tokens"] = getattr(answers, measure).mean(axis=1)
            for place, depth in enumerate(options.depths):
                column = needles.Answers(*(part[:, place] for part in answers))
                found["retrieval"].append({"length": length, "depth": depth, **needles.cell(column)})
            if len(options.depths) > 1:
                for measure in ("gain", "exact"):
                    bias = needles.position_bias(getattr(answers, measure), options.depths)
                    found["position_bias"].append({"length": length, "measure": measure, **bias})
    trained = config.data.sequence_length
    tried = [options.at] if options.at else [length for length in lengths if length >= trained] or [max(lengths)]
    for part in ("distractors", "joined"):
        if part in options.parts:
            rows, needed = None, 0
            for length in tried:
                try:
                    rows = _DISTRACTED[part](exam, length)
                except needles.TooShort as short:
                    needed = short.needed
                    continue
                found[part] = {"length": length, "rows": rows}
                left = COUNTS[len(rows) :] if part == "distractors" else ()
                if left:
                    notes.append(f"no {' or '.join(map(str, left))} distractors in {length} tokens (--at)")
                break
            if rows is None:
                notes.append(f"no {part} in {tried[-1]} tokens: the sentences alone take up to {needed} (--at)")
    return found


def _distractors(exam: needles.Exam, length: int) -> list[dict[str, Any]]:
    found = needles.distracted(exam, length, COUNTS)
    return [{"distractors": count, **needles.cell(answers)} for count, answers in found.items()]


def _joined(exam: needles.Exam, length: int) -> list[dict[str, Any]]:
    names = ("x, over its link to y", "y itself")
    return [
        {"question": name, **needles.cell(one)} for name, one in zip(names, needles.joined(exam, length), strict=True)
    ]


_DISTRACTED = {"distractors": _distractors, "joined": _joined}


def _loss_part(
    checkpoint: checkpoints.Checkpoint,
    corpus: reach.Corpus,
    length: int,
    options: argparse.Namespace,
    tell: Callable[[int], None],
    samples: dict[str, np.ndarray],
) -> dict[str, Any] | None:
    rows = reach.loss_rows(corpus, length, options.rows, options.seed)
    if rows is None:
        return None
    config, trained = checkpoint.config, checkpoint.config.data.sequence_length
    fine = sorted({*range(0, length, max(trained // 8, 1)), length})
    least, series, first = config.attention.prefix or 0, [], None
    for name, other in reach.scalings(config, length, options.scalings).items():
        nll = reach.position_losses(checkpoint._replace(config=other), rows.ids, options.batch_size, tell)
        series.append(
            {
                "scaling": name,
                "buckets": reach.buckets(nll, reach.octaves(trained, length), first, least),
                "curve": reach.buckets(nll, fine, first, least),
            }
        )
        if first is None:
            first = nll
            for one in series[0]["buckets"]:
                label = f"loss, {one['from']}-{one['to']} of {length} tokens"
                samples[label] = nll[:, one["from"] - 1 : one["to"]].mean(axis=1)
    return {
        "length": length,
        "documents": rows.ids.shape[0],
        "rows": rows.ids.shape[1],
        "joined": rows.joined,
        "series": series,
    }


# What is printed ------------------------------------------------------------------------------------------------------


def _share(one: dict[str, float]) -> str:
    return f"{100 * one['value']:.0f} ({100 * one['low']:.0f} to {100 * one['high']:.0f})"


def _nats(one: dict[str, float | None], sign: str = "") -> str:
    bounds = "one sample" if one["low"] is None else f"{one['low']:{sign}.3f} to {one['high']:{sign}.3f}"
    return f"{one['value']:{sign}.3f} ({bounds})"


def _of(loss: dict[str, Any]) -> str:
    if loss["joined"]:
        return f"{loss['documents']} rows of documents joined"
    return f"{loss['documents']} documents, {loss['rows']} row{'s' if loss['rows'] > 1 else ''} of each"


def _milliseconds(one: dict[str, Any]) -> str:
    value = 1e3 * one["value"]
    return f"{value:.2f}" if one["low"] is None else f"{value:.2f} ({1e3 * one['low']:.2f} to {1e3 * one['high']:.2f})"


def _measured(one: dict[str, Any]) -> tuple[str, ...]:
    return _share(one["exact"]), _share(one["first"]), f"{one['mean_rank']:.1f}", _nats(one["gain"], "+")


def _spread(one: dict[str, Any]) -> tuple[str, str]:
    return _nats(one["spread"]), f"{one['p']:.4f}"


def text(found: dict[str, Any]) -> str:
    """The tables of a checkpoint."""
    parts = [f"{found['checkpoint']} ({found['kind']}), trained on {found['trained_length']} tokens a row"]

    def table(title: str, heading: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        parts.append(f"{title}\n{aligned([heading, *rows])}")

    measured, over = [""], ""
    if "needle" in found:
        k, n = found["needle"]["candidates"], found["needle"]["samples"]
        measured = ["exact, %", f"first of {k}, % (chance {100 / k:.0f})", "mean rank", "gain, nats a token"]
        over = f"means over {n} samples, 95 %"
    if found.get("retrieval"):
        table(
            f"Needles by length and depth, {over}",
            ["length", "depth", *measured],
            [(str(one["length"]), f"{one['depth']:g}", *_measured(one)) for one in found["retrieval"]],
        )
    if found.get("position_bias"):
        table(
            "Position bias: the same evidence in the same text, 95 % over paired samples",
            ["length", "measure", "best depth", "worst", "best - worst", "p"],
            [
                (str(one["length"]), one["measure"], f"{one['best']:g}", f"{one['worst']:g}", *_spread(one))
                for one in found["position_bias"]
            ],
        )
    for part, title, column in (
        ("distractors", "Distractors", "distractors"),
        ("joined", "Two needles to be joined", "number of"),
    ):
        if part in found:
            length, rows = found[part]["length"], found[part]["rows"]
            lines = [(str(next(iter(one.values()))), *_measured(one)) for one in rows]
            table(f"{title}, {length} tokens, {over}", [column, *measured], lines)
    if "loss" in found:
        loss = found["loss"]
        table(
            f"Loss in nats by tokens of context, and what another scaling adds to it; {_of(loss)}, 95 % over them",
            ["scaling", *(f"{one['from']}-{one['to']}" for one in loss["series"][0]["buckets"])],
            [
                (
                    series["scaling"],
                    *(
                        _nats(one["minus_first"], "+") if "minus_first" in one else _nats(one["loss"])
                        for one in series["buckets"]
                    ),
                )
                for series in loss["series"]
            ],
        )
    if found.get("minus_first"):
        table(
            f"Minus {found['first']}, needles as means over depths; paired, 95 %",
            ["measure", "difference", "samples"],
            [(one["measure"], _nats(one, "+"), str(one["samples"])) for one in found["minus_first"]],
        )
    if found.get("cost"):
        times = ("first_token_seconds", "step_seconds_median", "step_seconds_p95")
        table(
            "Cost of one row in ms, compilation apart, 95 %",
            ["length", "prompt", "first token", "next ones, median", "P95", "cache, bytes", "passes", "steps"],
            [
                (
                    str(one["length"]),
                    str(one["prompt"]),
                    *(_milliseconds(one[name]) for name in times),
                    f"{one['cache_bytes']:,}",
                    str(one["repeats"]),
                    str(one["steps"]),
                )
                for one in found["cost"]
            ],
        )
    notes = "\n".join(f"note: {note}" for note in found["notes"])
    return "\n\n".join([*parts, notes] if notes else parts)


def draw(every: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """needles_K.png of each checkpoint and loss_by_position.png, with their numbers as CSV."""
    names = checkpoints.short_names([one["checkpoint"] for one in every])
    drawn = [
        _draw_needles(one, name, number, folder)
        for number, (one, name) in enumerate(zip(every, names, strict=True), start=1)
        if one.get("retrieval")
    ]
    losses = [
        (name, one["trained_length"], one["loss"]) for name, one in zip(names, every, strict=True) if "loss" in one
    ]
    return [*drawn, _draw_losses(losses, folder)] if losses else drawn


def _draw_needles(found: dict[str, Any], name: str, number: int, folder: Path) -> Path:
    from mhc.eval.common.sheet import Sheet

    cells = {(cell["length"], cell["depth"]): cell for cell in found["retrieval"]}
    lengths, depths = (sorted({place[axis] for place in cells}) for axis in (0, 1))
    sheet = Sheet(f"needles_{number}", columns=3, height=2.8, x="tokens of the row", sharey=False)
    k, n = found["needle"]["candidates"], found["needle"]["samples"]
    titles = {"gain": f"gain in nats, mean of {n}", "first": f"first of {k} (chance {1 / k:.2g})", "exact": "exact"}
    for panel, (measure, title) in enumerate(titles.items()):
        sheet.title(panel, title)
        values = np.array([[cells[length, depth][measure]["value"] for depth in depths] for length in lengths])
        sheet.cells(panel, name, values, "depth")
        axes = sheet.panels[panel]
        if measure != "gain":
            axes.images[0].set_clim(0, 1)
        low, high = axes.images[0].get_clim()
        for (x, y), value in np.ndenumerate(values):
            colour = "white" if value < (low + high) / 2 else "black"
            axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour)
        axes.set_xticks(range(len(lengths)), list(map(str, lengths)))
        axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
    return sheet.save(folder, folder)


def _draw_losses(losses: Sequence[tuple[str, int, dict[str, Any]]], folder: Path) -> Path:
    """``losses``: (name, trained length, loss) of each checkpoint; it gets a row: the losses, and their differences."""
    from mhc.eval.common.palette import palette
    from mhc.eval.common.sheet import Sheet

    labels = list(dict.fromkeys(series["scaling"] for _, _, loss in losses for series in loss["series"]))
    looks = dict(zip(labels, palette(len(labels)), strict=True))
    columns = 2 if any(len(loss["series"]) > 1 for _, _, loss in losses) else 1
    sheet = Sheet(
        "loss_by_position",
        columns=columns,
        rows=len(losses),
        legend=[(style, label) for label, style in looks.items()],
        x="tokens of context",
        sharey=False,
        wide=True,
    )
    for row, (name, trained, loss) in enumerate(losses):
        heading = f"{name}, {loss['documents']} {'rows' if loss['joined'] else 'documents'}"
        for column, (measure, title) in enumerate((("loss", "nats"), ("minus_first", "nats more than as trained"))):
            if column == columns:
                continue
            panel = row * columns + column
            sheet.title(panel, f"{heading}: {title}, 95 %")
            for series in loss["series"]:
                curve = [one for one in series["curve"] if measure in one]
                x = np.array([one["to"] for one in curve], float)
                for what in ("value", "low", "high") if curve else ():
                    if what != "value" and column == 0 and series is not loss["series"][0]:
                        continue  # as wide as the first one's; what matters is the difference
                    y = np.array([one[measure][what] for one in curve], float)
                    width, alpha = (1.5, 1.0) if what == "value" else (0.7, 0.6)
                    look = looks[series["scaling"]]
                    sheet.line(panel, series["scaling"], x, y, look, what=what, width=width, alpha=alpha)
            sheet.panels[panel].axvline(trained, color="#8a8a8a", linewidth=1)
    return sheet.save(folder, folder)


# The command line -----------------------------------------------------------------------------------------------------


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
    needle.add_argument("--statement", default=needles.STATEMENT, metavar="TEXT", help=f"({needles.STATEMENT})")
    needle.add_argument("--link", default=needles.LINK, metavar="TEXT", help=f"of joined needles ({needles.LINK})")
    needle.add_argument("--ids", action="store_true", help="needles of random ids, as for a corpus of ids")
    needle.add_argument("--at", type=int, metavar="T", help="length for distractors and joined; without: as trained")
    loss = parser.add_argument_group("loss")
    loss.add_argument("--rows", type=int, default=64, help="of the longest length (64)")
    loss.add_argument(
        "--scalings", nargs="*", choices=reach.SCALINGS, default=list(reach.SCALINGS), help="beside the run's own"
    )
    cost = parser.add_argument_group("cost")
    cost.add_argument("--new", type=int, default=32, metavar="N", help="tokens decoded, at most half a row (32)")
    cost.add_argument("--repeats", type=int, default=5, help="timed passes (5)")
    parser.add_argument("--json", metavar="FILE", help="write what was found there")
    parser.add_argument("--out", metavar="DIR", help="write figures and their numbers there")
    return parser


def _check(options: argparse.Namespace) -> None:
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
    needles.check_sentence(options.statement, "--statement")
    needles.check_sentence(options.link, "--link")
    options.depths = sorted(set(options.depths))
    options.lengths = sorted(set(options.lengths or []))


def _check_positions(options: argparse.Namespace) -> None:
    """Raises UserError for a length that a checkpoint has no positions for, before any weights are read."""
    from mhc.train.checkpoint import find_checkpoint

    for name in options.checkpoint:
        config, _ = find_checkpoint(*checkpoints.locate(name, options.step))
        most = most_positions(config)
        for option, length in (("--lengths", max(options.lengths, default=0)), ("--at", options.at or 0)):
            if most is not None and length > most:
                raise UserError(f"{option}: given {length}, allowed: at most {most}, the learned positions of {name}")


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code. Raises UserError for a mistake."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    changes = checkpoints.parse_changes(rest, parser)
    _check(options)
    out = cli.check_writable(options.out, "--out") if options.out else None
    if options.json:
        cli.check_file(options.json, "--json")
    _check_positions(options)

    every: list[dict[str, Any]] = []
    first: Found | None = None
    for name in options.checkpoint:
        checkpoint = checkpoints.load(name, options.step, average=options.average, changes=changes)
        print(f"{checkpoint.name}: compiling, then reading", file=sys.stderr, flush=True)
        found = evaluate(checkpoint, options)
        if first is None:
            first = found
        else:
            found.report["first"] = first.report["checkpoint"]
            found.report["minus_first"] = difference(found, first)
            if not found.report["minus_first"]:
                found.report["notes"].append("not compared with the first checkpoint: other text, or nothing to pair")
        every.append(found.report)
        print(text(every[-1]), end="\n\n" if name != options.checkpoint[-1] else "\n", flush=True)
        del checkpoint
    if options.json:
        from mhc.files import write_json

        write_json(options.json, {"split": options.split, "checkpoints": every})
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for path in draw(every, out):
            print(path, file=sys.stderr)
    return 0


if __name__ == "__main__":
    cli.run_main(main)
