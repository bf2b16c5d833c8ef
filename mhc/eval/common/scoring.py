"""Score tokens under a model: log-likelihoods of targets, of candidates, and of long texts by windows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from mhc.eval.common.checkpoints import Checkpoint
from mhc.eval.common.program import Batch, Program
from mhc.model.decoder import Decoder
from mhc.model.edits import Edits
from mhc.train.loss import chunk_length

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

FIELDS = ("tokens", "targets", "segment_ids", "positions", "candidates", "prefix")


class TokenScores(NamedTuple):
    """Holds the scores of every place of a batch; at padding they mean nothing."""

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
    """Return the scores of the targets; logits are held for ``chunk_length`` tokens of each row at a time.

    ``prefix`` and ``edits`` are those of ``Decoder.forward``.
    """
    h = decoder.forward(tokens, segment_ids, positions, prefix=prefix, edits=edits).h
    rows, length = tokens.shape
    chunk = chunk_length(decoder.config, rows, length)

    def of_chunk(part: tuple[jax.Array, jax.Array]) -> TokenScores:
        h, targets = part
        logits = decoder.logits(h).astype(jnp.float32)
        at_target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        nll = jax.nn.logsumexp(logits, axis=-1) - at_target
        return TokenScores(nll, jnp.argmax(logits, axis=-1) == targets)

    def split(a: jax.Array) -> jax.Array:
        return jnp.moveaxis(a.reshape(rows, length // chunk, chunk, *a.shape[2:]), 1, 0)

    scores = jax.lax.map(of_chunk, (split(h), split(targets)))
    return jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1).reshape(rows, length), scores)


def last_scores(
    decoder: Decoder,
    tokens: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    candidates: Int[Array, "B K"],
    prefix: Int[Array, " B"] | None = None,
) -> TokenScores:
    """Return the scores [B, K] of several tokens as the next one after each row, which one forward pass gives."""
    h = decoder.forward(tokens, segment_ids, positions, prefix=prefix).h
    last = jnp.maximum(jnp.sum(segment_ids > 0, axis=1) - 1, 0)
    logits = decoder.logits(jnp.take_along_axis(h, last[:, None, None], axis=1))[:, 0].astype(jnp.float32)
    log_p = jax.nn.log_softmax(logits, axis=-1)
    return TokenScores(
        -jnp.take_along_axis(log_p, candidates, axis=1), jnp.argmax(logits, axis=-1)[:, None] == candidates
    )


def scores(decoder: Decoder, batch: dict[str, Any]) -> TokenScores:
    """Return ``last_scores`` of a batch that has candidates, ``token_scores`` of any other."""
    function = last_scores if "candidates" in batch else token_scores
    return function(decoder, **batch)


class Scorer:
    """Scores batches under a checkpoint, compiled once for each shape of batch.

    A batch is a mapping of [B, T] int32 arrays: tokens, segment_ids (0: padding), positions, and either targets [B, T]
    or candidates [B, K]; also prefix [B], where the rows' prefixes differ from the config's.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._program = Program(checkpoint, scores)

    def each(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, TokenScores]]:
        """Yield each batch with its scores as numpy arrays, one batch ahead of the device."""
        return self._program.each(batches, FIELDS)


class Window(NamedTuple):
    """Holds the bounds of a stretch that is read at once, in pairs (input i, target i + 1) of a longer text."""

    start: int  # the first pair that is read
    scored: int  # the first one whose target is scored
    end: int


def windows(pairs: int, length: int, stride: int, first: int = 0) -> Iterator[Window]:
    """Yield windows of at most ``length`` pairs in which each pair from ``first`` on is scored once.

    The first window scores as many as it holds, each other one ``stride``; all reach back as far as ``length`` allows.
    """
    scored = first
    while scored < pairs:
        end = min(scored + (length if scored == first else stride), pairs)
        yield Window(max(end - length, 0), scored, end)
        scored = end
