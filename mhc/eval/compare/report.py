"""The report of a comparison: one HTML file that needs nothing beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mhc.eval.common.page import Drawn, document, figure, table, text
from mhc.eval.common.palette import Style
from mhc.eval.common.words import number
from mhc.eval.compare.figures import parameters, relative_cost, speed, styles, topology_colours
from mhc.eval.compare.findings import Finding, Measures
from mhc.eval.compare.ngram import Baselines
from mhc.eval.compare.recompute import PRESETS, Recomputed
from mhc.eval.compare.runs import Arm, differing_fields
from mhc.eval.compare.spikes import GAP, History, monitors, unjudged
from mhc.eval.compare.topologies import Paired, Topology
from mhc.monitor.progress import duration

MOST_EVENTS = 60  # rows of the page's table

NOT_JUDGED = "Loss and gradient norm were not judged; no monitor crossed its threshold in any arm."

_HOW_EVENTS = """Flagged steps no more than {gap} apart are one event. A crossing leads a loss event that comes within
the window of {window} (two probes, at least 32 steps); without one it is a false alarm. Late: after the loss.
Undecided: the run ended, or was rewound, within the window. Standing: past its threshold since before the window. No
loss step: the gradient norm alone was flagged. Undone: a rewind threw the step away. Monitors of the probes are as fine
as the probes' spacing. <code>python -m eval.replay RUN --step s</code> does a step again."""

_HOW_TO_READ = """
<p>A topology with streams mixes them at every sublayer <i>k</i> with a matrix H<sub>k</sub> (H_res). What the network
passes on is their product, so a small excess per sublayer compounds over depth. A run logs two composite gains per
sublayer, measured per token on a fixed probe batch and averaged over its tokens:</p>
<ul>
<li><b>Forward</b>, of H<sub>k</sub> … H<sub>1</sub> H<sub>0</sub>: the largest absolute row sum, by how much a signal
that all streams share can grow on its way from the embedding to sublayer <i>k</i>.</li>
<li><b>Backward</b>, of H<sub>S−1</sub> … H<sub>k</sub>: the largest absolute column sum, by how much a gradient can
grow on its way from the head back to sublayer <i>k</i>.</li>
</ul>
<p>A plain residual has gain 1 both ways. HC learns H_res freely, so its gains may take any value. mHC projects H_res
onto the doubly stochastic matrices (non-negative, rows and columns sum to 1), which are closed under products: exact
projection would give 1 in both directions at any depth.</p>
<p>The projection is a finite number of Sinkhorn iterations, and the last half-step decides which sums are exact. The
<code>paper</code> preset ends with the rows of H_res. The <code>deepseek</code> preset ends with the columns of a
matrix whose transpose is H_res, which are the rows of H_res again. Under both the rows sum to 1 (under
<code>deepseek</code> up to its eps), so the <b>forward</b> gain is 1 by construction and says nothing about training,
while the columns, and so the <b>backward</b> gain, carry the Sinkhorn error: judge mHC by that. The table of
recomputed gains shows both directions under both presets.</p>
<p>At <b>sublayer 0</b> all streams are still copies of the embedding. Mixing copies can only rescale them, by the row
sums of H_res, which are 1 for mHC: the map is inert there, whatever gain it shows. The figures over depth shade it.</p>
<p><b>Topologies</b> are arms that differ in learning rate and seeds alone. Each is judged at its own best rate, the one
with the lowest mean of the final validation over its seeds; a rate at which a seed diverged or was halted is never the
best. Differences to plain are taken seed by seed (same data order, same initial weights of everything but the maps),
and the 95 % interval of their mean is Student's t with n − 1 degrees of freedom. Where it includes 0 the seeds do not
separate the two; one seed separates nothing. Three seeds find only differences that are large against their spread; of
twenty comparisons one excludes 0 by chance; and a best rate picked on the validation set it is then judged by flatters
the topology with more rates. <b>Learning-rate sensitivity</b> is the mean over the rates of min(final validation loss,
loss before training), minus the lowest (arXiv:2309.14322); the loss before training is that of step 1.</p>
<p><b>Loss events</b> are what the run itself flagged: a loss or gradient norm more than its z-score threshold above the
steps before, or anything non-finite. Causes are the run's too, by rules of fixed order (docs/stability.md). A topology
that never spikes at this size has not been shown to be stable at a larger one.</p>
<p><b>Bits per byte</b> is the validation loss in bits divided by the bytes of text predicted, so that tokenisers can be
compared. <b>Spike score</b> is the share of steps whose loss lies more than 7 standard deviations from the mean of the
1000 steps before it, non-finite losses included; with less than 100 steps before it a loss is not judged. Seconds and
tokens per second are those of the machine at that time; arms that shared it with other work are slower.</p>
"""


def render(
    title: str,
    arms: Sequence[Arm],
    measures: Measures,
    found: Sequence[Finding],
    figures: Sequence[Drawn],
    baselines: Baselines,
    recomputed: Mapping[str, Recomputed] | None,
    everyone: Sequence[Topology],
    pairs: Sequence[Paired],
    histories: Sequence[History],
) -> str:
    """The whole HTML document, figures inside."""
    look = styles(everyone)
    sentences = "".join(f"<li>{text(finding.text)}</li>" for finding in found if not finding.warning)
    warnings = "".join(f'<p class="warning">{text(finding.text)}</p>' for finding in found if finding.warning)
    main, stability, stream = (
        f'<div class="figures">{"".join(figure(one) for one in figures if one.section == section)}</div>'
        for section in ("main", "stability", "stream")
    )
    count = f"{len(arms)} arm{'s' if len(arms) != 1 else ''}"
    deep = (
        "<details><summary>Inside the stream: distances to identity and uniform, effective streams and rank, "
        f"activations, attention, gradients per sublayer</summary>{stream}</details>"
        if any(one.section == "stream" for one in figures)
        else ""
    )
    body = f"""<h1>{text(title)}</h1>
<p class="lead">Comparison of {count}: residual topologies trained side by side.</p>
{warnings}
<ul class="findings">{sentences}</ul>
<h2>Topologies</h2>
{_topologies_table(everyone, pairs, measures)}
{_baselines_note(baselines)}
<h2>Curves</h2>
{main}
<h2>Stability</h2>
{_events_section(histories)}
{stability}
{deep}
<h2>Details</h2>
<details{" open" if len(arms) <= 6 else ""}><summary>Every arm</summary>
{_arms_table(arms, measures, look)}
</details>
<details{" open" if len(arms) <= 6 else ""}><summary>Gains recomputed from the final checkpoints</summary>
{_recomputed_table(arms, recomputed, look)}
</details>
<details{" open" if len(arms) <= 6 else ""}><summary>How the configurations differ</summary>
{_differences_table(arms, look)}
</details>
<h2>How to read this</h2>
{_HOW_TO_READ}"""
    return document(title, body)


def _name(arm: Arm, look: Mapping[str, Style]) -> str:
    """The arm's name beside a piece of its line."""
    style = look[arm.name]
    dashes = f' stroke-dasharray="{" ".join(f"{2 * dash:g}" for dash in style.dashes)}"' if style.dashes else ""
    line = f'<line x1="0" y1="5" x2="26" y2="5" stroke="{style.colour}" stroke-width="3"{dashes}/>'
    return f'<svg width="26" height="10" aria-hidden="true">{line}</svg>{text(arm.name)}'


def _arms_table(arms: Sequence[Arm], measures: Measures, look: Mapping[str, Style]) -> str:
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
                f"<td>{_name(arm, look)}</td>",
                f'<td class="text">{text(kind)}</td>',
                _cell(f"{m['params']:,}" if m["params"] is not None else "–"),
                _cell(f"{arm.steps:,}"),
                _cell(number(m["val_loss"], 5)),
                f"<td{' class=best' if leads else ''}>{number(m['bits_per_byte'], 5)}</td>",
                _cell(number(m["peak_forward_gain"])),
                _cell(number(m["peak_backward_gain"])),
                _cell(number(m["max_grad_norm"], 3)),
                _cell("not judged" if m["spike_score_loss"] is None else f"{100 * m['spike_score_loss']:.2f} %"),
                _cell(number(m["tokens_per_second"], 3)),
                _cell(duration(m["seconds"]) if m["seconds"] is not None else "–"),
                f'<td class="text">{state}</td>',
            ]
        )
    header = [
        "arm",
        '<th class="text">kind</th>',
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
        '<th class="text">state</th>',
    ]
    return table(header, rows)


def _baselines_note(baselines: Baselines) -> str:
    if baselines.unigram is None or baselines.bigram is None:
        return f'<p class="note">No n-gram baselines: {text(baselines.reason)}.</p>'
    note = (
        f"Baselines on the same split: byte unigram {baselines.unigram:.4f}, byte bigram {baselines.bigram:.4f} bits "
        f"per byte (add-one smoothing over 256 bytes, counted on {baselines.train_bytes:,} training bytes, scored on "
        f"{baselines.validation_bytes:,} validation bytes)."
    )
    if baselines.truncated:
        note += " The corpus is larger; only its beginning was counted."
    return f'<p class="note">{note}</p>'


def _topologies_table(everyone: Sequence[Topology], pairs: Sequence[Paired], measures: Measures) -> str:
    colours = topology_colours(everyone)
    by_label = {pair.topology: pair for pair in pairs}
    finite = [topology.best.mean for topology in everyone if math.isfinite(topology.best.mean)]
    rated = any(len(topology.rates) > 1 for topology in everyone)
    rows = []
    for topology in everyone:
        pair = by_label.get(topology.label)
        cost = relative_cost(topology, everyone) or (None, None)
        mean = topology.best.mean
        leads = len(finite) > 1 and mean == min(finite)
        score = "diverged" if math.isinf(mean) else "–" if math.isnan(mean) else number(mean, 5)
        std = topology.std
        spread = "" if std is None else f" ± {number(std, 2)}"
        peaks = [
            [value for arm in topology.arms if (value := measures[arm.name][f"peak_{way}_gain"]) is not None]
            for way in ("forward", "backward")
        ]
        total = parameters(topology)
        swatch = f'<span class="swatch" style="background:{colours[topology.label]}"></span>'
        row = [
            f'<td class="label">{swatch}{text(topology.label)}</td>',
            _cell(str(len(topology.arms))),
            f"<td{' class=best' if leads else ''}>{score}{spread}</td>",
            _cell(_difference(pair)),
            f'<td class="text note">{text(_short_verdict(pair))}</td>',
            _cell(" / ".join(number(max(values)) if values else "–" for values in peaks)),
            _cell(str(sum(measures[arm.name]["loss_events"] for arm in topology.arms))),
            _cell(number(speed(topology), 3) + (f" ({cost[0]:.2f}×)" if cost[0] is not None else "")),
            _cell((f"{total:,.0f}" if total else "–") + (f" ({cost[1] - 1:+.1%})" if cost[1] is not None else "")),
        ]
        if rated:
            edge = ", edge" if topology.at_edge else ""
            row[1:1] = [
                _cell(f"{topology.best.lr:g}<br>of {len(topology.rates)}{edge}"),
                _cell(number(topology.sensitivity, 3)),
            ]
        rows.append(row)
    header = [
        "topology",
        "seeds",
        "val. bits per byte<br>(mean ± s.d.)",
        "minus plain, paired<br>(95 % interval)",
        '<th class="text">sepa-<br>rated?</th>',
        "peak gain<br>forw. / backw.",
        "loss<br>events",
        "tokens/s<br>(of plain)",
        "parameters<br>(over plain)",
    ]
    if rated:
        header[1:1] = ["best rate", "lr sensi-<br>tivity"]
    return table(header, rows)


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


def _events_section(histories: Sequence[History]) -> str:
    """Loss events with their lead times, the record of each monitor, and what was done."""
    episodes = [(one, episode) for one in histories for episode in one.episodes]
    crossings = [crossing for one in histories for crossing in one.crossings]
    judged = any(one.judged_from is not None for one in histories)
    note = "".join(f'<p class="note">{text(line)}</p>' for line in unjudged(histories))
    where = "any arm" if all(one.judged_from is not None for one in histories) else "any arm that was judged"
    if not episodes and not crossings:
        none = f"No loss and no gradient norm was flagged, and no monitor crossed its threshold, in {where}."
        return f"<p>{none if judged else NOT_JUDGED}</p>{note}"
    windows = sorted({one.window for one in histories})
    window = f"{windows[0]} steps" if len(windows) == 1 else f"{windows[0]} to {windows[-1]} steps, by the arm's probes"
    rows = []
    for one, episode in episodes[:MOST_EVENTS]:
        steps = f"{episode.first:,}" if episode.first == episode.last else f"{episode.first:,}–{episode.last:,}"
        leads = sorted(episode.leads.items(), key=lambda item: -item[1])
        first = f"{leads[0][0]}, {_steps_before(leads[0][1])}" if leads else "–"
        others = ", ".join(f"{name} {lead}" for name, lead in leads[1:]) or "–"
        standing = ", ".join(f"{name} since {since:,}" for name, since in episode.standing.items()) or "–"
        cause = f"{episode.cause}: {episode.tensor}" if episode.tensor else episode.cause
        undone = " (undone)" if episode.undone else ""
        rows.append(
            [
                f"<td>{text(one.arm)}</td>",
                _cell(steps),
                _cell(f"{episode.loss_step:,}" if episode.loss_step is not None else "–"),
                f'<td class="text">{text(cause)}</td>',
                f'<td class="text">{text(first if episode.loss_step is not None else "–")}</td>',
                f'<td class="text">{text(others)}</td>',
                f'<td class="text">{text(standing)}</td>',
                f'<td class="text">{text(episode.action + undone)}</td>',
                f'<td class="text"><code>{text(episode.batch or "–")}</code></td>',
            ]
        )
    header = [
        "arm",
        "flagged<br>steps",
        "loss at<br>step",
        *(
            f'<th class="text">{words}</th>'
            for words in (
                "cause",
                "crossed first,<br>before the loss",
                "others",
                "standing",
                "action",
                "batch",
            )
        ),
    ]
    out = "<h3>Loss events and what led up to them</h3>"
    none = f"None: no loss and no gradient norm was flagged in {where}." if judged else "Not judged in any arm."
    out += (table(header, rows) if rows else f"<p>{none}</p>") + note
    if len(episodes) > MOST_EVENTS:
        out += f'<p class="note">The first {MOST_EVENTS} of {len(episodes)}; data/events.csv holds all.</p>'
    out += f'<p class="note">{_HOW_EVENTS.format(gap=GAP, window=window)}</p>'
    records = monitors(histories)
    if records:
        body = [
            [
                f"<td>{text(record.monitor)}</td>",
                *(
                    _cell(str(n))
                    for n in (
                        record.crossings,
                        record.led,
                        record.late,
                        record.false_alarms,
                        record.undecided,
                        record.missed,
                    )
                ),
                _cell(number(record.lead, 3)),
            ]
            for record in records
        ]
        out += "<h3>Monitors over all arms</h3>" + table(
            [
                "monitor",
                "crossings",
                "led a<br>loss event",
                "late",
                "false<br>alarms",
                "undecided",
                "events<br>missed",
                "median lead<br>(steps)",
            ],
            body,
        )
    acted = [one for one in histories if one.skipped or one.clipped or one.rewinds or one.halted is not None]
    if acted:
        body = []
        for one in acted:
            rewinds = "; ".join(f"{at:,} → {to:,}, {left} batches left out" for at, to, left in one.rewinds) or "–"
            body.append(
                [
                    f"<td>{text(one.arm)}</td>",
                    _cell(str(one.skipped)),
                    _cell(str(one.clipped)),
                    f'<td class="text">{text(rewinds)}</td>',
                    f'<td class="text">{text(one.halted if one.halted is not None else "–")}</td>',
                ]
            )
        out += "<h3>What was done</h3>" + table(
            [
                "arm",
                "updates<br>left out",
                "steps<br>clipped",
                '<th class="text">rewinds</th>',
                '<th class="text">halted</th>',
            ],
            body,
        )
    return out + "<p></p>"


def _steps_before(lead: int) -> str:
    return "at the same step" if lead == 0 else f"{lead} step{'' if lead == 1 else 's'} before"


def _recomputed_table(
    arms: Sequence[Arm], recomputed: Mapping[str, Recomputed] | None, look: Mapping[str, Style]
) -> str:
    if recomputed is None:
        return "<p>Skipped (<code>--no_recompute</code>).</p>"
    rows = []
    for arm in arms:
        if arm.name not in recomputed:
            continue
        result = recomputed[arm.name]
        own = arm.preset or arm.kind
        views = [own] if arm.preset is None else list(PRESETS)
        for index, view in enumerate(view for view in views if view in result.peaks):
            peak = result.peaks[view]
            preset = "" if arm.preset is None else view if view != own else f"{view} (the run's own)"
            rows.append(
                [
                    f"<td>{_name(arm, look) if index == 0 else ''}</td>",
                    f'<td class="text">{text(preset)}</td>',
                    _cell(number(peak["forward"], 5)),
                    _cell(number(peak["backward"], 5)),
                    _cell(f"{result.step:,}" if index == 0 else ""),
                    _difference_cell(result) if view == own else "<td></td>",
                ]
            )
        if not result.peaks:
            rows.append(
                [f"<td>{_name(arm, look)}</td>", f'<td class="note text" colspan="5">{text(result.reason)}</td>']
            )
    header = [
        "arm",
        '<th class="text">Sinkhorn preset</th>',
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
    if len(recomputed) < len(arms):
        note += '<p class="note">One arm of each topology, the first seed at its best rate.</p>'
    return table(header, rows) + note


def _difference_cell(result: Recomputed) -> str:
    if result.difference is None:
        return f'<td class="note">{text(result.reason)}</td>'
    return _cell(f"{result.difference:.1e}")


def _differences_table(arms: Sequence[Arm], look: Mapping[str, Style]) -> str:
    fields = differing_fields(arms)
    if not fields:
        return "<p>All arms have the same configuration.</p>"
    rows = [
        [f"<td>{_name(arm, look)}</td>", *(f'<td class="text">{_value(arm.flat.get(field))}</td>' for field in fields)]
        for arm in arms
    ]
    header = ["arm", *(f'<th class="text"><code>{text(field).replace(".", ".<wbr>")}</code></th>' for field in fields)]
    return table(header, rows)


def _value(value: Any) -> str:
    return "–" if value is None else f"<code>{text(value)}</code>"


def _cell(text: str) -> str:
    return f"<td>{text}</td>"
