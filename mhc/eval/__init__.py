"""Evaluate runs and checkpoints with programs, each started as ``python -m mhc.eval.NAME`` or ``eval.NAME``."""

from mhc.extras import require_train

require_train(__name__)
