"""Decide which keys a query may see, and hold what the attention of all layers shares in one pass."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from mhc.config import Config
from mhc.model.attention.implementations import choose_implementation
from mhc.model.positions import rotary_frequencies

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, Real


def positions_of(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Return positions that start again from 0 wherever the segment changes, int32."""
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None]
    before = jnp.pad(segment_ids, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    start = jax.lax.cummax(jnp.where(segment_ids != before, index, 0), axis=1)
    return index - start


def visible(
    queries: Int[Array, "b T"],
    keys: Int[Array, "b U"],
    *,
    window: int | None = None,
    prefix: Int[Array, " b"] | Int[Array, ""] | int | None = None,
) -> Bool[Array, "b T U"]:
    """Return True where a query at one position may see a key at another position of the same document.

    A query sees itself and earlier keys. With ``window`` it sees that many positions at most, itself included. Within
    the first ``prefix`` positions all tokens see one another.

    Args:
      prefix: by row, or one for all rows.
    """
    q, k = queries[:, :, None], keys[:, None, :]
    mask = k <= q
    if window is not None:
        mask &= q - k < window
    if prefix is not None:
        within = jnp.broadcast_to(jnp.asarray(prefix), (queries.shape[0],))[:, None, None]
        mask |= (q < within) & (k < within)
    return mask


@dataclasses.dataclass(frozen=True)
class AttentionContext:
    """Holds what every layer's attention shares in a pass over whole rows."""

    positions: Real[Array, "B T"]  # that are encoded; no whole numbers under positions.noise
    segment_ids: Int[Array, "B T"] | None
    distances: Real[Array, "b T"]  # positions to take differences of; b is 1 where all rows agree
    frequencies: tuple[jax.Array, float] | None  # of rotary positions
    table: Float[Array, "buckets H"] | None  # the biases of relative_bias
    full: Bool[Array, "b T U"] | None  # mask without a window; None where the implementation makes its own masks
    windowed: Bool[Array, "b T U"] | None  # mask with the window
    local: bool | jax.Array = False  # whether the current layer sees a window only; traced where layers are scanned

    def at(self, local: bool | jax.Array) -> AttentionContext:
        """Return this context for one layer, which sees only the window if ``local``."""
        return dataclasses.replace(self, local=local)

    @property
    def mask(self) -> Bool[Array, "b T U"]:
        """Return the current layer's mask."""
        assert self.full is not None
        if self.local is False or self.windowed is None:
            return self.full
        return self.windowed if self.local is True else jnp.where(self.local, self.windowed, self.full)


def attention_context(
    config: Config,
    shape: tuple[int, ...],
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    prefix: jax.Array | int | None = None,
    table: jax.Array | None = None,
    noise: jax.Array | None = None,
) -> AttentionContext:
    """Return the context of rows [B, T].

    Args:
      shape: (B, T).
      segment_ids: [B, T] numbers that keep packed documents apart; padding has id 0. None: one document a row.
      positions: [B, T]; by default those within each document.
      prefix: how many first positions of a document see one another; by default ``attention.prefix``.
      table: the learned biases [buckets, H] of ``relative_bias``.
      noise: [B, T] float32, added to what positions encode; masks are those of the positions themselves.
    """
    index = jnp.arange(shape[1], dtype=jnp.int32)[None]
    distances = index
    if positions is not None:
        distances = positions
    elif segment_ids is not None:
        # Differences within a document are those of places in the row.
        positions = positions_of(segment_ids)
    else:
        positions = jnp.broadcast_to(index, shape)
    lengths = None
    if config.positions.scaling == "dynamic":
        last = positions[:, None, :]
        if segment_ids is not None:
            last = jnp.where(segment_ids[:, :, None] == segment_ids[:, None, :], last, 0)
        lengths = jnp.broadcast_to(jnp.max(last, axis=-1) + 1, shape)
    frequencies = None
    if config.positions.kind == "rope":
        frequencies = rotary_frequencies(config, config.rope_dim or config.head_dim, lengths)
    context = AttentionContext(positions, segment_ids, distances, frequencies, table, None, None)
    prefix = prefix if prefix is not None else config.attention.prefix or None
    if not (choose_implementation(config) == "flash" and prefix is None):
        context = with_masks(context, config, index, prefix)
    if noise is None:
        return context
    return dataclasses.replace(context, positions=positions + noise, distances=distances + noise)


def with_masks(
    context: AttentionContext, config: Config, index: Int[Array, "1 T"], prefix: jax.Array | int | None
) -> AttentionContext:
    """Return the context with its masks, for an implementation that takes them."""
    positions, segment_ids = context.positions, context.segment_ids

    def mask(window: int | None) -> jax.Array:
        seen = visible(index, index, window=window)
        if prefix is not None:
            seen = seen | visible(positions, positions, window=1, prefix=prefix)
        if segment_ids is not None:
            seen = seen & (segment_ids[:, :, None] == segment_ids[:, None, :])
        return seen

    windowed = mask(config.attention.window) if any(config.local_layers) else None
    return dataclasses.replace(context, full=mask(None), windowed=windowed)


@dataclasses.dataclass(frozen=True)
class CacheContext:
    """Holds what all layers of one sort (windowed, or not) share when T tokens a row join a cache of U slots."""

    positions: Int[Array, "B T"]  # of the new tokens
    slots: Int[Array, "B T"]  # where the new tokens go; U for a token that is not kept
    key_positions: Int[Array, "B K"]  # of the attended keys: the slots after writing, or those before it and the tokens
    mask: Bool[Array, "B T K"]
    in_place: bool  # whether the slots after writing hold all that is attended
    frequencies: tuple[jax.Array, float] | None
    table: jax.Array | None

    def store(self, slots: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return (slots [B, U, ...] with ``new`` [B, T, ...] written to its places, keys or values to attend to)."""
        rows = jnp.arange(new.shape[0])[:, None]
        written = slots.at[rows, self.slots].set(new.astype(slots.dtype), mode="drop")
        return written, written if self.in_place else jnp.concatenate([slots, new.astype(slots.dtype)], axis=1)
