"""Draw residual maps: matrices, gains, distances and weights over depth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mhc.eval.mappings.maps import MAPS, Mappings
from mhc.eval.mappings.published import streams_used

if TYPE_CHECKING:
    from mhc.eval.common.page import Drawn


def chosen(depth: int) -> list[tuple[str, str, int]]:
    """Return (title, field of Mappings, sublayer) of the matrices that are drawn, as in the paper."""
    middle, last = depth // 2, depth - 1
    single = [(f"H of sublayer {k}", "single", k) for k in sorted({min(1, last), middle, last})]
    products = [("first half", "from_start", max(middle - 1, 0)), ("second half", "to_end", middle)]
    return [*single, *((f"product of the {title}", name, k) for title, name, k in products), ("product", "to_end", 0)]


# Figures --------------------------------------------------------------------------------------------------------------


def draw(every: Sequence[Mappings], folder: Path) -> list[Drawn]:
    """Draw maps_K.png of each checkpoint; gains, distances and weights of all: PNG and CSV in the folder."""
    from mhc.eval.common.page import Drawn
    from mhc.eval.common.palette import styles_of_kinds
    from mhc.eval.common.sheet import Sheet

    look = styles_of_kinds([maps.kind for maps in every])
    legend = [(style, maps.name) for style, maps in zip(look, every, strict=True)]
    drawn = []
    for number, maps in enumerate(every, start=1):
        if maps.single.shape[-1] == 1:
            continue  # plain: one stream that nothing mixes
        which = chosen(len(maps.single))
        sheet = Sheet(f"maps_{number}", columns=len(which), height=2.6, x="", sharey=False, wide=True)
        for panel, (title, name, k) in enumerate(which):
            sheet.title(panel, title)
            sheet.matrix(panel, maps.name, getattr(maps, name)[k])
        caption = (
            f"{_of_what(maps)}; row = output stream, column = input stream. At the right the row sums (what a signal "
            "that all streams share is multiplied with), below the column sums (the same for a gradient)."
        )
        drawn.append(Drawn(sheet.save(folder, folder), f"{maps.kind}: {maps.name}", caption, wide=True, section="main"))

    published = every[0].dynamic is not None
    for name, title, panels, caption, logarithmic in (*_CURVES, *(_PUBLISHED_CURVES if published else ())):
        columns = 3 if name == "dynamic" else 2
        sheet = Sheet(name, columns=columns, rows=len(panels) // columns, legend=legend, x="sublayer", sharey=False)
        for panel, (key, heading) in enumerate(panels):
            sheet.title(panel, heading)
            for maps, style in zip(every, look, strict=True):
                y = np.asarray(_curves(maps)[key], np.float64)
                sheet.line(panel, maps.name, np.arange(len(y), dtype=np.float64), y, style)
            if logarithmic:
                sheet.log(panel)
        caption += "" if published else _OVER_TOKENS.get(name, "")
        drawn.append(Drawn(sheet.save(folder, folder), title, caption, wide=True, section="main"))

    sheet = Sheet("weights", columns=2, rows=len(every), height=1.9, x="sublayer", sharey=False)
    for row, maps in enumerate(every):
        for column, (heading, values) in enumerate((("read: H_pre", maps.pre), ("write: H_post", maps.post))):
            panel = 2 * row + column
            sheet.title(panel, f"{heading}, {maps.name}")
            sheet.cells(panel, maps.name, values, "stream")
    caption = (
        f"How much of each stream a sublayer reads, and how much of its output goes to each. {_of_what(every[0])}."
    )
    drawn.append(Drawn(sheet.save(folder, folder), "Reading and writing", caption, wide=True, section="main"))
    return drawn


_CURVES: tuple[tuple[str, str, tuple[tuple[str, str], ...], str, bool], ...] = (
    (
        "gains",
        "Gains over depth",
        (
            ("gain/forward_single_mean", "forward, each sublayer"),
            ("gain/backward_single_mean", "backward, each sublayer"),
            ("gain/forward_composite_mean", "forward, from the embedding"),
            ("gain/backward_composite_mean", "backward, from the head"),
        ),
        "Largest absolute row sum (forward) and column sum (backward) of H_k and of its products.",
        True,
    ),
    (
        "distances",
        "Distance to identity and to uniform",
        (
            ("mix/to_identity_single", "each sublayer, to the identity"),
            ("mix/to_uniform_single", "each sublayer, to uniform mixing"),
            ("mix/to_identity_composite", "product from the embedding, to the identity"),
            ("mix/to_uniform_composite", "product from the embedding, to uniform mixing"),
        ),
        "Frobenius distance over √N. At the identity streams are kept apart, at uniform mixing they have become one.",
        False,
    ),
)

_OVER_TOKENS = {
    "gains": " They are taken per token and then averaged: the gains of the run's probes. Averaging the matrices "
    "first, as the pictures above do, hides what cancels between tokens."
}
_PUBLISHED_CURVES: tuple[tuple[str, str, tuple[tuple[str, str], ...], str, bool], ...] = (
    (
        "streams",
        "Streams used",
        (
            ("streams/read", "read: H_pre"),
            ("streams/written", "written: H_post"),
            ("streams/told_apart", "told apart: product from the embedding"),
            ("streams/left_at_end", "left at the end: product to the head"),
        ),
        "Participation ratios from 1 to N: of the weights of a read and of a write, and of the squared singular values "
        "of the products, which is 1 where they have made all streams one, and N where streams only change places.",
        False,
    ),
    (
        "dynamic",
        "What depends on the token",
        tuple(
            (f"{name}/{part}", f"H_{part}: {words}")
            for part in MAPS
            for name, words in (("scale", "scale"), ("norm", "norm of φ"), ("logit_rms", "dynamic logits, rms"))
        ),
        "A map's logits are base + scale · (φ m), where m are the normalised streams of a token. The last column is "
        "abs(scale) times the Frobenius norm of the map's rows of φ, over the root of their number: the root mean "
        "square of the second term where every direction of m is equally likely. Streams of a trained model have "
        "preferred directions, so that it is an estimate.",
        False,
    ),
)


def _curves(maps: Mappings) -> dict[str, np.ndarray]:
    """Return the curves over sublayers that figures may show, [S] each."""
    curves = dict(maps.probe)
    if maps.dynamic is not None:
        curves |= {f"streams/{name}": values for name, values in streams_used(maps).items()}
        for name, values in maps.dynamic._asdict().items():
            curves |= {f"{name}/{part}": column for part, column in zip(MAPS, values.T, strict=True)}
    return curves


def _of_what(maps: Mappings) -> str:
    """Return what the matrices of a figure are, for its caption."""
    return "Mean over tokens" if maps.dynamic is None else "Static maps, of base alone"
