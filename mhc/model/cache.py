"""Keep keys and values between a decoder's calls, by slot, and say where the next tokens go.

A layer's cache is a ring of slots: position p lies in slot p mod slots and replaces what lay there. A layer that sees
everything has max_length slots, so its ring never wraps; a layer that sees a window has at most ``window``. The row's
length alone tells which position lies in a slot, so the positions are not stored.

The streams of the residual need no cache, since the topology's maps are computed for each token by itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from mhc.config import Config
from mhc.model.attention import Cache, CacheContext, visible
from mhc.model.positions import rotary_frequencies

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecoderCache:
    """Holds the past of a batch of rows. It is a pytree: donate it to the program that extends it."""

    lengths: Int[Array, " B"]  # tokens so far
    prefix: Int[Array, " B"]  # first positions that see one another both ways
    layers: tuple[Cache, ...]  # by run of layers, stacked over each run; empty where rows are computed anew
    tokens: Int[Array, "B U"] | None  # all tokens, where rows are computed anew
    max_length: int = dataclasses.field(metadata={"static": True})


class LayerRun(NamedTuple):
    """Describes consecutive layers whose caches are alike, so that one scan runs over them."""

    first: int  # number of the first one in its stack
    layers: int  # how many there are
    local: bool  # whether they see a window only


def layer_runs(local: tuple[bool, ...]) -> Iterator[LayerRun]:
    """Yield the runs of a stack of layers; ``local`` says of each layer whether it sees a window only."""
    first = 0
    for layer in range(1, len(local) + 1):
        if layer == len(local) or local[layer] != local[first]:
            yield LayerRun(first, layer - first, local[first])
            first = layer


def check_length(config: Config, max_length: int) -> None:
    """Check that the model has positions for rows of ``max_length`` tokens.

    Raises:
      ValueError: the model lacks such positions.
    """
    if max_length < 1:
        raise ValueError(f"max_length: given {max_length}, allowed: 1 or more")
    if config.positions.kind == "learned" and max_length > config.max_length:
        raise ValueError(
            f"max_length: given {max_length}, allowed: at most {config.max_length}, the rows of the learned positions"
        )


def computes_anew(config: Config, max_length: int) -> bool:
    """Return whether rows must be computed anew at every call.

    Under dynamic scaling the rotary base grows with a row that is longer than the original length. What deeper layers
    would have kept was then computed with an older base.
    """
    return config.positions.scaling == "dynamic" and max_length > config.original_length


def slots_of(config: Config, max_length: int, local: bool) -> int:
    """Return how many slots a row of a layer's cache has."""
    return min(max_length, config.attention.window or max_length) if local else max_length


def slot_positions(lengths: Int[Array, " B"], slots: int) -> Int[Array, "B U"]:
    """Return the position in each slot of rows of these lengths, the newest that falls to it; -1 in an empty slot."""
    last = lengths[:, None] - 1
    return jnp.maximum(last - (last - jnp.arange(slots, dtype=jnp.int32)[None]) % slots, -1)


class NewTokens(NamedTuple):
    """Says where the tokens of a call belong."""

    valid: Bool[Array, "B T"]
    positions: Int[Array, "B T"]  # an invalid token has some position, which nobody sees
    lengths: Int[Array, " B"]  # after the call
    prefix: Int[Array, " B"]


def place(cache: DecoderCache, valid: Bool[Array, "B T"], prefix: Int[Array, " B"] | int) -> NewTokens:
    """Return the places of new tokens: valid ones follow one another from the row's length on.

    Args:
      prefix: first positions that see one another both ways, in rows that have no token yet.
    """
    counts = jnp.cumsum(valid, axis=1, dtype=jnp.int32)
    positions = jnp.maximum(cache.lengths[:, None] + counts - 1, 0)
    within = jnp.where(cache.lengths > 0, cache.prefix, jnp.minimum(jnp.asarray(prefix, jnp.int32), counts[:, -1]))
    return NewTokens(valid, positions, cache.lengths + counts[:, -1], within)


def cache_context(
    config: Config, cache: DecoderCache, new: NewTokens, local: bool, table: jax.Array | None
) -> CacheContext:
    """Return what attention needs to add the new tokens to the caches of layers that are alike, and to attend."""
    tokens = new.positions.shape[1]
    slots = slots_of(config, cache.max_length, local)
    # Several tokens at once may replace keys that the first of them still see: they attend to the slots as they were.
    in_place = tokens == 1 or not local
    if in_place:
        keys = slot_positions(new.lengths, slots)
    else:
        keys = jnp.concatenate([slot_positions(cache.lengths, slots), jnp.where(new.valid, new.positions, -1)], axis=1)
    window = config.attention.window if local else None
    mask = visible(new.positions, keys, window=window, prefix=new.prefix) & (keys >= 0)[:, None, :]
    # No slot is written twice: of several tokens that fall to one slot, the last is kept.
    kept = new.valid & (new.positions >= new.lengths[:, None] - slots)
    frequencies = None
    if config.positions.kind == "rope":
        # Under dynamic scaling this code is reached within the original length alone, where nothing is scaled.
        within = jnp.ones((1, 1), jnp.int32) if config.positions.scaling == "dynamic" else None
        frequencies = rotary_frequencies(config, config.rope_dim or config.head_dim, within)
    return CacheContext(
        positions=new.positions,
        slots=jnp.where(kept, new.positions % slots, slots),
        key_positions=keys,
        mask=mask,
        in_place=in_place,
        frequencies=frequencies,
        table=table,
    )
