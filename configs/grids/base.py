"""Configure the model that the ready grids vary, in two sizes: ``base.py:laptop`` and ``base.py:cluster``."""

from __future__ import annotations

from typing import TypeVar

from ml_collections import ConfigDict

from mhc.config import default
from mhc.errors import UserError, did_you_mean

T = TypeVar("T")
SIZES = ("laptop", "cluster")


def choose(size: str, *, laptop: T, cluster: T) -> T:
    """Return the value for a size. Raises UserError for an unknown one."""
    if size not in SIZES:
        raise UserError(f"size: given {size!r}, allowed: {' or '.join(SIZES)}{did_you_mean(size, SIZES)}")
    return laptop if size == "laptop" else cluster


def get_config(size: str = "laptop") -> ConfigDict:
    """Return the base config of a size."""
    return choose(size, laptop=_laptop, cluster=_cluster)()


def _laptop() -> ConfigDict:
    """Return 8 blocks of width 32, 1024 tokens a step, the embedded corpus: about a minute an arm on two CPU cores."""
    config = default()
    config.model.layers = 8
    config.model.width = 32
    config.attention.heads = 2
    config.data.sequence_length = 64
    config.optimizer.lr = 1e-2
    config.schedule.warmup_steps = 30
    config.train.steps = 300
    config.train.batch_size = 16
    config.validation.every = 100
    config.validation.batches = 8
    config.checkpoint.every = 100
    config.checkpoint.keep = 1
    config.monitor.probe_every = 20
    config.monitor.progress_every = 50
    return config


def _cluster() -> ConfigDict:
    """Return 12 blocks of width 768, 262144 tokens a step, 2.6 billion in all; name a corpus of that size."""
    config = default()
    config.model.layers = 12
    config.model.width = 768
    config.model.dtype = "bfloat16"
    config.attention.heads = 12
    config.data.sequence_length = 1024
    config.optimizer.lr = 1e-3
    config.schedule.warmup_steps = 500
    config.train.steps = 10_000
    config.train.batch_size = 256
    config.validation.every = 500
    config.validation.batches = 32
    config.checkpoint.every = 500
    config.checkpoint.keep = 2
    config.checkpoint.keep_every = 2500
    config.monitor.probe_every = 100
    return config
