"""Run self-attention, with and without a cache.

The two kinds of heads, ``HeadAttention`` (multi-head, grouped-query, multi-query) and ``LatentAttention`` (MLA), differ
in their projections alone. Each call takes a context, which holds what all layers share: positions, segments, masks and
rotary frequencies. It is an ``AttentionContext`` over whole rows and a ``CacheContext`` where a cache holds the past.
"""

from __future__ import annotations

from mhc.config import Config
from mhc.model.attention.base import Attention, Cache
from mhc.model.attention.context import AttentionContext, CacheContext, attention_context, positions_of, visible
from mhc.model.attention.heads import HeadAttention
from mhc.model.attention.implementations import attend_flash, attend_sdpa, attend_xla, choose_implementation
from mhc.model.attention.latent import LatentAttention
from mhc.rng import PathKey

__all__ = [
    "Attention",
    "AttentionContext",
    "Cache",
    "CacheContext",
    "HeadAttention",
    "LatentAttention",
    "attend_flash",
    "attend_sdpa",
    "attend_xla",
    "attention_context",
    "choose_implementation",
    "make_attention",
    "positions_of",
    "visible",
]


def make_attention(config: Config, *, key: PathKey) -> Attention:
    """Return one layer's attention, of the configured kind of heads."""
    return (LatentAttention if config.attention.kind == "mla" else HeadAttention)(config, key=key)
