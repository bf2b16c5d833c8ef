"""Put questions into tokens: sentences that give a key a value, in text or in random ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from mhc.errors import UserError
from mhc.eval.common.prompts import check_text

if TYPE_CHECKING:
    from mhc.data.tokenizers import Tokenizer

Ids = np.ndarray  # int32 [n]
STATEMENT = "The secret number of {key} is {value}."
LINK = "{key} belongs to {value}."


class Fact(NamedTuple):
    """Holds a sentence that gives a key its value; ``query`` alone asks for it."""

    query: Ids
    value: Ids
    end: Ids

    @property
    def sentence(self) -> Ids:
        """Return the whole sentence."""
        return np.concatenate(self)


class Language(Protocol):
    """Puts facts into tokens."""

    def keys(self, rng: np.random.Generator, count: int) -> list[Any]:
        """Return ``count`` distinct keys."""
        ...

    def values(self, rng: np.random.Generator, count: int) -> Ids:
        """Return ``count`` distinct values, [count, M]."""
        ...

    def fact(self, key: Any, value: Ids) -> Fact:
        """Return the sentence that gives a key a value."""
        ...

    def link(self, key: Any, other: Any) -> Ids:
        """Return the sentence which says that what is true of ``other`` is true of ``key``."""
        ...


class Text:
    """Puts facts into sentences on lines of their own, about invented names and five-digit numbers.

    Values are those numbers that the tokeniser spells with as many tokens as most, so that their probabilities compare.
    """

    def __init__(self, tokenizer: Tokenizer, statement: str = STATEMENT, link: str = LINK):
        """Prepare the sentences. Raises UserError as ``check_sentence`` does."""
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
        names: dict[str, None] = {}
        while len(names) < count:
            syllables = (rng.choice(list("bdfgklmnprstvz")) + rng.choice(list("aeiou")) for _ in range(3))
            names["".join(syllables).capitalize()] = None
        return list(names)

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
    """Refuse a sentence without {key} and, after it, {value}, once each, or without UTF-8. Raises UserError."""
    check_text(sentence, option)
    before, _, after = sentence.partition("{value}")
    if before.count("{key}") != 1 or "{key}" in after or sentence.count("{value}") != 1:
        raise UserError(f"{option}: given {sentence!r}, allowed: a sentence with {{key}}, then {{value}}, once each")


class RandomIds:
    """Puts facts into random ids: a mark, a key of four ids, a value of three. A link has another mark."""

    KEY, VALUE = 4, 3

    def __init__(self, vocabulary: Ids, seed: int = 0):
        """Choose the marks from ``vocabulary``, the ids to draw from. Raises UserError for fewer than four."""
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
    """Return ``count`` distinct results of ``draw``, [count, M], without None. Raises UserError for too few."""
    drawn: dict[bytes, Ids] = {}
    for _ in range(100 * (count + 1)):
        if len(drawn) == count:
            return np.stack(list(drawn.values()))
        ids = draw()
        if ids is not None and len(ids):
            drawn.setdefault(ids.tobytes(), ids)
    raise UserError(problem)
