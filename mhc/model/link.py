"""Define a link between layers, by which the attention of one block leaves arrays to that of later blocks.

``mhc.model.memory`` lists the links and says how a memory travels.
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
        """Return learned numbers for the probes, the same for every token: {name: array}."""
        return {}

    def __call__(
        self, q: Float[Array, "B T H K"], k: Float[Array, "B T G K"], v: Float[Array, "B T G J"], memory: Memory
    ) -> tuple[jax.Array, jax.Array, jax.Array, Memory]:
        """Return (queries, keys, values, memory for the next block). A cache keeps the keys and values returned."""
        raise NotImplementedError


class Row(NamedTuple):
    """Describes a link: a row of ``mhc.model.memory.LINKS``."""

    has: Callable[[Config], bool]
    """Says whether a model of this config has the link."""
    link: Callable[[Config, PathKey], Link]
    """Makes one layer's link: the class itself, where its constructor takes these two."""
    begin: Callable[[Config, int, int, jnp.dtype], Memory]
    """Is the class's ``begin``."""
