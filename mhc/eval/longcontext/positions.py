"""Measure the loss by position under each rotary scaling."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mhc.config import Config, PositionsConfig
from mhc.eval.common.checkpoints import Checkpoint
from mhc.eval.common.statistics import mean
from mhc.eval.longcontext.corpus import Corpus, fill_row, rows_at_once

SCALINGS = ("none", "linear", "ntk", "dynamic", "yarn", "llama3")
_OF_ONE_SCALING = ("attention_factor", "beta_fast", "beta_slow", "low_frequency", "high_frequency")  # of positions
_ENOUGH = 8  # documents that fill a row: with fewer, intervals would say little


class LossRows(NamedTuple):
    """Holds the rows that are read: every row fills the length, so that all positions come from the same rows."""

    ids: np.ndarray  # int32 [D, R, L + 1]: R rows of each of D documents
    joined: bool  # documents end to end, R = 1; otherwise a row is a stretch of one document


def loss_rows(corpus: Corpus, length: int, rows: int, seed: int) -> LossRows | None:
    """Return about ``rows`` rows: stretches, begun anywhere, of the first documents that are long enough.

    Where fewer than 8 are long enough, the rows are of documents end to end, each opened with bos. None where the split
    is shorter than a row.
    """
    rng, documents = np.random.default_rng([seed, length]), list[np.ndarray]()
    for number in range(corpus.size):
        if len(documents) == rows:
            break
        if corpus.sizes is not None and corpus.sizes[number] + 1 < length:
            continue
        ids = corpus.documents(number)
        if len(ids) > length:
            documents.append(ids)
    if len(documents) >= min(_ENOUGH, rows):
        starts = [rng.integers(len(ids) - length, size=rows // len(documents)) for ids in documents]
        stretches = [[ids[i : i + length + 1] for i in begin] for ids, begin in zip(documents, starts, strict=True)]
        return LossRows(np.array(stretches), joined=False)
    total = 0
    for number in range(corpus.size):
        total += len(corpus.documents(number)) - 2
        if total >= rows * length:
            break
    count = min(rows, total // length)
    if not count:
        return None
    joined = corpus.haystack.read((0, 0), count * length).reshape(count, 1, length)
    return LossRows(np.pad(joined, ((0, 0), (0, 0), (1, 0)), constant_values=corpus.tokenizer.bos_id), joined=True)


def scalings(config: Config, length: int, names: Sequence[str] = SCALINGS) -> dict[str, Config]:
    """Return configs that differ in rotary scaling alone, by name, the run's first.

    The others stretch the length without scaling to ``length``. Positions that are not rotary, and lengths that need no
    stretching, have the run's alone.
    """
    trained = config.positions
    label = trained.scaling if trained.kind == "rope" else trained.kind
    if trained.factor != 1.0:
        label += f" ×{trained.factor:g}"
    configs = {f"{label} (as trained)": config}
    factor = length / config.original_length
    if trained.kind != "rope" or factor <= 1.0:
        return configs
    defaults: dict[str, Any] = {
        field.name: field.default for field in dataclasses.fields(PositionsConfig) if field.name in _OF_ONE_SCALING
    }
    for name in names:
        if name != trained.scaling:
            # Dynamic scaling grows with the row by itself.
            by = 1.0 if name in ("none", "dynamic") else factor
            positions = dataclasses.replace(trained, scaling=name, factor=by, **defaults)
            configs[name if by == 1.0 else f"{name} ×{by:g}"] = dataclasses.replace(config, positions=positions)
    return configs


def position_losses(
    checkpoint: Checkpoint,
    ids: np.ndarray,
    batch_size: int,
    tell: Callable[[int], None] = lambda tokens: None,
) -> np.ndarray:
    """Return the nats of each target, float64 [D, L]: means over the R rows of a document, each read by itself.

    Under dynamic scaling the frequencies of a row depend on its length: positions between two doublings of the
    unscaled length are taken from rows cut at the second.

    Args:
      ids: rows [D, R, L + 1].
      batch_size: rows of the trained length at once.
      tell: called with the tokens read so far.
    """
    from mhc.data.rows.packing import empty_batch
    from mhc.eval.common.scoring import Scorer

    config, documents = checkpoint.config, len(ids)
    ids = ids.reshape(-1, ids.shape[-1])
    count, length = len(ids), ids.shape[1] - 1
    ends = [length]
    if config.positions.kind == "rope" and config.positions.scaling == "dynamic":
        unscaled = min(config.original_length, length)
        ends = [end for end in octaves(config.original_length, length) if end >= unscaled]
    scorer, nll, start, done = Scorer(checkpoint), np.zeros((count, length)), 0, 0
    for end in ends:
        size = min(rows_at_once(batch_size * config.data.sequence_length, end), count)

        def batches(end: int = end, size: int = size) -> Iterator[dict[str, np.ndarray]]:
            for first in range(0, count, size):
                batch = empty_batch(size, end)
                for row, stretch in enumerate(ids[first : first + size]):
                    fill_row(batch, row, stretch[: end + 1])
                yield batch

        for number, (_, scores) in enumerate(scorer.each(batches())):
            part = slice(number * size, min((number + 1) * size, count))
            nll[part, start:end] = scores.nll[: part.stop - part.start, start:end]
            done += size * end
            tell(done)
        start = end
    return nll.reshape(documents, -1, length).mean(axis=1)


def octaves(trained: int, length: int) -> list[int]:
    """Return edges of positions: 0, half the trained length, it, and its doublings up to ``length``."""
    edges = [0, *(trained * 2**k for k in range(length.bit_length()) if trained * 2**k < length), length]
    return [0, trained // 2, *edges[1:]] if 2 <= trained <= length else edges


def buckets(nll: np.ndarray, edges: Sequence[int], first: np.ndarray | None = None, least: int = 0) -> list[Any]:
    """Return the mean loss between edges with intervals over documents.

    Args:
      nll: [D, L].
      first: [D, L] of another scaling; the difference to it, paired by document, is added.
      least: tokens of context below which a target does not count (attention.prefix).
    """
    every = []
    for start, end in itertools.pairwise(edges):
        start = max(start, least - 1)
        if start >= end:
            continue
        values = nll[:, start:end].mean(axis=1)
        bucket: dict[str, Any] = {"from": start + 1, "to": end, "documents": len(nll)}  # tokens of context
        bucket["loss"] = mean(values).at()
        if first is not None:
            bucket["minus_first"] = mean(values - first[:, start:end].mean(axis=1)).at()
        every.append(bucket)
    return every
