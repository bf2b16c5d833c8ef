"""Configure a mixture of experts, 100 million active parameters of about 370 million: for one host."""

from __future__ import annotations

from ml_collections import ConfigDict

from mhc.config import default


def get_config() -> ConfigDict:
    """Return 12 blocks of width 512 with 16 experts, of which a token takes 2, and 1 that all tokens share.

    The command line must name a corpus and a tokenizer.
    """
    config = default()
    config.model.layers = 12
    config.model.width = 512
    config.model.vocab_size = 50_304
    config.model.dtype = "bfloat16"
    config.attention.heads = 8
    config.mlp.width = 4096
    config.moe.experts = 16
    config.moe.top_k = 2
    config.moe.shared = 1
    config.moe.dense_layers = 1
    config.moe.width = 1024
    config.moe.score = "sigmoid"
    config.data.sequence_length = 1024
    config.optimizer.lr = 6e-4
    config.schedule.warmup_steps = 700
    config.train.steps = 19_000
    config.train.batch_size = 512
    config.validation.every = 500
    config.checkpoint.every = 1000
    return config
