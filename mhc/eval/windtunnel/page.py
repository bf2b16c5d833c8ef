"""Make the tables and the page of a comparison of beliefs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mhc.eval.common import page, statistics
from mhc.eval.common.palette import Style, colours_of_kinds
from mhc.eval.common.sheet import Sheet
from mhc.eval.common.terminal import aligned
from mhc.eval.windtunnel.belief import Belief
from mhc.eval.windtunnel.sections import Result, Section, Shown
from mhc.files import write_json

MEASURES = {"entropy_mae_bits": "entropy error", "kl_bits": "KL(Bayes ‖ model)", "total_variation": "total variation"}
_FIELDS = {"entropy_mae_bits": "entropy_error", "kl_bits": "kl", "total_variation": "total_variation"}
CONTROL = "control without context"


class Measured(NamedTuple):
    """Holds all measurements of a checkpoint."""

    belief: Belief
    results: dict[str, Result]  # of the further measures, by name


def label(belief: Belief) -> str:
    """Return the topology's name, or that of the control."""
    return f"{belief.kind}, {CONTROL}" if belief.control else belief.kind


def topologies(runs: Sequence[Measured]) -> dict[str, dict[str, Any]]:
    """Return each measure of each topology: its mean over seeds, and its difference from plain at equal seeds.

    Intervals are Student's, over seeds; there is none of a single seed. A topology whose runs share no seed with plain,
    or are measured on another task, has no difference. The scalars of a further measure stand under its name.
    """
    groups: dict[str, list[Measured]] = {}
    for run in runs:
        groups.setdefault(label(run.belief), []).append(run)
    plain = {_pair(one): _scalars(one) for one in groups.get("plain", [])}
    out: dict[str, dict[str, Any]] = {}
    for name, group in groups.items():
        values = [_scalars(one) for one in group]
        others = [plain.get(_pair(one), {}) if name != "plain" else {} for one in group]
        entry: dict[str, Any] = {"seeds": len({one.belief.seed for one in group})}
        for section, scalar in dict.fromkeys(key for one in runs for key in _scalars(one)):
            key = (section, scalar)
            there = [one[key] for one in values if key in one]
            apart = [
                one[key] - other[key] for one, other in zip(values, others, strict=True) if key in one and key in other
            ]
            target = entry.setdefault(section, {}) if section else entry
            target[scalar] = _over_seeds(there) if there else None
            target[f"{scalar}_beyond_plain"] = _over_seeds(apart) if apart else None
        out[name] = entry
    return out


def _pair(run: Measured) -> tuple[str, tuple[int, int]]:
    """Return the key that a run shares with the plain run that it is paired with."""
    return run.belief.source, run.belief.seed


def _scalars(run: Measured) -> dict[tuple[str, str], float]:
    """Return all scalars: {(name of the further measure, or nothing for the belief, scalar): value}."""
    belief = {("", name): float(getattr(run.belief.distances, field).mean()) for name, field in _FIELDS.items()}
    return belief | {
        (name, scalar): value for name, result in run.results.items() for scalar, value in result.scalars.items()
    }


def _over_seeds(values: Sequence[float]) -> statistics.Bounds:
    low, high = statistics.t_interval(values) if len(values) > 1 else (None, None)
    return statistics.bounds(float(np.mean(values)), low, high)


def text_table(report: dict[str, Any]) -> str:
    """Return the measures of every checkpoint as lines of text, in bits."""
    rows = [["checkpoint", "residual", *MEASURES.values(), "without context"]]
    for entry in report["checkpoints"]:
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


def write(measured: Sequence[Measured], report: dict[str, Any], sections: Sequence[Section], folder: Path) -> Path:
    """Write windtunnel.html, its figures with their numbers, and windtunnel.json; returns the page's path.

    Raises:
        UserError: as `mhc.files.write_json`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    beliefs = [one.belief for one in measured]
    styles = _styles(beliefs)
    drawn = _draw(beliefs, styles, folder)
    best = [
        "The posterior is computed, not learned: a perfect model has an error of 0.",
        "Without context the best predictor has "
        f"{report['checkpoints'][0]['entropy_mae_bits_without_context']:.3f} bits of entropy error; a control below it "
        "leaks.",
    ]
    checkpoints = [
        [page.cell(page.text(one["checkpoint"]), "label"), page.cell(page.text(one["kind"]), "text")]
        + [page.cell(page.text(_shown(one[name]))) for name in MEASURES]
        for one in report["checkpoints"]
    ]
    by_topology = [
        [page.cell(page.text(name), "text"), page.cell(str(entry["seeds"]))]
        + [page.cell(page.text(_shown(entry[measure]))) for measure in MEASURES]
        + [page.cell(page.text(_shown(entry[f"{measure}_beyond_plain"]))) for measure in MEASURES]
        for name, entry in report["topologies"].items()
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
            *_further(measured, styles, report, sections, folder),
        ]
    )
    write_json(folder / "windtunnel.json", report)
    target = folder / "windtunnel.html"
    target.write_text(page.document("Belief against the exact posterior", body), "utf-8")
    return target


def _further(
    measured: Sequence[Measured],
    styles: Sequence[Style],
    report: dict[str, Any],
    sections: Sequence[Section],
    folder: Path,
) -> Iterator[str]:
    """Yield the HTML of each further measure: its heading, its comparison of topologies, and what it draws itself."""
    for section in sections:
        shown = [
            Shown(one.belief.name, label(one.belief), style, one.results[section.name])
            for one, style in zip(measured, styles, strict=True)
        ]
        scalars = list(dict.fromkeys(scalar for one in shown for scalar in one.result.scalars))
        yield f"<h2>{page.text(section.words)}</h2>"
        if scalars:
            rows = [
                [page.cell(page.text(name), "text"), page.cell(page.text(scalar.replace("_", " ")), "text")]
                + [page.cell(page.text(_shown(values[key]))) for key in (scalar, f"{scalar}_beyond_plain")]
                for scalar in scalars
                for name, entry in report["topologies"].items()
                for values in (entry[section.name],)
            ]
            yield page.table([page.heading("topology"), page.heading("measure"), "mean", "beyond plain"], rows)
        yield section.load().page(shown, folder)


def _styles(beliefs: Sequence[Belief]) -> list[Style]:
    colours = colours_of_kinds([belief.kind for belief in beliefs])
    return [Style(colours[belief.kind], (1.4, 1.4) if belief.control else ()) for belief in beliefs]


def _draw(beliefs: Sequence[Belief], styles: Sequence[Style], folder: Path) -> list[page.Drawn]:
    """Draw each measure by place, a line a checkpoint."""
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
