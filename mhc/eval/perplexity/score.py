"""Score checkpoints on a corpus, and report measures with intervals, differences, and loss by context."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mhc.errors import UserError
from mhc.eval.common.statistics import Estimate, bootstrap, ratio

if TYPE_CHECKING:
    from mhc.eval.common.checkpoints import Checkpoint
    from mhc.eval.common.rows import Corpus


class Sums(NamedTuple):
    """Holds sums over the tokens of each document, float64 [documents]."""

    nll: np.ndarray  # nats
    tokens: np.ndarray
    bytes: np.ndarray


class Measures(NamedTuple):
    """Holds measures of a corpus, in which each token counts the same: numbers, or arrays of one shape."""

    loss: np.ndarray  # nats per token
    perplexity: np.ndarray
    bits_per_token: np.ndarray
    bits_per_byte: np.ndarray  # nan where the corpus is of ids without text


def measures(nll: np.ndarray, tokens: np.ndarray, size: np.ndarray) -> Measures:
    """Return the measures of sums: nats, targets and bytes."""
    tokens, bits = np.maximum(tokens, 1.0), np.asarray(nll) / math.log(2.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        by_byte = np.where(np.asarray(size) > 0, bits / size, np.nan)
    return Measures(nll / tokens, np.exp(nll / tokens), bits / tokens, by_byte)


class Scored(NamedTuple):
    """Holds the scores of a checkpoint."""

    name: str
    kind: str  # of the residual
    steps: tuple[int, ...]
    documents: np.ndarray  # the numbers of those that have a scored token
    sums: Sums  # of each of them
    by_position: np.ndarray  # [T, 2]: nats and tokens by the number of tokens before the target that the model saw
    tokenizer: str  # hash: bits per token of different ones are not comparable
    seconds: float
    withheld: str | None = None  # the reason why bits per byte is not given


def score(checkpoint: Checkpoint, corpus: Corpus, tell: Callable[[int], None] = lambda tokens: None) -> Scored:
    """Return the sums of a checkpoint over a corpus, added up in float64.

    Args:
      tell: called after each batch with the tokens scored so far.

    Raises:
      UserError: the corpus has no token to score.
    """
    from mhc.data import tokenizers
    from mhc.data.corpus import fidelity
    from mhc.eval.common.rows import scored_places
    from mhc.eval.common.scoring import Scorer

    started = time.monotonic()
    config = checkpoint.config
    length = config.data.sequence_length
    sums = np.zeros((3, corpus.documents))
    by_position = np.zeros((length + 1, 2))
    for batch, scores in Scorer(checkpoint).each(corpus.batches):
        places = scored_places(config, batch)
        documents, nll = batch["documents"][places], scores.nll[places].astype(np.float64)
        for row, values in zip(sums, (nll, np.ones(len(nll)), batch["target_bytes"][places]), strict=True):
            row += np.bincount(documents, values, corpus.documents)
        context = batch["context"][places]
        by_position[:, 0] += np.bincount(context, nll, length + 1)
        by_position[:, 1] += np.bincount(context, minlength=length + 1)
        tell(int(sums[1].sum()))
    if not sums[1].any():
        raise UserError("nothing to score: the split has no token")
    documents = np.flatnonzero(sums[1])
    return Scored(
        checkpoint.name,
        config.residual.kind,
        checkpoint.steps,
        documents,
        Sums(*sums[:, documents]),
        by_position[1:],
        tokenizers.load(config.data.tokenizer).content_hash,
        time.monotonic() - started,
        fidelity.why_withheld(corpus.lost, config.data.tokenizer),
    )


def estimates(sums: Sums) -> dict[str, Estimate]:
    """Return each of `Measures` by its name, with intervals over documents drawn with replacement."""

    every = bootstrap(lambda total: np.stack(measures(*map(total, sums)), axis=-1), len(sums.nll))
    return {name: every.part(column) for column, name in enumerate(Measures._fields)}


def summary(scored: Scored, first: Scored | None) -> dict[str, Any]:
    """Return a checkpoint's results for JSON: measures with intervals, loss by position, difference to the first."""
    context, (nll, tokens) = np.arange(1, len(scored.by_position) + 1), scored.by_position.T
    out = {
        "checkpoint": scored.name,
        "kind": scored.kind,
        "steps": list(scored.steps),
        "documents": len(scored.documents),
        "tokens": int(scored.sums.tokens.sum()),
        "bytes": int(scored.sums.bytes.sum()),
        **{name: estimate.at() for name, estimate in estimates(scored.sums).items()},
        "by_context": [
            {"context": int(c), "loss": float(a / b), "tokens": int(b)}
            for c, a, b in zip(context, nll, tokens, strict=True)
            if b
        ],
        "seconds": scored.seconds,
    }
    if scored.withheld:
        out |= {"bits_per_byte": dict.fromkeys(("value", "low", "high")), "bits_per_byte_reason": scored.withheld}
    if first is not None and first is not scored and len(scored.documents) > 1:
        out["minus_first"] = difference(scored, first)
    return out


def difference(scored: Scored, first: Scored) -> dict[str, Any] | None:
    """Return bits per byte minus those of the first, paired by document; nats per token if the corpus is of ids.

    It is in nats per token also where a tokeniser loses text. None where the two did not score the same documents, or
    not the same number of tokens (bytes) of each.
    """
    if not np.array_equal(scored.documents, first.documents):
        return None
    by_byte = scored.sums.bytes.any() and not scored.withheld and not first.withheld
    by = "bytes" if by_byte else "tokens"
    size = getattr(scored.sums, by)
    if not np.array_equal(size, getattr(first.sums, by)):
        return None
    gap = (scored.sums.nll - first.sums.nll) / (math.log(2.0) if by_byte else 1.0)
    return {"measure": "bits_per_byte" if by_byte else "loss", **ratio(gap, size).at()}
