"""Configure about a billion parameters (grouped queries, 16 wide blocks): for a slice or a few hosts."""

from __future__ import annotations

from ml_collections import ConfigDict

from mhc.config import default


def get_config() -> ConfigDict:
    """Return 16 blocks of width 2048, a million tokens a step, 42 billion in all.

    The command line must name a corpus, a tokenizer and a mesh.
    """
    config = default()
    config.model.layers = 16
    config.model.width = 2048
    config.model.vocab_size = 50_304
    config.model.dtype = "bfloat16"
    config.model.remat = "full"
    config.attention.heads = 32
    config.attention.kv_heads = 8
    config.mlp.width = 8192
    config.head.tied = True
    config.data.sequence_length = 2048
    config.optimizer.lr = 3e-4
    config.schedule.warmup_steps = 2000
    config.train.steps = 40_000
    config.train.batch_size = 512
    config.validation.every = 1000
    config.checkpoint.every = 1000
    return config
