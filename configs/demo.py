"""Configure the demo, deep and narrow: a product of many residual maps shows within minutes on two CPU cores."""

from __future__ import annotations

from ml_collections import ConfigDict

from mhc.config import default


def get_config() -> ConfigDict:
    """Return 16 blocks of width 32 on the embedded corpus, 150 steps, at a rate at which plain is healthy."""
    config = default()
    config.model.layers = 16
    config.model.width = 32
    config.attention.heads = 2
    config.data.sequence_length = 64
    config.optimizer.lr = 1e-2
    config.schedule.warmup_steps = 20
    config.train.steps = 150
    config.train.batch_size = 32
    config.validation.every = 50
    config.monitor.probe_every = 15
    return config
