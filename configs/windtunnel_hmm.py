"""Train on the hidden Markov wind tunnel, whose filtered posterior is known (mhc.data.windtunnel, arXiv:2512.22471).

python train.py --config configs/windtunnel_hmm.py:laptop --workdir runs/hmm
"""

from __future__ import annotations

from ml_collections import ConfigDict

from mhc.config import default
from mhc.data.windtunnel import config_sizes, task

SIZES = ("paper", "laptop")


def get_config(size: str = "paper") -> ConfigDict:
    """Return a config of size ``paper`` or ``laptop``.

    ``paper``: 20 observations, 9 layers × 8 heads of width 256. ``laptop``: 10 observations, minutes on one core.
    """
    config = config_sizes(
        default(), size, paper="windtunnel:hmm,reach=50", laptop="windtunnel:hmm,observations=10,reach=25"
    )
    laptop = size == "laptop"
    config.model.layers, config.model.width, config.attention.heads = (3, 64, 8) if laptop else (9, 256, 8)
    config.positions.kind, config.positions.max_length = "learned", task(config.data.source).span
    config.optimizer.lr = 2e-2 if laptop else 1e-3
    if laptop:
        config.optimizer.name = "muon"  # AdamW stays on the plateau for several times the tokens
    config.train.steps, config.train.batch_size = (1200, 32) if laptop else (50_000, 256)
    return config
