"""What a decoder keeps between calls: keys and values of its layers by slot, and where the next tokens go.

A layer's cache is a ring of slots: position p lies in slot p mod slots, and evicts what lay there. Layers that see
everything have max_length slots, so that theirs never wraps; those that see a window have at most ``window``. Which
position lies in a slot follows from the row's length alone, so that it need not be kept.

The streams of the residual need no cache: the topology's maps are per token.
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
    """A batch of rows, each as far as it has come. A pytree: donate it to the program that extends it."""

    lengths: Int[Array, " B"]  # tokens so far
    prefix: Int[Array, " B"]  # first positions that see one another both ways
    layers: tuple[Cache, ...]  # by run of layers, stacked over them; none where rows are computed again
    tokens: Int[Array, "B U"] | None  # all tokens, where rows are computed again
    max_length: int = dataclasses.field(metadata={"static": True})


class LayerRun(NamedTuple):
    """Consecutive layers of one kind, from ``first`` of their stack on: they are scanned over."""

    first: int
    layers: int
    local: bool  # they see a window only


def layer_runs(local: tuple[bool, ...]) -> Iterator[LayerRun]:
    """The runs of a stack of layers, given of each whether it sees only a window."""
    first = 0
    for layer in range(1, len(local) + 1):
        if layer == len(local) or local[layer] != local[first]:
            yield LayerRun(first, layer - first, local[first])
            first = layer


def check_length(config: Config, max_length: int) -> None:
    """Raises ValueError where the model has no positions for rows of ``max_length`` tokens."""
    if max_length < 1:
        raise ValueError(f"max_length: given {max_length}, allowed: 1 or more")
    if config.positions.kind == "learned" and max_length > config.max_length:
        raise ValueError(
            f"max_length: given {max_length}, allowed: at most {config.max_length}, the rows of the learned positions"
        )


def computes_again(config: Config, max_length: int) -> bool:
    """Whether rows must be computed anew at every call: under dynamic scaling the rotary base grows with the row, once
    it is longer than the original length, and what deeper layers would have kept was computed with an older base."""
    return config.positions.scaling == "dynamic" and max_length > config.original_length


def slots_of(config: Config, max_length: int, local: bool) -> int:
    """Slots a row of a layer's cache."""
    return min(max_length, config.attention.window or max_length) if local else max_length


def slot_positions(lengths: Int[Array, " B"], slots: int) -> Int[Array, "B U"]:
    """The position that each slot of a row of this length holds, the newest that falls to it; -1 where none does."""
    last = lengths[:, None] - 1
    return jnp.maximum(last - (last - jnp.arange(slots, dtype=jnp.int32)[None]) % slots, -1)


class NewTokens(NamedTuple):
    """Where the tokens of a call belong."""

    valid: Bool[Array, "B T"]
    positions: Int[Array, "B T"]  # of an invalid one: some position, which nobody sees
    lengths: Int[Array, " B"]  # after the call
    prefix: Int[Array, " B"]


def place(cache: DecoderCache, valid: Bool[Array, "B T"], prefix: Int[Array, " B"] | int) -> NewTokens:
    """Valid tokens follow one another from the row's length on; ``prefix`` counts for rows that have no token yet."""
    counts = jnp.cumsum(valid, axis=1, dtype=jnp.int32)
    positions = jnp.maximum(cache.lengths[:, None] + counts - 1, 0)
    within = jnp.where(cache.lengths > 0, cache.prefix, jnp.minimum(jnp.asarray(prefix, jnp.int32), counts[:, -1]))
    return NewTokens(valid, positions, cache.lengths + counts[:, -1], within)


def cache_context(
    config: Config, cache: DecoderCache, new: NewTokens, local: bool, table: jax.Array | None
) -> CacheContext:
    """What the attention of layers of one kind needs to add the new tokens to their caches and to attend."""
    tokens = new.positions.shape[1]
    slots = slots_of(config, cache.max_length, local)
    # Several tokens at once may evict what the first of them still see: those attend to the slots as they were.
    in_place = tokens == 1 or not local
    if in_place:
        keys = slot_positions(new.lengths, slots)
    else:
        keys = jnp.concatenate([slot_positions(cache.lengths, slots), jnp.where(new.valid, new.positions, -1)], axis=1)
    window = config.attention.window if local else None
    mask = visible(new.positions, keys, window=window, prefix=new.prefix) & (keys >= 0)[:, None, :]
    # No slot is written twice: of the tokens that fall to one, the last is kept.
    kept = new.valid & (new.positions >= new.lengths[:, None] - slots)
    frequencies = None
    if config.positions.kind == "rope":
        # Dynamic scaling gets here within the original length alone, where it scales nothing.
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
