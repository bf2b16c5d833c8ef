"""Log-likelihoods of tokens under a model, and the arithmetic of what is reported of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from eval.checkpoints import Checkpoint
from mhc.model.decoder import Decoder
from mhc.model.edits import Edits
from mhc.sharding import BATCH_AXES, compiler_options, put_batch, replicated, threads_of_one_cpu, tracing_for
from mhc.train.loss import chunk_length

FIELDS = ("tokens", "targets", "segment_ids", "positions")


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
    edits: Edits | None = None,
) -> TokenScores:
    """Scores of the targets, from logits of ``chunk_length`` tokens a row at a time. ``edits``: as in ``forward``."""
    h = decoder.forward(tokens, segment_ids, positions, edits=edits).h
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


class Scorer:
    """``token_scores`` of a checkpoint, compiled once for each shape of batch."""

    def __init__(self, checkpoint: Checkpoint):
        mesh = checkpoint.mesh
        definition = checkpoint.definition
        self._params, self._mesh = checkpoint.params, mesh
        self.shards = int(np.prod([mesh.shape[axis] for axis in BATCH_AXES]))

        def run(params: Any, batch: dict[str, jax.Array]) -> TokenScores:
            with tracing_for(mesh):
                return token_scores(definition.bind(params), *(batch[name] for name in FIELDS))

        self._run = jax.jit(run, out_shardings=replicated(mesh), compiler_options=compiler_options(mesh))

    def submit(self, batch: Mapping[str, np.ndarray]) -> TokenScores:
        """Scores of a batch of [B, T] int32 arrays, on the device; B is a multiple of ``shards``."""
        placed = put_batch({name: batch[name] for name in FIELDS}, self._mesh)
        found = self._run(self._params, placed)
        return jax.block_until_ready(found) if threads_of_one_cpu(self._mesh) else found

    def each(self, batches: Iterable[Mapping[str, np.ndarray]]) -> Iterator[tuple[Mapping[str, np.ndarray], Any]]:
        """(batch, its scores as numpy arrays), one batch ahead of the device. Rows are filled up to the shards."""
        waiting: tuple[Mapping[str, np.ndarray], TokenScores] | None = None
        for batch in batches:
            rows = len(batch["tokens"])
            short = -rows % self.shards
            whole = {name: np.pad(batch[name], ((0, short), (0, 0))) for name in FIELDS} if short else batch
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
