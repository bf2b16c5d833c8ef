"""Ask how nearly doubly stochastic H_res must be: Sinkhorn iterations 1, 2, 5, 20 of mhc, beside identity and plain."""

from __future__ import annotations

from configs.grids.base import choose
from mhc.grid import Grid, axis, chain, product, seeds


def get_grid(size: str = "laptop") -> Grid:
    """Return 18 arms; 30 in cluster size."""
    numbers = choose(size, laptop=(0, 1, 2), cluster=(0, 1, 2, 3, 4))
    several = product(axis("residual.kind", "mhc"), axis("residual.iters", 1, 2, 5, 20))
    return Grid(f"base.py:{size}", product(seeds(*numbers), chain(axis("residual.kind", "plain", "identity"), several)))
