"""Configure the three models of the mHC paper (arXiv:2512.24880); configs/paper_{3b,9b,27b}.py choose a size.

Two things are unpublished, and these choices reproduce the published counts: queries are not compressed, and the one
leading dense layer has a feed-forward of 8 expert widths. Name a corpus, a tokenizer of at most 129,280 tokens and a
mesh: ``--config.data.source=... --config.data.tokenizer=... --config.mesh.fsdp=...``.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from mhc.config import default


def get_config(
    layers: int, width: int, expert_width: int, experts: int, heads: int, batch: int, steps: int, lr: float
) -> ConfigDict:
    """Return a model of the paper's family, as it was trained."""
    config = default()
    config.model.layers = layers
    config.model.width = width
    config.model.vocab_size = 129_280
    config.model.dtype = "bfloat16"
    config.model.remat = "full"
    config.attention.kind = "mla"
    config.attention.heads = heads
    config.attention.head_dim = 128
    config.attention.kv_rank = 512
    config.attention.rope_dim = 64
    config.mlp.width = 8 * expert_width
    config.moe.experts = experts
    config.moe.top_k = 6
    config.moe.shared = 2
    config.moe.dense_layers = 1
    config.moe.width = expert_width
    config.moe.score = "sigmoid"
    config.moe.balance = "loss_free"
    config.norm.eps = 1e-20
    config.residual.rms_eps = 1e-20
    config.residual.kind = "mhc"  # its defaults are the paper's: N = 4, alpha 0.01, 20 Sinkhorn iterations
    config.data.sequence_length = 4096
    config.train.batch_size = batch
    config.train.steps = steps
    config.optimizer.lr = lr
    config.optimizer.b1 = 0.9
    config.optimizer.b2 = 0.95
    config.optimizer.eps = 1e-20
    config.optimizer.weight_decay = 0.1
    config.schedule.kind = "step"
    config.schedule.warmup_steps = 2000
    config.schedule.step_fractions = (0.8, 0.9)
    config.schedule.step_ratios = (0.316, 0.1)
    config.validation.every = 1000
    config.checkpoint.every = 1000
    return config
