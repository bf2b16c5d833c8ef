"""Provide what several views draw or print: heat maps, axes of tokens, values with bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from mhc.eval.common.palette import INK
from mhc.eval.common.sheet import Sheet
from mhc.eval.common.statistics import Bounds

FEW = 10  # documents
COLOURS = {"attention": "#0072b2", "feed-forward": "#d55e00", "block": INK}


def heat(
    sheet: Sheet, panel: int, values: np.ndarray, y: str, *, low: float, high: float, exact: np.ndarray | None = None
) -> None:
    """Draw values [rows, columns] as colours around 0, rows upwards and named ``y``; ``exact`` go into the table."""
    axes = sheet.panels[panel]
    for number, row in enumerate(values if exact is None else exact):
        sheet.note(panel, f"{y} {number}", "value", np.arange(len(row)), row)
    image = axes.imshow(
        values, aspect="auto", origin="lower", cmap="RdBu_r", vmin=low, vmax=high, interpolation="nearest"
    )
    axes.grid(visible=False)
    axes.set_ylabel(y)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    bar = sheet.figure.colorbar(image, ax=axes, pad=0.01, aspect=20)
    bar.ax.tick_params(labelsize=8, colors=INK)


def token_axis(axis: Any, labels: Sequence[str], *, least: int) -> None:
    """Label the positions of an axis with their tokens, if there is room for so many."""
    if len(labels) <= least:
        axis.set_ticks(range(len(labels)), [label.replace("$", r"\$") for label in labels], fontsize=6.5)
        if axis.axis_name == "x":
            for tick in axis.get_ticklabels():
                tick.set_rotation(90)


def few(result: Mapping[str, Any]) -> list[str]:
    """Return a line of warning if the intervals rest on few documents."""
    if result["documents"] >= FEW:
        return []
    return [f"note: rows of {result['documents']} document(s): the intervals tell nothing of others (--rows)"]


def with_bounds(bounds: Bounds, signed: bool = False) -> str:
    """Return ``value (low to high)``."""
    sign = "+" if signed else ""
    value, low, high = (bounds[key] for key in ("value", "low", "high"))
    text = f"{value:{sign}.4g}"
    return text if low is None or high is None else f"{text} ({low:{sign}.4g} to {high:{sign}.4g})"
