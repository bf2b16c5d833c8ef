"""Compute bits per byte of byte n-gram models: what a model must beat before its numbers mean anything.

Both models are counted on the training documents with add-one smoothing over the 256 bytes and scored on the validation
documents. A document starts in a context of its own, so that no byte is predicted from another document.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from mhc.config import DataConfig
from mhc.data.windtunnel import is_windtunnel
from mhc.errors import UserError

START = 256  # the context of a document's first byte
MAX_BYTES = 1 << 28  # of each split; 65 792 probabilities are settled long before


@dataclasses.dataclass(frozen=True)
class Baselines:
    """Holds bits per byte of the two models; None, with the reason, if they cannot be computed."""

    unigram: float | None
    bigram: float | None
    reason: str | None = None
    train_bytes: int = 0
    validation_bytes: int = 0
    truncated: bool = False  # a split was longer than MAX_BYTES: only its beginning was read


def count(documents: Iterable[bytes]) -> NDArray[np.int64]:
    """Return counts [257, 256] of (context, byte) over documents; row 256 is the start of a document."""
    counts = np.zeros(257 * 256, np.int64)
    for document in documents:
        data = np.frombuffer(document, np.uint8)
        if not len(data):
            continue
        counts[START * 256 + int(data[0])] += 1
        pairs = data[:-1].astype(np.int32) * 256 + data[1:]
        if len(pairs) < 4096:  # adding a whole histogram would cost more than the document
            np.add.at(counts, pairs, 1)
        else:
            counts[: 256 * 256] += np.bincount(pairs, minlength=256 * 256)
    return counts.reshape(257, 256)


def bits_per_byte(train: NDArray[np.int64], validation: NDArray[np.int64]) -> tuple[float, float]:
    """Return (unigram, bigram) bits per byte from the counts [257, 256] of the two splits.

    Raises:
        ValueError: the validation counts are empty.
    """
    total = int(validation.sum())
    if not total:
        raise ValueError("no validation bytes to score")
    single = train.sum(axis=0) + 1
    unigram = -np.log2(single / single.sum())
    bigram = -np.log2((train + 1) / (train.sum(axis=1, keepdims=True) + 256))
    return float(validation.sum(axis=0) @ unigram) / total, float((validation * bigram).sum()) / total


def baselines(data: DataConfig, *, max_bytes: int = MAX_BYTES) -> Baselines:
    """Return the two models on a run's own splits.

    Token-id sources hold no text, and a corpus may be missing where the report is made: both give None and a reason.
    """
    if data.source.startswith("tokens:") or (data.validation is not None and data.validation.startswith("tokens:")):
        return Baselines(None, None, "the source holds token ids only, no bytes to count")
    if is_windtunnel(data.source):
        return Baselines(None, None, "a wind tunnel has no text to count bytes of")
    from mhc.data.corpus.sources import documents  # tfds is heavy: only where there is text to count

    try:
        train_stream = _Limited(documents(data, "train"), max_bytes)
        train = count(train_stream)
        validation_stream = _Limited(documents(data, "validation"), max_bytes)
        validation = count(validation_stream)
    except UserError as error:
        return Baselines(None, None, str(error))
    if not validation.sum():
        return Baselines(None, None, "the validation split holds no bytes")
    unigram, bigram = bits_per_byte(train, validation)
    return Baselines(
        unigram,
        bigram,
        train_bytes=int(train.sum()),
        validation_bytes=int(validation.sum()),
        truncated=train_stream.cut or validation_stream.cut,
    )


class _Limited:
    """Yields documents up to the one with which ``limit`` bytes are passed; ``cut`` tells whether any was left out."""

    def __init__(self, documents: Iterator[bytes], limit: int) -> None:
        self._documents, self._limit, self.cut = documents, limit, False

    def __iter__(self) -> Iterator[bytes]:
        seen = 0
        for document in self._documents:
            if seen >= self._limit:
                self.cut = True
                return
            seen += len(document)
            yield document
