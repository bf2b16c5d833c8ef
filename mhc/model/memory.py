"""What attention of one block leaves to that of later blocks, beside the residual stream.

A *memory* is a dict of arrays that travels through depth with the residual's state; it is empty where nobody asks for
one. Its leaves follow the state rule of ``mhc.residual.protocol``: [B, T, ...], or a scalar. It is made anew in every
pass, and from the new tokens alone where a cache holds the past.

A ``Link`` is what a layer does with it, such as a value residual or keys shared between layers. No link ships yet: a
new one is one file and one row of ``LINKS``.
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
    """What attention heads of one layer take from earlier layers' and leave to later ones.

    Its parameters are vectors, float32, whole on every device, trained by AdamW without weight decay. Latent attention
    has no links: it keeps no keys and values.
    """

    @staticmethod
    def begin(config: Config, batch: int, tokens: int, dtype: jnp.dtype) -> Memory:
        """Return the memory before block 0, under names of the link's own."""
        raise NotImplementedError

    def __call__(
        self, q: Float[Array, "B T H K"], k: Float[Array, "B T G K"], v: Float[Array, "B T G J"], memory: Memory
    ) -> tuple[jax.Array, jax.Array, jax.Array, Memory]:
        """Return (queries, keys, values, memory for the next block); with a cache, what is returned is what is kept."""
        raise NotImplementedError


class Row(NamedTuple):
    """A row of ``LINKS``."""

    has: Callable[[Config], bool]
    """Whether a model of this config has the link."""
    link: Callable[[Config, PathKey], Link]
    """How one layer's is made: the class itself, where it takes these two."""
    begin: Callable[[Config, int, int, jnp.dtype], Memory]
    """The class's ``begin``."""


LINKS: dict[str, Row] = {}
"""Every link by name; they act in this order."""


def links(config: Config, key: PathKey) -> dict[str, Link]:
    """Return the links of one layer's attention by name, freshly made."""
    return {name: row.link(config, key / name) for name, row in LINKS.items() if row.has(config)}


def empty(config: Config, batch: int, tokens: int) -> Memory:
    """Return the memory before block 0 of rows [batch, tokens], in the compute dtype.

    Raises:
      ValueError: two links use one name.
    """
    memory: Memory = {}
    for name, row in LINKS.items():
        if row.has(config):
            begun = row.begin(config, batch, tokens, jnp.dtype(config.model.dtype))
            if set(begun) & set(memory):
                raise ValueError(f"link {name}: another link uses {', '.join(set(begun) & set(memory))}")
            memory |= begun
    return memory
