"""List the parts that an ablation can leave out of a model, and make the edits that leave them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mhc.config import Config
from mhc.model.edits import SUBLAYERS, Edits

Head = tuple[int, int]  # (layer, head)


class Case(NamedTuple):
    """Describes the heads or sublayers that are ablated together."""

    kind: str  # head; attention, feed-forward, block; heads (a set that was asked for), random
    layer: int | None = None
    heads: tuple[Head, ...] = ()
    outputs: tuple[tuple[int, int], ...] = ()  # (layer, which of SUBLAYERS)

    @property
    def name(self) -> str:
        """Return the name in tables and figures."""
        if self.layer is not None and self.kind != "head":
            return f"{self.kind} {self.layer}"
        return f"{self.kind} {' '.join(f'{layer}.{head}' for layer, head in self.heads)}"


class Means(NamedTuple):
    """Holds the mean outputs of heads and sublayers over tokens, float64."""

    heads: np.ndarray  # [L, H, J]: heads' results before the output projection
    outputs: np.ndarray  # [L, 2, D]: F's output


def cases(config: Config, units: Sequence[str] = ("heads", "layers")) -> list[Case]:
    """Return a case for every head, and for every attention, feed-forward and block."""
    layers, heads = config.model.layers, config.attention.heads
    out: list[Case] = []
    if "heads" in units:
        out += [Case("head", layer, ((layer, head),)) for layer in range(layers) for head in range(heads)]
    if "layers" in units:
        for number, kind in enumerate(SUBLAYERS):
            out += [Case(kind, layer, (), ((layer, number),)) for layer in range(layers)]
        out += [Case("block", layer, (), ((layer, 0), (layer, 1))) for layer in range(layers)]
    return out


def edits_of(case: Case, config: Config, factor: float = 0.0, means: Means | None = None) -> Edits:
    """Return edits that multiply what is ablated by ``factor`` and add its mean, where ``means`` are given.

    Their shapes are always the same.
    """
    layers, heads, width = config.model.layers, config.attention.heads, config.model.width
    head_scale, head_shift = np.ones((layers, heads)), np.zeros((layers, heads, config.value_dim))
    output_scale, output_shift = np.ones((layers, 2)), np.zeros((layers, 2, width))
    for which in case.heads:
        head_scale[which] = factor
        head_shift[which] = 0.0 if means is None else means.heads[which]
    for which in case.outputs:
        output_scale[which] = factor
        output_shift[which] = 0.0 if means is None else means.outputs[which]
    leaves = (leaf.astype(np.float32) for leaf in (head_scale, head_shift, output_scale, output_shift))
    return Edits(**dict(zip(("head_scale", "head_shift", "output_scale", "output_shift"), leaves, strict=True)))  # type: ignore[arg-type]
