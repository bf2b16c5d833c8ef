"""Make the report's tables of single arms: results, recomputed gains, and how the configurations differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mhc.eval.common.page import cell, heading, table, text
from mhc.eval.common.palette import Style
from mhc.eval.common.words import number
from mhc.eval.compare.comparison import Comparison
from mhc.eval.compare.figures.series import styles
from mhc.eval.compare.recompute import Recomputed
from mhc.eval.compare.runs import Arm, differing_fields
from mhc.monitor.progress import duration


def table_of(comparison: Comparison) -> str:
    """Return the table of every arm's results."""
    arms, measures, look = comparison.arms, comparison.measures, styles(comparison.topologies)
    bits = [measures[arm.name]["bits_per_byte"] for arm in arms]
    best = min((value for value in bits if value is not None), default=None)
    rows = []
    for arm in arms:
        m = measures[arm.name]
        kind = f"{arm.kind} ({arm.preset})" if arm.preset else arm.kind
        state = text(m["exit_reason"] or "finished")
        if not arm.finished:
            reason = f": {m['exit_reason']}" if m["exit_reason"] else ""
            state = f'<span class="unfinished">unfinished{text(reason)}</span>'
        leads = best is not None and m["bits_per_byte"] == best and len(arms) > 1
        rows.append(
            [
                cell(_name(arm, look)),
                cell(text(kind), "text"),
                cell(f"{m['params']:,}" if m["params"] is not None else "–"),
                cell(f"{arm.steps:,}"),
                cell(number(m["val_loss"], 5)),
                cell(number(m["bits_per_byte"], 5), "best" if leads else ""),
                cell(number(m["peak_forward_gain"])),
                cell(number(m["peak_backward_gain"])),
                cell(number(m["max_grad_norm"], 3)),
                cell("not judged" if m["spike_score_loss"] is None else f"{100 * m['spike_score_loss']:.2f} %"),
                cell(number(m["tokens_per_second"], 3)),
                cell(duration(m["seconds"]) if m["seconds"] is not None else "–"),
                cell(state, "text"),
            ]
        )
    header = [
        "arm",
        heading("kind"),
        "params",
        "steps",
        "val. loss<br>(nats)",
        "val. bits<br>per byte",
        "peak gain<br>forward",
        "peak gain<br>backward",
        "max grad.<br>norm",
        "spike<br>score",
        "tokens/s<br>(median)",
        "time",
        heading("state"),
    ]
    return table(header, rows)


def recomputed(comparison: Comparison) -> str:
    """Return the table of the gains of the final checkpoints."""
    arms, results, look = comparison.arms, comparison.recomputed, styles(comparison.topologies)
    if results is None:
        return "<p>Skipped (<code>--no_recompute</code>).</p>"
    rows = []
    for arm in arms:
        if arm.name not in results:
            continue
        result = results[arm.name]
        logged = arm.preset or arm.kind
        views = arm.presets or (logged,)
        for index, view in enumerate(view for view in views if view in result.peaks):
            peak = result.peaks[view]
            preset = "" if arm.preset is None else view if view != logged else f"{view} (the run's own)"
            rows.append(
                [
                    cell(_name(arm, look) if index == 0 else ""),
                    cell(text(preset), "text"),
                    cell(number(peak["forward"], 5)),
                    cell(number(peak["backward"], 5)),
                    cell(f"{result.step:,}" if index == 0 else ""),
                    _difference(result) if view == logged else cell(""),
                ]
            )
        if not result.peaks:
            rows.append([cell(_name(arm, look)), f'<td class="note text" colspan="5">{text(result.reason)}</td>'])
    header = [
        "arm",
        heading("Sinkhorn preset"),
        "gain forward",
        "gain backward",
        "step",
        "largest relative difference<br>to the logged gains",
    ]
    note = (
        '<p class="note">Token-mean composite gain, largest over sublayers, of the final checkpoint on the run\'s '
        "probe batch. For mhc the same parameters are also projected with the other preset: the direction that is "
        "exact swaps.</p>"
    )
    if len(results) < len(arms):
        note += '<p class="note">One arm of each topology, the first seed at its best rate.</p>'
    return table(header, rows) + note


def _difference(result: Recomputed) -> str:
    if result.difference is None:
        return cell(text(result.reason), "note")
    return cell(f"{result.difference:.1e}")


def differences(comparison: Comparison) -> str:
    """Return the table of the fields in which the configurations differ."""
    arms, look = comparison.arms, styles(comparison.topologies)
    fields = differing_fields(arms)
    if not fields:
        return "<p>All arms have the same configuration.</p>"
    rows = [[cell(_name(arm, look)), *(cell(_value(arm.flat.get(field)), "text") for field in fields)] for arm in arms]
    header = ["arm", *(heading(f"<code>{text(field).replace('.', '.<wbr>')}</code>") for field in fields)]
    return table(header, rows)


def _value(value: Any) -> str:
    return "–" if value is None else f"<code>{text(value)}</code>"


def _name(arm: Arm, look: Mapping[str, Style]) -> str:
    """Return HTML of the arm's name beside a sample of its line in the figures."""
    style = look[arm.name]
    dashes = f' stroke-dasharray="{" ".join(f"{2 * dash:g}" for dash in style.dashes)}"' if style.dashes else ""
    line = f'<line x1="0" y1="5" x2="26" y2="5" stroke="{style.colour}" stroke-width="3"{dashes}/>'
    return f'<svg width="26" height="10" aria-hidden="true">{line}</svg>{text(arm.name)}'
