"""Launch, resume and collect grids: many runs that differ in stated fields.

A grid file builds its arms with the functions below and returns a ``Grid`` from ``get_grid()``, as docs/grids.md shows.
"""

from mhc.extras import require_train
from mhc.grid.arms import Arms, Grid, arm, axis, branches, chain, product, seeds, zipped

__all__ = ["Arms", "Grid", "arm", "axis", "branches", "chain", "product", "seeds", "zipped"]

require_train(__name__)
