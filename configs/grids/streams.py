"""Ask how many streams to use: N = 1, 2, 4, 8 of hc and mhc beside plain; N = 1 separates maps from streams."""

from __future__ import annotations

from configs.grids.base import choose
from mhc.grid import Grid, arm, axis, chain, product, seeds


def get_grid(size: str = "laptop") -> Grid:
    """Return 18 arms; 27 in cluster size."""
    numbers = choose(size, laptop=(0, 1), cluster=(0, 1, 2))
    several = product(axis("residual.kind", "hc", "mhc"), axis("residual.n", 1, 2, 4, 8))
    return Grid(f"base.py:{size}", product(seeds(*numbers), chain(arm({"residual.kind": "plain"}), several)))
