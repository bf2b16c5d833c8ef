"""Draw what the residual maps of checkpoints and of published models do."""

from mhc.eval.mappings.maps import Mappings, measure
from mhc.eval.mappings.program import main
from mhc.eval.mappings.published import measure_published

__all__ = ["Mappings", "main", "measure", "measure_published"]
