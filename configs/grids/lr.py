"""Ask how sensitive each topology is to the learning rate, and which rate is its best: half a decade between rates."""

from __future__ import annotations

from configs.grids.base import choose
from configs.grids.topologies import KINDS
from mhc.grid import Grid, axis, product, seeds


def get_grid(size: str = "laptop") -> Grid:
    """Return 7 rates of plain, hc and mhc, one seed; in cluster size of every kind, three seeds."""
    kinds = choose(size, laptop=("plain", "hc", "mhc"), cluster=KINDS)
    numbers = choose(size, laptop=(0,), cluster=(0, 1, 2))
    rates = choose(
        size, laptop=(1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0), cluster=(1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
    )
    return Grid(
        f"base.py:{size}", product(seeds(*numbers), axis("optimizer.lr", *rates), axis("residual.kind", *kinds))
    )
