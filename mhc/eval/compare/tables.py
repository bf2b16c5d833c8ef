"""Write the tables of a comparison as CSV: topologies, learning rates, paired seeds, events, monitors, actions."""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mhc.eval.compare.comparison import Comparison
from mhc.eval.compare.cost import parameters, relative_cost, speed
from mhc.eval.compare.spikes import NAMES, Episode, History, monitors
from mhc.eval.compare.topologies import Topology

_EVENT = (
    *("arm", "first", "last", "flagged_steps", "loss_step", "finite", "cause", "tensor", "action", "undone"),
    *("loss", "grad_norm", "batch", "window", "crossed_first"),
)


def row_of(topology: Topology, comparison: Comparison) -> dict[str, Any]:
    """Return a topology's entries for summary.json; None stands for what is not known."""
    pair = next((pair for pair in comparison.pairs if pair.topology == topology.label), None)
    cost = relative_cost(topology, comparison.topologies) or (None, None)
    best = topology.best
    return {
        "kind": topology.kind,
        "best_lr": best.lr,
        "best_lr_at_edge": topology.at_edge,
        "rates": len(topology.rates),
        "seeds": len(topology.arms),
        "bits_per_byte_mean": None if math.isnan(best.mean) else best.mean,
        "bits_per_byte_std": topology.std,
        "lr_sensitivity": topology.sensitivity,
        "reference": pair.reference if pair else None,
        "minus_plain_mean": pair.mean if pair else None,
        "minus_plain_low": pair.interval[0] if pair and pair.interval else None,
        "minus_plain_high": pair.interval[1] if pair and pair.interval else None,
        "paired_seeds": len(pair.differences) if pair else 0,
        "verdict": pair.verdict if pair else None,
        "tokens_per_second": speed(topology),
        "tokens_per_second_of_plain": cost[0],
        "parameters": parameters(topology),
        "parameters_of_plain": cost[1],
    }


def write(comparison: Comparison, folder: Path) -> None:
    """Write topologies, rates, seeds_paired, events, monitors and actions (.csv) into ``folder``, made when missing."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (head, rows) in _tables(comparison).items():
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(head)
            writer.writerows(["" if value is None else value for value in row] for row in rows)


Table = tuple[Sequence[str], Sequence[Sequence[Any]]]  # names of the columns, rows


def _tables(comparison: Comparison) -> dict[str, Table]:
    """Return each table by the name of its file."""
    topologies, pairs, histories = comparison.topologies, comparison.pairs, comparison.histories
    by_topology = {topology.label: row_of(topology, comparison) for topology in topologies}
    return {
        "topologies": (
            ("topology", *next(iter(by_topology.values()))),
            [[label, *row.values()] for label, row in by_topology.items()],
        ),
        "rates": (
            ("topology", "lr", "seed.init", "seed.data", "bits_per_byte"),
            [
                [topology.label, rate.lr, *seeds, value]
                for topology in topologies
                for rate in topology.rates
                for seeds, value in rate.scores.items()
            ],
        ),
        "seeds_paired": (
            ("topology", "reference", "seed.init", "seed.data", "difference"),
            [[pair.topology, pair.reference, *seeds, gap] for pair in pairs for seeds, gap in pair.differences.items()],
        ),
        "events": (
            (*_EVENT, *(f"lead.{name}" for name in NAMES)),
            [_event(episode, history.window) for history in histories for episode in history.episodes],
        ),
        "monitors": (
            ("monitor", "crossings", "led", "late", "false_alarms", "undecided", "missed", "median_lead"),
            [dataclasses.astuple(record) for record in monitors(histories)],
        ),
        "actions": (
            ("arm", "updates_left_out", "steps_clipped", "rewinds", "halted"),
            [[events.arm, events.skipped, events.clipped, _rewinds(events), events.halted] for events in histories],
        ),
    }


def _event(episode: Episode, window: int) -> list[Any]:
    """Return the row of an event: the columns of ``_EVENT``, then the lead of each monitor."""
    return [
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
        window,
        episode.leader,
        *(episode.leads.get(name) for name in NAMES),
    ]


def _rewinds(history: History) -> str:
    return "; ".join(f"{at} to {to}" for at, to, _ in history.rewinds)
