"""Ask whether the residual matters: none, a scaled one, and output projections that do not shrink with depth."""

from __future__ import annotations

from configs.grids.base import choose
from mhc.grid import Grid, arm, axis, chain, product, seeds


def get_grid(size: str = "laptop") -> Grid:
    """Return 18 arms, 27 in cluster size.

    ``scale`` s: x' = s x + F(x), 0: no residual. ``init.scale_residual=False``: the output projections start at full
    size instead of 1/sqrt(2L) of it.
    """
    numbers = choose(size, laptop=(0, 1), cluster=(0, 1, 2))
    kinds = axis("residual.kind", "plain", "hc", "mhc")
    controls = chain(
        kinds,
        product(axis("residual.kind", "plain"), axis("residual.scale", 0.0, 0.7, 0.9)),
        product(kinds, arm({"init.scale_residual": False})),
    )
    return Grid(f"base.py:{size}", product(seeds(*numbers), controls))
