"""Questions whose answer stands once in a long text: what is hidden where, what is asked, how answers are judged.

A model enters as a function of rows (context, value) alone: whatever can score a value can be put in its place.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from mhc.errors import UserError
from mhc.eval.common.prompts import check_text
from mhc.eval.common.statistics import Bounds, bounds, mean, share_interval

if TYPE_CHECKING:
    from mhc.data.tokenizers import Tokenizer

Ids = np.ndarray  # int32 [n]
STATEMENT = "The secret number of {key} is {value}."
LINK = "{key} belongs to {value}."
DECOYS = 2  # pairs beside the one that a joined question is about
_PERMUTATIONS = 2000


class Row(NamedTuple):
    """What a model is given."""

    context: Ids  # all before the value, bos first
    value: Ids  # [M]


class ValueScore(NamedTuple):
    """What it makes of the value."""

    log_prob: float  # nats, summed over the value's tokens
    exact: bool  # whether each of its tokens is the most probable one: greedy decoding would give the value


Score = Callable[[Iterable[Row]], Sequence[ValueScore]]  # rows of one call are equally long, value included


class TooShort(Exception):
    """A question does not fit; ``needed``: tokens that the longest one takes without any other text."""

    def __init__(self, needed: int):
        super().__init__(needed)
        self.needed = needed


# Sentences ------------------------------------------------------------------------------------------------------------


class Fact(NamedTuple):
    """A sentence that gives a key its value; ``query`` alone asks for it."""

    query: Ids
    value: Ids
    end: Ids

    @property
    def sentence(self) -> Ids:
        return np.concatenate(self)


class Language(Protocol):
    """How facts are put into tokens."""

    def keys(self, rng: np.random.Generator, count: int) -> list[Any]:
        """So many, no two alike."""
        ...

    def values(self, rng: np.random.Generator, count: int) -> Ids:
        """[count, M], no two alike."""
        ...

    def fact(self, key: Any, value: Ids) -> Fact: ...

    def link(self, key: Any, other: Any) -> Ids:
        """The sentence which says that what is true of ``other`` is true of ``key``."""
        ...


class Text:
    """Sentences on lines of their own, about invented names and five-digit numbers.

    Values are those numbers that the tokeniser spells with as many tokens as most, so that their probabilities compare.
    """

    def __init__(self, tokenizer: Tokenizer, statement: str = STATEMENT, link: str = LINK):
        """Raises UserError as ``check_sentence``."""
        check_sentence(statement, "--statement")
        check_sentence(link, "--link")
        self._encode, self._link = tokenizer.encode, link
        lead, _, self._end = statement.partition("{value}")
        self._lead = lead.rstrip(" ")
        self._gap = lead[len(self._lead) :]  # tokenisers join a space to the word after it
        rng = np.random.default_rng(0)
        sizes = np.bincount([len(self._spelled(rng)) for _ in range(64)])
        self._size = int(np.argmax(sizes))

    def _spelled(self, rng: np.random.Generator) -> Ids:
        return self._encode(f"{self._gap}{rng.integers(10_000, 100_000)}")

    def keys(self, rng: np.random.Generator, count: int) -> list[str]:
        found: dict[str, None] = {}
        while len(found) < count:
            syllables = (rng.choice(list("bdfgklmnprstvz")) + rng.choice(list("aeiou")) for _ in range(3))
            found["".join(syllables).capitalize()] = None
        return list(found)

    def values(self, rng: np.random.Generator, count: int) -> Ids:
        def spelled() -> Ids | None:
            ids = self._spelled(rng)
            return ids if len(ids) == self._size else None

        return _different(spelled, count, "the tokeniser does not tell numbers apart; allowed: --ids")

    def fact(self, key: str, value: Ids) -> Fact:
        query = self._encode("\n" + self._lead.replace("{key}", key))
        return Fact(query, value, self._encode(self._end + "\n"))

    def link(self, key: str, other: str) -> Ids:
        return self._encode("\n" + self._link.replace("{key}", key).replace("{value}", other) + "\n")


def check_sentence(sentence: str, option: str) -> None:
    """Raises UserError where {key} and, after it, {value} are not in it once each, and where it is not UTF-8."""
    check_text(sentence, option)
    before, _, after = sentence.partition("{value}")
    if before.count("{key}") != 1 or "{key}" in after or sentence.count("{value}") != 1:
        raise UserError(f"{option}: given {sentence!r}, allowed: a sentence with {{key}}, then {{value}}, once each")


class RandomIds:
    """Sequences of random ids: a mark, a key of four ids, a value of three. A link has a mark of its own."""

    KEY, VALUE = 4, 3

    def __init__(self, vocabulary: Ids, seed: int = 0):
        """``vocabulary``: ids to draw from. Raises UserError for fewer than four."""
        if len(vocabulary) < 4:
            raise UserError(f"--ids: the text has {len(vocabulary)} different ids, allowed: 4 or more")
        self._marks = np.random.default_rng(seed).choice(vocabulary, 2, replace=False).astype(np.int32)
        self._vocabulary = np.setdiff1d(vocabulary, self._marks).astype(np.int32)

    def _draw(self, rng: np.random.Generator, count: int, size: int) -> Ids:
        return _different(
            lambda: rng.choice(self._vocabulary, size), count, "--ids: the text has too few different ids"
        )

    def keys(self, rng: np.random.Generator, count: int) -> list[Ids]:
        return list(self._draw(rng, count, self.KEY))

    def values(self, rng: np.random.Generator, count: int) -> Ids:
        return self._draw(rng, count, self.VALUE)

    def fact(self, key: Ids, value: Ids) -> Fact:
        return Fact(np.concatenate([self._marks[:1], key]), value, np.zeros(0, np.int32))

    def link(self, key: Ids, other: Ids) -> Ids:
        return np.concatenate([self._marks[1:], key, other])


def _different(draw: Callable[[], Ids | None], count: int, problem: str) -> Ids:
    """[count, M]; None of ``draw`` is left out. Raises UserError where new ones do not come."""
    found: dict[bytes, Ids] = {}
    for _ in range(100 * (count + 1)):
        if len(found) == count:
            return np.stack(list(found.values()))
        ids = draw()
        if ids is not None and len(ids):
            found.setdefault(ids.tobytes(), ids)
    raise UserError(problem)


# The text around them -------------------------------------------------------------------------------------------------


class Haystack:
    """Documents end to end, read from anywhere, round and round."""

    def __init__(self, document: Callable[[int], Ids], count: int, separator: Ids):
        """``document``: number -> its ids, without bos and eos; ``separator``: ids between two."""
        self._document, self._count, self._separator = functools.lru_cache(64)(document), count, separator

    def start(self, rng: np.random.Generator) -> tuple[int, int]:
        """A place: (document, token)."""
        number = int(rng.integers(self._count))
        return number, int(rng.integers(len(self._document(number)) + 1))

    def read(self, start: tuple[int, int], length: int) -> Ids:
        """``length`` ids from a place on. Raises UserError where no document has any."""
        number, offset = start
        parts, left, empty = [np.zeros(0, np.int32)], length, 0
        while left > 0:
            ids = self._document(number % self._count)
            empty = 0 if len(ids) else empty + 1
            if empty > self._count:
                raise UserError("no text to hide anything in: the split has no token")
            if len(ids):
                piece = np.concatenate([ids[offset:], self._separator])[:left]
                parts.append(piece)
                left -= len(piece)
            number, offset = number + 1, 0
        return np.concatenate(parts).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Question:
    """One sample: sentences to be hidden at depths of the text, what is asked, and what may be answered."""

    sentences: tuple[Ids, ...]
    depths: tuple[float, ...]  # of each sentence: 0 before the text, 1 after it
    query: Ids
    candidates: Ids  # [K, M], the value first
    start: tuple[int, int]  # of the text

    @property
    def needed(self) -> int:
        """Tokens without any text: bos, sentences, query, value."""
        return 1 + sum(map(len, self.sentences)) + len(self.query) + self.candidates.shape[1]

    def context(self, haystack: Haystack, length: int, bos: int, without: int | None = None) -> Ids:
        """All before the value, so long that with it there are ``length`` tokens.

        ``without``: a sentence that is left out, and more text put in.
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
    """Tokens of the text before a sentence at this depth."""
    return int(depth * room + 0.5)


# Asking ---------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Exam:
    """What is the same for all questions."""

    language: Language
    haystack: Haystack
    score: Score
    bos: int
    samples: int
    candidates: int  # K
    seed: int = 0
    prefix: int = 0  # tokens that the model sees both ways: a value among them would be no prediction

    def check(self, questions: Iterable[Question], length: int) -> None:
        """Raises TooShort."""
        needed = max(max(one.needed, self.prefix + one.candidates.shape[1] + 1) for one in questions)
        if needed > length:
            raise TooShort(needed)

    def draw(self, task: int, sample: int) -> np.random.Generator:
        """Randomness of a sample: the same whatever the length, the depth and the model."""
        return np.random.default_rng([self.seed, task, sample])


class Answers(NamedTuple):
    """Of questions, float64 [n] each."""

    exact: np.ndarray  # 1 where greedy decoding gives the value
    first: np.ndarray  # 1 where it is the most probable candidate; shared among equals
    rank: np.ndarray  # among the candidates, 1: the most probable
    log_prob: np.ndarray  # nats per token of the value
    control: np.ndarray  # of the same without the evidence; nan where that was not asked

    @property
    def gain(self) -> np.ndarray:
        """Nats per token of the value that the evidence is worth."""
        return self.log_prob - self.control

    def grid(self, *shape: int) -> Answers:
        return Answers(*(part.reshape(shape) for part in self))


class Asked(NamedTuple):
    context: Ids
    candidates: Ids
    control: Ids | None  # another context, without the evidence


def ask(every: Sequence[Asked], score: Score) -> Answers:
    """All candidates of each, and the value after the control."""

    def rows() -> Iterable[Row]:
        for one in every:
            yield from (Row(one.context, value) for value in one.candidates)
            if one.control is not None:
                yield Row(one.control, one.candidates[0])

    scores, found, place = score(rows()), [], 0
    for one in every:
        count, size = one.candidates.shape
        own = scores[place : place + count]
        place += count
        log_probs = np.array([score.log_prob for score in own])
        better, equal = int(np.sum(log_probs[1:] > log_probs[0])), int(np.sum(log_probs[1:] == log_probs[0]))
        control = np.nan
        if one.control is not None:
            control = scores[place].log_prob / size
            place += 1
        first = 0.0 if better else 1.0 / (1 + equal)
        found.append((float(own[0].exact), first, 1 + better + equal / 2, log_probs[0] / size, control))
    return Answers(*np.array(found, np.float64).T)


def cell(answers: Answers) -> dict[str, Any]:
    """What is said of samples [n]: means with 95 % intervals, Wilson's of shares, bootstrap of nats."""

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
    """[samples, depths]: one needle. A sample has the same text, needle and candidates at every depth.

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
    found = ask(every, exam.score).grid(exam.samples, len(depths))
    return found._replace(control=np.repeat(found.control[:, :1], len(depths), axis=1))


def distracted(exam: Exam, length: int, counts: Sequence[int]) -> dict[int, Answers]:
    """By number of distractors: needles of the same form with other keys, whose values are candidates too.

    A sample's needle lies at the same random depth whatever the number; few distractors are the first of many. The
    control has the distractors without the needle. Numbers that do not fit are left out; raises TooShort where none
    but 0 does.
    """
    most = max(counts)
    found: dict[int, list[Question]] = {}
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
            if max(found, default=0) == 0:
                raise
            break
        found[count] = questions
    return {count: ask(_asked(exam, questions, length, 0), exam.score) for count, questions in found.items()}


def joined(exam: Exam, length: int) -> tuple[Answers, Answers]:
    """(joined, direct): "x belongs to y" and "the number of y is v" lie apart; what is the number of x, and of y?

    Other pairs of the same form lie there too, whose values are candidates. The control of the joined question has no
    link from x, and all else; that of the direct one has no number of y. Raises TooShort.
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
    one, other = (ask(_asked(exam, questions, length, without), exam.score) for without, questions in enumerate(both))
    return one, other


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
    """What the place of the same evidence in the same text does to a measure [samples, depths], higher is better.

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
