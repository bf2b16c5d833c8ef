"""Configure about 350 million parameters (GPT-2 medium's shape), for one host."""

from __future__ import annotations

from ml_collections import ConfigDict

from mhc.config import default


def get_config() -> ConfigDict:
    """Return 24 blocks of width 1024, 524,288 tokens a step, 16 billion in all; name a corpus and a tokenizer."""
    config = default()
    config.model.layers = 24
    config.model.width = 1024
    config.model.vocab_size = 50_304
    config.model.dtype = "bfloat16"
    config.model.remat = "dots"
    config.attention.heads = 16
    config.head.tied = True
    config.data.sequence_length = 1024
    config.optimizer.lr = 4e-4
    config.schedule.warmup_steps = 1000
    config.train.steps = 30_000
    config.train.batch_size = 512
    config.validation.every = 500
    config.checkpoint.every = 1000
    return config
