"""Read the text that needles are hidden in and losses are measured on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mhc.config import Config
from mhc.errors import UserError
from mhc.eval.longcontext.sentences import Ids


class Haystack:
    """Reads documents end to end, from any place, and from the first again after the last."""

    def __init__(self, document: Callable[[int], Ids], count: int, separator: Ids):
        """Take the documents.

        Args:
          document: gives the ids of a document by its number, without bos and eos.
          count: of the documents.
          separator: ids between two of them.
        """
        self._document, self._count, self._separator = functools.lru_cache(64)(document), count, separator

    def start(self, rng: np.random.Generator) -> tuple[int, int]:
        """Draw a place: (document, token)."""
        number = int(rng.integers(self._count))
        return number, int(rng.integers(len(self._document(number)) + 1))

    def read(self, start: tuple[int, int], length: int) -> Ids:
        """Return ``length`` ids from a place on. Raises UserError where no document has any."""
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


class Corpus(NamedTuple):
    """Holds a split, as single documents and as one text laid end to end."""

    documents: Callable[[int], np.ndarray]  # number -> bos, ids, and eos unless it goes on elsewhere
    sizes: np.ndarray | None  # about the bytes (ids) of each document, where known
    size: int  # documents
    haystack: Haystack
    tokenizer: Any
    is_text: bool
    identity: tuple[str, str]  # of tokeniser and text: equal for corpora that give the same rows


def open_corpus(config: Config, split: Any) -> Corpus:
    """Return the run's corpus, or the one that ``--config.data.*`` names. Raises UserError as training does."""
    from mhc.data import tokenizers
    from mhc.data.rows.encoding import encoder, open_corpus

    tokenizer = tokenizers.load(config.data.tokenizer)
    source = open_corpus(config.data, tokenizer, split)
    encode = encoder(source, tokenizer)

    def inner(number: int) -> np.ndarray:
        ids = encode(number).tokens[1:]
        return ids[:-1] if len(ids) and ids[-1] == tokenizer.eos_id else ids

    is_text = not isinstance(source[0], np.ndarray)  # of a prepared text: Tokenised
    separator = tokenizer.encode("\n\n") if is_text else np.zeros(0, np.int32)
    haystack = Haystack(inner, len(source), separator)
    return Corpus(
        lambda number: encode(number).tokens,
        source.sizes,
        len(source),
        haystack,
        tokenizer,
        is_text,
        (tokenizer.content_hash, f"{source.fingerprint} {source.holdout}"),
    )


def rows_at_once(tokens: int, length: int) -> int:
    """Return the number of rows of a length in a batch of about ``tokens`` tokens."""
    return max(tokens // length, 1)


def fill_row(batch: dict[str, np.ndarray], row: int, ids: np.ndarray) -> None:
    """Fill a row with n + 1 ids of a document, as n pairs of input and target."""
    pairs = len(ids) - 1
    batch["tokens"][row, :pairs], batch["targets"][row, :pairs] = ids[:-1], ids[1:]
    batch["segment_ids"][row, :pairs], batch["positions"][row, :pairs] = 1, np.arange(pairs)
