"""Let the attention of one block leave arrays for the attention of later blocks, beside the residual stream.

A *memory* is a dict of arrays that travels through depth with the residual's state; it is empty where no link asks for
one. Its leaves follow the state rule of ``mhc.residual.protocol``: [B, T, ...], or a scalar. Every pass makes it anew,
and from the new tokens alone where a cache holds the past.

A ``Link`` is what a layer does with the memory, such as a value residual or keys shared between layers. No link ships
yet: a new one is one file and one row of ``LINKS``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mhc.rng import PathKey

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from mhc.config import Config

Memory = dict[str, jax.Array]


class Link(nnx.Module):
    """Changes one layer's queries, keys and values by what earlier layers left, and leaves arrays to later layers.

    Its parameters are float32 vectors that are whole on every device; AdamW trains them without weight decay. Latent
    attention takes no links, since it keeps no keys and values.
    """

    @staticmethod
    def begin(config: Config, batch: int, tokens: int, dtype: jnp.dtype) -> Memory:
        """Return the link's part of the memory before block 0, under names that no other link uses."""
        raise NotImplementedError

    def constants(self) -> dict[str, jax.Array]:
        """Return learned numbers that are worth a probe, the same for every token: {name: array}."""
        return {}

    def __call__(
        self, q: Float[Array, "B T H K"], k: Float[Array, "B T G K"], v: Float[Array, "B T G J"], memory: Memory
    ) -> tuple[jax.Array, jax.Array, jax.Array, Memory]:
        """Return (queries, keys, values, memory for the next block). A cache keeps the keys and values returned."""
        raise NotImplementedError


class Row(NamedTuple):
    """Describes a link: a row of ``LINKS``."""

    has: Callable[[Config], bool]
    """Says whether a model of this config has the link."""
    link: Callable[[Config, PathKey], Link]
    """Makes one layer's link: the class itself, where its constructor takes these two."""
    begin: Callable[[Config, int, int, jnp.dtype], Memory]
    """Is the class's ``begin``."""


LINKS: dict[str, Row] = {}
"""Every link by name. They act in this order."""


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
