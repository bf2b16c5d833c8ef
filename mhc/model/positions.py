"""Encode positions: rotary frequencies with their scalings, sinusoids, and biases of attention's logits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from mhc.config import Config

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, Real


def _wide(x: jax.Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)


# Rotary ---------------------------------------------------------------------------------------------------------------


def rotate(
    x: Float[Array, "B T H K"], positions: Real[Array, "B T"], frequencies: Float[Array, "... K/2"], factor: float = 1.0
) -> Float[Array, "B T H K"]:
    """Turn each pair (x_i, x_{i + K/2}) by the angle position * frequency_i, in float32 (RoPE, arXiv:2104.09864).

    Args:
      frequencies: radians per position: [K/2], or [B, T, K/2] where they differ by token.
      factor: multiplies the result (YaRN's attention factor).
    """
    angle = positions[..., None, None].astype(jnp.float32) * (
        frequencies[None, None, None] if frequencies.ndim == 1 else frequencies[:, :, None]
    )
    cos, sin = factor * jnp.cos(angle), factor * jnp.sin(angle)  # [B, T, 1, K/2]
    a, b = jnp.split(x.astype(_wide(x)), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def base_frequencies(size: int, theta: float | jax.Array) -> jax.Array:
    """Return theta^(-2i/K) for i = 0 .. K/2 - 1, float32; theta [...] gives [..., K/2]."""
    base = jnp.asarray(theta, jnp.float32)[..., None]
    exponent = -jnp.arange(size // 2, dtype=jnp.float32) / (size // 2)
    return base ** jax.lax.broadcast_to_rank(exponent, base.ndim)


def rotary_frequencies(
    config: Config, size: int, lengths: Int[Array, "B T"] | None = None
) -> tuple[Float[Array, "... half"], float]:
    """Return (frequencies, factor of cosines and sines) of the config's rotary scaling, for heads of width ``size``.

    - none: theta^(-2i/K).
    - linear: these divided by ``factor`` (arXiv:2306.15595).
    - ntk: as none, with theta times factor^(K / (K - 2)).
    - dynamic: as ntk, with a factor that grows from 1 as a document outgrows ``original_length`` O:
      factor * length / O - (factor - 1). The result is [B, T, K/2].
    - yarn (arXiv:2309.00071): a ramp from scaled to unscaled over the number of turns within O.
    - llama3: scaled below low_frequency turns within O, unscaled above high_frequency, interpolated between.

    Args:
      lengths: for each token the length of its document; dynamic needs it.

    Raises:
      ValueError: dynamic is given no lengths.
    """
    p, o = config.positions, config.original_length
    if p.scaling == "ntk":
        return base_frequencies(size, p.theta * p.factor ** (size / max(size - 2, 1))), 1.0
    if p.scaling == "dynamic":
        if lengths is None:
            raise ValueError("dynamic rotary scaling needs the documents' lengths")
        longer = jnp.maximum(p.factor * lengths.astype(jnp.float32) / o - (p.factor - 1.0), 1.0)
        return base_frequencies(size, p.theta * longer ** (size / max(size - 2, 1))), 1.0
    plain = base_frequencies(size, p.theta)
    if p.scaling == "linear":
        return plain / p.factor, 1.0
    if p.scaling == "yarn":
        # The pair that turns `turns` times within O, as a real number.
        def pair(turns: float) -> float:
            return size * math.log(o / (turns * 2 * math.pi)) / (2 * math.log(p.theta))

        low = max(math.floor(pair(p.beta_fast)), 0)
        high = min(math.ceil(pair(p.beta_slow)), size - 1)
        ramp = jnp.clip((jnp.arange(size // 2, dtype=jnp.float32) - low) / max(high - low, 1e-3), 0.0, 1.0)
        default = 0.1 * math.log(p.factor) + 1.0
        return plain * (1.0 - ramp) + plain / p.factor * ramp, p.attention_factor or default
    if p.scaling == "llama3":
        turns = o * plain / (2 * math.pi)
        smooth = jnp.clip((turns - p.low_frequency) / (p.high_frequency - p.low_frequency), 0.0, 1.0)
        return plain * smooth + plain / p.factor * (1.0 - smooth), 1.0
    return plain, 1.0


# Added to the embedding -----------------------------------------------------------------------------------------------


def sinusoidal(positions: Real[Array, "B T"], width: int) -> Float[Array, "B T D"]:
    """Return sines (even places) and cosines (odd) of position * 10000^(-2i/D), float32 (arXiv:1706.03762)."""
    half = (width + 1) // 2
    frequency = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) * 2 / width)
    angle = positions[..., None].astype(jnp.float32) * frequency[None, None]
    pairs = jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1)  # [B, T, half, 2]
    return pairs.reshape(*positions.shape, 2 * half)[..., :width]


# Added to attention's logits ------------------------------------------------------------------------------------------


def alibi_slopes(heads: int) -> np.ndarray:
    """Return ALiBi's slopes [H], float32: 2^(-8h/H) for h = 1 .. H (arXiv:2108.12409).

    Where H is no power of two, they are those of the largest power below, then every second one of twice that power.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * h / power) for h in range(1, power + 1)]
    slopes += [2.0 ** (-8.0 * h / (2 * power)) for h in range(1, 2 * (heads - power), 2)]
    return np.asarray(slopes, np.float32)


def bucket(distance: Int[Array, "*shape"], buckets: int, max_distance: int) -> Int[Array, "*shape"]:
    """Return T5's bucket of each distance into the past (arXiv:1910.10683).

    The first half of the buckets hold one distance each. The others grow logarithmically up to ``max_distance``; all
    larger distances share the last one. The future has bucket 0.
    """
    exact = buckets // 2
    past = jnp.maximum(distance, 0)
    share = jnp.log(jnp.maximum(past, 1).astype(jnp.float32) / exact) / math.log(max_distance / exact)
    coarse = exact + (share * (buckets - exact)).astype(jnp.int32)
    return jnp.where(past < exact, past, jnp.minimum(coarse, buckets - 1))


def logit_bias(
    config: Config, table: Float[Array, "buckets H"] | None, queries: Real[Array, "b T"], keys: Real[Array, "b U"]
) -> Float[Array, "b H T U"] | None:
    """Return what positions add to attention's logits, float32; None where they add nothing.

    Args:
      table: the learned biases of ``relative_bias``.
      queries: positions of the queries.
      keys: positions of the keys.
    """
    distance = queries[:, :, None] - keys[:, None, :]  # [b, T, U]
    if config.positions.kind == "alibi":
        slopes = jnp.asarray(alibi_slopes(config.attention.heads))
        return -slopes[None, :, None, None] * distance[:, None].astype(jnp.float32)
    if table is not None:
        chosen = table[bucket(distance, config.positions.buckets, config.positions.max_distance)]  # [b, T, U, H]
        return jnp.moveaxis(chosen, -1, 1)
    return None
