"""Test byte n-gram baselines against a slow exact computation."""

from __future__ import annotations

import itertools
import sys
import types
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from math import log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mhc.config import DataConfig
from mhc.errors import UserError
from mhc.eval.compare.ngram import START, baselines, bits_per_byte, count

documents = st.lists(st.binary(max_size=30) | st.text("ab ", max_size=30).map(str.encode), max_size=5)


def slow(train: list[bytes], validation: list[bytes]) -> tuple[float, float]:
    """Compute both models byte by byte, with probabilities as exact fractions."""
    single: Counter[int] = Counter()
    pairs: Counter[tuple[int, int]] = Counter()
    contexts: Counter[int] = Counter()
    for document in train:
        previous = START
        for byte in document:
            single[byte] += 1
            pairs[previous, byte] += 1
            contexts[previous] += 1
            previous = byte
    total = sum(single.values())
    unigram = bigram = 0.0
    for document in validation:
        previous = START
        for byte in document:
            unigram -= log2(Fraction(single[byte] + 1, total + 256))
            bigram -= log2(Fraction(pairs[previous, byte] + 1, contexts[previous] + 256))
            previous = byte
    size = sum(map(len, validation))
    return unigram / size, bigram / size


@given(documents, documents.filter(any))
@settings(deadline=None)
def test_equals_the_slow_computation(train: list[bytes], validation: list[bytes]) -> None:
    assert bits_per_byte(count(train), count(validation)) == pytest.approx(slow(train, validation), rel=1e-12)


def test_long_documents_take_the_same_counts() -> None:
    data = np.random.default_rng(0).integers(0, 256, 20_000, np.uint8).tobytes()
    whole = count([data])
    assert whole.sum() == len(data) and whole[START].sum() == 1
    pairs = Counter(itertools.pairwise(data))
    assert all(whole[a, b] == n for (a, b), n in pairs.items())


def test_untrained_models_give_eight_bits() -> None:
    assert bits_per_byte(count([]), count([b"any text"])) == pytest.approx((8.0, 8.0))


def test_no_validation_bytes() -> None:
    with pytest.raises(ValueError, match="no validation bytes"):
        bits_per_byte(count([b"a"]), count([b""]))


@pytest.fixture
def corpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[bytes]]:
    """Put a corpus in place of the data package."""
    splits: dict[str, list[bytes]] = {"train": [b"abab", b"ba"], "validation": [b"ab", b"b"]}

    def stream(config: DataConfig, split: str) -> Iterator[bytes]:
        if config.source == "text:missing":
            raise UserError("data.source: no file matches 'missing'")
        return iter(splits[split])

    module = types.ModuleType("mhc.data.corpus.sources")
    module.documents = stream  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mhc.data.corpus.sources", module)
    return splits


def test_baselines_of_a_corpus(corpus: dict[str, list[bytes]]) -> None:
    result = baselines(DataConfig())
    assert (result.unigram, result.bigram) == pytest.approx(slow(corpus["train"], corpus["validation"]))
    assert (result.train_bytes, result.validation_bytes, result.truncated) == (6, 3, False)


def test_a_cut_is_told(corpus: dict[str, list[bytes]]) -> None:
    result = baselines(DataConfig(), max_bytes=3)
    assert result.truncated and result.train_bytes == 4
    assert result.unigram == pytest.approx(slow([b"abab"], corpus["validation"])[0])


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (DataConfig(source="tokens:*.bin"), "token ids only"),
        (DataConfig(validation="tokens:v.npy"), "token ids only"),
        (DataConfig(source="text:missing"), "no file matches"),
    ],
)
def test_none_with_a_reason(corpus: dict[str, list[bytes]], config: DataConfig, reason: str) -> None:
    result = baselines(config)
    assert result.unigram is None and result.bigram is None
    assert result.reason is not None and reason in result.reason


def test_empty_validation_split(corpus: dict[str, list[bytes]]) -> None:
    corpus["validation"] = []
    assert baselines(DataConfig()).reason == "the validation split holds no bytes"
