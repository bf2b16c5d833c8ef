"""Make the report's section of beliefs, from the results of eval.windtunnel for runs on wind tunnels."""

from __future__ import annotations

from mhc.eval.common.page import cell, heading, table, text
from mhc.eval.common.words import number
from mhc.eval.compare.beliefs import Beliefs, Bounds

_HOW = """Means over seeds with 95 % intervals by Student&#8217;s t; differences from plain are paired by seed."""
_HOW_LEADS = """A measure crosses where it leaves the band of the healthy arms of its topology for two checkpoints.
It led where the loss said something later; the lead is the steps between. leads.html explains more, and shows the
arms."""


def section(beliefs: Beliefs | None) -> str:
    """Return the section; "" where the arms are not trained on wind tunnels."""
    if beliefs is None:
        return ""
    if not beliefs.scalars and not beliefs.leads:
        return (
            "\n<h2>Belief</h2>\n<p>Not measured. <code>python -m eval.windtunnel --checkpoint RUN … --out DIR</code> "
            "measures how exactly these runs hold their task&#8217;s posterior, and <code>--leads DIR --out DIR</code> "
            "its lead over the loss. With the folder of this report as <code>--out</code> both stand here.</p>"
        )
    return "\n".join(["\n<h2>Belief</h2>", *_scalars(beliefs), *_leads(beliefs)])


def _scalars(beliefs: Beliefs) -> list[str]:
    rows = [
        [
            cell(text(row.topology), "text"),
            cell(str(row.seeds)),
            cell(text(row.measure.replace("_", " ")), "text"),
            cell(_shown(row.value)),
            cell(_shown(row.beyond)),
        ]
        for row in beliefs.scalars
    ]
    header = [heading("topology"), "seeds", heading("measure"), "mean", "beyond plain"]
    return [f'<p class="note">{_HOW}</p>', table(header, rows)] if rows else []


def _leads(beliefs: Beliefs) -> list[str]:
    header = [
        *(heading("measure"), "crossings", "led a<br>loss event", "late", "false<br>alarms", "undecided"),
        *("events<br>missed", "median lead<br>(steps)", "range"),
    ]
    out = []
    for words, records in beliefs.leads.items():
        rows = [
            [
                cell(text(row.measure), "text"),
                *(cell(str(count)) for count in row.counts),
                cell(number(row.median, 3)),
                cell(f"{row.leads[0]} to {row.leads[-1]}" if row.leads else "–"),
            ]
            for row in records
        ]
        out += [f"<h3>Lead over the loss: {text(words)}</h3>", table(header, rows)]
    return [*out, f'<p class="note">{_HOW_LEADS}</p>'] if out else []


def _shown(value: Bounds | None) -> str:
    if value is None:
        return "–"
    if value["low"] is None or value["high"] is None:
        return number(value["value"], 3)
    return f"{number(value['value'], 3)} ({number(value['low'], 3)} to {number(value['high'], 3)})"
