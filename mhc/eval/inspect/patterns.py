"""Compute attention patterns of heads over a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from mhc.eval.common.ablation import Head
from mhc.eval.common.checkpoints import Checkpoint
from mhc.eval.common.program import Program, multiple
from mhc.eval.inspect.rows import observed
from mhc.model.attention import Attention
from mhc.model.decoder import Decoder, SublayerView


class Pattern(NamedTuple):
    """Holds the attention weights of a head's queries."""

    layer: int
    head: int
    weights: np.ndarray  # [T, U], a query's sum to 1
    visible: np.ndarray  # [T, U] bool
    entropy: float  # of a query's weights, nats, mean over queries


def patterns(checkpoint: Checkpoint, tokens: Sequence[int], heads: Sequence[Head]) -> Iterator[Pattern]:
    """Yield the attention weights of some heads over one text."""
    layers = sorted({layer for layer, _ in heads})
    columns = sorted({head for _, head in heads})

    def run(decoder: Decoder, batch: dict[str, jax.Array]) -> jax.Array:
        def observe(view: SublayerView) -> dict[str, jax.Array]:
            core = view.sublayer.core
            if not isinstance(core, Attention):
                return {}
            (context,) = view.args
            return {"scores": core.scores(view.sublayer.before(view.u), context, view.memory)[0, np.array(columns)]}

        scores = observed(decoder, batch, observe)["scores"]
        return scores[np.array(layers)]

    program = Program(checkpoint, run)
    batch = program.put({"tokens": np.array([tokens] * multiple(1, checkpoint.mesh), np.int32)})
    scores = np.asarray(program(batch), np.float64)  # [layers, heads, T, U]
    for layer, head in heads:
        of_head = scores[layers.index(layer), columns.index(head)]
        visible = np.isfinite(of_head)
        weights = np.exp(of_head - of_head.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        logs = np.log(weights, where=weights > 0, out=np.zeros_like(weights))
        yield Pattern(layer, head, weights, visible, float(-(weights * logs).sum(axis=-1).mean()))
