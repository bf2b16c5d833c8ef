"""Launch, resume and collect a grid: many runs that differ in stated fields.

A grid file builds its arms with the functions below and gives a ``Grid`` from ``get_grid()``; docs/grids.md shows how.
"""

from mhc.extras import require_train
from mhc.grid.arms import Arms, Grid, arm, axis, branches, chain, product, seeds, zipped

__all__ = ["Arms", "Grid", "arm", "axis", "branches", "chain", "product", "seeds", "zipped"]

require_train(__name__)
