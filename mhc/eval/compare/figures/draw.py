"""Draw the figures of a comparison, in the order of the report: one table of figures for each of its sections."""

from __future__ import annotations

from pathlib import Path

from mhc.eval.common.page import Drawn
from mhc.eval.compare.comparison import Comparison
from mhc.eval.compare.figures import main, stability, stream
from mhc.eval.compare.figures.series import Gallery

FIGURES = (*main.FIGURES, *stability.FIGURES, *stream.FIGURES)


def draw(comparison: Comparison, folder: Path, data: Path) -> list[Drawn]:
    """Draw every figure that the runs have data for: NAME.png into ``folder``, its data as NAME.csv into ``data``."""
    for path in (folder, data):
        path.mkdir(parents=True, exist_ok=True)
    gallery = Gallery(comparison)
    drawn = []
    for figure in FIGURES:
        sheet = figure.make(gallery)
        if sheet is not None:
            caption = figure.caption if isinstance(figure.caption, str) else figure.caption(gallery)
            drawn.append(Drawn(sheet.save(folder, data), figure.title, caption, sheet.wide, figure.section))
    return drawn
