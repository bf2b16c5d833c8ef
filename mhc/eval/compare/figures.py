"""The figures of a comparison, in the order of the report.

With few arms every arm is a series. With more than ``CROWD`` a topology is one: its arms at its best learning rate,
each a line of the same colour where single steps matter (losses, gradient norms), their mean where a profile does.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib import ticker

from mhc.eval.common.page import Drawn
from mhc.eval.common.palette import GREY, Style, colours_of_variants, variations
from mhc.eval.common.sheet import Sheet, finite_range, handle, limit_top, smooth
from mhc.eval.compare.ngram import Baselines
from mhc.eval.compare.runs import DIRECTIONS, Arm, Floats, gap_to_plain, is_plain
from mhc.eval.compare.spikes import Episode, History
from mhc.eval.compare.topologies import Paired, Topology, reference_of, score

_MARKS = {
    "nonfinite": "X",
    "signal_explosion": "^",
    "attention_logit_growth": "s",
    "representation_collapse": "v",
    "gradient_explosion": "D",
    "loss_spike": "o",
}
_OTHER_MARK = "*"
_MARK_STYLE = Style("#111111")
CROWD = 8
MOST_MAPS = 6  # heat maps are drawn of so many series


@dataclasses.dataclass(frozen=True)
class Series:
    """What is drawn as one: an arm, or the arms of a topology at its best rate."""

    label: str
    style: Style
    arms: tuple[Arm, ...]

    @property
    def kind(self) -> str:
        return self.arms[0].kind

    def mean(self, measure: Callable[[Arm], tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
        """(x, mean over the arms of ``measure``) at the x that all arms have; arms without any are left out."""
        found = [(x, y) for x, y in map(measure, self.arms) if len(x)]
        if not found:
            return np.zeros(0), np.zeros(0)
        shared = functools.reduce(np.intersect1d, [x for x, _ in found])
        return shared, np.mean([y[np.isin(x, shared)] for x, y in found], axis=0)


def topology_colours(everyone: Sequence[Topology]) -> dict[str, str]:
    """Return a colour for each label: that of the kind, from dark to light over the topologies of one kind."""
    labels: dict[str, list[str]] = {}
    for topology in everyone:
        labels.setdefault(topology.kind, []).append(topology.label)
    return colours_of_variants(labels)


def styles(everyone: Sequence[Topology]) -> dict[str, Style]:
    """Return a style for each arm's name: the topology's colour, with other dashes or lighter for further arms."""
    colours = topology_colours(everyone)
    out: dict[str, Style] = {}
    for topology in everyone:
        arms = topology.every_arm
        looks = variations(colours[topology.label], len(arms))
        out |= {arm.name: look for arm, look in zip(arms, looks, strict=True)}
    return out


def draw(
    arms: Sequence[Arm],
    everyone: Sequence[Topology],
    pairs: Sequence[Paired],
    histories: Sequence[History],
    baselines: Baselines,
    folder: Path,
    data: Path,
) -> list[Drawn]:
    """Draw every figure that the arms have data for: NAME.png into ``folder``, its data as NAME.csv into ``data``."""
    for path in (folder, data):
        path.mkdir(parents=True, exist_ok=True)
    gallery = _Gallery(arms, everyone, histories)
    drawn: list[Drawn] = []

    def add(section: str, sheet: Sheet | None, title: str, caption: str) -> None:
        if sheet is not None:
            drawn.append(Drawn(sheet.save(folder, data), title, caption, sheet.wide, section))

    which = gallery.which
    hollow, points = ("", "") if gallery.crowded else ("; hollow points: validation", "; points: validation")
    add("main", gallery.loss(), "Training loss", f"{which} {gallery.raw}{hollow}. {gallery.marks}")
    add(
        "main",
        gallery.validation(baselines),
        "Validation bits per byte",
        f"{which} Grey lines: byte n-gram models counted on the training split and scored on the validation split.",
    )
    add(
        "main",
        gallery.gap(),
        "Loss gap to plain",
        f"Loss minus plain's at the same step (below zero is better than plain), smoothed{points}. "
        "Plain is the arm that differs in the residual alone, or also in the learning rate where each has its own; "
        "without one, the mean of those with the same seeds, else of all.",
    )
    add(
        "main",
        gallery.grad_norm(),
        "Gradient norm",
        f"Global norm before clipping, log scale. {gallery.raw} (geometric mean). {gallery.marks}",
    )
    add(
        "main",
        _paired_sheet(pairs, everyone),
        "Difference to plain, paired by seed",
        "Final validation bits per byte minus plain's, each topology at its own best rate: a dot a seed, a bar the "
        "mean with its 95 % interval (Student's t). An interval that includes 0 separates nothing; one seed has none.",
    )
    add(
        "main",
        _rates_sheet(everyone),
        "Sensitivity to the learning rate",
        "Final validation bits per byte over the peak rate: the mean over seeds, and every seed as a point. Crosses at "
        "the top: runs that diverged or were halted.",
    )
    add(
        "main",
        _cost_sheet(everyone),
        "Cost relative to plain",
        "Tokens per second (median over steps and arms) and parameters, over those of plain. Arms that shared a "
        "machine with other work are slower.",
    )
    probed = gallery.probed("gain/forward_composite_mean")
    mixing = [series for series in probed if series.kind != "plain"]
    add(
        "stability",
        gallery.gain_steps(mixing),
        "Composite gain over steps",
        "Token mean, largest over sublayers, at each probe; log scale. A plain residual stands at 1 (grey line).",
    )
    add(
        "stability",
        gallery.gain_depth("gain_depth_last", mixing, lambda gains: len(gains) - 1),
        "Composite gain over depth at the last probe",
        "Token mean per sublayer; log scale. Forward: of H_k … H_0, backward: of H_(S−1) … H_k. Shaded and hollow: "
        "sublayer 0, where all streams are still identical, so that mixing them is inert.",
    )
    add(
        "stability",
        gallery.gain_depth("gain_depth_peak", mixing, lambda gains: int(np.argmax(gains.max(axis=1)))),
        "Composite gain over depth at its peak",
        "The same at the probe at which each series' gain in that direction is largest"
        + (", a mean over its arms." if gallery.crowded else " (the legend names the step)."),
    )
    left_out = f" The first {MOST_MAPS} of {len(mixing)} series." if len(mixing) > MOST_MAPS else ""
    add(
        "stability",
        gallery.gain_heat(mixing),
        "Composite gain over steps and depth",
        "Token mean; one colour scale for all. Of several seeds the one with the largest gain." + left_out,
    )
    add(
        "stability",
        gallery.over_steps(
            "ds_error",
            [series for series in gallery.probed("ds_error/rows") if series.kind != "plain"],
            [("rows", "ds_error/rows", np.max), ("columns", "ds_error/columns", np.max)],
            y="largest |marginal − 1|",
            log=True,
        ),
        "Doubly stochastic error",
        "How far the row and column sums of H_res are from 1: the largest over tokens and sublayers. HC does not ask "
        "for 1; mHC's last half-step makes one of the two exact. What is exactly 0 (identity) is not drawn.",
    )
    add(
        "stream",
        gallery.over_depth(
            "mix_depth",
            [series for series in gallery.probed("mix/to_identity_single") if series.kind != "plain"],
            [
                (f"{span} map, distance to {name}", f"mix/to_{target}_{span}")
                for span in ("single", "composite")
                for target, name in (("identity", "the identity"), ("uniform", "uniform"))
            ],
            y="distance / √N",
            columns=2,
            log=True,
        ),
        "Distance to the identity and to uniform over depth",
        "Frobenius distance of H_res, and of the product H_k … H_0, to I and to J/N, at the last probe. Products of "
        "doubly stochastic maps drift to uniform: all streams become one. It is the price of their stability. Log "
        "scale; what is exactly 0 is not drawn.",
    )
    add(
        "stream",
        gallery.over_steps(
            "diversity_steps",
            gallery.probed("representation/rank"),
            [
                ("effective streams (mean over sublayers after 0)", "stream/effective", _later_mean),
                ("rank of the representation (smallest block)", "representation/rank", np.min),
            ],
            y="participation ratio",
            sharey=False,
        ),
        "Effective streams and representation rank over steps",
        "Participation ratios. Streams: 1 means that all carry the same vector, N that they are orthogonal and equal. "
        "Rank: of the hidden states' covariance over the probe's tokens; a fall is a collapse across tokens.",
    )
    add(
        "stream",
        gallery.over_depth(
            "diversity_depth",
            gallery.probed("representation/rank"),
            [
                ("effective streams", "stream/effective"),
                ("rank of the representation", "representation/rank"),
                ("mean cosine between tokens", "representation/mean_cosine"),
            ],
            y="",
            columns=3,
        ),
        "Effective streams, rank and likeness of tokens over depth",
        "At the last probe. Rank and cosine stand after each block, the streams after each sublayer.",
    )
    add(
        "stream",
        gallery.over_depth(
            "activations",
            gallery.probed("activation/residual_rms"),
            [
                ("residual stream", "activation/residual_rms"),
                ("output of the sublayer", "activation/sublayer_out_rms"),
            ],
            y="root mean square",
            columns=2,
            log=True,
        ),
        "Activation norms over depth",
        "At the last probe, on the fixed probe batch; log scale.",
    )
    add(
        "stream",
        gallery.over_steps(
            "attention",
            gallery.probed("activation/attention_logit_max"),
            [
                ("largest attention logit", "activation/attention_logit_max", np.max),
                ("attention entropy (nats, mean over blocks)", "activation/attention_entropy", np.mean),
            ],
            y="",
            sharey=False,
        ),
        "Attention over steps",
        "Logits that grow and an entropy that falls towards 0 come before some instabilities.",
    )
    add(
        "stream",
        gallery.over_depth(
            "gradients",
            gallery.probed("grad/norm"),
            [("gradient norm", "grad/norm"), ("update / parameter norm", "update/ratio")],
            y="",
            columns=2,
            log=True,
            sharey=False,
        ),
        "Gradient norms and relative updates over depth",
        "Of each sublayer (its maps among its parameters) at the step of the last probe; log scale.",
    )
    add(
        "stream",
        gallery.grad_heat(),
        "Gradient norm over steps and depth",
        "Of each sublayer; one colour scale for all. Of several seeds the one with the largest norm.",
    )
    return drawn


class _Gallery:
    """The figures that draw series of arms."""

    def __init__(self, arms: Sequence[Arm], everyone: Sequence[Topology], histories: Sequence[History]):
        self.histories = {one.arm: one for one in histories}
        self.crowded = len(arms) > CROWD
        look = styles(everyone)
        if self.crowded:
            colours = topology_colours(everyone)
            self.series = [Series(top.label, Style(colours[top.label]), top.arms) for top in everyone]
        else:
            self.series = [Series(arm.name, look[arm.name], (arm,)) for arm in arms]
        self.shown = [arm for series in self.series for arm in series.arms]
        self.raw = "Smoothed" if self.crowded else "Every step in light lines, smoothed in full ones"
        several = self.crowded and any(len(top.rates) > 1 for top in everyone)
        self.which = "Every topology at its best learning rate." if several else ""
        marked = any(self.histories[arm.name].episodes for arm in self.shown)
        self.marks = "Black marks: flagged steps, by cause; hollow where a rewind undid them." if marked else ""

    def legend(self, series: Sequence[Series]) -> list[tuple[Style, str]]:
        return [
            (one.style, one.label if len(one.arms) == 1 else f"{one.label} ({len(one.arms)} arms)") for one in series
        ]

    def probed(self, key: str) -> list[Series]:
        """Series with probes that hold the key."""
        return [series for series in self.series if any(len(arm.probe(key)[0]) for arm in series.arms)]

    # ------------------------------------------------------------------------------------------------------- curves

    def loss(self) -> Sheet:
        sheet = Sheet("loss", legend=self.legend(self.series), y="loss (nats per token)")
        for series in self.series:
            for arm in series.arms:
                self._curve(sheet, arm.name, *arm.column("loss"), series.style)
                if not self.crowded:
                    sheet.points(0, arm.name, *arm.column("val_loss"), series.style, what="validation")
        limit_top(sheet.panels[0], [arm.column("loss")[1] for arm in self.shown])
        self._mark(sheet, "loss")
        return sheet

    def validation(self, baselines: Baselines) -> Sheet | None:
        if not any(len(arm.column("val_bits_per_byte")[0]) for arm in self.shown):
            return None
        sheet = Sheet("validation", legend=self.legend(self.series), y="bits per byte")
        for series in self.series:
            for arm in series.arms:
                sheet.line(0, arm.name, *arm.column("val_bits_per_byte"), series.style, marker=True)
        for name, value in (("unigram", baselines.unigram), ("bigram", baselines.bigram)):
            if value is not None:
                sheet.level(0, value, f"{name} {value:.2f}")
        axes = sheet.panels[0]
        axes.set_xlim(left=0)
        axes.margins(y=0.08)
        return sheet

    def gap(self) -> Sheet | None:
        others = [series for series in self.series if not is_plain(series.arms[0])]
        if not others or not any(is_plain(arm) for arm in self.shown):
            return None
        sheet = Sheet("loss_gap", legend=self.legend(others), y="loss − plain's (nats per token)")
        sheet.level(0, 0, colour=GREY)
        drawn = []
        for series in others:
            for arm in series.arms:
                steps, gap = gap_to_plain(arm, self.shown, "loss")
                smoothed = smooth(gap, 1 / 16)  # a difference of two noisy curves
                sheet.line(0, arm.name, steps, smoothed, series.style, what="smoothed")
                drawn.append(smoothed)
                if not self.crowded:
                    sheet.points(
                        0, arm.name, *gap_to_plain(arm, self.shown, "val_loss"), series.style, what="validation"
                    )
        finite = np.concatenate([values[np.isfinite(values)] for values in drawn])
        if len(finite) > 20:  # the first steps after init must not set the scale
            low, high = np.quantile(finite, [0.02, 0.98])
            room = 0.25 * max(high - low, 1e-3)
            sheet.panels[0].set_ylim(max(min(low, 0) - room, -20), min(max(high, 0) + room, 20))
        return sheet

    def grad_norm(self) -> Sheet:
        sheet = Sheet("grad_norm", legend=self.legend(self.series), y="gradient norm")
        for series in self.series:
            for arm in series.arms:
                self._curve(sheet, arm.name, *arm.column("grad_norm"), series.style, geometric=True)
        clips = {arm.flat.get("optimizer.clip_norm") for arm in self.shown}
        clip = clips.pop() if len(clips) == 1 else None
        if clip is not None:
            sheet.level(0, clip, f"clipped to {clip:g}", dotted=True)
        sheet.log(0)
        flagged = finite_range(episode.grad_norm for arm in self.shown for episode in self.histories[arm.name].episodes)
        axes = sheet.panels[0]
        if flagged is not None and flagged[1] > axes.get_ylim()[1]:
            axes.set_ylim(top=1.3 * flagged[1])
            sheet.log(0)
        self._mark(sheet, "grad_norm")
        return sheet

    def _curve(self, sheet: Sheet, name: str, x: Floats, y: Floats, style: Style, *, geometric: bool = False) -> None:
        """The smoothed series, over its raw values; a cross where it stops being finite.

        ``geometric``: smoothed as the log scale shows it, so that one large value does not lift all its neighbours.
        """
        if not self.crowded:
            sheet.line(0, name, x, np.where(np.isfinite(y), y, np.nan), style, what="raw", width=0.7, alpha=0.3)
        smoothed = np.exp(smooth(np.log(np.maximum(y, 1e-30)))) if geometric else smooth(y)
        sheet.line(0, name, x, smoothed, style, what="smoothed", width=1.1 if self.crowded else 1.6)
        broken = np.flatnonzero(~np.isfinite(y))
        if len(broken):
            before = np.flatnonzero(np.isfinite(y[: broken[0]]))
            if len(before):
                at = x[broken[:1]], y[before[-1:]]
                sheet.points(0, name, *at, style, what="first non-finite", marker="x", size=8)

    def _mark(self, sheet: Sheet, key: str) -> None:
        """Flagged steps, with their causes, where their values lie within view; else at its edge."""
        axes = sheet.panels[0]
        low, high = axes.get_ylim()
        episodes = [episode for arm in self.shown for episode in self.histories[arm.name].episodes]
        causes: dict[str, list[Episode]] = {}
        for episode in episodes:
            causes.setdefault(episode.cause, []).append(episode)
        handles = []
        for cause, group in sorted(causes.items()):
            marker = _MARKS.get(cause, _OTHER_MARK)
            for undone in (False, True):
                some = [episode for episode in group if episode.undone is undone]
                values = [episode.value if key == "loss" else episode.grad_norm for episode in some]
                y = [min(max(value, low), high) if math.isfinite(value) else high for value in values]
                for episode, value, place in zip(some, values, y, strict=True):
                    sheet.note(0, episode.arm, cause + (" (undone)" if undone else ""), [episode.step], [value])
                    (line,) = axes.plot(
                        episode.step,
                        place,
                        linestyle="none",
                        marker=marker,
                        markersize=6,
                        markerfacecolor="white" if undone else _MARK_STYLE.colour,
                        markeredgecolor=_MARK_STYLE.colour,
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

    # -------------------------------------------------------------------------------------------------------- gains

    def gain_steps(self, some: Sequence[Series]) -> Sheet | None:
        if not some:
            return None
        sheet = Sheet("gain_steps", columns=2, legend=self.legend(some), y="composite gain")
        for panel, direction in enumerate(DIRECTIONS):
            sheet.title(panel, direction)
            sheet.level(panel, 1, colour=GREY)
            for series in some:
                for arm in series.arms:
                    steps, gains = arm.gains(direction)
                    if len(steps):
                        sheet.line(panel, arm.name, steps, gains.max(axis=1), series.style, marker=True)
            sheet.log(panel)
        return sheet

    def gain_depth(self, name: str, some: Sequence[Series], pick: Callable[[Floats], int]) -> Sheet | None:
        if not some:
            return None
        sheet = Sheet(
            name, columns=2, x="sublayer", y="composite gain", legend=self.legend(some) if self.crowded else ()
        )
        for panel, direction in enumerate(DIRECTIONS):
            axes = sheet.panels[panel]
            sheet.title(panel, direction)
            axes.axvspan(-0.5, 0.5, color="#efefef", linewidth=0)
            sheet.level(panel, 1, colour=GREY)
            handles = []
            for series in some:
                picked = []
                for arm in series.arms:
                    steps, gains = arm.gains(direction)
                    if len(steps):
                        row = pick(gains)
                        picked.append((int(steps[row]), gains[row]))
                if not picked:
                    continue
                gain = np.mean([values for _, values in picked], axis=0)
                depth = np.arange(len(gain), dtype=np.float64)
                sheet.line(panel, series.label, depth, gain, series.style, marker=True)
                axes.plot(
                    0, gain[0], marker="o", markersize=4.5, markerfacecolor="white", markeredgecolor=series.style.colour
                )
                handles.append((series, picked[0][0]))
            sheet.log(panel)
            if not self.crowded:
                lines = [handle(series.style, f"{series.label} (step {step})") for series, step in handles]
                axes.legend(handles=lines, loc="best", fontsize=8)
        return sheet

    def gain_heat(self, some: Sequence[Series]) -> Sheet | None:
        some = some[:MOST_MAPS]
        if not some:
            return None
        tables = []
        for series in some:
            arms = [arm for arm in series.arms if len(arm.gains("forward")[0])]
            arm = max(arms, key=lambda arm: max(np.max(arm.gains(direction)[1]) for direction in DIRECTIONS))
            tables.append((series, [arm.gains(direction) for direction in DIRECTIONS]))
        span = finite_range(float(v) for _, both in tables for _, gains in both for v in gains.ravel())
        low, high = span or (1.0, 1.0)
        sheet = Sheet("gain_heat", columns=2, rows=len(some), height=1.75, y="sublayer")
        for row, (series, both) in enumerate(tables):
            for column, (direction, (steps, gains)) in enumerate(zip(DIRECTIONS, both, strict=True)):
                panel = 2 * row + column
                sheet.title(panel, f"{series.label}, {direction}")
                last = row == len(tables) - 1 and column == 1
                sheet.heat(
                    panel,
                    series.label,
                    steps,
                    gains,
                    low=max(min(low, 0.8), 1e-3),
                    high=max(high, 1.25),
                    colours=last,
                )
                if row < len(tables) - 1:
                    sheet.panels[panel].set_xlabel("")
        return sheet

    # ----------------------------------------------------------------------------------------------------- profiles

    def over_steps(
        self,
        name: str,
        some: Sequence[Series],
        measures: Sequence[tuple[str, str, Callable[..., Floats]]],
        *,
        y: str,
        log: bool = False,
        sharey: bool = True,
    ) -> Sheet | None:
        """A measure of the probes, reduced over sublayers, at every probe; measures: (title, key, reduction)."""
        if not some:
            return None
        sheet = Sheet(name, columns=len(measures), legend=self.legend(some), y=y, sharey=sharey)
        for panel, (title, key, reduce) in enumerate(measures):
            sheet.title(panel, title)
            for series in some:
                x, values = series.mean(functools.partial(_reduced, key=key, reduce=reduce))
                values = np.where(values > 0, values, np.nan) if log else values
                sheet.line(panel, series.label, x, values, series.style, marker=True)
            if log:
                sheet.log(panel)
        return sheet

    def over_depth(
        self,
        name: str,
        some: Sequence[Series],
        measures: Sequence[tuple[str, str]],
        *,
        y: str,
        columns: int,
        log: bool = False,
        sharey: bool | None = None,
    ) -> Sheet | None:
        """Measures of the last probe over depth, averaged over the arms of a series; measures: (title, key)."""
        if not some:
            return None
        rows = -(-len(measures) // columns)
        shared = (bool(y) if sharey is None else sharey) and columns > 1
        sheet = Sheet(
            name, columns=columns, rows=rows, legend=self.legend(some), x="depth", y=y, sharey=shared, height=2.9
        )
        for panel, (title, key) in enumerate(measures):
            sheet.title(panel, title)
            for series in some:
                found = [values[-1] for steps, values in (arm.probe(key) for arm in series.arms) if len(steps)]
                if found and all(len(values) == len(found[0]) for values in found):
                    values = np.mean(found, axis=0)
                    blocks = key.startswith("representation/")
                    depth = np.arange(len(values), dtype=np.float64) * (2 if blocks else 1) + (1 if blocks else 0)
                    values = np.where(values > 0, values, np.nan) if log else values
                    sheet.line(panel, series.label, depth, values, series.style, marker=True)
            sheet.panels[panel].set_xlabel("sublayer")
            if log:
                sheet.log(panel)
        return sheet

    def grad_heat(self) -> Sheet | None:
        tables = []
        for series in self.series:
            found = [table for arm in series.arms if len((table := _sublayer_gradients(arm))[0])]
            if found:
                tables.append((series, max(found, key=lambda table: float(np.nanmax(table[1])))))
        tables = tables[: 2 * MOST_MAPS]
        span = finite_range(float(v) for _, (_, norms) in tables for v in norms.ravel() if v > 0)
        if span is None:
            return None
        rows = -(-len(tables) // 2)
        sheet = Sheet("grad_heat", columns=2, rows=rows, height=1.75, y="sublayer", sharey=False)
        for panel, (series, (steps, norms)) in enumerate(tables):
            sheet.title(panel, series.label)
            sheet.heat(
                panel, series.label, steps, norms, low=span[0], high=max(span[1], 1.01 * span[0]), colours=panel == 0
            )
            if panel < len(tables) - 2:
                sheet.panels[panel].set_xlabel("")
        for axes in sheet.panels[len(tables) :]:
            axes.set_visible(False)
        return sheet


def _paired_sheet(pairs: Sequence[Paired], everyone: Sequence[Topology]) -> Sheet | None:
    if not pairs:
        return None
    colours = topology_colours(everyone)
    height = max(1.6, 0.8 + 0.36 * len(pairs))
    sheet = Sheet("seeds", height=height, x="bits per byte minus plain's", y="")
    axes = sheet.panels[0]
    axes.axvline(0, color=GREY, linewidth=1)
    for row, pair in enumerate(pairs):
        style = Style(colours[pair.topology])
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


def _rates_sheet(everyone: Sequence[Topology]) -> Sheet | None:
    some = [topology for topology in everyone if len(topology.rates) > 1]
    if not some:
        return None
    colours = topology_colours(everyone)
    legend = [(Style(colours[topology.label]), topology.label) for topology in some]
    sheet = Sheet("lr_sensitivity", legend=legend, x="peak learning rate", y="final validation bits per byte")
    axes = sheet.panels[0]
    axes.set_xscale("log")
    tried = sorted({rate.lr for topology in some for rate in topology.rates})
    if len(tried) <= 9:
        axes.set_xticks(tried, [f"{lr:g}" for lr in tried])
        axes.xaxis.set_minor_locator(ticker.NullLocator())
    broken = []
    for topology in some:
        style = Style(colours[topology.label])
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


def _cost_sheet(everyone: Sequence[Topology]) -> Sheet | None:
    rows = [(topology.label, *relative) for topology in everyone if (relative := relative_cost(topology, everyone))]
    if len(rows) < 2:
        return None
    colours = topology_colours(everyone)
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
                axes.barh(row, value, color=colours[label], height=0.62)
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


def relative_cost(topology: Topology, everyone: Sequence[Topology]) -> tuple[float | None, float | None] | None:
    """(tokens per second, parameters) over plain's: that which differs in the residual alone; None without one."""
    reference = topology if is_plain(topology.arms[0]) else reference_of(topology, everyone)
    if reference is None:
        return None

    def of(measure: Callable[[Topology], float | None]) -> float | None:
        ours, theirs = measure(topology), measure(reference)
        return ours / theirs if ours is not None and theirs else None

    return of(speed), of(parameters)


def speed(topology: Topology) -> float | None:
    """Tokens per second: median over the arms of the median over steps."""
    medians = [
        float(np.median(values)) for arm in topology.every_arm if len(values := arm.column("tokens_per_second")[1])
    ]
    return float(np.median(medians)) if medians else None


def parameters(topology: Topology) -> float | None:
    """Of the first arm whose summary tells."""
    known = [arm.summary["params"] for arm in topology.every_arm if arm.summary and "params" in arm.summary]
    return float(known[0]) if known else None


def _reduced(arm: Arm, key: str, reduce: Callable[..., Floats]) -> tuple[Floats, Floats]:
    steps, values = arm.probe(key)
    return (steps, np.asarray(reduce(values, axis=1))) if len(steps) else (steps, np.zeros(0))


def _later_mean(values: Floats, axis: int) -> Floats:
    """Mean over sublayers after the first, where all streams are still alike."""
    return np.asarray((values[:, 1:] if values.shape[1] > 1 else values).mean(axis=axis))


def _sublayer_gradients(arm: Arm, most: int = 160) -> tuple[Floats, Floats]:
    """(steps, norms [P, S]) from the metrics, the largest of every stretch of steps; from the probes of older runs."""
    rows = [row for row in arm.metrics if row.get("grad_norm_by_sublayer")]
    if not rows:
        return arm.probe("grad/norm")
    steps = np.array([row["step"] for row in rows], np.float64)
    norms = np.array([row["grad_norm_by_sublayer"] for row in rows], np.float64)
    size = -(-len(steps) // most)
    starts = np.arange(0, len(steps), size)
    return steps[starts], np.maximum.reduceat(norms, starts, axis=0)
