"""Configure about 125 million parameters (GPT-2 small's shape), for one accelerator."""

from __future__ import annotations

from ml_collections import ConfigDict

from mhc.config import default


def get_config() -> ConfigDict:
    """Return 12 blocks of width 768, 524,288 tokens a step, 10 billion in all; name a corpus and a tokenizer."""
    config = default()
    config.model.layers = 12
    config.model.width = 768
    config.model.vocab_size = 50_304
    config.model.dtype = "bfloat16"
    config.attention.heads = 12
    config.head.tied = True
    config.data.sequence_length = 1024
    config.optimizer.lr = 6e-4
    config.schedule.warmup_steps = 700
    config.train.steps = 19_000
    config.train.batch_size = 512
    config.validation.every = 500
    config.checkpoint.every = 1000
    return config
