"""Observe the attention of a model at the supervised places of its task, for the measures of its changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mhc.config import Config
from mhc.data.windtunnel import Sequences, Task
from mhc.model.attention import Attention, Tokenwise
from mhc.model.decoder import Decoder, SublayerView

if TYPE_CHECKING:
    from jaxtyping import Float64

NO_ATTENTION = "attention.kind=tokenwise has no attention: no token looks at another"
_BYTES = 128 * 2**20  # of the logits of one batch


class Queries(NamedTuple):
    """Holds what the attention of one layer computes with: logits [B, H, T, U], values [B, U, G, J], results."""

    scores: jax.Array  # float32, -inf where a query does not see a key
    values: jax.Array
    results: jax.Array  # [B, T, H, J], before the output projection


def attends(config: Config) -> bool:
    """Return whether the model has attention, in which tokens see one another."""
    return config.attention.kind != "tokenwise"


def queries(view: SublayerView) -> Queries | None:
    """Return what a sublayer's attention computes with; None where the sublayer has no attention.

    Latent attention has keys and values of every head too, where whole rows are computed.
    """
    core = view.sublayer.core
    if not isinstance(core, Attention) or isinstance(core, Tokenwise) or view.heads is None:
        return None
    (context,) = view.args
    x = view.sublayer.before(view.u)
    values = core.recall(x, context.positions, context.frequencies, view.memory)[2]
    return Queries(core.scores(x, context, view.memory), values, view.heads)


def scores_at_places(decoder: Decoder, batch: dict[str, jax.Array]) -> jax.Array:
    """Return attention's logits of the queries at the supervised places, float32 [B, L, H, P, T]; -inf: not seen.

    The batch has tokens [B, T] and places [B, P].
    """

    def observe(view: SublayerView) -> dict[str, jax.Array]:
        seen = queries(view)
        return {} if seen is None else {"scores": at_places(seen.scores, batch["places"])}

    return jnp.moveaxis(decoder.forward(batch["tokens"], observe=observe).observed["scores"], 0, 1)


def at_places(x: jax.Array, places: jax.Array) -> jax.Array:
    """Return the queries [..., B, H, P, U] at places [B, P] of values [..., B, H, T, U]."""
    index = places.reshape(*(1,) * (x.ndim - 4), places.shape[0], 1, places.shape[1], 1)
    return jnp.take_along_axis(x, index, axis=-2)


def weights(scores: Float64[np.ndarray, "*B U"]) -> Float64[np.ndarray, "*B U"]:
    """Return attention's weights: the softmax of logits over the last axis, 0 where a logit is -inf."""
    shifted = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out: np.ndarray = shifted / shifted.sum(axis=-1, keepdims=True)
    return out


def batches(
    config: Config, task: Task, sequences: int, copies: int = 1
) -> Iterator[tuple[Sequences, dict[str, np.ndarray]]]:
    """Yield (held-out sequences, a program's inputs from them), so many sequences in all.

    The batch has tokens [B, T] and places [B, P].

    Args:
        copies: how many arrays as large as all logits a program holds at once; batches are the smaller for it.
    """
    row = 4 * config.model.layers * config.attention.heads * task.length**2 * copies
    size = max(1, min(64, _BYTES // row))
    for first in range(0, sequences, size):
        drawn = task.make(0, "validation", range(first, min(first + size, sequences)))
        places = np.tile(task.places.astype(np.int32), (len(drawn.tokens), 1))
        yield drawn, {"tokens": drawn.tokens, "places": places}
