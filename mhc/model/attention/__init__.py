"""Run self-attention, with and without a cache.

The two kinds of heads, ``HeadAttention`` (multi-head, grouped-query, multi-query) and ``LatentAttention`` (MLA), differ
in their projections alone. Each call takes a context, which holds what all layers share: positions, segments, masks and
rotary frequencies. It is an ``AttentionContext`` over whole rows and a ``CacheContext`` where a cache holds the past.
``Tokenwise`` takes their place in a control, in which no token sees another.
"""

from __future__ import annotations

from mhc.config import Config
from mhc.model.attention.base import Attention, Cache
from mhc.model.attention.context import AttentionContext, CacheContext, attention_context, positions_of, visible
from mhc.model.attention.heads import HeadAttention
from mhc.model.attention.implementations import attend_flash, attend_sdpa, attend_xla, choose_implementation
from mhc.model.attention.latent import LatentAttention
from mhc.model.attention.tokenwise import Tokenwise
from mhc.rng import PathKey

__all__ = [
    "Attention",
    "AttentionContext",
    "Cache",
    "CacheContext",
    "HeadAttention",
    "LatentAttention",
    "Tokenwise",
    "attend_flash",
    "attend_sdpa",
    "attend_xla",
    "attention_context",
    "choose_implementation",
    "make_attention",
    "positions_of",
    "visible",
]


_KINDS: dict[str, type[Attention]] = {"heads": HeadAttention, "mla": LatentAttention, "tokenwise": Tokenwise}


def make_attention(config: Config, *, key: PathKey) -> Attention:
    """Return one layer's attention, of the configured kind."""
    return _KINDS[config.attention.kind](config, key=key)
