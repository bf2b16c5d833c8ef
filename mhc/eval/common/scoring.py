"""Log-likelihoods of tokens under a model, and the arithmetic of what is reported of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mhc.eval.common.checkpoints import Checkpoint
from mhc.model.decoder import Decoder
from mhc.model.edits import Edits
from mhc.sharding import BATCH_AXES, jit, put_batch, replicated, threads_of_one_cpu, tracing_for
from mhc.train.loss import chunk_length

FIELDS = ("tokens", "targets", "segment_ids", "positions", "candidates", "prefix")


class TokenScores(NamedTuple):
    """Of every place of a batch; padding holds numbers that mean nothing."""

    nll: Float[Array, "B T"]  # nats of the target
    greedy: Bool[Array, "B T"]  # whether the target is the most probable token


def token_scores(
    decoder: Decoder,
    tokens: Int[Array, "B T"],
    targets: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    prefix: Int[Array, " B"] | None = None,
    edits: Edits | None = None,
) -> TokenScores:
    """Scores of the targets, from logits of ``chunk_length`` tokens a row at a time. ``prefix``, ``edits``: as in
    ``forward``."""
    h = decoder.forward(tokens, segment_ids, positions, prefix=prefix, edits=edits).h
    rows, length = tokens.shape
    chunk = chunk_length(decoder.config, rows, length)

    def part(one: tuple[jax.Array, jax.Array]) -> TokenScores:
        h, targets = one
        logits = decoder.logits(h).astype(jnp.float32)
        at_target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        nll = jax.nn.logsumexp(logits, axis=-1) - at_target
        return TokenScores(nll, jnp.argmax(logits, axis=-1) == targets)

    def split(a: jax.Array) -> jax.Array:
        return jnp.moveaxis(a.reshape(rows, length // chunk, chunk, *a.shape[2:]), 1, 0)

    found = jax.lax.map(part, (split(h), split(targets)))
    return jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1).reshape(rows, length), found)


def last_scores(
    decoder: Decoder,
    tokens: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    candidates: Int[Array, "B K"],
    prefix: Int[Array, " B"] | None = None,
) -> TokenScores:
    """Scores [B, K] of several tokens for the place behind each row's last one, which one forward pass gives."""
    h = decoder.forward(tokens, segment_ids, positions, prefix=prefix).h
    last = jnp.maximum(jnp.sum(segment_ids > 0, axis=1) - 1, 0)
    logits = decoder.logits(jnp.take_along_axis(h, last[:, None, None], axis=1))[:, 0].astype(jnp.float32)
    log_p = jax.nn.log_softmax(logits, axis=-1)
    return TokenScores(
        -jnp.take_along_axis(log_p, candidates, axis=1), jnp.argmax(logits, axis=-1)[:, None] == candidates
    )


class Scorer:
    """``token_scores`` and ``last_scores`` of a checkpoint, compiled once for each shape of batch.

    A batch is a mapping of [B, T] int32 arrays: tokens, segment_ids (0: padding), positions, and either targets [B, T]
    or candidates [B, K]; also prefix [B], where the rows' own differ from the config's.
    """

    def __init__(self, checkpoint: Checkpoint):
        mesh = checkpoint.mesh
        definition = checkpoint.definition
        self._params, self._mesh = checkpoint.params, mesh
        self.shards = int(np.prod([mesh.shape[axis] for axis in BATCH_AXES]))

        def run(params: Any, batch: dict[str, Any]) -> TokenScores:
            with tracing_for(mesh):
                scores = last_scores if "candidates" in batch else token_scores
                return scores(definition.bind(params), **batch)

        self._run = jit(run, mesh, out_shardings=replicated(mesh))

    def submit(self, batch: Mapping[str, np.ndarray]) -> TokenScores:
        """Scores of a batch, on the device; B is a multiple of ``shards``."""
        placed = put_batch({name: batch[name] for name in FIELDS if name in batch}, self._mesh)
        found = self._run(self._params, placed)
        return jax.block_until_ready(found) if threads_of_one_cpu(self._mesh) else found

    def each(self, batches: Iterable[Mapping[str, np.ndarray]]) -> Iterator[tuple[Mapping[str, np.ndarray], Any]]:
        """(batch, its scores as numpy arrays), one batch ahead of the device. Rows are filled up to the shards."""
        waiting: tuple[Mapping[str, np.ndarray], TokenScores] | None = None
        for batch in batches:
            rows = len(batch["tokens"])
            short = -rows % self.shards
            whole = {name: _more_rows(batch[name], short) for name in FIELDS if name in batch} if short else batch
            now = (batch, self.submit(whole))
            if waiting is not None:
                yield waiting[0], self._fetch(*waiting)
            waiting = now
        if waiting is not None:
            yield waiting[0], self._fetch(*waiting)

    @staticmethod
    def _fetch(batch: Mapping[str, np.ndarray], scores: TokenScores) -> TokenScores:
        rows = len(batch["tokens"])
        return jax.tree.map(lambda a: np.asarray(a)[:rows], scores)


def _more_rows(array: np.ndarray, rows: int) -> np.ndarray:
    return np.pad(array, ((0, rows), *((0, 0),) * (array.ndim - 1)))


class Window(NamedTuple):
    """Tokens that are read at once, as pairs (input i, target i + 1) of a longer text."""

    start: int  # the first pair that is read
    scored: int  # the first one whose target is scored
    end: int


def windows(pairs: int, length: int, stride: int, first: int = 0) -> Iterator[Window]:
    """Windows of at most ``length`` pairs in which each pair from ``first`` on is scored once.

    The first window scores as many as it holds, each other one ``stride``; all reach back as far as ``length`` allows.
    """
    scored = first
    while scored < pairs:
        end = min(scored + (length if scored == first else stride), pairs)
        yield Window(max(end - length, 0), scored, end)
        scored = end


# Sums over documents --------------------------------------------------------------------------------------------------


class Sums(NamedTuple):
    """Of each document, float64 [documents]."""

    nll: np.ndarray  # nats
    tokens: np.ndarray
    bytes: np.ndarray


class Measures(NamedTuple):
    """Of a corpus, each token counting the same."""

    loss: float  # nats per token
    perplexity: float
    bits_per_token: float
    bits_per_byte: float  # nan where the corpus is of ids without text


def measures(nll: float, tokens: float, size: float) -> Measures:
    """From sums: nats, targets, bytes."""
    loss = nll / max(tokens, 1.0)
    bits = nll / np.log(2.0)
    return Measures(loss, float(np.exp(loss)), bits / max(tokens, 1.0), bits / size if size else float("nan"))


def resampled(documents: int, draws: int = 2000, seed: int = 0) -> np.ndarray:
    """Bootstrap weights [draws, documents]: how often each document is drawn. Equal for equal arguments."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(documents, np.full(documents, 1.0 / documents), size=draws)


def intervals(sums: Sums, weights: np.ndarray) -> dict[str, tuple[float, float]]:
    """Percentile bootstrap intervals (95 %) of ``Measures``, documents drawn with replacement (``resampled``)."""
    nll, tokens, size = (weights @ part for part in sums)
    drawn = np.array([measures(*one) for one in zip(nll, tokens, size, strict=True)])
    low, high = np.percentile(drawn, (2.5, 97.5), axis=0)
    return {name: (float(low[i]), float(high[i])) for i, name in enumerate(Measures._fields)}


def mean_interval(values: np.ndarray) -> tuple[float, float | None, float | None]:
    """(mean, low, high) of one value a sample: 95 % percentile bootstrap; no bounds for fewer than two samples."""
    values = np.asarray(values, np.float64)
    if len(values) < 2:
        return float(values.mean()), None, None
    drawn = resampled(len(values)) @ values / len(values)
    low, high = np.percentile(drawn, (2.5, 97.5))
    return float(values.mean()), float(low), float(high)
