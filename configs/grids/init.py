"""Ask whether the initial maps matter: the presets of mhc and its relatives, beside hc, which has one, and plain."""

from __future__ import annotations

from configs.grids.base import choose
from mhc.grid import Grid, axis, chain, product, seeds

PRESETS = ("home", "equivalent", "fanin", "v4")


def get_grid(size: str = "laptop") -> Grid:
    """Return 18 arms; in cluster size also the presets of mhc_lite, kromhc and identity: 54."""
    kinds = choose(size, laptop=("mhc",), cluster=("mhc", "mhc_lite", "kromhc", "identity"))
    presets = product(axis("residual.kind", *kinds), axis("residual.init", *PRESETS))
    return Grid(f"base.py:{size}", product(seeds(0, 1, 2), chain(axis("residual.kind", "plain", "hc"), presets)))
