"""Draw the main figures: curves, differences to plain, learning rates, cost."""

from __future__ import annotations

import math

import numpy as np
from matplotlib import ticker

from mhc.eval.common.palette import GREY, Style
from mhc.eval.common.sheet import Floats, Sheet
from mhc.eval.compare.cost import relative_cost
from mhc.eval.compare.figures.series import Figure, Gallery, finite_range, limit_top, smooth
from mhc.eval.compare.runs import gap_to_plain, is_plain
from mhc.eval.compare.spikes import Episode
from mhc.eval.compare.topologies import score

_MARKS = {
    "nonfinite": "X",
    "signal_explosion": "^",
    "attention_logit_growth": "s",
    "representation_collapse": "v",
    "gradient_explosion": "D",
    "loss_spike": "o",
}
_OTHER_MARK, _MARK_COLOUR = "*", "#111111"


def loss(gallery: Gallery) -> Sheet:
    """Draw the training loss."""
    sheet = Sheet("loss", legend=gallery.legend(gallery.series), y="loss (nats per token)")
    for series in gallery.series:
        for arm in series.arms:
            _curve(gallery, sheet, arm.name, *arm.column("loss"), series.style)
            if not gallery.crowded:
                sheet.points(0, arm.name, *arm.column("val_loss"), series.style, what="validation")
    limit_top(sheet.panels[0], [arm.column("loss")[1] for arm in gallery.shown])
    _mark(gallery, sheet, "loss")
    return sheet


def validation(gallery: Gallery) -> Sheet | None:
    """Draw validation bits per byte, with the n-gram baselines."""
    baselines = gallery.comparison.baselines
    if not any(len(arm.column("val_bits_per_byte")[0]) for arm in gallery.shown):
        return None
    sheet = Sheet("validation", legend=gallery.legend(gallery.series), y="bits per byte")
    for series in gallery.series:
        for arm in series.arms:
            sheet.line(0, arm.name, *arm.column("val_bits_per_byte"), series.style, marker=True)
    for name, value in (("unigram", baselines.unigram), ("bigram", baselines.bigram)):
        if value is not None:
            sheet.level(0, value, f"{name} {value:.2f}")
    axes = sheet.panels[0]
    axes.set_xlim(left=0)
    axes.margins(y=0.08)
    return sheet


def loss_gap(gallery: Gallery) -> Sheet | None:
    """Draw the loss minus plain's."""
    others = [series for series in gallery.series if not is_plain(series.arms[0])]
    if not others or not any(is_plain(arm) for arm in gallery.shown):
        return None
    sheet = Sheet("loss_gap", legend=gallery.legend(others), y="loss − plain's (nats per token)")
    sheet.level(0, 0, colour=GREY)
    drawn = []
    for series in others:
        for arm in series.arms:
            steps, gap = gap_to_plain(arm, gallery.shown, "loss")
            smoothed = smooth(gap, 1 / 16)  # a difference of two noisy curves
            sheet.line(0, arm.name, steps, smoothed, series.style, what="smoothed")
            drawn.append(smoothed)
            if not gallery.crowded:
                sheet.points(
                    0, arm.name, *gap_to_plain(arm, gallery.shown, "val_loss"), series.style, what="validation"
                )
    finite = np.concatenate([values[np.isfinite(values)] for values in drawn])
    if len(finite) > 20:  # the first steps after init must not set the scale
        low, high = np.quantile(finite, [0.02, 0.98])
        room = 0.25 * max(high - low, 1e-3)
        sheet.panels[0].set_ylim(max(min(low, 0) - room, -20), min(max(high, 0) + room, 20))
    return sheet


def grad_norm(gallery: Gallery) -> Sheet:
    """Draw the gradient norm before clipping."""
    sheet = Sheet("grad_norm", legend=gallery.legend(gallery.series), y="gradient norm")
    for series in gallery.series:
        for arm in series.arms:
            _curve(gallery, sheet, arm.name, *arm.column("grad_norm"), series.style, geometric=True)
    clips = {arm.flat.get("optimizer.clip_norm") for arm in gallery.shown}
    clip = clips.pop() if len(clips) == 1 else None
    if clip is not None:
        sheet.level(0, clip, f"clipped to {clip:g}", dotted=True)
    sheet.log(0)
    flagged = finite_range(episode.grad_norm for episode in gallery.episodes)
    axes = sheet.panels[0]
    if flagged is not None and flagged[1] > axes.get_ylim()[1]:
        axes.set_ylim(top=1.3 * flagged[1])
        sheet.log(0)
    _mark(gallery, sheet, "grad_norm")
    return sheet


def _curve(
    gallery: Gallery, sheet: Sheet, name: str, x: Floats, y: Floats, style: Style, *, geometric: bool = False
) -> None:
    """Draw a smoothed series over its raw values, with a cross where it stops being finite.

    ``geometric`` smooths as the log scale shows it, so that one large value does not lift all its neighbours.
    """
    if not gallery.crowded:
        sheet.line(0, name, x, np.where(np.isfinite(y), y, np.nan), style, what="raw", width=0.7, alpha=0.3)
    smoothed = np.exp(smooth(np.log(np.maximum(y, 1e-30)))) if geometric else smooth(y)
    sheet.line(0, name, x, smoothed, style, what="smoothed", width=1.1 if gallery.crowded else 1.6)
    broken = np.flatnonzero(~np.isfinite(y))
    if len(broken):
        before = np.flatnonzero(np.isfinite(y[: broken[0]]))
        if len(before):
            at = x[broken[:1]], y[before[-1:]]
            sheet.points(0, name, *at, style, what="first non-finite", marker="x", size=8)


def _mark(gallery: Gallery, sheet: Sheet, key: str) -> None:
    """Mark flagged steps by their causes, where their values lie within view, else at its edge."""
    axes = sheet.panels[0]
    low, high = axes.get_ylim()
    causes: dict[str, list[Episode]] = {}
    for episode in gallery.episodes:
        causes.setdefault(episode.cause, []).append(episode)
    handles = []
    for cause, group in sorted(causes.items()):
        for undone in (False, True):
            for episode in (episode for episode in group if episode.undone is undone):
                value = episode.value if key == "loss" else episode.grad_norm
                sheet.note(0, episode.arm, cause + (" (undone)" if undone else ""), [episode.step], [value])
                (line,) = axes.plot(
                    episode.step,
                    min(max(value, low), high) if math.isfinite(value) else high,
                    linestyle="none",
                    marker=_MARKS.get(cause, _OTHER_MARK),
                    markersize=6,
                    markerfacecolor="white" if undone else _MARK_COLOUR,
                    markeredgecolor=_MARK_COLOUR,
                    markeredgewidth=0.9,
                    clip_on=False,
                    zorder=6,
                )
                if episode is group[0]:
                    line.set_label(cause)
                    handles.append(line)
    axes.set_ylim(low, high)
    if handles:
        axes.legend(
            handles=handles,
            labels=sorted(causes),
            loc="upper right",
            fontsize=7.5,
            framealpha=0.85,
            bbox_to_anchor=(1.0, 0.95),
        )


def paired_seeds(gallery: Gallery) -> Sheet | None:
    """Draw the differences to plain, seed by seed, with the interval of their mean."""
    pairs = gallery.comparison.pairs
    if not pairs:
        return None
    height = max(1.6, 0.8 + 0.36 * len(pairs))
    sheet = Sheet("seeds", height=height, x="bits per byte minus plain's", y="")
    axes = sheet.panels[0]
    axes.axvline(0, color=GREY, linewidth=1)
    for row, pair in enumerate(pairs):
        style = Style(gallery.colours[pair.topology])
        values = np.array(list(pair.differences.values()))
        sheet.points(0, pair.topology, values, np.full(len(values), row + 0.0), style, what="seed", size=4.5)
        sheet.points(
            0, pair.topology, np.array([pair.mean]), np.array([row + 0.0]), style, what="mean", marker="|", size=13
        )
        if pair.interval is not None:
            ends = np.array(pair.interval)
            sheet.line(0, pair.topology, ends, np.full(2, row + 0.0), style, what="95 % interval")
    # With few seeds an interval may be far wider than the dots: they set the scale, within reason.
    dots = np.concatenate([list(pair.differences.values()) for pair in pairs] + [np.zeros(1)])
    ends = np.array([end for pair in pairs for end in pair.interval or ()])
    reach = 3 * max(float(np.ptp(dots)), 1e-3)
    seen = np.r_[dots, np.clip(ends, dots.min() - reach, dots.max() + reach)]
    room = 0.06 * max(float(np.ptp(seen)), 1e-3)
    axes.set_xlim(seen.min() - room, seen.max() + room)
    axes.set_ylim(len(pairs) - 0.5, -0.5)
    axes.set_yticks(range(len(pairs)), [pair.topology for pair in pairs])
    axes.xaxis.set_major_locator(ticker.MaxNLocator(6))
    axes.grid(visible=False, axis="y")
    return sheet


def rates(gallery: Gallery) -> Sheet | None:
    """Draw the final validation over the learning rate."""
    some = [topology for topology in gallery.comparison.topologies if len(topology.rates) > 1]
    if not some:
        return None
    legend = [(Style(gallery.colours[topology.label]), topology.label) for topology in some]
    sheet = Sheet("lr_sensitivity", legend=legend, x="peak learning rate", y="final validation bits per byte")
    axes = sheet.panels[0]
    axes.set_xscale("log")
    tried = sorted({rate.lr for topology in some for rate in topology.rates})
    if len(tried) <= 9:
        axes.set_xticks(tried, [f"{lr:g}" for lr in tried])
        axes.xaxis.set_minor_locator(ticker.NullLocator())
    broken = []
    for topology in some:
        style = Style(gallery.colours[topology.label])
        lrs = np.array([rate.lr for rate in topology.rates])
        means = np.array([rate.mean for rate in topology.rates])
        sheet.line(0, topology.label, lrs, means, style, what="mean over seeds", marker=True)
        for rate in topology.rates:
            values = np.array([score(arm) or math.nan for arm in rate.arms])
            finite = values[np.isfinite(values)]
            if len(rate.arms) > 1:
                sheet.points(0, topology.label, np.full(len(finite), rate.lr), finite, style, what="seed", size=3.5)
            if np.isinf(values).any():
                broken.append((topology.label, rate.lr, style))
    drawn = [rate.mean for topology in some for rate in topology.rates if math.isfinite(rate.mean)]
    if drawn:  # what is close to the best is what counts
        best = min(drawn)
        top = min(max(drawn), best + 6 * max(float(np.median(drawn)) - best, 0.05))
        axes.set_ylim(best - 0.06 * (top - best + 0.05), top + 0.1 * (top - best + 0.05))
    edge = axes.get_ylim()[1]
    for label, lr, style in broken:
        sheet.note(0, label, "diverged or halted", [lr], [math.inf])
        axes.plot(lr, edge, marker="x", color=style.colour, markersize=7, markeredgewidth=2, clip_on=False, zorder=6)
    return sheet


def cost(gallery: Gallery) -> Sheet | None:
    """Draw speed and parameters as shares of plain's."""
    topologies = gallery.comparison.topologies
    costs = {topology.label: relative_cost(topology, topologies) for topology in topologies}
    rows = [(label, *shares) for label, shares in costs.items() if shares]
    if len(rows) < 2:
        return None
    height = max(1.6, 0.9 + 0.26 * len(rows))
    sheet = Sheet("cost", columns=2, height=height, x="share of plain's", y="")
    for panel, title in enumerate(("tokens per second", "parameters")):
        axes = sheet.panels[panel]
        sheet.title(panel, title)
        axes.axvline(1, color=GREY, linewidth=1)
        for row, (label, *values) in enumerate(rows):
            value = values[panel]
            if value is not None:
                sheet.note(panel, label, "share", [value], [row])
                axes.barh(row, value, color=gallery.colours[label], height=0.62)
                axes.annotate(
                    f"{value:.2f}" if panel == 0 else f"{value:.4f}",
                    (value, row),
                    xytext=(3, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8,
                    color="#444444",
                )
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.margins(x=0.14)
        axes.set_yticks(range(len(rows)), [label for label, *_ in rows])
        axes.xaxis.set_major_locator(ticker.MaxNLocator(5))
        axes.grid(visible=False, axis="y")
    return sheet


def _points(gallery: Gallery, what: str) -> str:
    """Return words for captions that say what the points are; with many arms no points are drawn."""
    return "" if gallery.crowded else f"; {what}: validation"


FIGURES = (
    Figure(
        "main",
        "Training loss",
        lambda gallery: f"{gallery.rates} {gallery.smoothing}{_points(gallery, 'hollow points')}. {gallery.marks}",
        loss,
    ),
    Figure(
        "main",
        "Validation bits per byte",
        lambda gallery: (
            f"{gallery.rates} Grey lines: byte n-gram models counted on the training split and scored on the "
            "validation split."
        ),
        validation,
    ),
    Figure(
        "main",
        "Loss gap to plain",
        lambda gallery: (
            "Loss minus plain's at the same step (below zero is better than plain), "
            f"smoothed{_points(gallery, 'points')}. Plain is the arm that differs in the residual alone, or also in "
            "the learning rate where each has its own; without one, the mean of those with the same seeds, else of "
            "all."
        ),
        loss_gap,
    ),
    Figure(
        "main",
        "Gradient norm",
        lambda gallery: (
            f"Global norm before clipping, log scale. {gallery.smoothing} (geometric mean). {gallery.marks}"
        ),
        grad_norm,
    ),
    Figure(
        "main",
        "Difference to plain, paired by seed",
        "Final validation bits per byte minus plain's, each topology at its own best rate: a dot a seed, a bar the "
        "mean with its 95 % interval (Student's t). An interval that includes 0 separates nothing; one seed has none.",
        paired_seeds,
    ),
    Figure(
        "main",
        "Sensitivity to the learning rate",
        "Final validation bits per byte over the peak rate: the mean over seeds, and every seed as a point. Crosses at "
        "the top: runs that diverged or were halted.",
        rates,
    ),
    Figure(
        "main",
        "Cost relative to plain",
        "Tokens per second (median over steps and arms) and parameters, over those of plain. Arms that shared a "
        "machine with other work are slower.",
        cost,
    ),
)
