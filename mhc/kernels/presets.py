"""What Sinkhorn may be asked for: its presets, and the one check of them for kernels, functions and modules."""

from __future__ import annotations

import math

from mhc.errors import did_you_mean
from mhc.kinds import SINKHORN_PRESETS


def check_sinkhorn(preset: str, iters: int = 1, eps: float = 0.0) -> None:
    """Refuse an unknown preset, fewer than one iteration, or an eps that no sum can be divided by.

    Raises:
      ValueError: as said, with what is allowed.
    """
    if preset not in SINKHORN_PRESETS:
        near = did_you_mean(preset, SINKHORN_PRESETS) if isinstance(preset, str) else ""
        raise ValueError(f"unknown Sinkhorn preset {preset!r}; allowed: {', '.join(SINKHORN_PRESETS)}{near}")
    if isinstance(iters, bool) or not hasattr(iters, "__index__") or iters < 1:
        raise ValueError(f"iters must be at least 1 and a whole number, got {iters!r}")
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps must be a finite number of at least 0, got {eps!r}")
