"""Let the attention of one block leave arrays for the attention of later blocks, beside the residual stream.

A *memory* is a dict of arrays that travels through depth with the residual's state; it is empty where no link asks for
one. Its leaves follow the state rule of ``mhc.residual.protocol``: [B, T, ...], or a scalar. Every pass makes it anew,
and from the new tokens alone where a cache holds the past.

A ``Link`` is what a layer does with the memory, such as a value residual or keys shared between layers. A new one is
one file and one row of ``LINKS``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from mhc.model import value_residual
from mhc.model.link import Link, Memory, Row
from mhc.rng import PathKey

if TYPE_CHECKING:
    from mhc.config import Config

__all__ = ["LINKS", "Link", "Memory", "Row", "empty", "links"]

LINKS: dict[str, Row] = {"first_values": value_residual.ROW}
"""Every link by name. They act in this order. A name must not end in ``residual``, as paths of connections do."""


def links(config: Config, key: PathKey) -> dict[str, Link]:
    """Make the links of one layer's attention; return them by name."""
    return {name: row.link(config, key / name) for name, row in LINKS.items() if row.has(config)}


def empty(config: Config, batch: int, tokens: int) -> Memory:
    """Return the memory before block 0 of rows [batch, tokens], in the compute dtype.

    Raises:
      ValueError: two links use one name.
    """
    memory: Memory = {}
    for name, row in LINKS.items():
        if row.has(config):
            added = row.begin(config, batch, tokens, jnp.dtype(config.model.dtype))
            if set(added) & set(memory):
                raise ValueError(f"link {name}: another link uses {', '.join(set(added) & set(memory))}")
            memory |= added
    return memory
