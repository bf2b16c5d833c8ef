"""Make the report's table of topologies: each at its best learning rate, over seeds, against plain, with its cost."""

from __future__ import annotations

import math

from mhc.eval.common.page import cell, heading, table, text
from mhc.eval.common.words import number
from mhc.eval.compare.comparison import Comparison
from mhc.eval.compare.cost import parameters, relative_cost, speed
from mhc.eval.compare.figures.series import topology_colours
from mhc.eval.compare.topologies import Paired, Topology


def table_of(comparison: Comparison) -> str:
    """Return the table of topologies."""
    rated = any(len(topology.rates) > 1 for topology in comparison.topologies)
    header = [
        "topology",
        *(["best rate", "lr sensi-<br>tivity"] if rated else []),
        "seeds",
        "val. bits per byte<br>(mean ± s.d.)",
        "minus plain, paired<br>(95 % interval)",
        heading("sepa-<br>rated?"),
        "peak gain<br>forw. / backw.",
        "loss<br>events",
        "tokens/s<br>(of plain)",
        "parameters<br>(over plain)",
    ]
    return table(header, [_row(topology, comparison, rated) for topology in comparison.topologies])


def _row(topology: Topology, comparison: Comparison, rated: bool) -> list[str]:
    measures = comparison.measures
    pair = next((pair for pair in comparison.pairs if pair.topology == topology.label), None)
    cost = relative_cost(topology, comparison.topologies) or (None, None)
    colour, total = topology_colours(comparison.topologies)[topology.label], parameters(topology)
    peaks = [
        [value for arm in topology.arms if (value := measures[arm.name][f"peak_{way}_gain"]) is not None]
        for way in ("forward", "backward")
    ]
    edge = ", edge" if topology.at_edge else ""
    return [
        cell(f'<span class="swatch" style="background:{colour}"></span>{text(topology.label)}', "label"),
        *([cell(f"{topology.best.lr:g}<br>of {len(topology.rates)}{edge}")] if rated else []),
        *([cell(number(topology.sensitivity, 3))] if rated else []),
        cell(str(len(topology.arms))),
        _score(topology, comparison),
        cell(_difference(pair)),
        cell(text(_short_verdict(pair)), "text note"),
        cell(" / ".join(number(max(values)) if values else "–" for values in peaks)),
        cell(str(sum(measures[arm.name]["loss_events"] for arm in topology.arms))),
        cell(number(speed(topology), 3) + (f" ({cost[0]:.2f}×)" if cost[0] is not None else "")),
        cell((f"{total:,.0f}" if total else "–") + (f" ({cost[1] - 1:+.1%})" if cost[1] is not None else "")),
    ]


def _score(topology: Topology, comparison: Comparison) -> str:
    """Return the cell of the mean score over seeds, which is marked where it is the best."""
    finite = [other.best.mean for other in comparison.topologies if math.isfinite(other.best.mean)]
    mean, std = topology.best.mean, topology.std
    score = "diverged" if math.isinf(mean) else "–" if math.isnan(mean) else number(mean, 5)
    spread = "" if std is None else f" ± {number(std, 2)}"
    return cell(f"{score}{spread}", "best" if len(finite) > 1 and mean == min(finite) else "")


def _difference(pair: Paired | None) -> str:
    if pair is None:
        return "–"
    span = f"<br>({pair.interval[0]:+.4f} to {pair.interval[1]:+.4f})" if pair.interval else ""
    return f"{pair.mean:+.4f}{span}"


def _short_verdict(pair: Paired | None) -> str:
    if pair is None:
        return ""
    if pair.interval is None:
        return "one seed"
    return "yes" if pair.separated else "no"
