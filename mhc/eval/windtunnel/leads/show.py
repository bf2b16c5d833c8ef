"""Make the tables, the figure and the page of lead times."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mhc.eval.common import page, statistics
from mhc.eval.common.palette import palette
from mhc.eval.common.sheet import Sheet
from mhc.eval.common.terminal import aligned
from mhc.eval.common.words import number
from mhc.eval.windtunnel.leads.bands import Measure, Record, Trace, band_of, judging, outcomes, record
from mhc.eval.windtunnel.leads.reading import DETECTORS, HELD_OUT, KL, MEASURES
from mhc.files import write_json

TITLE = "Lead times of a belief over the loss"
HEADER = ("measure", "arms", "crossings", "led", "late", "false alarms", "undecided", "missed", "lead", "range")
_HOW = """Healthy arms are those of the same topology at the lowest rate, at the same step. A band reaches four
standard deviations over their seeds from their median, and at least 0.05. Keys and alignment are judged by their change
since the rates part, because seeds settle on different geometries. A measure crosses at the first checkpoint
outside, on the bad side, whose next one is outside too. Led: the loss said something later, or at that step; the lead
is the steps between. Late: the loss was first. False alarm: the loss said nothing. Undecided: the run ended too soon
after. Missed: the loss said something, and the measure never crossed. A lead is as fine as the spacing of checkpoints,
and a crossing is sure one checkpoint later."""


def report(traces: Sequence[Trace]) -> dict[str, Any]:
    """Return the content of leads.json.

    ``records`` holds the table of each detector, ``arms`` each arm's measures and outcomes, and ``topologies`` the
    measures at the last checkpoint, by topology and rate, with their differences from plain at equal seeds.
    """
    traces = judging(KL, HELD_OUT, traces)
    found = {detector: outcomes(_measures(detector), traces, detector) for detector in DETECTORS}
    arms = []
    for trace in traces:
        crossed = {
            each.measure: {"step": each.left.step, "sure": each.left.sure} if each.left else None
            for each in found["spike"]
            if each.arm == trace.arm
        }
        verdicts = {
            detector: {each.measure: each.verdict for each in every if each.arm == trace.arm}
            for detector, every in found.items()
        }
        arms.append(
            {
                "arm": trace.arm,
                "kind": trace.kind,
                "lr": trace.rate,
                "seed": {"init": trace.seed[0], "data": trace.seed[1]},
                "last_step": trace.last,
                "loss": dict(trace.loss),
                "crossed": crossed,
                "verdicts": verdicts,
                "steps": trace.steps,
                "values": dict(trace.values),
            }
        )
    return {
        "measures": {measure.name: measure.words for measure in MEASURES},
        "detectors": DETECTORS,
        "records": {
            detector: [_as_json(record(measure, every)) for measure in _measures(detector)]
            for detector, every in found.items()
        },
        "events": {detector: sum(trace.loss[detector] is not None for trace in traces) for detector in DETECTORS},
        "topologies": topologies(traces),
        "arms": arms,
    }


def _measures(detector: str) -> list[Measure]:
    """Return the measures that are compared with a detector: the held-out loss is not compared with itself."""
    return [measure for measure in MEASURES if detector != HELD_OUT or measure is not KL]


def _as_json(row: Record) -> dict[str, Any]:
    return {
        **{name: getattr(row, name) for name in ("measure", "arms", "crossings", "led", "late", "false_alarms")},
        **{name: getattr(row, name) for name in ("undecided", "missed")},
        "median_lead": row.lead,
        "leads": list(row.leads),
    }


def topologies(traces: Sequence[Trace]) -> list[dict[str, Any]]:
    """Return each measure at the last checkpoint, for each topology and rate.

    Each is the mean over seeds with Student's interval, and the difference from the plain arms of the same rate and
    seeds with its own; None stands where there is nothing to compare.
    """
    plain = {(trace.rate, trace.seed): trace for trace in traces if trace.kind == "plain"}
    groups: dict[tuple[str, float], list[Trace]] = {}
    for trace in traces:
        groups.setdefault((trace.kind, trace.rate), []).append(trace)
    out = []
    for (kind, rate), group in groups.items():
        entry: dict[str, Any] = {"kind": kind, "lr": rate, "seeds": len(group)}
        for measure in MEASURES:
            there = [_last(trace, measure.name) for trace in group]
            pairs = [
                _last(trace, measure.name) - _last(plain[rate, trace.seed], measure.name)
                for trace in group
                if kind != "plain" and (rate, trace.seed) in plain
            ]
            entry[measure.name] = _over_seeds(there)
            entry[f"{measure.name}_beyond_plain"] = _over_seeds(pairs)
        out.append(entry)
    return out


def _last(trace: Trace, name: str) -> float:
    return float(trace.values[name][-1]) if len(trace.steps) else np.nan


def _over_seeds(values: Sequence[float]) -> statistics.Bounds | None:
    """Return the mean of the finite values with Student's interval; None where there are none."""
    finite = [value for value in values if np.isfinite(value)]
    if not finite:
        return None
    low, high = statistics.t_interval(finite) if len(finite) > 1 else (None, None)
    return statistics.bounds(float(np.mean(finite)), low, high)


def rows(report: dict[str, Any], detector: str) -> list[list[str]]:
    """Return the rows of a detector's table, of the columns ``HEADER``."""
    out = []
    for row in report["records"][detector]:
        leads = row["leads"]
        spread = f"{leads[0]} to {leads[-1]}" if leads else "–"
        counts = ("arms", "crossings", "led", "late", "false_alarms", "undecided", "missed")
        words = report["measures"][row["measure"]]
        out.append([words, *(str(row[name]) for name in counts), number(row["median_lead"], 3), spread])
    return out


def text_table(report: dict[str, Any]) -> str:
    """Return the table of each detector as lines of text."""
    parts = []
    for detector, words in DETECTORS.items():
        events = f"{report['events'][detector]} of {len(report['arms'])} arms"
        parts += [f"{detector}: {words}; {events}", aligned([list(HEADER), *rows(report, detector)])]
    return "\n".join(parts)


def write(traces: Sequence[Trace], report: dict[str, Any], folder: Path) -> Path:
    """Write leads.html, leads.png with its numbers, and leads.json; returns the page's path.

    Raises:
        UserError: as `mhc.files.write_json`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = draw(traces, folder)
    body = [f"<h1>{TITLE}</h1>", f'<p class="note">{page.text(_HOW)}</p>']
    for detector, words in DETECTORS.items():
        count = f"{report['events'][detector]} of {len(report['arms'])} arms"
        body += [
            f"<h2>Detector: {page.text(detector)}</h2>",
            f"<p>The loss says something where {page.text(words)}: {count}.</p>",
            page.table(
                [page.heading(HEADER[0]), *HEADER[1:]],
                [[page.cell(page.text(row[0]), "text"), *map(page.cell, row[1:])] for row in rows(report, detector)],
            ),
        ]
    body += [
        page.figures([drawn]),
        "<h2>Topologies at the last checkpoint</h2>",
        '<p class="note">Means over seeds with 95 % intervals by Student&#8217;s t; differences from plain are paired '
        "by seed.</p>",
        _topologies(report),
        "<h2>Arms</h2>",
        _arms(report),
    ]
    write_json(folder / "leads.json", report)
    target = folder / "leads.html"
    target.write_text(page.document(TITLE, "\n".join(body)), "utf-8")
    return target


def _topologies(report: dict[str, Any]) -> str:
    lines = [
        [page.cell(page.text(entry["kind"]), "text"), page.cell(f"{entry['lr']:g}"), page.cell(str(entry["seeds"]))]
        + [page.cell(_bounds(entry[f"{measure.name}{ending}"])) for measure in MEASURES for ending in ("", _BEYOND)]
        for entry in report["topologies"]
    ]
    columns = [words for measure in MEASURES for words in (page.text(measure.words), "beyond plain")]
    return page.table([page.heading("topology"), "rate", "seeds", *columns], lines)


_BEYOND = "_beyond_plain"


def _bounds(value: statistics.Bounds | None) -> str:
    if value is None:
        return "–"
    if value["low"] is None or value["high"] is None:
        return f"{value['value']:.3f}"
    return f"{value['value']:.3f} ({value['low']:.3f} to {value['high']:.3f})"


def _arms(report: dict[str, Any]) -> str:
    lines = []
    for entry in report["arms"]:
        crossed = [entry["crossed"].get(measure.name) for measure in MEASURES]
        lines.append(
            [
                page.cell(page.text(entry["kind"]), "text"),
                page.cell(f"{entry['lr']:g}"),
                page.cell(f"{entry['seed']['init']}"),
                *(page.cell("–" if step is None else f"{step:,}") for step in entry["loss"].values()),
                *(page.cell("–" if each is None else f"{each['step']:,}") for each in crossed),
            ]
        )
    header = [page.heading("topology"), "rate", "seed", *(f"loss: {name}" for name in DETECTORS)]
    return page.table([*header, *(page.text(measure.words) for measure in MEASURES)], lines)


def draw(traces: Sequence[Trace], folder: Path) -> page.Drawn:
    """Draw each measure over the steps: a row a measure, a column a topology, a colour a rate, a line a seed.

    Dashes mark where the band ends, a cross the last checkpoint before an arm's first loss event.
    """
    kinds = list(dict.fromkeys(trace.kind for trace in traces))
    rates = sorted({trace.rate for trace in traces})
    styles = dict(zip(rates, palette(len(rates)), strict=True))
    sheet = Sheet(
        "leads",
        columns=len(kinds),
        rows=len(MEASURES),
        height=2.1,
        legend=[(style, f"rate {rate:g}") for rate, style in styles.items()],
        wide=True,
    )
    for row, measure in enumerate(MEASURES):
        sheet.panels[row * len(kinds)].set_ylabel(measure.words.split(",")[0])
        for column, kind in enumerate(kinds):
            panel = row * len(kinds) + column
            sheet.title(panel, f"{kind}: {measure.words}" if len(kinds) < 3 else kind)
            for trace in traces:
                if trace.kind == kind:
                    _line(sheet, panel, trace, measure.name, styles)
            every = [trace for trace in traces if trace.kind == kind]
            top = max(every, key=lambda trace: trace.rate)
            judged_by_level = top.rate > rates[0] and not measure.by_change
            limits = band_of(measure, top, traces) if judged_by_level else None
            if limits is not None:
                edge = limits.centre + measure.worse * limits.width
                sheet.points(panel, "edge of the band", limits.steps, edge, styles[rates[0]], marker="_", size=4)
    return page.Drawn(
        sheet.save(folder, folder),
        "The measures over training",
        "A line is an arm. Dashes mark where the healthy band of a measure ends that is judged by its level. A cross "
        "marks an arm's first loss event, at the last checkpoint before it.",
        True,
    )


def _line(sheet: Sheet, panel: int, trace: Trace, name: str, styles: dict[float, Any]) -> None:
    values, style = trace.values[name], styles[trace.rate]
    sheet.line(panel, trace.arm, trace.steps, values, style, alpha=0.8, width=1.2)
    event = trace.loss["spike"]
    before = np.flatnonzero(trace.steps <= event) if event is not None else np.zeros(0, int)
    if len(before):
        where = before[-1:]
        sheet.points(panel, trace.arm, trace.steps[where], values[where], style, what="loss event", marker="x")
