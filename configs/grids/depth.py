"""Ask what depth does to each topology: gains compound over 2L sublayers, and everything else stays."""

from __future__ import annotations

from configs.grids.base import choose
from configs.grids.topologies import KINDS
from mhc.grid import Grid, axis, product, seeds


def get_grid(size: str = "laptop") -> Grid:
    """Return 4 depths of plain, hc and mhc with one seed; in size cluster, of every kind with three seeds."""
    kinds = choose(size, laptop=("plain", "hc", "mhc"), cluster=KINDS)
    numbers = choose(size, laptop=(0,), cluster=(0, 1, 2))
    depths = choose(size, laptop=(2, 4, 8, 16), cluster=(6, 12, 24, 48))
    return Grid(
        f"base.py:{size}", product(seeds(*numbers), axis("model.layers", *depths), axis("residual.kind", *kinds))
    )
