"""Ablate heads and sublayers: the loss without them, and the means that can take their place.

Ablations share one compiled program, since which head is ablated is data.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mhc.config import Config
from mhc.eval.common.ablation import Case, Head, Means, edits_of
from mhc.eval.common.checkpoints import Checkpoint
from mhc.eval.common.program import Program
from mhc.eval.common.scoring import token_scores
from mhc.eval.common.statistics import Estimate, ratio
from mhc.eval.inspect.rows import INPUTS, Rows, Tell, observed, over
from mhc.model.decoder import Decoder, SublayerView
from mhc.model.edits import Edits

How = Literal["zero", "mean", "scale"]


class Ablation(NamedTuple):
    """Holds the loss of a model, and its change by each case that is ablated, over the same R rows."""

    cases: list[Case]
    base: float  # nats per token
    change: Estimate  # [cases]: loss less that of the whole model, nats per token
    tokens: int


def random_heads(config: Config, count: int, draws: int, seed: int, without: Sequence[Head] = ()) -> list[Case]:
    """Return ``draws`` random sets of ``count`` different heads, none of which is in ``without``."""
    every = [(layer, head) for layer in range(config.model.layers) for head in range(config.attention.heads)]
    others = [head for head in every if head not in set(without)]
    if not 0 < count <= len(others):
        return []
    rng = np.random.default_rng(seed)
    return [
        Case("random", None, tuple(others[i] for i in sorted(rng.choice(len(others), count, replace=False))))
        for _ in range(draws)
    ]


def mean_outputs(checkpoint: Checkpoint, rows: Rows, tell: Tell = lambda done, total: None) -> Means:
    """Return the mean outputs of heads and sublayers over the tokens of some rows."""

    def run(decoder: Decoder, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        valid = (batch["segment_ids"] > 0).astype(jnp.float32)

        def observe(view: SublayerView) -> dict[str, jax.Array]:
            out = {"outputs": jnp.einsum("btd,bt->d", view.y.astype(jnp.float32), valid)}
            if view.heads is not None:
                out["heads"] = jnp.einsum("bthj,bt->hj", view.heads.astype(jnp.float32), valid)
            return out

        return observed(decoder, batch, observe)

    program = Program(checkpoint, run)
    parts = over(program, rows, tell)
    tokens = sum(int((batch["segment_ids"] > 0).sum()) for batch in rows.batches)
    heads, outputs = (
        np.asarray(np.sum([part[name] for part in parts], axis=0, dtype=np.float64)) / tokens
        for name in ("heads", "outputs")
    )
    return Means(heads, outputs.reshape(-1, 2, outputs.shape[-1]))


class Ablater:
    """Computes losses of rows under edits; one program serves all of them."""

    def __init__(self, checkpoint: Checkpoint, rows: Rows):
        def run(decoder: Decoder, batch: dict[str, jax.Array], edits: Edits) -> jax.Array:
            inputs = {name: batch[name] for name in (*INPUTS, "targets")}
            scores = token_scores(decoder, **inputs, edits=edits)
            return jnp.sum(scores.nll * batch["counted"], axis=1)

        self._config, self._rows = checkpoint.config, rows
        self.program = Program(checkpoint, run)
        self._batches = [self.program.put(batch) for batch in rows.batches]

    def nll(self, edits: Edits) -> np.ndarray:
        """Return the loss of each row [R], summed over its tokens, in nats, float64."""
        sums = jax.device_get([self.program(batch, edits) for batch in self._batches])
        return np.concatenate(sums).astype(np.float64)[self._rows.there]

    def ablate(
        self,
        which: Sequence[Case],
        factor: float = 0.0,
        means: Means | None = None,
        tell: Tell = lambda done, total: None,
    ) -> Ablation:
        """Return how each case changes the loss."""
        base = self.nll(edits_of(Case("none"), self._config))
        changes = []
        for number, case in enumerate(which):
            changes.append(self.nll(edits_of(case, self._config, factor, means)) - base)
            tell(number + 1, len(which))
        tokens = self._rows.sums("counted")
        change = ratio(np.stack(changes, axis=1), tokens)
        return Ablation(list(which), float(base.sum() / tokens.sum()), change, int(tokens.sum()))


def differs(change: Estimate, comparisons: int) -> np.ndarray:
    """Return whether each change differs from 0 at a level of 5 % for ``comparisons`` of them together (Bonferroni)."""
    least = statistics.NormalDist().inv_cdf(1.0 - 0.025 / comparisons)
    return np.abs(change.value) > least * change.error  # False where there is no error to compare with


def chance(value: float, control: np.ndarray) -> float:
    """Return a p-value: the share of control draws with at least that change, the value itself counted as a draw."""
    return float((1 + np.sum(control >= value)) / (1 + len(control)))
