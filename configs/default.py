"""List every field of a run with its default; ``python train.py --fields`` prints them with their meaning.

``--config.residual.n=4`` or ``--config.optimizer.clip_norm=None`` sets a field on the command line. A config file of
your own changes some fields and keeps the rest, as configs/demo.py does.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from mhc.config import default


def get_config() -> ConfigDict:
    """Return the default configuration, locked: a field that does not exist cannot be set by mistake."""
    return default()
