"""Run a checkpoint over held-out sequences of its task, and measure its belief at every supervised place."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mhc.data.windtunnel import HiddenMarkov, Sequences, Task, is_windtunnel, task
from mhc.errors import UserError
from mhc.eval.common.checkpoints import Checkpoint
from mhc.eval.common.program import Program
from mhc.eval.windtunnel.measures import Distances, distances, optimum, without_context
from mhc.model.decoder import Decoder
from mhc.model.edits import Edits

BATCH = 64  # sequences that go through the model at once


class Belief(NamedTuple):
    """Holds how far a checkpoint is from the posterior, on each of the same held-out sequences.

    Attributes:
        name: the checkpoint, as the user gave it.
        kind: of the residual.
        control: whether it is the control that sees no context.
        seed: (seed.init, seed.data) of its run.
        source: the task that it was measured on.
        distances: of the model, each [sequences, places].
        baseline: of the best predictor without context, likewise.
        optimum: the cross-entropy of the posterior itself, nats.
    """

    name: str
    kind: str
    control: bool
    seed: tuple[int, int]
    source: str
    distances: Distances
    baseline: Distances
    optimum: float


def measure(checkpoint: Checkpoint, sequences: int, source: str | None = None) -> Belief:
    """Measure a checkpoint on held-out sequences, the same for every model of a task.

    Args:
        checkpoint: of a run on a wind tunnel.
        sequences: how many.
        source: another task for the same model, such as more observations; None: that of its run.

    Raises:
        UserError: the run is on no wind tunnel, or the model does not fit the task: other ids or classes, or positions
            that do not reach so far.
    """
    chosen = fitting(checkpoint, source)
    drawn = held_out(chosen, sequences)
    config, posterior = checkpoint.config, np.concatenate([block.posterior for block in drawn])
    return Belief(
        name=checkpoint.name,
        kind=config.residual.kind,
        control=config.attention.kind == "tokenwise",
        seed=(config.seed.init, config.seed.data),
        source=source or config.data.source,
        distances=distances_of(Program(checkpoint, log_probabilities), chosen, drawn),
        baseline=without_context(posterior),
        optimum=optimum(posterior),
    )


def held_out(chosen: Task, sequences: int) -> list[Sequences]:
    """Return the held-out sequences of these numbers, from 0 on, in blocks that go through a model at once."""
    return [
        chosen.make(0, "validation", range(first, min(first + BATCH, sequences)))
        for first in range(0, sequences, BATCH)
    ]


def distances_of(program: Program, chosen: Task, drawn: Sequence[Sequences], *more: Any) -> Distances:
    """Return how far a model is from the posterior on each sequence, [sequences, places].

    Args:
        program: gives log-probabilities [B, T, V] as ``log_probabilities`` does.
        drawn: blocks of sequences of the task.
        more: what the program takes beside each batch.
    """
    batches = ({"tokens": block.tokens} for block in drawn)
    parts = [
        distances(found[:, chosen.places].astype(np.float64), block.posterior, chosen.first_class)
        for block, (_, found) in zip(drawn, program.each(batches, ("tokens",), *more), strict=True)
    ]
    return Distances(*(np.concatenate(values) for values in zip(*parts, strict=True)))


def fitting(checkpoint: Checkpoint, source: str | None = None) -> Task:
    """Return the task that a checkpoint is measured on. Raises UserError as `measure`."""
    config = checkpoint.config
    trained_on = config.data.source
    if not is_windtunnel(trained_on):
        raise UserError(
            f"{checkpoint.name}: data.source={trained_on} is no wind tunnel, allowed: a run on windtunnel:…"
        )
    chosen, trained = task(source or trained_on), task(trained_on)
    if (chosen.vocabulary, chosen.classes, chosen.name) != (trained.vocabulary, trained.classes, trained.name):
        raise UserError(f"{source}: has other ids or classes than {trained_on}, on which {checkpoint.name} was trained")
    if config.positions.kind == "learned" and chosen.length > config.max_length:
        raise UserError(
            f"{source}: its sequences have {chosen.length} tokens, allowed: at most the {config.max_length} that "
            f"{checkpoint.name} has learned positions for"
        )
    return chosen


def longer(source: str, observations: int) -> str:
    """Return the source of the same task with another number of observations.

    Raises:
        UserError: the task has no observations, or cannot have so many.
    """
    if not isinstance(task(source), HiddenMarkov):
        raise UserError(f"--observations: {source} has none, allowed: with windtunnel:hmm")
    rest = re.sub(r",\s*(observations|reach)\s*=\s*\d+", "", source)  # held-out sequences are not shifted
    changed = f"{rest},observations={observations}"
    task(changed)  # out of bounds: said there
    return changed


def log_probabilities(decoder: Decoder, batch: dict[str, jax.Array], edits: Edits | None = None) -> jax.Array:
    """Return the model's log-probabilities of its outputs, float32 [B, T, V], under interventions where there are."""
    logits = decoder.logits(decoder.forward(batch["tokens"], edits=edits).h)
    return jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)


def as_json(belief: Belief) -> dict[str, Any]:
    """Return what windtunnel.json says of a checkpoint: means with 95 % intervals over sequences, and by place."""
    from mhc.eval.common import statistics

    measures = {"entropy_mae_bits": "entropy_error", "kl_bits": "kl", "total_variation": "total_variation"}
    out: dict[str, Any] = {
        "checkpoint": belief.name,
        "kind": belief.kind,
        "control": belief.control,
        "seed": {"init": belief.seed[0], "data": belief.seed[1]},
        "source": belief.source,
        "sequences": len(belief.distances.kl),
    }
    for name, field in measures.items():
        values = getattr(belief.distances, field)
        out[name] = statistics.mean(values.mean(axis=1)).at()
        out[f"{name}_by_place"] = values.mean(axis=0)
        out[f"{name}_without_context"] = float(getattr(belief.baseline, field).mean())
    out["cross_entropy_nats"] = float(belief.distances.cross_entropy.mean())
    out["optimum_nats"] = belief.optimum
    return out
