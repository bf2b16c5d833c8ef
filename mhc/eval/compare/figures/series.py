"""Describe the series that the figures of a comparison draw, and make the sheets that several figures share.

With few arms every arm is a series. With more than ``CROWD`` a topology is one: its arms at its best learning rate,
each a line of the same colour where single steps matter (losses, gradient norms), their mean where a profile does.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from matplotlib.axes import Axes

from mhc.eval.common.palette import Style, colours_of_variants, variations
from mhc.eval.common.sheet import Floats, Sheet
from mhc.eval.compare.comparison import Comparison
from mhc.eval.compare.runs import Arm
from mhc.eval.compare.spikes import Episode
from mhc.eval.compare.topologies import Topology

MOST_MAPS = 6  # heat maps are drawn of so many series


@dataclasses.dataclass(frozen=True)
class Figure:
    """Describes a figure of the report.

    Attributes:
        section: of the report: main, stability or stream.
        title: its heading.
        caption: what it shows, in a sentence or two; a function where that depends on the runs.
        make: draws it; None where the runs have no data for it.
    """

    section: str
    title: str
    caption: str | Callable[[Gallery], str]
    make: Make


@dataclasses.dataclass(frozen=True)
class Series:
    """Describes what is drawn as one: an arm, or the arms of a topology at its best rate."""

    label: str
    style: Style
    arms: tuple[Arm, ...]

    @property
    def mixes(self) -> bool:
        """Return whether its arms have streams that maps mix: all but plain residuals."""
        return self.arms[0].mixes

    def mean(self, measure: Callable[[Arm], tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
        """Return (x, mean over the arms of ``measure``) at the x that all arms have; arms without any are left out."""
        curves = [(x, y) for x, y in map(measure, self.arms) if len(x)]
        if not curves:
            return np.zeros(0), np.zeros(0)
        shared = functools.reduce(np.intersect1d, [x for x, _ in curves])
        return shared, np.mean([y[np.isin(x, shared)] for x, y in curves], axis=0)


def topology_colours(topologies: Sequence[Topology]) -> dict[str, str]:
    """Return a colour for each label: that of the kind, from dark to light over the topologies of one kind."""
    labels: dict[str, list[str]] = {}
    for topology in topologies:
        labels.setdefault(topology.kind, []).append(topology.label)
    return colours_of_variants(labels)


def styles(topologies: Sequence[Topology]) -> dict[str, Style]:
    """Return a style for each arm's name: the topology's colour, with other dashes or lighter for further arms."""
    colours = topology_colours(topologies)
    out: dict[str, Style] = {}
    for topology in topologies:
        arms = topology.every_arm
        looks = variations(colours[topology.label], len(arms))
        out |= {arm.name: look for arm, look in zip(arms, looks, strict=True)}
    return out


class Gallery:
    """Holds the series of a comparison and how they are drawn."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison, self.crowded = comparison, comparison.crowded
        self.colours = topology_colours(comparison.topologies)
        if self.crowded:
            self.series = [
                Series(topology.label, Style(self.colours[topology.label]), topology.arms)
                for topology in comparison.topologies
            ]
        else:
            look = styles(comparison.topologies)
            self.series = [Series(arm.name, look[arm.name], (arm,)) for arm in comparison.arms]
        self.shown = [arm for series in self.series for arm in series.arms]
        episodes = {history.arm: history.episodes for history in comparison.histories}
        self.episodes: list[Episode] = [episode for arm in self.shown for episode in episodes[arm.name]]

    @property
    def rates(self) -> str:
        """Return a sentence for captions: at which learning rate the topologies are shown."""
        several = self.crowded and any(len(topology.rates) > 1 for topology in self.comparison.topologies)
        return "Every topology at its best learning rate." if several else ""

    @property
    def smoothing(self) -> str:
        """Return words for captions that say how noisy curves are smoothed."""
        return "Smoothed" if self.crowded else "Every step in light lines, smoothed in full ones"

    @property
    def marks(self) -> str:
        """Return a sentence for captions: what the marks at flagged steps mean."""
        return "Black marks: flagged steps, by cause; hollow where a rewind undid them." if self.episodes else ""

    def legend(self, series: Sequence[Series]) -> list[tuple[Style, str]]:
        """Return (style, label) of each series."""
        return [
            (one.style, one.label if len(one.arms) == 1 else f"{one.label} ({len(one.arms)} arms)") for one in series
        ]

    def probed(self, key: str) -> list[Series]:
        """Return those series whose probes have a value under the key."""
        return [series for series in self.series if any(len(arm.probe(key)[0]) for arm in series.arms)]

    def mixing(self, key: str = "gain/forward_composite_mean") -> list[Series]:
        """Return those series that mix streams and whose probes have a value under the key."""
        return [series for series in self.probed(key) if series.mixes]


Make = Callable[[Gallery], Sheet | None]


def over_steps(
    name: str,
    key: str,
    measures: Sequence[tuple[str, str, Callable[..., Floats]]],
    *,
    y: str,
    mixing: bool = False,
    log: bool = False,
    sharey: bool = True,
) -> Make:
    """Return a figure of measures of the probes, reduced over sublayers, at every probe.

    Args:
        name: of its files.
        key: the series whose probes hold it are drawn; with ``mixing`` only those that mix streams.
        measures: (title, key of the probes, reduction) of each panel.
        y: name of the axis.
        log: draw a log scale; what is not positive is left out.
        sharey: panels have one scale.
    """

    def make(gallery: Gallery) -> Sheet | None:
        every = gallery.mixing(key) if mixing else gallery.probed(key)
        if not every:
            return None
        sheet = Sheet(name, columns=len(measures), legend=gallery.legend(every), y=y, sharey=sharey)
        for panel, (title, measure, reduce) in enumerate(measures):
            sheet.title(panel, title)
            for series in every:
                x, values = series.mean(functools.partial(_reduced, key=measure, reduce=reduce))
                sheet.line(panel, series.label, x, _positive(values) if log else values, series.style, marker=True)
            if log:
                sheet.log(panel)
        return sheet

    return make


def over_depth(
    name: str,
    key: str,
    measures: Sequence[tuple[str, str]],
    *,
    y: str,
    columns: int,
    mixing: bool = False,
    log: bool = False,
    sharey: bool = True,
) -> Make:
    """Return a figure of measures of the last probe over depth, averaged over the arms of a series.

    Args:
        measures: (title, key of the probes) of each panel. The other arguments are those of ``over_steps``.
        columns: panels in a row.
    """

    def make(gallery: Gallery) -> Sheet | None:
        every = gallery.mixing(key) if mixing else gallery.probed(key)
        if not every:
            return None
        rows = -(-len(measures) // columns)
        legend = gallery.legend(every)
        sheet = Sheet(name, columns=columns, rows=rows, legend=legend, x="depth", y=y, sharey=sharey, height=2.9)
        for panel, (title, measure) in enumerate(measures):
            sheet.title(panel, title)
            for series in every:
                last = [values[-1] for steps, values in (arm.probe(measure) for arm in series.arms) if len(steps)]
                if last and all(len(values) == len(last[0]) for values in last):
                    values = np.mean(last, axis=0)
                    blocks = measure.startswith("representation/")
                    depth = np.arange(len(values), dtype=np.float64) * (2 if blocks else 1) + (1 if blocks else 0)
                    values = _positive(values) if log else values
                    sheet.line(panel, series.label, depth, values, series.style, marker=True)
            sheet.panels[panel].set_xlabel("sublayer")
            if log:
                sheet.log(panel)
        return sheet

    return make


def _positive(values: Floats) -> Floats:
    return np.where(values > 0, values, np.nan)


def _reduced(arm: Arm, key: str, reduce: Callable[..., Floats]) -> tuple[Floats, Floats]:
    steps, values = arm.probe(key)
    return (steps, np.asarray(reduce(values, axis=1))) if len(steps) else (steps, np.zeros(0))


def smooth(values: Floats, share: float = 1 / 40) -> Floats:
    """Return the mean of the finite values within ``share`` of the series either way; NaN where there is none.

    The window never looks farther ahead than back, so that a steep start is not bent; at the end, where curves are flat
    and read closely, it keeps its full reach back.
    """
    n = len(values)
    reach = round(share * n)
    index = np.arange(n)
    back = np.minimum(index, reach)
    low, high = index - back, index + np.minimum(back, n - 1 - index) + 1
    finite = np.isfinite(values)
    total = np.r_[0.0, np.cumsum(np.where(finite, values, 0.0))]
    count = np.r_[0, np.cumsum(finite)]
    with np.errstate(invalid="ignore"):
        return np.asarray((total[high] - total[low]) / (count[high] - count[low]))


def limit_top(axes: Axes, series: Iterable[Floats]) -> None:
    """Leave what lies far above the first losses (a divergence) out of view, so that the curves can be read."""
    finite = [values[np.isfinite(values)] for values in series]
    starts = [float(values[: max(1, len(values) // 50)].max()) for values in finite if len(values)]
    top = max((float(values.max()) for values in finite if len(values)), default=0.0)
    if starts and top > 1.5 * max(starts):
        axes.set_ylim(top=1.25 * max(starts))


def finite_range(values: Iterable[float]) -> tuple[float, float] | None:
    """Return (smallest, largest) of the finite values; None without any."""
    kept = [value for value in values if math.isfinite(value)]
    return (min(kept), max(kept)) if kept else None
