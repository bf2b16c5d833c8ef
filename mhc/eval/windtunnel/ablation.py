"""Measure how much each sublayer and each head matters to the belief: how its distances change without it.

A sublayer that is left out gives nothing, so that the residual connection alone carries the stream past it. A head that
is left out gives nothing to its output projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mhc.data.windtunnel import Task
from mhc.eval.common import page as pages
from mhc.eval.common import statistics
from mhc.eval.common.ablation import Case, cases, edits_of
from mhc.eval.common.checkpoints import Checkpoint
from mhc.eval.common.program import Program
from mhc.eval.windtunnel import belief
from mhc.eval.windtunnel.attention import NO_ATTENTION, attends
from mhc.eval.windtunnel.measures import Distances
from mhc.eval.windtunnel.sections import Result, Shown

MEASURES = {"entropy_mae_bits": "entropy error", "kl_bits": "KL(Bayes ‖ model)"}
_FIELDS = {"entropy_mae_bits": "entropy_error", "kl_bits": "kl"}


class Ablation(NamedTuple):
    """Holds the change of each distance, bits, by each case that is left out."""

    cases: list[Case]
    base: dict[str, float]  # of the whole model
    change: dict[str, statistics.Estimate]  # [cases], the mean over sequences and places with its interval


def ablate(checkpoint: Checkpoint, task: Task, sequences: int) -> Ablation:
    """Leave out each head, each sublayer and each block of a checkpoint in turn, on the same held-out sequences."""
    config = checkpoint.config
    program, drawn = Program(checkpoint, belief.log_probabilities), belief.held_out(task, sequences)

    def distances(case: Case) -> Distances:
        return belief.distances_of(program, task, drawn, edits_of(case, config))

    def by_sequence(found: Distances) -> dict[str, np.ndarray]:
        return {name: getattr(found, field).mean(axis=1) for name, field in _FIELDS.items()}

    which = cases(config)
    whole = by_sequence(distances(Case("none")))
    parts = [by_sequence(distances(case)) for case in which]
    change = {
        name: statistics.ratio(np.stack([part[name] - base for part in parts], axis=1), np.ones(sequences))
        for name, base in whole.items()
    }
    return Ablation(which, {name: float(base.mean()) for name, base in whole.items()}, change)


# ---------------------------------------------------------------------------------------------------------- the section


def measure(checkpoint: Checkpoint, task: Task, sequences: int) -> Result:
    """Return the changes; the scalars are the mean and the largest over heads, and over sublayers of each sort."""
    found = ablate(checkpoint, task, sequences)
    scalars: dict[str, float] = {}
    for kind in ("head", "attention", "feed-forward"):
        there = np.array([case.kind == kind for case in found.cases])
        for name, change in found.change.items():
            values, word = change.value[there], kind.replace("-", "_")
            scalars |= {f"{word}_{name}_mean": float(values.mean()), f"{word}_{name}_largest": float(values.max())}
    note = {} if attends(checkpoint.config) else {"note": f"{NO_ATTENTION}; its heads are parts of a feed-forward"}
    return Result(scalars, as_json(found, sequences) | note)


def as_json(found: Ablation, sequences: int) -> dict[str, Any]:
    """Return what windtunnel.json says of each case, with 95 % intervals over sequences."""
    return {
        "sequences": sequences,
        "base": found.base,
        "cases": [
            {
                "kind": case.kind,
                "layer": case.layer,
                "head": case.heads[0][1] if case.kind == "head" else None,
                **{name: change.at(number) for name, change in found.change.items()},
            }
            for number, case in enumerate(found.cases)
        ],
    }


def page(results: Sequence[Shown], folder: Path) -> str:
    """Return a table of each checkpoint and distance: a row a layer, a column a head or sublayer."""
    del folder  # nothing is drawn
    parts = [
        '<p class="note">What is added to each distance, in bits, where a head or a sublayer is left out. Block: both '
        "sublayers of it. Changes whose 95 % interval over sequences holds 0 are in brackets.</p>"
    ]
    for one in results:
        json = one.result.json
        if "note" in json:
            parts.append(f'<p class="note">{pages.text(one.name)}: {pages.text(json["note"])}.</p>')
        for name, words in MEASURES.items():
            title = f"{one.name}: {words}, {json['base'][name]:.4f} bits as a whole"
            parts.append(f"<h3>{pages.text(title)}</h3>")
            parts.append(_table(json["cases"], name))
    return "".join(parts)


def _table(found: Sequence[dict[str, Any]], name: str) -> str:
    columns = list(dict.fromkeys(_column(case) for case in found))
    cells = {(case["layer"], _column(case)): _shown(case[name]) for case in found}
    rows = [
        [pages.cell(f"layer {layer + 1}", "text"), *(pages.cell(pages.text(cells[layer, each])) for each in columns)]
        for layer in sorted({case["layer"] for case in found})
    ]
    return pages.table([pages.heading("left out"), *columns], rows)


def _column(case: dict[str, Any]) -> str:
    return f"head {case['head'] + 1}" if case["kind"] == "head" else str(case["kind"])


def _shown(change: statistics.Bounds) -> str:
    value, low, high = change["value"], change["low"], change["high"]
    assert value is not None
    certain = low is None or high is None or low > 0 or high < 0
    return f"{value:+.4f}" if certain else f"({value:+.4f})"
