"""Draw the next token from logits: temperature, top-k, top-p, min-p, greedy, and sampling guided by an entropy.

These are pure functions over logits [B, V]. Each row has a key of its own, so what it samples does not depend on the
batch that it is in.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, Key

GUIDES = ("output", "hidden", "lens")
"""Names what the thresholds of guided sampling are compared with; see `Sampling`."""


def _refuse(given: Draw, allowed: dict[str, tuple[bool, str]]) -> None:
    for name, (fine, words) in allowed.items():
        if not fine:
            raise ValueError(f"{name}: given {getattr(given, name)}, allowed: {words}")


@dataclasses.dataclass(frozen=True)
class Draw:
    """Describes how a token is drawn from logits.

    The logits are divided by ``temperature``. Then tokens are left out in three steps: all but the ``top_k`` most
    probable; of these, all but the fewest most probable whose share reaches ``top_p`` (arXiv:1904.09751); of these,
    those that are less than ``min_p`` times as probable as the first (arXiv:2407.01082).

    Raises:
      ValueError: a value is not allowed; the message names the field.
    """

    temperature: float = 1.0  # 0: the most probable token
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        _refuse(self, self._allowed())

    def _allowed(self) -> dict[str, tuple[bool, str]]:
        return {
            "temperature": (0 <= self.temperature < math.inf, "0 (greedy) or more"),
            "top_k": (self.top_k is None or self.top_k >= 1, "1 or more"),
            "top_p": (self.top_p is None or 0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (self.min_p is None or 0 <= self.min_p <= 1, "from 0 to 1"),
        }


UNSURE, SURE = Draw(1.2, top_p=0.95), Draw(0.0)  # above and below the thresholds, unless said otherwise


@dataclasses.dataclass(frozen=True)
class Sampling(Draw):
    """Describes how the next token is drawn, where an entropy may decide how.

    Above ``entropy_high`` the token is drawn as ``above`` describes, below ``entropy_low`` as ``below``, else as the
    fields of `Draw`. The entropy is that of the ``guide``: ``output``, in bits, of the model's own distribution;
    ``hidden``, from 0 to 1, of the last block's feed-forward activations (`activation_entropy`); ``lens``, in bits, of
    the distribution that the head gives for the state behind block ``lens_block`` (a logit lens).

    Raises:
      ValueError: a value is not allowed; the message names the field.
    """

    entropy_low: float | None = None
    entropy_high: float | None = None
    guide: str = "output"
    lens_block: int | None = None
    above: Draw = UNSURE
    below: Draw = SURE

    def _allowed(self) -> dict[str, tuple[bool, str]]:
        most, unit = (1.0, "0 to 1, a share of log F") if self.guide == "hidden" else (math.inf, "0 bits or more")
        low, high = self.entropy_low, self.entropy_high
        least = "0" if low is None else f"entropy_low={low}"
        top = f"at least {least}" if most == math.inf else f"from {least} to 1"
        return super()._allowed() | {
            "guide": (self.guide in GUIDES, f"one of {', '.join(GUIDES)}"),
            "lens_block": (
                self.lens_block is not None or self.guide != "lens",
                "the number of a block with guide=lens",
            ),
            "entropy_low": (low is None or 0 <= low <= most, unit),
            "entropy_high": (high is None or (low or 0) <= high <= most, top),
        }

    @property
    def looks_inside(self) -> bool:
        """Return whether a value is needed that is not in the logits."""
        return self.guide != "output" or self.lens_block is not None


def parse_draw(text: str) -> Draw:
    """Return the draw that a text describes: ``greedy``, or ``temperature=1.2,top_p=0.95``.

    Raises:
      ValueError: the text describes none; the message says why.
    """
    if text == "greedy":
        return SURE
    values: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name not in {field.name for field in dataclasses.fields(Draw)} or not equals or name in values:
            raise ValueError(f"given {text}, allowed: greedy, or temperature=, top_k=, top_p= and min_p= with commas")
        try:
            values[name] = int(value) if name == "top_k" else float(value)
        except ValueError:
            raise ValueError(f"{name}: given {value}, allowed: a number") from None
    return Draw(**values)


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


def entropy_bits(logits: Float[Array, "*tokens V"]) -> Float[Array, "*tokens"]:
    """Return the entropy of the distribution that the logits give, in bits, float32."""
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return -jnp.sum(jnp.where(log_p > -jnp.inf, jnp.exp(log_p) * log_p, 0.0), axis=-1) / math.log(2.0)


def activation_entropy(a: Float[Array, "*tokens F"]) -> Float[Array, "*tokens"]:
    """Return H(p) / log F of p = abs(a) / sum(abs(a)), float32: 0 where one activation is all, 1 where all are equal.

    Activations that are all zero say nothing: they have 1, the entropy of equal ones, and so have activations of
    width 1 where the quotient would be 0 / 0.
    """
    size = jnp.abs(a.astype(jnp.float32))
    largest = jnp.max(size, axis=-1, keepdims=True)
    size = size / jnp.where(largest > 0, largest, 1.0)  # so that no sum of tiny values is lost
    total = jnp.sum(size, axis=-1, keepdims=True)
    p = jnp.where(total > 0, size / jnp.where(total > 0, total, 1.0), 1.0 / a.shape[-1])
    entropy = -jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1.0)), 0.0), axis=-1)
    return jnp.ones_like(entropy) if a.shape[-1] == 1 else entropy / math.log(a.shape[-1])


def choose(
    logits: Float[Array, "B V"], how: Sampling, entropy: Float[Array, " B"] | None = None
) -> tuple[Float[Array, "B V"], Int[Array, " B"]]:
    """Return (the logits to sample from, -inf where a token is left out; what decided, int32).

    What decided is -1 below the lower threshold, 1 above the upper one, else 0.

    Args:
      logits: of the model.
      how: the draw.
      entropy: of the guide; None: that of the logits.
    """
    chosen = adjust(logits, how.temperature, how.top_k, how.top_p, how.min_p)
    entropy = (entropy_bits(logits) if entropy is None else entropy)[:, None]
    decided = jnp.zeros(entropy.shape, jnp.int32)
    if how.entropy_high is not None:
        over = entropy > how.entropy_high
        chosen = jnp.where(over, adjust(logits, **dataclasses.asdict(how.above)), chosen)
        decided = jnp.where(over, 1, decided)
    if how.entropy_low is not None:
        under = entropy < how.entropy_low
        chosen = jnp.where(under, adjust(logits, **dataclasses.asdict(how.below)), chosen)
        decided = jnp.where(under, -1, decided)
    return chosen, decided[:, 0]


def draw(chosen: Float[Array, "B V"], keys: Key[Array, " B"]) -> Int[Array, " B"]:
    """Return a token of each row, int32, sampled from the logits that `choose` returned."""
    return jax.vmap(jax.random.categorical)(keys, chosen).astype(jnp.int32)


def sample(
    logits: Float[Array, "B V"], keys: Key[Array, " B"], how: Sampling, entropy: Float[Array, " B"] | None = None
) -> Int[Array, " B"]:
    """Draw the next token of each row, int32; ``entropy`` as in `choose`."""
    return draw(choose(logits, how, entropy)[0], keys)


def token_keys(keys: Key[Array, " B"], positions: Int[Array, " B"]) -> Key[Array, " B"]:
    """Return each row's key for the token at a position, so that an interrupted row continues with the same tokens."""
    return jax.vmap(jax.random.fold_in)(keys, positions)
