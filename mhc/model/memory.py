"""What attention of one block leaves to that of later blocks, beside the residual stream.

A *memory* is a dict of arrays that travels through depth with the residual's state; it is empty where nobody asks for
one. Its leaves follow the state rule of ``mhc.residual.protocol``: [B, T, ...], or a scalar. It is made anew in every
pass, and from the new tokens alone where a cache holds the past.

A ``Link`` is what a layer does with it: value residuals and keys shared between layers are one file each, and one row
of ``LINKS``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from mhc.rng import PathKey

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from mhc.config import Config

Memory = dict[str, jax.Array]


class Link(nnx.Module):
    """What attention heads of one layer take from earlier layers' and leave to later ones."""

    @staticmethod
    def begin(config: Config, batch: int, tokens: int, dtype: jnp.dtype) -> Memory:
        """Return the memory before block 0, under names of the link's own."""
        raise NotImplementedError

    def __call__(
        self, q: Float[Array, "B T H K"], k: Float[Array, "B T G K"], v: Float[Array, "B T G J"], memory: Memory
    ) -> tuple[jax.Array, jax.Array, jax.Array, Memory]:
        """Return (queries, keys, values, memory for the next block); with a cache, what is returned is what is kept."""
        raise NotImplementedError


LinkBuilder = Callable[["Config", PathKey], Link]
# Name → (whether a config has the link, how it is made, its class). Links act in this order.
LINKS: dict[str, tuple[Callable[[Config], bool], LinkBuilder, type[Link]]] = {}


def links(config: Config, key: PathKey) -> dict[str, Link]:
    """Return the links of one layer's attention by name, freshly made."""
    return {name: build(config, key / name) for name, (has, build, _) in LINKS.items() if has(config)}


def empty(config: Config, batch: int, tokens: int) -> Memory:
    """Return the memory before block 0 of rows [batch, tokens], in the compute dtype."""
    dtype = jnp.dtype(config.model.dtype)
    memory: Memory = {}
    for has, _, link in LINKS.values():
        if has(config):
            memory |= link.begin(config, batch, tokens, dtype)
    return memory
