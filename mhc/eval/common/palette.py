"""Choose the colours and dashes of series: a topology has its own colour, other series have spare ones."""

from __future__ import annotations

import colorsys
import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

INK, GRID, GREY = "#333333", "#e3e3e3", "#4d4d4d"

# Okabe and Ito's palette: its colours stay apart under the common kinds of colour blindness. A kind that is not listed
# takes a spare colour.
_COLOURS = {
    "plain": GREY,
    "hc": "#d55e00",
    "mhc": "#0072b2",
    "mhc_lite": "#009e73",
    "kromhc": "#b5588f",
    "identity": "#8c6d31",
}
_SPARE_COLOURS = ("#e69f00", "#56b4e9", "#882255", "#44aa99", "#999933")
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 1.8), (1.4, 1.4), (6, 1.5, 1.4, 1.5))


@dataclasses.dataclass(frozen=True)
class Style:
    """Describes how one series is drawn in every figure."""

    colour: str
    dashes: tuple[float, ...] = ()


def colours_of_kinds(kinds: Iterable[str]) -> dict[str, str]:
    """Return a colour for each residual kind: the kind's own, or a spare one in the order of ``kinds``."""
    spare = itertools.cycle(_SPARE_COLOURS)
    return {kind: _COLOURS[kind] if kind in _COLOURS else next(spare) for kind in dict.fromkeys(kinds)}


def colours_of_variants(labels: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return a colour for each label of each kind: the kind's own, from dark to light where it has several labels."""
    colours = colours_of_kinds(labels)
    return {
        label: _shade(colours[kind], index, len(variants))
        for kind, variants in labels.items()
        for index, label in enumerate(variants)
    }


def palette(count: int) -> list[Style]:
    """Return styles for series that are no topologies: other colours first, then other dashes."""
    colours = [*_COLOURS.values(), *_SPARE_COLOURS]
    return [Style(colours[i % len(colours)], DASHES[i // len(colours) % len(DASHES)]) for i in range(count)]


def styles_of_kinds(kinds: Sequence[str]) -> list[Style]:
    """Return a style for each series of these kinds: the kinds' own colours where no two are of one kind."""
    if len(set(kinds)) == len(kinds) and all(kind in _COLOURS for kind in kinds):
        return [Style(_COLOURS[kind]) for kind in kinds]
    return palette(len(kinds))


def variations(colour: str, count: int) -> list[Style]:
    """Return styles of one colour for ``count`` series: other dashes first, then lighter shades."""
    styles = []
    for index in range(count):
        shade = index // len(DASHES)
        styles.append(
            Style(_lighter(colour, min(0.75, 0.25 * shade) if shade < 4 else 0.8), DASHES[index % len(DASHES)])
        )
    return styles


def _shade(colour: str, index: int, count: int) -> str:
    """Return the shade number ``index`` of ``count``, from dark to light; a single one is the colour itself."""
    if count == 1:
        return colour
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    hue, _, saturation = colorsys.rgb_to_hls(red, green, blue)
    lightness = 0.22 + 0.5 * index / (count - 1)
    channels = colorsys.hls_to_rgb(hue, lightness, saturation)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)


def _lighter(colour: str, share: float) -> str:
    """Return ``colour`` mixed with ``share`` of white."""
    channels = [int(colour[index : index + 2], 16) for index in (1, 3, 5)]
    return "#" + "".join(f"{round(channel + (255 - channel) * share):02x}" for channel in channels)
