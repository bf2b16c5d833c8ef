"""The tables of a comparison as CSV: topologies, learning rates, paired seeds, events, monitors, actions."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mhc.eval.compare.figures import parameters, relative_cost, speed
from mhc.eval.compare.spikes import NAMES, History, monitors
from mhc.eval.compare.topologies import Paired, Topology

_EVENT = (
    *("arm", "first", "last", "flagged_steps", "loss_step", "finite", "cause", "tensor", "action", "undone"),
    *("loss", "grad_norm", "batch", "window", "crossed_first"),
)


def topology(one: Topology, everyone: Sequence[Topology], pairs: Sequence[Paired]) -> dict[str, Any]:
    """What summary.json says of a topology; None where it is not known."""
    pair = next((pair for pair in pairs if pair.topology == one.label), None)
    cost = relative_cost(one, everyone) or (None, None)
    return {
        "kind": one.kind,
        "best_lr": one.best.lr,
        "best_lr_at_edge": one.at_edge,
        "rates": len(one.rates),
        "seeds": len(one.arms),
        "bits_per_byte_mean": None if math.isnan(one.best.mean) else one.best.mean,
        "bits_per_byte_std": one.std,
        "lr_sensitivity": one.sensitivity,
        "reference": pair.reference if pair else None,
        "minus_plain_mean": pair.mean if pair else None,
        "minus_plain_low": pair.interval[0] if pair and pair.interval else None,
        "minus_plain_high": pair.interval[1] if pair and pair.interval else None,
        "paired_seeds": len(pair.differences) if pair else 0,
        "verdict": pair.verdict if pair else None,
        "tokens_per_second": speed(one),
        "tokens_per_second_of_plain": cost[0],
        "parameters": parameters(one),
        "parameters_of_plain": cost[1],
    }


def write(folder: Path, everyone: Sequence[Topology], pairs: Sequence[Paired], histories: Sequence[History]) -> None:
    """Write topologies, rates, seeds_paired, events, monitors and actions (.csv) into ``folder``, made when missing."""
    folder.mkdir(parents=True, exist_ok=True)
    _csv(
        folder / "topologies.csv",
        ("topology", *topology(everyone[0], everyone, pairs)),
        ([one.label, *topology(one, everyone, pairs).values()] for one in everyone),
    )
    _csv(
        folder / "rates.csv",
        ("topology", "lr", "seed.init", "seed.data", "bits_per_byte"),
        (
            [one.label, rate.lr, *seeds, value]
            for one in everyone
            for rate in one.rates
            for seeds, value in rate.scores.items()
        ),
    )
    _csv(
        folder / "seeds_paired.csv",
        ("topology", "reference", "seed.init", "seed.data", "difference"),
        ([pair.topology, pair.reference, *seeds, value] for pair in pairs for seeds, value in pair.differences.items()),
    )
    _csv(
        folder / "events.csv",
        (*_EVENT, *(f"lead.{name}" for name in NAMES)),
        (
            [
                episode.arm,
                episode.first,
                episode.last,
                episode.count,
                episode.loss_step,
                episode.finite,
                episode.cause,
                episode.tensor,
                episode.action,
                episode.undone,
                episode.value,
                episode.grad_norm,
                episode.batch,
                one.window,
                episode.leader,
                *(episode.leads.get(name) for name in NAMES),
            ]
            for one in histories
            for episode in one.episodes
        ),
    )
    _csv(
        folder / "monitors.csv",
        ("monitor", "crossings", "led", "late", "false_alarms", "undecided", "missed", "median_lead"),
        (
            [one.monitor, one.crossings, one.led, one.late, one.false_alarms, one.undecided, one.missed, one.lead]
            for one in monitors(histories)
        ),
    )
    _csv(
        folder / "actions.csv",
        ("arm", "updates_left_out", "steps_clipped", "rewinds", "halted"),
        (
            [one.arm, one.skipped, one.clipped, "; ".join(f"{at} to {to}" for at, to, _ in one.rewinds), one.halted]
            for one in histories
        ),
    )


def _csv(path: Path, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(head)
        writer.writerows(["" if value is None else value for value in row] for row in rows)
