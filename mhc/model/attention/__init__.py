"""Self-attention, with and without a cache.

Two kinds of heads share everything but their projections: ``HeadAttention`` (multi-head, grouped-query, multi-query)
and ``LatentAttention`` (MLA). ``Tokenwise`` is the control that sees no other token. Each call takes a context with
what all layers share, such as positions, segments, masks and rotary frequencies: an ``AttentionContext`` over whole
rows, a ``CacheContext`` with a cache.
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
