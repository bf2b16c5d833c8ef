"""Train on the bijection wind tunnel, whose exact posterior is known (mhc.data.windtunnel, arXiv:2512.22471).

python train.py --config configs/windtunnel_bijection.py:laptop --workdir runs/bijection
"""

from __future__ import annotations

from ml_collections import ConfigDict

from mhc.config import default
from mhc.data.windtunnel import config_sizes

SIZES = ("paper", "laptop")


def get_config(size: str = "paper") -> ConfigDict:
    """Return a config of size ``paper`` or ``laptop``.

    ``paper``: 20 symbols, 6 layers × 6 heads of width 192. ``laptop``: 8 symbols, minutes on one core.
    """
    config = config_sizes(default(), size, paper="windtunnel:bijection", laptop="windtunnel:bijection,symbols=8")
    laptop = size == "laptop"
    config.model.layers, config.model.width, config.attention.heads = (2, 64, 4) if laptop else (6, 192, 6)
    config.optimizer.lr = 3e-3 if laptop else 1e-3
    config.train.steps, config.train.batch_size = (1500, 64) if laptop else (10_000, 256)
    return config
