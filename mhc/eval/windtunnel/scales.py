"""Measure the two time scales of a run: how fast its attention settles, and how fast its belief becomes precise.

Over the checkpoints that a run keeps: the total variation between the attention of consecutive ones, that between each
and the last, and the distance of the belief from the posterior. The **half-time** of each is the step from which on it
is at most half as far from its end as at the first checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mhc.data.windtunnel import Task
from mhc.eval.common import checkpoints
from mhc.eval.common import page as pages
from mhc.eval.common.checkpoints import Checkpoint
from mhc.eval.common.program import Program
from mhc.eval.common.sheet import Sheet
from mhc.eval.windtunnel import attention, belief
from mhc.eval.windtunnel.measures import Distances
from mhc.eval.windtunnel.sections import Result, Shown

if TYPE_CHECKING:
    from jaxtyping import Float64

LEAST = 3
"""Checkpoints that a half-time needs."""
_FEW = (
    f"a half-time needs {LEAST} checkpoints or more: checkpoint.every and checkpoint.keep_every keep them, and "
    "checkpoint.keep the last ones"
)


class Scales(NamedTuple):
    """Holds the changes of C checkpoints of a run; L layers, H heads.

    Attributes:
        steps: int64 [C], ascending.
        change: float64 [C - 1, L, H], total variation between the attention of a checkpoint and of the one before it,
            0 … 1: the mean over sequences and supervised places; None without attention.
        distance: float64 [C, L, H], that between each checkpoint and the last; None without attention.
        entropy_error: float64 [C], bits.
        kl: float64 [C], bits.
    """

    steps: np.ndarray
    change: np.ndarray | None
    distance: np.ndarray | None
    entropy_error: np.ndarray
    kl: np.ndarray


def total_variation(
    one: Float64[np.ndarray, "B L H P U"], other: Float64[np.ndarray, "B L H P U"]
) -> Float64[np.ndarray, "L H"]:
    """Return the sum over sequences and queries of ½ Σ_j |α_j − β_j| between the weights that two sets of logits give.

    Divided by B · P it is their mean, from 0 for the same attention to 1 where no query looks at the same key.
    """
    apart = np.abs(attention.weights(one) - attention.weights(other))
    return np.asarray(0.5 * apart.sum(axis=(0, 3, 4)))


def half_time(steps: Sequence[int] | np.ndarray, values: Sequence[float] | np.ndarray) -> float | None:
    """Return the step from which on a falling series has come half of the way from its first value to its last.

    It is interpolated between checkpoints. A series that comes so far and goes back has not settled. None where there
    are fewer than `LEAST` values, or the last one is not below the first.
    """
    at, series = np.asarray(steps, np.float64), np.asarray(values, np.float64)
    if len(series) < LEAST or not (np.isfinite(series[[0, -1]]).all() and series[-1] < series[0]):
        return None
    half = (series[0] + series[-1]) / 2
    last = int(np.flatnonzero(~(series <= half))[-1])  # what is not a number has not come so far
    above, below = series[last : last + 2]
    if not np.isfinite(above):
        return float(at[last + 1])
    return float(at[last] + (at[last + 1] - at[last]) * (above - half) / (above - below))


def follow(checkpoint: Checkpoint, task: Task, sequences: int) -> Scales:
    """Follow a run on held-out sequences, over the checkpoints that it keeps, to the step of a given one.

    Raises:
        UserError: a checkpoint cannot be read.
    """
    steps = checkpoints.steps_until(checkpoint)
    end = checkpoints.at_step(checkpoint, steps[-1])
    drawn = belief.held_out(task, sequences)
    precision: list[Distances] = []
    change: list[np.ndarray] = []
    distance: list[np.ndarray] = []
    attends, before = attention.attends(checkpoint.config), None
    for step in steps:
        now = checkpoints.at_step(end, step)
        precision.append(belief.distances_of(Program(now, belief.log_probabilities), task, drawn))
        if attends:
            others = [end] if before is None else [end, before]
            to_end, *from_before = _apart(now, others, task, sequences)
            distance.append(to_end)
            change += from_before
        before = now
    empty = np.zeros((0, *distance[0].shape)) if attends else None
    return Scales(
        np.array(steps),
        np.stack(change) if change else empty,
        np.stack(distance) if attends else None,
        np.array([each.entropy_error.mean() for each in precision]),
        np.array([each.kl.mean() for each in precision]),
    )


def _apart(now: Checkpoint, others: Sequence[Checkpoint], task: Task, sequences: int) -> list[np.ndarray]:
    """Return the mean total variation [L, H] between the attention of a checkpoint and that of each of others."""

    def scores(of: Checkpoint) -> Iterator[np.ndarray]:
        inputs = (batch for _, batch in attention.batches(now.config, task, sequences))
        for _, found in Program(of, attention.scores_at_places).each(inputs, ("tokens", "places")):
            yield found.astype(np.float64)

    sums: list[Any] = [0.0] * len(others)
    for one, *rest in zip(scores(now), *map(scores, others), strict=True):
        for number, other in enumerate(rest):
            sums[number] = sums[number] + total_variation(one, other)
    return [total / (sequences * len(task.places)) for total in sums]


# ---------------------------------------------------------------------------------------------------------- the section


def measure(checkpoint: Checkpoint, task: Task, sequences: int) -> Result:
    """Return both time scales; the scalars are half-times in steps: that of attention is of the mean over heads."""
    found = follow(checkpoint, task, sequences)
    times = half_times(found)
    scalars = {name: value for name, value in times.items() if value is not None}
    if times["attention_half_time"] is not None and times["kl_half_time"] is not None:
        scalars["kl_after_attention"] = times["kl_half_time"] - times["attention_half_time"]
    return Result(scalars, as_json(found, sequences))


def half_times(found: Scales) -> dict[str, float | None]:
    """Return the half-time of the attention, of the divergence and of the error of entropy, in steps."""
    attention_path = None if found.distance is None else half_time(found.steps, found.distance.mean(axis=(1, 2)))
    return {
        "attention_half_time": attention_path,
        "kl_half_time": half_time(found.steps, found.kl),
        "entropy_half_time": half_time(found.steps, found.entropy_error),
    }


def as_json(found: Scales, sequences: int) -> dict[str, Any]:
    """Return the entry of windtunnel.json by checkpoint, layer and head. None stands for what does not exist."""
    by_head = None
    if found.distance is not None:
        layers, heads = found.distance.shape[1:]
        by_head = [[half_time(found.steps, found.distance[:, n, h]) for h in range(heads)] for n in range(layers)]
    notes = [
        *([attention.NO_ATTENTION] if found.distance is None else []),
        *([_FEW] if len(found.steps) < LEAST else []),
    ]
    return {
        "sequences": sequences,
        "steps": found.steps.tolist(),
        "attention_change": None if found.change is None else found.change.tolist(),
        "attention_to_end": None if found.distance is None else found.distance.tolist(),
        "entropy_mae_bits": found.entropy_error.tolist(),
        "kl_bits": found.kl.tolist(),
        **half_times(found),
        "attention_half_time_by_head": by_head,
        **({"note": "; ".join(notes)} if notes else {}),
    }


def page(results: Sequence[Shown], folder: Path) -> str:
    """Return the figure of both time scales over the steps of training."""
    titles = {
        "attention_change": "attention: change from the checkpoint before",
        "attention_to_end": "attention: distance to its end",
        "kl_bits": "belief: KL(Bayes ‖ model), bits",
    }
    sheet = Sheet(
        "scales",
        columns=len(titles),
        legend=list({one.label: (one.style, one.label) for one in results}.values()),
        y="total variation",
        sharey=False,
    )
    for panel, (name, title) in enumerate(titles.items()):
        sheet.title(panel, title)
        for one in results:
            values = one.result.json[name]
            if not values:
                continue
            line = np.array(values, float)
            line = line if line.ndim == 1 else line.mean(axis=(1, 2))
            x = np.array(one.result.json["steps"][-len(line) :], float)
            sheet.line(panel, one.name, x, line, one.style, marker=True, alpha=0.8)
        if name == "kl_bits":
            sheet.log(panel)
    drawn = pages.Drawn(
        sheet.save(folder, folder),
        "Two time scales",
        "Each point is a checkpoint. Attention is compared at the supervised places, by total variation between its "
        "weights: the mean over layers and heads.",
        True,
    )
    notes = dict.fromkeys(f"{one.name}: {one.result.json['note']}" for one in results if "note" in one.result.json)
    return "".join(f'<p class="note">{pages.text(note)}.</p>' for note in notes) + pages.figures([drawn])
