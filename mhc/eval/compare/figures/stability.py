"""Draw the figures of stability: gains, and how far maps are from doubly stochastic."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mhc.eval.common.palette import GREY
from mhc.eval.common.sheet import Floats, Sheet, handle
from mhc.eval.compare.figures.series import MOST_MAPS, Figure, Gallery, finite_range, over_steps
from mhc.eval.compare.runs import DIRECTIONS


def gain_steps(gallery: Gallery) -> Sheet | None:
    """Draw the largest composite gain over sublayers at every probe."""
    some = gallery.mixing()
    if not some:
        return None
    sheet = Sheet("gain_steps", columns=2, legend=gallery.legend(some), y="composite gain")
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


def gain_depth(gallery: Gallery, name: str, pick: Callable[[Floats], int]) -> Sheet | None:
    """Draw composite gains over depth at one probe of each arm, which ``pick`` chooses from its gains [P, S]."""
    some = gallery.mixing()
    if not some:
        return None
    sheet = Sheet(
        name, columns=2, x="sublayer", y="composite gain", legend=gallery.legend(some) if gallery.crowded else ()
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
        if not gallery.crowded:
            lines = [handle(series.style, f"{series.label} (step {step})") for series, step in handles]
            axes.legend(handles=lines, loc="best", fontsize=8)
    return sheet


def gain_heat(gallery: Gallery) -> Sheet | None:
    """Draw composite gains over steps and depth."""
    some = gallery.mixing()[:MOST_MAPS]
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


def _left_out(gallery: Gallery) -> str:
    count = len(gallery.mixing())
    return f" The first {MOST_MAPS} of {count} series." if count > MOST_MAPS else ""


FIGURES = (
    Figure(
        "stability",
        "Composite gain over steps",
        "Token mean, largest over sublayers, at each probe; log scale. A plain residual stands at 1 (grey line).",
        gain_steps,
    ),
    Figure(
        "stability",
        "Composite gain over depth at the last probe",
        "Token mean per sublayer; log scale. Forward: of H_k … H_0, backward: of H_(S−1) … H_k. Shaded and hollow: "
        "sublayer 0, where all streams are still identical, so that mixing them is inert.",
        lambda gallery: gain_depth(gallery, "gain_depth_last", lambda gains: len(gains) - 1),
    ),
    Figure(
        "stability",
        "Composite gain over depth at its peak",
        lambda gallery: (
            "The same at the probe at which each series' gain in that direction is largest"
            + (", a mean over its arms." if gallery.crowded else " (the legend names the step).")
        ),
        lambda gallery: gain_depth(gallery, "gain_depth_peak", lambda gains: int(np.argmax(gains.max(axis=1)))),
    ),
    Figure(
        "stability",
        "Composite gain over steps and depth",
        lambda gallery: (
            f"Token mean; one colour scale for all. Of several seeds the one with the largest gain.{_left_out(gallery)}"
        ),
        gain_heat,
    ),
    Figure(
        "stability",
        "Doubly stochastic error",
        "How far the row and column sums of H_res are from 1: the largest over tokens and sublayers. HC does not ask "
        "for 1; mHC's last half-step makes one of the two exact. What is exactly 0 (identity) is not drawn.",
        over_steps(
            "ds_error",
            "ds_error/rows",
            [("rows", "ds_error/rows", np.max), ("columns", "ds_error/columns", np.max)],
            y="largest |marginal − 1|",
            mixing=True,
            log=True,
        ),
    ),
)
