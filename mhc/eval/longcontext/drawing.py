"""Draw needles by length and depth, and the loss by position."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mhc.eval.common.checkpoints import short_names
from mhc.eval.common.palette import palette
from mhc.eval.common.sheet import Sheet


def draw(every: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Draw needles_K.png of each checkpoint and loss_by_position.png, with their numbers as CSV."""
    names = short_names([one["checkpoint"] for one in every])
    drawn = [
        _draw_needles(result, name, number, folder)
        for number, (result, name) in enumerate(zip(every, names, strict=True), start=1)
        if result.get("retrieval")
    ]
    losses = [
        (name, one["trained_length"], one["loss"]) for name, one in zip(names, every, strict=True) if "loss" in one
    ]
    return [*drawn, _draw_losses(losses, folder)] if losses else drawn


def _draw_needles(result: dict[str, Any], name: str, number: int, folder: Path) -> Path:
    cells = {(cell["length"], cell["depth"]): cell for cell in result["retrieval"]}
    lengths, depths = (sorted({place[axis] for place in cells}) for axis in (0, 1))
    sheet = Sheet(f"needles_{number}", columns=3, height=2.8, x="tokens of the row", sharey=False)
    k, n = result["needle"]["candidates"], result["needle"]["samples"]
    titles = {"gain": f"gain in nats, mean of {n}", "first": f"first of {k} (chance {1 / k:.2g})", "exact": "exact"}
    for panel, (measure, title) in enumerate(titles.items()):
        sheet.title(panel, title)
        values = np.array([[cells[length, depth][measure]["value"] for depth in depths] for length in lengths])
        sheet.cells(panel, name, values, "depth")
        axes = sheet.panels[panel]
        if measure != "gain":
            axes.images[0].set_clim(0, 1)
        low, high = axes.images[0].get_clim()
        for (x, y), value in np.ndenumerate(values):
            colour = "white" if value < (low + high) / 2 else "black"
            axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour)
        axes.set_xticks(range(len(lengths)), list(map(str, lengths)))
        axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
    return sheet.save(folder, folder)


def _draw_losses(losses: Sequence[tuple[str, int, dict[str, Any]]], folder: Path) -> Path:
    """Draw a row of panels for each checkpoint, its losses and their differences, from (name, trained length, loss)."""
    labels = list(dict.fromkeys(series["scaling"] for _, _, loss in losses for series in loss["series"]))
    looks = dict(zip(labels, palette(len(labels)), strict=True))
    columns = 2 if any(len(loss["series"]) > 1 for _, _, loss in losses) else 1
    sheet = Sheet(
        "loss_by_position",
        columns=columns,
        rows=len(losses),
        legend=[(style, label) for label, style in looks.items()],
        x="tokens of context",
        sharey=False,
        wide=True,
    )
    for row, (name, trained, loss) in enumerate(losses):
        heading = f"{name}, {loss['documents']} {'rows' if loss['joined'] else 'documents'}"
        for column, (measure, title) in enumerate((("loss", "nats"), ("minus_first", "nats more than as trained"))):
            if column == columns:
                continue
            panel = row * columns + column
            sheet.title(panel, f"{heading}: {title}, 95 %")
            for series in loss["series"]:
                curve = [point for point in series["curve"] if measure in point]
                x = np.array([point["to"] for point in curve], float)
                for what in ("value", "low", "high") if curve else ():
                    if what != "value" and column == 0 and series is not loss["series"][0]:
                        continue  # as wide as the first one's; what matters is the difference
                    y = np.array([point[measure][what] for point in curve], float)
                    width, alpha = (1.5, 1.0) if what == "value" else (0.7, 0.6)
                    look = looks[series["scaling"]]
                    sheet.line(panel, series["scaling"], x, y, look, what=what, width=width, alpha=alpha)
            sheet.panels[panel].axvline(trained, color="#8a8a8a", linewidth=1)
    return sheet.save(folder, folder)
