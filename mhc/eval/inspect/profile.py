"""Measure sizes of activations and statistics of attention."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mhc.eval.common.checkpoints import Checkpoint
from mhc.eval.common.program import Program
from mhc.eval.common.statistics import Estimate, ratio
from mhc.eval.inspect.rows import Rows, Tell, observed, over
from mhc.model.attention import Attention
from mhc.model.decoder import Decoder, SublayerView


class Profile(NamedTuple):
    """Holds means over the tokens of R rows; S sublayers, L blocks, H heads."""

    residual: Estimate  # [S]: rms of the residual state behind each sublayer, over its streams
    output: Estimate  # [S]: rms of F's output
    entropy: Estimate  # [L, H]: of a query's weights, nats, mean over queries
    entropy_by_layer: Estimate  # [L]
    first: Estimate  # [L, H]: share of the weights on the document's first token, mean over queries
    logit_max: np.ndarray  # [L, H]: largest attention logit of a visible pair in all rows
    tokens: int


def profile(checkpoint: Checkpoint, rows: Rows, tell: Tell = lambda done, total: None) -> Profile:
    """Return sizes of activations and statistics of attention, without padding."""

    def run(decoder: Decoder, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        valid = batch["segment_ids"] > 0

        def over_tokens(values: jax.Array) -> jax.Array:
            """Return the mean over the tokens of each row: [B, ..., T] -> [B, ...]."""
            shape = (valid.shape[0], *(1,) * (values.ndim - 2), valid.shape[1])
            return jnp.sum(jnp.where(valid.reshape(shape), values, 0.0), axis=-1)

        def observe(view: SublayerView) -> dict[str, jax.Array]:
            streams = view.topology.streams(view.state).astype(jnp.float32)
            out = {
                "residual": over_tokens(jnp.mean(jnp.square(streams), axis=(-2, -1))),
                "output": over_tokens(jnp.mean(jnp.square(view.y.astype(jnp.float32)), axis=-1)),
            }
            core = view.sublayer.core
            if isinstance(core, Attention):
                (context,) = view.args
                scores = core.scores(view.sublayer.before(view.u), context, view.memory)
                log_weights = jax.nn.log_softmax(scores, axis=-1)
                weights = jnp.exp(log_weights)
                entropy = -jnp.sum(jnp.where(weights > 0, weights * log_weights, 0.0), axis=-1)
                first = jnp.sum(jnp.where((context.positions == 0)[:, None, None], weights, 0.0), axis=-1)
                largest = jnp.where(valid[:, None], jnp.max(scores, axis=-1), -jnp.inf)
                out |= {"entropy": over_tokens(entropy), "first": over_tokens(first)}
                out["logit_max"] = jnp.max(largest, axis=-1)
            return out

        return observed(decoder, batch, observe)

    program = Program(checkpoint, run)
    parts = over(program, rows, tell)
    # [S or L, rows, ...] -> [R, S or L, ...]
    sums = {
        name: np.moveaxis(np.concatenate([part[name] for part in parts], axis=1), 1, 0)[rows.there].astype(np.float64)
        for name in parts[0]
    }
    tokens = rows.sums("segment_ids")
    return Profile(
        ratio(sums["residual"], tokens, np.sqrt),
        ratio(sums["output"], tokens, np.sqrt),
        ratio(sums["entropy"], tokens),
        ratio(sums["entropy"].mean(axis=-1), tokens),
        ratio(sums["first"], tokens),
        sums["logit_max"].max(axis=0),
        int(tokens.sum()),
    )
