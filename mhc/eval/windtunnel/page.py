"""Make the tables and the page of a comparison of beliefs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mhc.eval.common import page, statistics
from mhc.eval.common.palette import Style, colours_of_kinds
from mhc.eval.common.sheet import Sheet
from mhc.eval.common.terminal import aligned
from mhc.eval.windtunnel.belief import Belief
from mhc.files import write_json

MEASURES = {"entropy_mae_bits": "entropy error", "kl_bits": "KL(Bayes ‖ model)", "total_variation": "total variation"}
_FIELDS = {"entropy_mae_bits": "entropy_error", "kl_bits": "kl", "total_variation": "total_variation"}
CONTROL = "control without context"


def label(belief: Belief) -> str:
    """Return the topology's name, or that of the control."""
    return f"{belief.kind}, {CONTROL}" if belief.control else belief.kind


def topologies(beliefs: Sequence[Belief]) -> dict[str, dict[str, Any]]:
    """Return each measure of each topology: its mean over seeds, and its difference from plain at equal seeds.

    Intervals are Student's, over seeds; there is none of a single seed. A topology whose runs share no seed with plain,
    or are measured on another task, has no difference.
    """
    groups: dict[str, list[Belief]] = {}
    for belief in beliefs:
        groups.setdefault(label(belief), []).append(belief)
    plain = {(belief.source, belief.seed): belief for belief in groups.get("plain", [])}
    out: dict[str, dict[str, Any]] = {}
    for name, group in groups.items():
        entry: dict[str, Any] = {"seeds": len({belief.seed for belief in group})}
        for measure in MEASURES:
            values = [_mean(belief, measure) for belief in group]
            entry[measure] = _over_seeds(values)
            pairs = [(belief, plain.get((belief.source, belief.seed))) for belief in group]
            apart = [_mean(one, measure) - _mean(other, measure) for one, other in pairs if other is not None]
            entry[f"{measure}_beyond_plain"] = _over_seeds(apart) if apart and name != "plain" else None
        out[name] = entry
    return out


def _mean(belief: Belief, measure: str) -> float:
    return float(getattr(belief.distances, _FIELDS[measure]).mean())


def _over_seeds(values: Sequence[float]) -> statistics.Bounds:
    low, high = statistics.t_interval(values) if len(values) > 1 else (None, None)
    return statistics.bounds(float(np.mean(values)), low, high)


def text_table(found: dict[str, Any]) -> str:
    """Return the measures of every checkpoint as lines of text, in bits."""
    rows = [["checkpoint", "residual", *MEASURES.values(), "without context"]]
    for entry in found["checkpoints"]:
        kind = f"{entry['kind']}, control" if entry["control"] else entry["kind"]
        values = [_shown(entry[name]) for name in MEASURES]
        rows.append([entry["checkpoint"], kind, *values, f"{entry['entropy_mae_bits_without_context']:.3f}"])
    return aligned(rows)


def _shown(value: statistics.Bounds | None) -> str:
    if value is None:
        return "–"
    if value["low"] is None:
        return f"{value['value']:.4f}"
    return f"{value['value']:.4f} ({value['low']:.4f} to {value['high']:.4f})"


def write(beliefs: Sequence[Belief], found: dict[str, Any], folder: Path) -> Path:
    """Write windtunnel.html, windtunnel.png with its numbers, and windtunnel.json; returns the page's path.

    Raises:
        UserError: as `mhc.files.write_json`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = _draw(beliefs, folder)
    best = [
        "The posterior is computed, not learned: a perfect model has an error of 0.",
        "Without context the best predictor has "
        f"{found['checkpoints'][0]['entropy_mae_bits_without_context']:.3f} bits of entropy error; a control below it "
        "leaks.",
    ]
    checkpoints = [
        [page.cell(page.text(one["checkpoint"]), "label"), page.cell(page.text(one["kind"]), "text")]
        + [page.cell(page.text(_shown(one[name]))) for name in MEASURES]
        for one in found["checkpoints"]
    ]
    by_topology = [
        [page.cell(page.text(name), "text"), page.cell(str(entry["seeds"]))]
        + [page.cell(page.text(_shown(entry[measure]))) for measure in MEASURES]
        + [page.cell(page.text(_shown(entry[f"{measure}_beyond_plain"]))) for measure in MEASURES]
        for name, entry in found["topologies"].items()
    ]
    beyond = [f"{words}, beyond plain" for words in MEASURES.values()]
    body = "\n".join(
        [
            "<h1>Belief against the exact posterior</h1>",
            f'<p class="lead">{page.text(beliefs[0].source)}, {len(beliefs[0].distances.kl)} held-out sequences; bits, '
            "but for total variation.</p>",
            "<ul class='findings'>" + "".join(f"<li>{page.text(line)}</li>" for line in best) + "</ul>",
            page.figures(drawn),
            "<h2>Topologies</h2>",
            '<p class="note">Means over seeds with 95 % intervals by Student&#8217;s t; differences from plain are '
            "paired by seed.</p>",
            page.table([page.heading("topology"), "seeds", *MEASURES.values(), *beyond], by_topology),
            "<h2>Checkpoints</h2>",
            '<p class="note">Intervals are over sequences.</p>',
            page.table([page.heading("checkpoint"), page.heading("residual"), *MEASURES.values()], checkpoints),
        ]
    )
    write_json(folder / "windtunnel.json", found)
    target = folder / "windtunnel.html"
    target.write_text(page.document("Belief against the exact posterior", body), "utf-8")
    return target


def _draw(beliefs: Sequence[Belief], folder: Path) -> list[page.Drawn]:
    """Draw each measure by place, a line a checkpoint."""
    colours = colours_of_kinds([belief.kind for belief in beliefs])
    styles = [Style(colours[belief.kind], (1.4, 1.4) if belief.control else ()) for belief in beliefs]
    labels = dict(zip(map(label, beliefs), styles, strict=True))
    sheet = Sheet(
        "windtunnel",
        columns=len(MEASURES),
        legend=[(style, name) for name, style in labels.items()],
        x="supervised place",
        y="bits",
        sharey=False,
    )
    for panel, (measure, words) in enumerate(MEASURES.items()):
        sheet.title(panel, words)
        for belief, style in zip(beliefs, styles, strict=True):
            values = getattr(belief.distances, _FIELDS[measure]).mean(axis=0)
            sheet.line(panel, belief.name, np.arange(1.0, len(values) + 1), values, style, marker=True, alpha=0.8)
    caption = "Mean over sequences at each supervised place. Lines of one colour are seeds of one topology."
    return [page.Drawn(sheet.save(folder, folder), "Distance from the posterior by place", caption, True)]
