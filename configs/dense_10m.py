"""Configure about ten million parameters, for a laptop and for measuring topologies against each other."""

from __future__ import annotations

from ml_collections import ConfigDict

from mhc.config import default


def get_config() -> ConfigDict:
    """Return 8 blocks of width 320, 4096 tokens a step, the embedded corpus in bytes."""
    config = default()
    config.model.layers = 8
    config.model.width = 320
    config.attention.heads = 5
    config.data.sequence_length = 512
    config.optimizer.lr = 2e-3
    config.schedule.warmup_steps = 100
    config.train.steps = 2000
    config.train.batch_size = 8
    return config
