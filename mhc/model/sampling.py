"""Draw the next token from logits: temperature, top-k, top-p, min-p, greedy, and sampling guided by entropy.

These are pure functions over logits [B, V]. Each row has a key of its own, so what it samples does not depend on the
batch that it is in.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, Key

UNSURE_TOP_P, UNSURE_TEMPERATURE = 0.95, 1.2  # of entropy-guided sampling above entropy_high


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Describes how the next token is drawn.

    The logits are divided by ``temperature``. Then tokens are left out in three steps: all but the ``top_k`` most
    probable; of these, all but the fewest most probable whose share reaches ``top_p`` (arXiv:1904.09751); of these,
    those that are less than ``min_p`` times as probable as the first (arXiv:2407.01082). The entropy in bits of the
    model's own distribution may decide otherwise: above ``entropy_high`` the token is sampled with top-p 0.95 and
    temperature 1.2 instead, below ``entropy_low`` greedily.

    Raises:
      ValueError: a value is not allowed; the message names the field.
    """

    temperature: float = 1.0  # 0: the most probable token
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    entropy_low: float | None = None
    entropy_high: float | None = None

    def __post_init__(self) -> None:
        allowed = {
            "temperature": (0 <= self.temperature < math.inf, "0 (greedy) or more"),
            "top_k": (self.top_k is None or self.top_k >= 1, "1 or more"),
            "top_p": (self.top_p is None or 0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (self.min_p is None or 0 <= self.min_p <= 1, "from 0 to 1"),
            "entropy_low": (self.entropy_low is None or self.entropy_low >= 0, "0 bits or more"),
            "entropy_high": (
                self.entropy_high is None or self.entropy_high >= (self.entropy_low or 0),
                f"at least {'0' if self.entropy_low is None else f'entropy_low={self.entropy_low}'}",
            ),
        }
        for name, (fine, words) in allowed.items():
            if not fine:
                raise ValueError(f"{name}: given {getattr(self, name)}, allowed: {words}")


def top_k_mask(logits: Float[Array, "B V"], k: int) -> Bool[Array, "B V"]:
    """Return True for the k most probable tokens; where several are equal, lower ids come first."""
    _, first = jax.lax.top_k(logits, min(k, logits.shape[-1]))
    rows = jnp.arange(logits.shape[0])[:, None]
    return jnp.zeros(logits.shape, bool).at[rows, first].set(True)


def top_p_mask(logits: Float[Array, "B V"], p: float) -> Bool[Array, "B V"]:
    """Return True for the fewest most probable tokens, one or more, that together have at least probability p."""
    order = jnp.argsort(-logits, axis=-1, stable=True)
    shares = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
    before = jnp.cumsum(shares, axis=-1) - shares
    kept = (before < p) | (jnp.arange(logits.shape[-1]) == 0)[None]
    return jnp.take_along_axis(kept, jnp.argsort(order, axis=-1), axis=-1)


def min_p_mask(logits: Float[Array, "B V"], p: float) -> Bool[Array, "B V"]:
    """Return True for tokens that are at least p times as probable as the most probable one."""
    if p == 0:
        return jnp.ones(logits.shape, bool)
    return logits >= jnp.max(logits, axis=-1, keepdims=True) + math.log(p)


def adjust(
    logits: Float[Array, "B V"],
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Float[Array, "B V"]:
    """Return the logits to sample from, -inf where a token is left out; temperature 0 leaves the most probable one."""
    if temperature == 0:
        first = jnp.argmax(logits, axis=-1, keepdims=True)
        return jnp.where(jnp.arange(logits.shape[-1])[None] == first, 0.0, -jnp.inf)
    logits = logits.astype(jnp.float32) / temperature
    if top_k is not None:
        logits = jnp.where(top_k_mask(logits, top_k), logits, -jnp.inf)
    if top_p is not None:
        logits = jnp.where(top_p_mask(logits, top_p), logits, -jnp.inf)
    if min_p is not None:
        logits = jnp.where(min_p_mask(logits, min_p), logits, -jnp.inf)
    return logits


def entropy_bits(logits: Float[Array, "B V"]) -> Float[Array, " B"]:
    """Return the entropy of the distribution that the logits give, in bits, float32."""
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return -jnp.sum(jnp.where(log_p > -jnp.inf, jnp.exp(log_p) * log_p, 0.0), axis=-1) / math.log(2.0)


def sample(logits: Float[Array, "B V"], keys: Key[Array, " B"], how: Sampling) -> Int[Array, " B"]:
    """Draw the next token of each row, int32."""
    chosen = adjust(logits, how.temperature, how.top_k, how.top_p, how.min_p)
    entropy = entropy_bits(logits)[:, None]
    if how.entropy_high is not None:
        chosen = jnp.where(entropy > how.entropy_high, adjust(logits, UNSURE_TEMPERATURE, top_p=UNSURE_TOP_P), chosen)
    if how.entropy_low is not None:
        chosen = jnp.where(entropy < how.entropy_low, adjust(logits, 0.0), chosen)
    return jax.vmap(jax.random.categorical)(keys, chosen).astype(jnp.int32)


def token_keys(keys: Key[Array, " B"], positions: Int[Array, " B"]) -> Key[Array, " B"]:
    """Return each row's key for the token at a position, so that an interrupted row continues with the same tokens."""
    return jax.vmap(jax.random.fold_in)(keys, positions)
