"""Evaluate a checkpoint: needles, distractors, joined needles, loss by position, cost."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mhc.config import Config
from mhc.data.rows.packing import empty_batch
from mhc.eval.common.checkpoints import Checkpoint
from mhc.eval.common.scoring import Scorer
from mhc.eval.common.statistics import mean
from mhc.eval.common.terminal import Progress
from mhc.eval.longcontext import needles
from mhc.eval.longcontext.corpus import Corpus, fill_row, open_corpus, rows_at_once
from mhc.eval.longcontext.cost import Clock
from mhc.eval.longcontext.lengths import default_lengths
from mhc.eval.longcontext.positions import buckets, loss_rows, octaves, position_losses, scalings
from mhc.eval.longcontext.sentences import Language, RandomIds, Text

COUNTS = (0, 1, 4, 16)  # distractors


class ModelScore:
    """Scores values under a checkpoint, as ``needles.Score``; one program for each length of row."""

    def __init__(self, checkpoint: Checkpoint, batch_size: int, tell: Callable[[int], None] | None = None):
        """Prepare the scorer.

        Args:
          batch_size: rows of the trained length at once; of longer ones fewer.
          tell: called with the rows so far.
        """
        self._scorer = Scorer(checkpoint)
        self._tokens = batch_size * checkpoint.config.data.sequence_length
        self._tell, self._done = tell or (lambda rows: None), 0

    def __call__(self, rows: Iterable[needles.Row]) -> list[needles.ValueScore]:
        values = []
        for batch, scores in self._scorer.each(self._batches(iter(rows))):
            for row, (start, end) in enumerate(batch["places"]):
                if end:  # otherwise it fills up the batch
                    nll = float(scores.nll[row, start:end].sum(dtype=np.float64))
                    values.append(needles.ValueScore(-nll, bool(scores.greedy[row, start:end].all())))
            self._done += len(batch["places"])
            self._tell(self._done)
        return values

    def _batches(self, rows: Iterator[needles.Row]) -> Iterator[dict[str, np.ndarray]]:
        first = next(rows)
        length = len(first.context) + len(first.value)
        every = itertools.chain([first], rows)
        count = rows_at_once(self._tokens, length)
        while group := list(itertools.islice(every, count)):
            batch = empty_batch(count, length) | {"places": np.zeros((count, 2), np.int32)}
            for row, (context, value) in enumerate(group):
                ids = np.concatenate([context, value])
                fill_row(batch, row, ids)
                batch["places"][row] = len(context) - 1, len(ids) - 1
            yield batch


class Evaluated(NamedTuple):
    """Holds the results of all parts for a checkpoint."""

    report: dict[str, Any]  # for JSON
    samples: dict[str, np.ndarray]  # by measure, one value a sample or document: what pairs checkpoints
    identity: tuple[str, str]  # of the corpus


def evaluate(checkpoint: Checkpoint, options: argparse.Namespace) -> Evaluated:
    """Return the results of the parts that the options name. Raises UserError for a corpus that cannot be read."""
    config = checkpoint.config
    corpus = open_corpus(config, options.split)
    lengths, limit = (options.lengths, None) if options.lengths else default_lengths(config)
    notes = [limit] if limit else []
    samples: dict[str, np.ndarray] = {}
    result: dict[str, Any] = {
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
        result["needle"] = {
            "of": "ids" if isinstance(exam.language, RandomIds) else "text",
            "candidates": options.candidates,
            "samples": options.samples,
            "seed": options.seed,
        }
        result |= _needle_parts(exam, config, lengths, options, notes, samples)
    if "loss" in options.parts:
        progress = Progress("tokens of the loss by position", name=checkpoint.name)
        part = _loss_part(checkpoint, corpus, max(lengths), options, progress, samples)
        if part is None:
            notes.append(f"no loss by position: the split has fewer than {max(lengths)} tokens")
        else:
            result["loss"] = part
    if "cost" in options.parts:
        clock, result["cost"] = Clock(checkpoint), []
        progress = Progress("lengths timed", len(lengths), name=checkpoint.name)
        for number, length in enumerate(lengths):
            progress(number)
            if length < 2:
                continue
            ids = corpus.haystack.read((0, 0), length)
            result["cost"].append(clock.measure(ids, min(options.new, length // 2), options.repeats))
    return Evaluated(result, samples, corpus.identity)


def difference(evaluated: Evaluated, first: Evaluated) -> list[dict[str, Any]]:
    """Return differences to the first checkpoint, paired by sample (of the mean over depths) or document.

    There are none if the two read different text.
    """
    if evaluated.identity != first.identity:
        return []
    return [
        {
            "measure": measure,
            "samples": len(values),
            **mean(values - first.samples[measure]).at(),
        }
        for measure, values in evaluated.samples.items()
        if measure in first.samples
    ]


def _exam(corpus: Corpus, options: argparse.Namespace, score: needles.Score, prefix: int) -> needles.Exam:
    tokenizer = corpus.tokenizer
    language: Language
    if options.ids or not corpus.is_text:
        seen = np.unique(corpus.haystack.read((0, 0), 20_000))
        language = RandomIds(np.setdiff1d(seen, [tokenizer.bos_id, tokenizer.eos_id]))
    else:
        language = Text(tokenizer, options.statement, options.link)
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
    result: dict[str, Any] = {}
    if "needles" in options.parts:
        result["retrieval"], result["position_bias"] = [], []
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
                result["retrieval"].append({"length": length, "depth": depth, **needles.cell(column)})
            if len(options.depths) > 1:
                for measure in ("gain", "exact"):
                    bias = needles.position_bias(getattr(answers, measure), options.depths)
                    result["position_bias"].append({"length": length, "measure": measure, **bias})
    trained = config.data.sequence_length
    tried = [options.at] if options.at else [length for length in lengths if length >= trained] or [max(lengths)]
    for part in ("distractors", "joined"):
        if part in options.parts:
            result |= _in_the_first_that_holds_it(part, exam, tried, notes)
    return result


def _in_the_first_that_holds_it(
    part: str, exam: needles.Exam, lengths: Sequence[int], notes: list[str]
) -> dict[str, Any]:
    """Return the part's results for the first of the lengths that its sentences fit in; {} if they fit in none."""
    needed = 0
    for length in lengths:
        try:
            rows = _DISTRACTED[part](exam, length)
        except needles.TooShort as short:
            needed = short.needed
            continue
        left = COUNTS[len(rows) :] if part == "distractors" else ()
        if left:
            notes.append(f"no {' or '.join(map(str, left))} distractors in {length} tokens (--at)")
        return {part: {"length": length, "rows": rows}}
    notes.append(f"no {part} in {lengths[-1]} tokens: the sentences alone take up to {needed} (--at)")
    return {}


def _distractors(exam: needles.Exam, length: int) -> list[dict[str, Any]]:
    result = needles.distracted(exam, length, COUNTS)
    return [{"distractors": count, **needles.cell(answers)} for count, answers in result.items()]


def _joined(exam: needles.Exam, length: int) -> list[dict[str, Any]]:
    names, both = ("x, over its link to y", "y itself"), needles.joined(exam, length)
    return [{"question": name, **needles.cell(answers)} for name, answers in zip(names, both, strict=True)]


_DISTRACTED = {"distractors": _distractors, "joined": _joined}


def _loss_part(
    checkpoint: Checkpoint,
    corpus: Corpus,
    length: int,
    options: argparse.Namespace,
    tell: Callable[[int], None],
    samples: dict[str, np.ndarray],
) -> dict[str, Any] | None:
    rows = loss_rows(corpus, length, options.rows, options.seed)
    if rows is None:
        return None
    config, trained = checkpoint.config, checkpoint.config.data.sequence_length
    fine = sorted({*range(0, length, max(trained // 8, 1)), length})
    least, series, first = config.attention.prefix or 0, [], None
    for name, other in scalings(config, length, options.scalings).items():
        nll = position_losses(checkpoint._replace(config=other), rows.ids, options.batch_size, tell)
        series.append(
            {
                "scaling": name,
                "buckets": buckets(nll, octaves(trained, length), first, least),
                "curve": buckets(nll, fine, first, least),
            }
        )
        if first is None:
            first = nll
            for bucket in series[0]["buckets"]:
                label = f"loss, {bucket['from']}-{bucket['to']} of {length} tokens"
                samples[label] = nll[:, bucket["from"] - 1 : bucket["to"]].mean(axis=1)
    return {
        "length": length,
        "documents": rows.ids.shape[0],
        "rows": rows.ids.shape[1],
        "joined": rows.joined,
        "series": series,
    }
