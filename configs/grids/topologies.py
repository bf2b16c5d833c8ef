"""Ask which topology is better, and which stays stable: every kind, paired by seed."""

from __future__ import annotations

from configs.grids.base import choose
from mhc.grid import Grid, axis, product, seeds

KINDS = ("plain", "hc", "mhc", "mhc_lite", "kromhc", "identity")


def get_grid(size: str = "laptop") -> Grid:
    """Return 18 arms; 30 in cluster size."""
    numbers = choose(size, laptop=(0, 1, 2), cluster=(0, 1, 2, 3, 4))
    return Grid(f"base.py:{size}", product(seeds(*numbers), axis("residual.kind", *KINDS)))
