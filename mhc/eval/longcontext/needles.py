"""Ask questions whose answer stands once in a long text: what is hidden where, what is asked, how it is judged.

A model enters as a function of rows (context, value) alone: whatever can score a value can be put in its place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mhc.eval.common.statistics import Bounds, bounds, mean, share_interval
from mhc.eval.longcontext.corpus import Haystack
from mhc.eval.longcontext.sentences import Ids, Language

DECOYS = 2  # pairs beside the one that a joined question is about
_PERMUTATIONS = 2000


class Row(NamedTuple):
    """Holds a row that a model scores: the context, and the value that follows it."""

    context: Ids  # all before the value, bos first
    value: Ids  # [M]


class ValueScore(NamedTuple):
    """Holds a model's score of a value."""

    log_prob: float  # nats, summed over the value's tokens
    exact: bool  # whether each of its tokens is the most probable one: greedy decoding would give the value


Score = Callable[[Iterable[Row]], Sequence[ValueScore]]  # rows of one call are equally long, value included


class TooShort(Exception):
    """Reports that a question does not fit; ``needed``: how many tokens the longest one takes without other text."""

    def __init__(self, needed: int):
        super().__init__(needed)
        self.needed = needed


@dataclasses.dataclass(frozen=True)
class Question:
    """Describes a sample: sentences to hide at depths of the text, what is asked, and what may be answered."""

    sentences: tuple[Ids, ...]
    depths: tuple[float, ...]  # of each sentence: 0 before the text, 1 after it
    query: Ids
    candidates: Ids  # [K, M], the value first
    start: tuple[int, int]  # of the text

    @property
    def needed(self) -> int:
        """Return the number of tokens without any text: bos, sentences, query, value."""
        return 1 + sum(map(len, self.sentences)) + len(self.query) + self.candidates.shape[1]

    def context(self, haystack: Haystack, length: int, bos: int, without: int | None = None) -> Ids:
        """Return everything before the value, so long that there are ``length`` tokens with the value.

        Args:
          without: the number of a sentence that is left out, with more text in its place.
        """
        kept = [i for i in range(len(self.sentences)) if i != without]
        room = length - self.needed + (0 if without is None else len(self.sentences[without]))
        text = haystack.read(self.start, room)
        offsets = {i: offset_of(self.depths[i], room) for i in kept}
        parts, done = [np.array([bos], np.int32)], 0
        for i in sorted(kept, key=lambda i: offsets[i]):
            parts += [text[done : offsets[i]], self.sentences[i]]
            done = offsets[i]
        return np.concatenate([*parts, text[done:], self.query]).astype(np.int32)


def offset_of(depth: float, room: int) -> int:
    """Return how many tokens of the text stand before a sentence at a depth from 0 to 1."""
    return int(depth * room + 0.5)


# Asking ---------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Exam:
    """Describes what all questions of an evaluation share."""

    language: Language
    haystack: Haystack
    score: Score
    bos: int
    samples: int
    candidates: int  # K
    seed: int = 0
    prefix: int = 0  # tokens that the model sees both ways: a value among them would be no prediction

    def check(self, questions: Iterable[Question], length: int) -> None:
        """Raise TooShort where a question does not fit."""
        needed = max(max(question.needed, self.prefix + question.candidates.shape[1] + 1) for question in questions)
        if needed > length:
            raise TooShort(needed)

    def draw(self, task: int, sample: int) -> np.random.Generator:
        """Return the random generator of a sample: the same whatever the length, the depth and the model."""
        return np.random.default_rng([self.seed, task, sample])


class Answers(NamedTuple):
    """Holds the answers to n questions, float64 [n] each."""

    exact: np.ndarray  # 1 where greedy decoding gives the value
    first: np.ndarray  # 1 where it is the most probable candidate; shared among equals
    rank: np.ndarray  # among the candidates, 1: the most probable
    log_prob: np.ndarray  # nats per token of the value
    control: np.ndarray  # of the same without the evidence; nan where that was not asked

    @property
    def gain(self) -> np.ndarray:
        """Return how many nats per token of the value the evidence is worth."""
        return self.log_prob - self.control

    def grid(self, *shape: int) -> Answers:
        """Return the answers in another shape."""
        return Answers(*(part.reshape(shape) for part in self))


class Asked(NamedTuple):
    """Holds the rows that are scored for one question."""

    context: Ids
    candidates: Ids
    control: Ids | None  # another context, without the evidence


def ask(every: Sequence[Asked], score: Score) -> Answers:
    """Return the answers: score all candidates of each question, and the true value after the control's context."""

    def rows() -> Iterable[Row]:
        for asked in every:
            yield from (Row(asked.context, value) for value in asked.candidates)
            if asked.control is not None:
                yield Row(asked.control, asked.candidates[0])

    scores, answers, place = score(rows()), [], 0
    for asked in every:
        count, size = asked.candidates.shape
        of_candidates = scores[place : place + count]
        place += count
        log_probs = np.array([score.log_prob for score in of_candidates])
        better, equal = int(np.sum(log_probs[1:] > log_probs[0])), int(np.sum(log_probs[1:] == log_probs[0]))
        control = np.nan
        if asked.control is not None:
            control = scores[place].log_prob / size
            place += 1
        first = 0.0 if better else 1.0 / (1 + equal)
        answers.append((float(of_candidates[0].exact), first, 1 + better + equal / 2, log_probs[0] / size, control))
    return Answers(*np.array(answers, np.float64).T)


def cell(answers: Answers) -> dict[str, Any]:
    """Return the means over samples [n] with 95 % intervals: Wilson's for shares, bootstrap for nats."""

    def share(values: np.ndarray) -> Bounds:
        return bounds(float(values.mean()), *share_interval(float(values.sum()), len(values)))

    return {
        "samples": len(answers.exact),
        "exact": share(answers.exact),
        "first": share(answers.first),
        "mean_rank": float(answers.rank.mean()),
        "gain": mean(answers.gain).at(),
    }


# Tasks ----------------------------------------------------------------------------------------------------------------


def retrieval(exam: Exam, length: int, depths: Sequence[float]) -> Answers:
    """Return answers [samples, depths] about one needle; a sample has the same text and candidates at every depth.

    Raises TooShort.
    """
    questions = []
    for sample in range(exam.samples):
        rng = exam.draw(0, sample)
        start, (key,) = exam.haystack.start(rng), exam.language.keys(rng, 1)
        values = exam.language.values(rng, exam.candidates)
        fact = exam.language.fact(key, values[0])
        questions += [Question((fact.sentence,), (depth,), fact.query, values, start) for depth in depths]
    exam.check(questions, length)
    every = [
        Asked(
            one.context(exam.haystack, length, exam.bos),
            one.candidates,
            # Without the needle all depths are the same.
            one.context(exam.haystack, length, exam.bos, without=0) if number % len(depths) == 0 else None,
        )
        for number, one in enumerate(questions)
    ]
    answers = ask(every, exam.score).grid(exam.samples, len(depths))
    return answers._replace(control=np.repeat(answers.control[:, :1], len(depths), axis=1))


def distracted(exam: Exam, length: int, counts: Sequence[int]) -> dict[int, Answers]:
    """Return answers by number of distractors: needles of the same form with other keys; their values are candidates.

    A sample's needle lies at the same random depth whatever the number; few distractors are the first of many. The
    control has the distractors without the needle. Numbers that do not fit are left out; raises TooShort where none
    but 0 does.
    """
    most = max(counts)
    asked: dict[int, list[Question]] = {}
    for count in sorted(counts):
        questions = []
        for sample in range(exam.samples):
            rng = exam.draw(1, sample)
            start, keys = exam.haystack.start(rng), exam.language.keys(rng, 1 + most)
            values, depths = exam.language.values(rng, max(1 + most, exam.candidates)), rng.random(1 + most)
            facts = [exam.language.fact(key, value) for key, value in zip(keys, values, strict=False)][: 1 + count]
            sentences = tuple(fact.sentence for fact in facts)
            candidates = values[: exam.candidates]
            questions.append(Question(sentences, tuple(depths[: 1 + count]), facts[0].query, candidates, start))
        try:
            exam.check(questions, length)
        except TooShort:
            if max(asked, default=0) == 0:
                raise
            break
        asked[count] = questions
    return {count: ask(_asked(exam, questions, length, 0), exam.score) for count, questions in asked.items()}


def joined(exam: Exam, length: int) -> tuple[Answers, Answers]:
    """Ask for the number of x, and of y, where "x belongs to y" and "the number of y is v" lie apart.

    Other pairs of the same form lie there too, whose values are candidates. The control of the question about x has no
    link from x, and all else; that of the question about y has no number of y.

    Returns:
      (answers about x, answers about y).

    Raises:
      TooShort: the sentences do not fit.
    """
    both: tuple[list[Question], list[Question]] = ([], [])
    for sample in range(exam.samples):
        rng = exam.draw(2, sample)
        start, keys = exam.haystack.start(rng), exam.language.keys(rng, 2 * (1 + DECOYS))
        values = exam.language.values(rng, max(1 + DECOYS, exam.candidates))
        sentences: list[Ids] = []
        for x, y, value in zip(keys[::2], keys[1::2], values, strict=False):
            sentences += [exam.language.link(x, y), exam.language.fact(y, value).sentence]
        depths, candidates = tuple(rng.random(len(sentences))), values[: exam.candidates]
        for questions, key in zip(both, keys[:2], strict=True):
            query = exam.language.fact(key, values[0]).query
            questions.append(Question(tuple(sentences), depths, query, candidates, start))
        exam.check((both[0][-1], both[1][-1]), length)
    over_link, direct = (
        ask(_asked(exam, questions, length, without), exam.score) for without, questions in enumerate(both)
    )
    return over_link, direct


def _asked(exam: Exam, questions: Iterable[Question], length: int, without: int) -> list[Asked]:
    return [
        Asked(
            one.context(exam.haystack, length, exam.bos),
            one.candidates,
            one.context(exam.haystack, length, exam.bos, without),
        )
        for one in questions
    ]


def position_bias(values: np.ndarray, depths: Sequence[float]) -> dict[str, Any]:
    """Return how the depth of the same evidence in the same text changes a measure [samples, depths]; more is better.

    The spread is that between the best and the worst depth's mean. Both are picked by the samples that then measure
    them, so that it is never 0: ``p`` is the share of permutations of each sample's depths that spread at least as far.
    """
    means = values.mean(axis=0)
    best, worst = int(np.argmax(means)), int(np.argmin(means))
    spread = float(means[best] - means[worst])
    rng, wider, part = np.random.default_rng(0), 0, 100
    for _ in range(_PERMUTATIONS // part):
        order = np.argsort(rng.random((part, *values.shape)), axis=-1)
        mixed = np.take_along_axis(np.broadcast_to(values, order.shape), order, axis=-1).mean(axis=1)
        wider += int(np.sum(np.ptp(mixed, axis=-1) >= spread - 1e-12))
    below = [mean(values[:, best] - values[:, place]).at() for place in range(len(depths))]
    return {
        "samples": len(values),
        "best": depths[best],
        "worst": depths[worst],
        "spread": {"value": spread, "low": below[worst]["low"], "high": below[worst]["high"]},
        "p": (1 + wider) / (1 + _PERMUTATIONS),
        "depths": [
            {"depth": depth, "mean": float(middle), "below_best": gap["value"], "low": gap["low"], "high": gap["high"]}
            for depth, middle, gap in zip(depths, means, below, strict=True)
        ],
    }
