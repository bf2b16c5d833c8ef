"""Compute the gradients of attention by its logits and values in closed form (arXiv:2512.22473).

With results c_i = Σ_j α_ij v_j, α the softmax of the logits s over j, and u_i = ∂L/∂c_i, let b_ij = u_i · v_j. Then

    ∂L/∂s_ij = α_ij (b_ij − Σ_l α_il b_il)        ∂L/∂v_j = Σ_i α_ij u_i

The **advantage** −(b_ij − Σ_l α_il b_il) says by how much key j serves query i better than the mean of the keys that
the query weights: gradient descent raises the logits of positive advantage. A column of α holds the
**responsibilities**, by which queries share the update of a value. All functions keep the dtype of what they are given.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Float64


class Gradients(NamedTuple):
    """Holds the closed forms.

    Attributes:
        advantage: [B, H, T, U], −(b_ij − Σ_l α_il b_il).
        scores: [B, H, T, U], ∂L/∂s.
        values: [B, U, G, J], ∂L/∂v.
    """

    advantage: jax.Array
    scores: jax.Array
    values: jax.Array


def contexts(scores: Float[Array, "B H T U"], values: Float[Array, "B U G J"]) -> Float[Array, "B T H J"]:
    """Return c_i = Σ_j α_ij v_j; -inf is a key that a query does not see. Head h reads values of head h // (H / G)."""
    return jnp.einsum("bhtu,buhj->bthj", jax.nn.softmax(scores, axis=-1), _of_heads(values, scores.shape[1]))


def gradients(
    scores: Float[Array, "B H T U"], values: Float[Array, "B U G J"], u: Float[Array, "B T H J"]
) -> Gradients:
    """Return the closed forms of the gradients by logits and values; ``u`` is the gradient by the results."""
    batch, heads = scores.shape[:2]
    alpha = jax.nn.softmax(scores, axis=-1)
    b = jnp.einsum("bthj,buhj->bhtu", u, _of_heads(values, heads))
    advantage = jnp.sum(alpha * b, axis=-1, keepdims=True) - b
    by_head = jnp.einsum("bhtu,bthj->buhj", alpha, u)
    groups = values.shape[2]
    to_values = by_head.reshape(batch, -1, groups, heads // groups, u.shape[-1]).sum(axis=3)
    return Gradients(advantage, -alpha * advantage, to_values)


def _of_heads(values: jax.Array, heads: int) -> jax.Array:
    return jnp.repeat(values, heads // values.shape[2], axis=2)


def queries_per_value(alpha: Float[Array, "B H T U"]) -> Float[Array, "B H"]:
    """Return how many queries share the update of a value, (Σ_i α_ij)² / Σ_i α_ij², as the mean over values.

    It is 1 where one query alone is responsible. Values that no query sees do not count.
    """
    mass, square = alpha.sum(axis=2), (alpha**2).sum(axis=2)  # [B, H, U]
    seen = mass > 0
    share = jnp.where(seen, mass**2 / jnp.where(seen, square, 1.0), 0.0)
    return share.sum(axis=-1) / seen.sum(axis=-1)


def responsibility_at(alpha: Float[Array, "B H T U"], there: Bool[Array, "B T"]) -> Float[Array, "B H"]:
    """Return the share of a value's responsibilities that the queries ``there`` have, the mean over values, 0 … 1."""
    mass = alpha.sum(axis=2)
    part = jnp.where(there[:, None, :, None], alpha, 0.0).sum(axis=2)
    seen = mass > 0
    return jnp.where(seen, part / jnp.where(seen, mass, 1.0), 0.0).sum(axis=-1) / seen.sum(axis=-1)


@dataclasses.dataclass(frozen=True)
class Moments:
    """Holds sums over pairs of a query and a key, from which correlations are taken: float64 [6, L, H]."""

    sums: np.ndarray  # of 1, x, y, x², y², x y

    def __add__(self, other: Moments) -> Moments:
        """Return the sums over the pairs of both."""
        return Moments(self.sums + other.sums)

    def correlation(self) -> Float64[np.ndarray, "L H"]:
        """Return Pearson's correlation of x and y, −1 … 1; nan where one of them does not vary but for rounding."""
        count, x, y, xx, yy, xy = self.sums
        with np.errstate(divide="ignore", invalid="ignore"):
            mean_x, mean_y = x / count, y / count
            of_x, of_y = xx / count - mean_x**2, yy / count - mean_y**2
            varies = (of_x > 1e-12 * xx / count) & (of_y > 1e-12 * yy / count)
            found = np.where(varies, (xy / count - mean_x * mean_y) / np.sqrt(of_x * of_y), np.nan)
        return np.asarray(np.clip(found, -1.0, 1.0))


class Agreement(NamedTuple):
    """Holds how the advantage at one checkpoint correlates with the change of attention to the next."""

    with_scores: Moments
    with_weights: Moments


def agreement(
    advantage: Float64[np.ndarray, "B L H P U"],
    before: Float64[np.ndarray, "B L H P U"],
    after: Float64[np.ndarray, "B L H P U"],
) -> Agreement:
    """Compare the advantage with the change of logits, and with that of weights, between two checkpoints.

    The softmax does not see what is added to all logits of a query: their change is taken less its mean under α, as the
    advantage is. Pairs count where the query sees the key, and another one too.

    Args:
        advantage: at the first checkpoint.
        before: logits of the first checkpoint, -inf where a query does not see a key.
        after: logits of the next one.
    """
    seen = np.isfinite(before) & np.isfinite(after)
    seen &= seen.sum(axis=-1, keepdims=True) > 1
    alpha, later = _softmax(before, seen), _softmax(after, seen)
    change = np.where(seen, np.where(seen, after, 0.0) - np.where(seen, before, 0.0), 0.0)
    change = change - (alpha * change).sum(axis=-1, keepdims=True)
    return Agreement(_moments(advantage, change, seen), _moments(advantage, later - alpha, seen))


def _softmax(scores: np.ndarray, seen: np.ndarray) -> np.ndarray:
    most = np.where(seen, scores, -np.inf).max(axis=-1, keepdims=True)
    out = np.where(seen, np.exp(np.where(seen, scores - np.where(np.isfinite(most), most, 0.0), 0.0)), 0.0)
    total = out.sum(axis=-1, keepdims=True)
    return np.asarray(out / np.where(total > 0, total, 1.0))


def _moments(x: np.ndarray, y: np.ndarray, seen: np.ndarray) -> Moments:
    x, y = np.where(seen, x, 0.0), np.where(seen, y, 0.0)
    terms = (seen.astype(np.float64), x, y, x * x, y * y, x * y)
    return Moments(np.stack([term.sum(axis=(0, 3, 4)) for term in terms]))
