"""Draw one figure of panels and keep the numbers drawn in it: saved as PNG and as CSV.

PNG files are twice as dense as a page shows them. A CSV holds what is drawn: panel, series, what (the kind of
mark), x, y.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray
from PIL import Image

from mhc.eval.common.palette import GRID, INK, Style

Floats = NDArray[np.float64]

NARROW, WIDE = 5.3, 10.8  # inches; a page shows an inch as 100 CSS pixels
DPI = 200
POINTS = 1500  # drawn per line: more than the pixels of a figure's width


class Sheet:
    """Holds a figure of panels in rows and columns, and the table of what is drawn in it.

    Args:
        name: of its files.
        columns, rows: panels.
        legend: (style, label) above the figure.
        height: inches of a row of panels.
        x, y: names of the axes; ``y`` labels the first panel of each row.
        sharey: panels of a row have one scale.
        wide: takes the page's width also with one column.
    """

    def __init__(
        self,
        name: str,
        *,
        columns: int = 1,
        rows: int = 1,
        legend: Sequence[tuple[Style, str]] = (),
        height: float = 3.25,
        x: str = "step",
        y: str = "",
        sharey: bool = True,
        wide: bool = False,
    ):
        self.name, self.x, self.y = name, x, y
        self.table: list[tuple[str, str, str, float, float]] = []
        self.titles: dict[int, str] = {}
        width = WIDE if columns > 1 or wide else NARROW
        handles = [handle(style, label) for style, label in legend]
        longest = max((len(label) for _, label in legend), default=0)
        per_row = max(1, min(6, int(width * 15 / (longest + 7))))
        lines = -(-len(handles) // per_row)
        self.figure = Figure(figsize=(width, height * rows + 0.19 * lines), layout="constrained", facecolor="white")
        grid = self.figure.subplots(rows, columns, squeeze=False, sharey="row" if sharey else False)
        self.panels: list[Axes] = list(grid.ravel())
        for axes in self.panels:
            axes.grid(color=GRID, linewidth=0.7)
            axes.set_axisbelow(True)
            axes.tick_params(colors=INK, labelsize=8.5, width=0.7)
            axes.spines[["top", "right"]].set_visible(False)
            axes.spines[["left", "bottom"]].set_color("#9a9a9a")
            for label in (axes.xaxis.label, axes.yaxis.label, axes.title):
                label.set_color(INK)
                label.set_fontsize(9)
            axes.set_xlabel(x)
            axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        for row in range(rows):
            grid[row, 0].set_ylabel(y)
        if handles:
            self.figure.legend(handles=handles, loc="outside upper left", ncols=per_row, frameon=False, fontsize=8.5)

    @property
    def wide(self) -> bool:
        """Return whether the figure takes the page's width."""
        return bool(self.figure.get_figwidth() > NARROW)

    def title(self, panel: int, text: str) -> None:
        """Set the title of a panel."""
        self.titles[panel] = text
        self.panels[panel].set_title(text, fontsize=9.5, color=INK)

    def note(self, panel: int, series: str, what: str, x: Iterable[float], y: Iterable[float]) -> None:
        """Put numbers into the table."""
        title = self.titles.get(panel, "")
        self.table += [(title, series, what, float(a), float(b)) for a, b in zip(x, y, strict=True)]

    def line(
        self,
        panel: int,
        series: str,
        x: Floats,
        y: Floats,
        style: Style,
        *,
        what: str = "value",
        marker: bool = False,
        width: float = 1.6,
        alpha: float = 1.0,
    ) -> None:
        """Draw a line, broken where a value is not finite; with ``marker`` every value is drawn as a point too."""
        x, y = (x, y) if marker else envelope(x, y)
        self.note(panel, series, what, x, y)
        self.panels[panel].plot(
            x,
            np.where(np.isfinite(y), y, np.nan),
            color=style.colour,
            dashes=style.dashes or (None, None),
            linewidth=width,
            alpha=alpha,
            marker="o" if marker else "",
            markersize=3,
        )

    def points(
        self,
        panel: int,
        series: str,
        x: Floats,
        y: Floats,
        style: Style,
        *,
        what: str = "point",
        marker: str = "o",
        size: float = 4.5,
        filled: bool = False,
    ) -> None:
        """Draw points without a line, hollow unless ``filled``."""
        self.note(panel, series, what, x, y)
        self.panels[panel].plot(
            x,
            np.where(np.isfinite(y), y, np.nan),
            linestyle="none",
            marker=marker,
            markersize=size,
            markerfacecolor=style.colour if filled else "white",
            markeredgecolor=style.colour,
            markeredgewidth=1.2,
            zorder=4,
        )

    def interval(self, panel: int, series: str, x: float, values: tuple[float, float, float], style: Style) -> None:
        """Draw a point with its interval; ``values`` are (value, low, high)."""
        value, low, high = values
        for what, y in (("value", value), ("low", low), ("high", high)):
            self.note(panel, series, what, [x], [y])
        self.panels[panel].vlines([x], [low], [high], color=style.colour, linewidth=1.6)
        self.panels[panel].plot([x], [value], marker="o", markersize=5, color=style.colour)

    def level(self, panel: int, value: float, text: str = "", *, colour: str = "#8a8a8a", dotted: bool = False) -> None:
        """Draw a horizontal line with its name at the right."""
        axes = self.panels[panel]
        axes.axhline(value, color=colour, linewidth=1, dashes=(1.4, 1.4) if dotted else (None, None))
        if text:
            axes.annotate(
                text,
                (1, value),
                xycoords=("axes fraction", "data"),
                xytext=(-3, 2),
                textcoords="offset points",
                ha="right",
                va="bottom",
                color="#666666",
                fontsize=8,
            )

    def log(self, panel: int) -> None:
        """Give a panel a log scale, with plain numbers at its ticks."""
        axes = self.panels[panel]
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

    def heat(
        self, panel: int, series: str, x: Floats, values: Floats, *, low: float, high: float, colours: bool = False
    ) -> None:
        """Draw values [P, S] at x [P] as colours on a log scale from low to high: x to the right, S upwards."""
        axes = self.panels[panel]
        title = self.titles.get(panel, "")
        self.table += [
            (title, series, f"sublayer {k}", float(step), float(value))
            for step, row in zip(x, values, strict=True)
            for k, value in enumerate(row)
        ]
        middle = (x[1:] + x[:-1]) / 2
        edges = np.r_[x[0], middle, x[-1]] if len(x) > 1 else np.array([x[0] - 0.5, x[0] + 0.5])
        clipped = np.clip(np.nan_to_num(values, nan=high, posinf=high), low, high)
        mesh = axes.pcolormesh(
            edges,
            np.arange(values.shape[1] + 1) - 0.5,
            clipped.T,
            norm=LogNorm(low, high),
            cmap="viridis",
            rasterized=True,
        )
        axes.grid(visible=False)
        axes.set_ylim(-0.5, values.shape[1] - 0.5)
        axes.yaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        if colours:
            bar = self.figure.colorbar(mesh, ax=self.panels, shrink=0.9, pad=0.01, aspect=30)
            bar.ax.tick_params(labelsize=8, colors=INK)
            bar.ax.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
            bar.ax.yaxis.set_minor_formatter(ticker.NullFormatter())

    def cells(self, panel: int, series: str, values: Floats, y: str) -> None:
        """Draw values [S, N] as colours with their scale: sublayers to the right, N upwards, named ``y``."""
        axes = self.panels[panel]
        for n, column in enumerate(values.T):
            self.note(panel, series, f"{y} {n}", np.arange(len(column)), column)
        image = axes.imshow(values.T, aspect="auto", origin="lower", cmap="viridis", interpolation="nearest")
        axes.grid(visible=False)
        axes.set_ylabel(y)
        axes.yaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        bar = self.figure.colorbar(image, ax=axes, pad=0.01, aspect=16)
        bar.ax.tick_params(labelsize=8, colors=INK)

    def matrix(self, panel: int, series: str, values: Floats) -> None:
        """Draw values [rows, columns] as coloured cells with numbers, row sums at the right, column sums below.

        Colours reach from -1 to 1: beyond, the numbers tell.
        """
        axes = self.panels[panel]
        for i, row in enumerate(values):
            self.note(panel, series, f"row {i}", np.arange(len(row)), row)
        axes.imshow(np.clip(values, -1, 1), cmap="RdBu_r", vmin=-1, vmax=1)
        axes.grid(visible=False)
        axes.set_xticks(range(values.shape[1]), [_short(total) for total in values.sum(axis=0)])
        axes.set_yticks(range(len(values)), [_short(total) for total in values.sum(axis=1)])
        axes.yaxis.tick_right()
        axes.tick_params(length=0, labelsize=7)
        axes.spines[:].set_visible(False)
        for (i, j), value in np.ndenumerate(values):
            colour = "white" if abs(value) > 0.6 else INK
            axes.text(j, i, _short(value), ha="center", va="center", fontsize=6.5, color=colour)

    def save(self, figures: Path, data: Path) -> Path:
        """Write NAME.png and NAME.csv; return the PNG's path."""
        path = figures / f"{self.name}.png"
        self.figure.set_dpi(DPI)
        canvas = FigureCanvasAgg(self.figure)
        canvas.draw()  # savefig would draw twice
        # A palette makes the file, and the page that it is put into, three times as small.
        image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize(256, dither=Image.Dither.NONE)
        image.save(path, optimize=True, dpi=(DPI, DPI))
        with (data / f"{self.name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["panel", "series", "what", self.x, self.y or "value"])
            for panel, series, what, x, y in self.table:
                writer.writerow([panel, series, what, f"{x:.9g}", f"{y:.9g}"])
        return path


def _short(value: float) -> str:
    """Return a number in about four characters: 0.12, 12.3, 123, 1e5."""
    if abs(value) >= 999.5:
        return f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    return f"{value:.2f}" if abs(value) < 9.995 else f"{value:.3g}"


def handle(style: Style, label: str) -> Line2D:
    """Return the line that shows a style in a legend."""
    return Line2D([], [], color=style.colour, dashes=style.dashes or (None, None), linewidth=1.6, label=label)


def envelope(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Return at most 2·POINTS points that keep the extremes of every stretch, so that no spike is lost."""
    size = len(x) // POINTS
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
