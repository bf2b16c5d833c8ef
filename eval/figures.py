"""The figures of a comparison, drawn with matplotlib and returned as PNG files twice as dense as a page shows them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from eval.ngram import Baselines
from eval.runs import DIRECTIONS, Arm, Floats, gap_to_plain

# Okabe and Ito's palette: its colours stay apart under the common kinds of colour blindness.
_COLOURS = {
    "plain": "#4d4d4d",
    "hc": "#d55e00",
    "mhc": "#0072b2",
    "mhc_lite": "#009e73",
    "kromhc": "#b5588f",
    "identity": "#8c6d31",
}
_SPARE_COLOURS = ("#e69f00", "#56b4e9", "#882255", "#44aa99", "#999933")
_DASHES: tuple[tuple[float, ...], ...] = ((), (5, 1.8), (1.4, 1.4), (6, 1.5, 1.4, 1.5))
_INK, _GRID = "#333333", "#e3e3e3"
_DPI = 200
_CROWD = 8  # more arms than this: the legend names kinds, and raw lines are left out
_POINTS = 1500  # drawn per line: more than the pixels of a figure's width
_NARROW, _WIDE = 5.3, 10.8  # inches; a page shows an inch as 100 CSS pixels


@dataclasses.dataclass(frozen=True)
class Style:
    """How one arm is drawn in every figure."""

    colour: str
    dashes: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A figure on disk.

    Attributes:
        path: the PNG file.
        title: its heading in the report.
        caption: what it shows, in a sentence or two.
        wide: takes a whole row.
    """

    path: Path
    title: str
    caption: str
    wide: bool


def styles(arms: Sequence[Arm]) -> dict[str, Style]:
    """A style per arm's name: one colour per kind, other dashes, then lighter shades, for further arms of a kind."""
    spare = itertools.cycle(_SPARE_COLOURS)
    colours = dict(_COLOURS)
    seen: dict[str, int] = {}
    out = {}
    for arm in arms:
        if arm.kind not in colours:
            colours[arm.kind] = next(spare)
        index = seen.get(arm.kind, 0)
        seen[arm.kind] = index + 1
        shade = index // len(_DASHES) % 3
        out[arm.name] = Style(_lighter(colours[arm.kind], 0.28 * shade), _DASHES[index % len(_DASHES)])
    return out


def draw(arms: Sequence[Arm], baselines: Baselines, folder: Path) -> list[Drawn]:
    """Draw every figure that the arms have data for into ``folder`` (made when missing), in the order of the report."""
    folder.mkdir(parents=True, exist_ok=True)
    look = styles(arms)
    drawn: list[Drawn] = []
    raw = "Every step in light lines, smoothed in full ones" if len(arms) <= _CROWD else "Smoothed"

    def add(name: str, figure: Figure, title: str, caption: str) -> None:
        path = folder / f"{name}.png"
        FigureCanvasAgg(figure)
        figure.savefig(path, dpi=_DPI)
        drawn.append(Drawn(path, title, caption, figure.get_figwidth() > _NARROW))

    add("loss", _loss(arms, look), "Training loss", f"{raw}; points: validation.")
    if any(len(arm.column("val_bits_per_byte")[0]) for arm in arms):
        add(
            "validation",
            _validation(arms, look, baselines),
            "Validation bits per byte",
            "Grey lines: byte n-gram models counted on the training split and scored on the validation split.",
        )
    if any(arm.kind == "plain" for arm in arms) and any(arm.kind != "plain" for arm in arms):
        add(
            "loss_gap",
            _gap(arms, look),
            "Loss gap to plain",
            "Loss minus plain's at the same step (below zero is better than plain), smoothed; points: validation. "
            "Plain is the arm that differs in the residual alone; without one, the mean of those with the same seeds, "
            "else of all.",
        )
    add(
        "grad_norm",
        _grad_norm(arms, look),
        "Gradient norm",
        f"Global norm before clipping, log scale. {raw}.",
    )
    probed = [arm for arm in arms if arm.kind != "plain" and len(arm.gains("forward")[0])]
    if probed:
        add(
            "gain_steps",
            _gain_steps(probed, look),
            "Composite gain over steps",
            "Token mean, largest over sublayers, at each probe; log scale. A plain residual stands at 1 (grey line).",
        )
        add(
            "gain_depth_last",
            _gain_depth(probed, look, lambda gains: len(gains) - 1),
            "Composite gain over depth at the last probe",
            "Token mean per sublayer; log scale. Forward: of H_k … H_0, backward: of H_(S−1) … H_k. Shaded and hollow: "
            "sublayer 0, where all streams are still identical, so that mixing them is inert.",
        )
        add(
            "gain_depth_peak",
            _gain_depth(probed, look, lambda gains: int(np.argmax(gains.max(axis=1)))),
            "Composite gain over depth at its peak",
            "The same at the probe at which each arm's gain in that direction is largest (the legend names the step).",
        )
    return drawn


def smooth(values: Floats, share: float = 1 / 40) -> Floats:
    """Mean of the finite values within ``share`` of the series either way; NaN where there is none.

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


def _loss(arms: Sequence[Arm], look: dict[str, Style]) -> Figure:
    figure, (axes,) = _figure(arms, look)
    for arm in arms:
        steps, loss = arm.column("loss")
        _raw_and_smooth(axes, steps, loss, look[arm.name], raw=len(arms) <= _CROWD)
        _points(axes, *arm.column("val_loss"), look[arm.name])
    axes.set_ylabel("loss (nats per token)")
    _limit_top(axes, [arm.column("loss")[1] for arm in arms])
    return _steps(figure, axes)


def _validation(arms: Sequence[Arm], look: dict[str, Style], baselines: Baselines) -> Figure:
    figure, (axes,) = _figure(arms, look)
    for arm in arms:
        steps, bits = arm.column("val_bits_per_byte")
        _line(axes, steps, bits, look[arm.name], marker="o", markersize=3.5)
    for name, value in (("unigram", baselines.unigram), ("bigram", baselines.bigram)):
        if value is not None:
            axes.axhline(value, color="#8a8a8a", linewidth=1)
            axes.annotate(
                f"{name} {value:.2f}",
                (1, value),
                xycoords=("axes fraction", "data"),
                xytext=(-3, 2),
                textcoords="offset points",
                ha="right",
                va="bottom",
                color="#666666",
                fontsize=8,
            )
    axes.set_ylabel("bits per byte")
    axes.set_xlim(left=0)
    axes.margins(y=0.08)
    return _steps(figure, axes)


def _gap(arms: Sequence[Arm], look: dict[str, Style]) -> Figure:
    others = [arm for arm in arms if arm.kind != "plain"]
    figure, (axes,) = _figure(others, look)
    axes.axhline(0, color=_COLOURS["plain"], linewidth=1)
    drawn = []
    for arm in others:
        steps, gap = gap_to_plain(arm, arms, "loss")
        smoothed = smooth(gap, 1 / 16)  # a difference of two noisy curves
        _line(axes, steps, smoothed, look[arm.name])
        _points(axes, *gap_to_plain(arm, arms, "val_loss"), look[arm.name])
        drawn.append(smoothed)
    axes.set_ylabel("loss − plain's (nats per token)")
    finite = np.concatenate([series[np.isfinite(series)] for series in drawn])
    if len(finite) > 20:  # the first steps after init must not set the scale
        low, high = np.quantile(finite, [0.02, 0.98])
        room = 0.25 * max(high - low, 1e-3)
        axes.set_ylim(max(min(low, 0) - room, -20), min(max(high, 0) + room, 20))
    return _steps(figure, axes)


def _grad_norm(arms: Sequence[Arm], look: dict[str, Style]) -> Figure:
    figure, (axes,) = _figure(arms, look)
    for arm in arms:
        _raw_and_smooth(axes, *arm.column("grad_norm"), look[arm.name], raw=len(arms) <= _CROWD)
    clips = {arm.flat.get("optimizer.clip_norm") for arm in arms}
    clip = clips.pop() if len(clips) == 1 else None
    if clip is not None:
        axes.axhline(clip, color="#8a8a8a", linewidth=1, dashes=(1.4, 1.4))
        axes.annotate(
            f"clipped to {clip:g}",
            (1, clip),
            xycoords=("axes fraction", "data"),
            xytext=(-3, 2),
            textcoords="offset points",
            ha="right",
            va="bottom",
            color="#666666",
            fontsize=8,
        )
    axes.set_ylabel("gradient norm")
    _log(axes)
    return _steps(figure, axes)


def _gain_steps(arms: Sequence[Arm], look: dict[str, Style]) -> Figure:
    figure, panels = _figure(arms, look, panels=2)
    for axes, direction in zip(panels, DIRECTIONS, strict=True):
        axes.axhline(1, color=_COLOURS["plain"], linewidth=1)
        for arm in arms:
            steps, gains = arm.gains(direction)
            _line(axes, steps, gains.max(axis=1), look[arm.name], marker="o", markersize=3)
        axes.set_title(direction, fontsize=9.5)
        _log(axes)
        _steps(figure, axes)
    panels[0].set_ylabel("composite gain")
    return figure


def _gain_depth(arms: Sequence[Arm], look: dict[str, Style], pick: Callable[[Floats], int]) -> Figure:
    figure, panels = _figure(arms, look, panels=2, legend=False)
    for axes, direction in zip(panels, DIRECTIONS, strict=True):
        axes.axvspan(-0.5, 0.5, color="#efefef", linewidth=0)
        axes.axhline(1, color=_COLOURS["plain"], linewidth=1)
        handles = []
        for arm in arms:
            steps, gains = arm.gains(direction)
            row = pick(gains)
            style = look[arm.name]
            depth = np.arange(gains.shape[1], dtype=np.float64)
            _line(axes, depth, gains[row], style, marker="o", markersize=3)
            _points(axes, depth[:1], gains[row, :1], style)
            handles.append(_handle(style, f"{arm.name} (step {int(steps[row])})"))
        axes.set_title(direction, fontsize=9.5)
        axes.set_xlabel("sublayer")
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        _log(axes)
        axes.legend(handles=handles if len(arms) <= _CROWD else _kind_handles(arms, look), loc="best", fontsize=8)
    panels[0].set_ylabel("composite gain")
    return figure


def _figure(
    arms: Sequence[Arm], look: dict[str, Style], *, panels: int = 1, legend: bool = True
) -> tuple[Figure, list[Axes]]:
    """An empty figure of one narrow panel, or of several side by side with one y axis; the legend above them."""
    width = _WIDE if panels > 1 else _NARROW
    handles = []
    if legend and len(arms) <= _CROWD:
        handles = [_handle(look[arm.name], arm.name) for arm in arms]
    elif legend:
        handles = _kind_handles(arms, look)
    longest = max((len(str(handle.get_label())) for handle in handles), default=0)
    per_row = max(1, min(6, int(width * 13 / (longest + 7))))
    rows = -(-len(handles) // per_row)
    figure = Figure(figsize=(width, 3.25 + 0.19 * rows), layout="constrained", facecolor="white")
    grid = figure.subplots(1, panels, squeeze=False, sharey=True)
    for axes in grid[0]:
        axes.grid(color=_GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.tick_params(colors=_INK, labelsize=8.5, width=0.7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("#9a9a9a")
        for label in (axes.xaxis.label, axes.yaxis.label, axes.title):
            label.set_color(_INK)
        axes.xaxis.label.set_fontsize(9)
        axes.yaxis.label.set_fontsize(9)
    if handles:
        figure.legend(handles=handles, loc="outside upper left", ncols=per_row, frameon=False, fontsize=8.5)
    return figure, list(grid[0])


def _steps(figure: Figure, axes: Axes) -> Figure:
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    return figure


def _handle(style: Style, label: str) -> Line2D:
    return Line2D([], [], color=style.colour, dashes=style.dashes or (None, None), linewidth=1.6, label=label)


def _kind_handles(arms: Sequence[Arm], look: dict[str, Style]) -> list[Line2D]:
    """One handle per kind, in the colour of its first arm."""
    kinds: dict[str, list[Arm]] = {}
    for arm in arms:
        kinds.setdefault(arm.kind, []).append(arm)
    return [
        _handle(Style(look[group[0].name].colour, ()), f"{kind} ({len(group)} arms)" if len(group) > 1 else kind)
        for kind, group in kinds.items()
    ]


def _line(axes: Axes, x: Floats, y: Floats, style: Style, *, marker: str = "", markersize: float = 0) -> None:
    """A line, broken where a value is not finite."""
    x, y = _thin(x, y) if not marker else (x, y)
    finite = np.isfinite(y)
    axes.plot(
        x,
        np.where(finite, y, np.nan),
        color=style.colour,
        dashes=style.dashes or (None, None),
        linewidth=1.6,
        marker=marker,
        markersize=markersize,
    )


def _raw_and_smooth(axes: Axes, x: Floats, y: Floats, style: Style, *, raw: bool) -> None:
    """The smoothed series, over its raw values; a cross where it stops being finite."""
    if raw:
        raw_x, raw_y = _envelope(x, np.where(np.isfinite(y), y, np.nan))
        axes.plot(raw_x, raw_y, color=style.colour, linewidth=0.7, alpha=0.3)
    _line(axes, x, smooth(y), style)
    broken = np.flatnonzero(~np.isfinite(y))
    if len(broken):
        before = np.flatnonzero(np.isfinite(y[: broken[0]]))
        if len(before):
            axes.plot(x[broken[0]], y[before[-1]], marker="x", color=style.colour, markersize=8, markeredgewidth=2)


def _points(axes: Axes, x: Floats, y: Floats, style: Style) -> None:
    """Hollow points, without a line."""
    axes.plot(
        x,
        np.where(np.isfinite(y), y, np.nan),
        linestyle="none",
        marker="o",
        markersize=4.5,
        markerfacecolor="white",
        markeredgecolor=style.colour,
        markeredgewidth=1.2,
    )


def _thin(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    stride = max(1, len(x) // _POINTS)
    return x[::stride], y[::stride]


def _envelope(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """At most 2·_POINTS points that keep the extremes of every stretch, so that no spike is lost."""
    size = len(x) // _POINTS
    if size < 2:
        return x, y
    whole = len(x) // size * size
    blocks = y[:whole].reshape(-1, size)
    low = np.argmin(np.where(np.isnan(blocks), np.inf, blocks), axis=1)
    high = np.argmax(np.where(np.isnan(blocks), -np.inf, blocks), axis=1)
    start = np.arange(len(blocks)) * size
    index = np.sort(np.stack([start + low, start + high], axis=1), axis=1).ravel()
    index = np.r_[index, np.arange(whole, len(x))]
    return x[index], y[index]


def _limit_top(axes: Axes, series: Iterable[Floats]) -> None:
    """Leave what lies far above the first losses (a divergence) out of view, so that the curves can be read."""
    finite = [values[np.isfinite(values)] for values in series]
    starts = [float(values[: max(1, len(values) // 50)].max()) for values in finite if len(values)]
    top = max((float(values.max()) for values in finite if len(values)), default=0.0)
    if starts and top > 1.5 * max(starts):
        axes.set_ylim(top=1.25 * max(starts))


def _log(axes: Axes) -> None:
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high < 1.3 * low:  # a scale made of noise would look like a difference
        middle = (low * high) ** 0.5
        axes.set_ylim(middle / 1.15, middle * 1.15)
        low, high = axes.get_ylim()
    formatter = ticker.FuncFormatter(lambda value, _: f"{value:g}" if 1e-3 <= value < 1e5 else f"{value:.0e}")
    axes.yaxis.set_major_formatter(formatter)
    if high < 12 * low:
        nice = ticker.LogLocator(subs=(1, 1.5, 2, 3, 5, 7)) if high > 2 * low else ticker.MaxNLocator(6)
        axes.yaxis.set_major_locator(nice)
        axes.yaxis.set_minor_locator(ticker.NullLocator())
    else:
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())


def _lighter(colour: str, share: float) -> str:
    """``colour`` mixed with ``share`` of white."""
    channels = [int(colour[index : index + 2], 16) for index in (1, 3, 5)]
    return "#" + "".join(f"{round(channel + (255 - channel) * share):02x}" for channel in channels)
