"""Map how strong the prior and how sure the likelihood is, by layer, head and position, and what both say together.

The terms are those of a reading of the transformer as Bayesian filtering. They are names of measured quantities here,
and no claim: docs/belief.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mhc.eval.common.signals import last_activations
from mhc.model.attention import Attention, Tokenwise
from mhc.model.decoder import Decoder, SublayerView
from mhc.model.sampling import activation_entropy, entropy_bits

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

WEAK, SURE = 0.25, 0.75  # quantiles of the joint diagnosis


def key_cosine_variance(
    q: Float[Array, "B T H K"], k: Float[Array, "B U H K"], visible: Bool[Array, "B H T U"]
) -> Float[Array, "B H T"]:
    """Return the variance of the cosines between a query and the keys that it sees, float32; 0 where it sees one."""

    def unit(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        return wide / jnp.maximum(jnp.linalg.norm(wide, axis=-1, keepdims=True), 1e-30)

    cosines = jnp.einsum("bthk,buhk->bhtu", unit(q), unit(k))
    count = jnp.maximum(jnp.sum(visible, axis=-1), 1)
    mean = jnp.sum(jnp.where(visible, cosines, 0.0), axis=-1) / count
    return jnp.sum(jnp.where(visible, jnp.square(cosines - mean[..., None]), 0.0), axis=-1) / count


def observe(view: SublayerView) -> dict[str, jax.Array]:
    """Return prior and values of attention by head; input, output and the collapsed stream behind a feed-forward."""
    core = view.sublayer.core
    if not isinstance(core, Attention):
        return {"u": view.u, "y": view.y, "collapsed": view.topology.collapse(view.state)}
    if isinstance(core, Tokenwise):
        return {}
    (context,) = view.args
    x = view.sublayer.before(view.u)
    q, k, v, _ = core.recall(x, context.positions, context.frequencies, view.memory)
    k, v = (jnp.repeat(each, q.shape[2] // each.shape[2], axis=2) for each in (k, v))
    visible = jnp.isfinite(core.scores(x, context, view.memory))
    return {"prior": key_cosine_variance(q, k, visible), "values": v}


def maps(
    decoder: Decoder, tokens: jax.Array, segment_ids: jax.Array | None = None, lens_block: int | None = None
) -> dict[str, jax.Array]:
    """Return what is measured at each position of whole rows [B, T], float32.

    - prior [B, L, H, T]: variance over the visible keys of the cosine between query and key.
    - confidence [B, L, H, T]: abs(⟨v, y⟩), v the value of the position itself as its head's output projection writes it
      to the stream, y the output of the feed-forward of the same block.
    - output, lens [B, T]: entropies in bits of the model's distribution, and of what the head makes of the stream
      behind ``lens_block`` (None: the middle block).
    - hidden [B, T]: `activation_entropy` of the last block's feed-forward.
    - log_probabilities [B, T, V]: of the model.

    A model without attention has no prior and no confidence.
    """
    out = decoder.forward(tokens, segment_ids, observe=observe)
    seen, logits = out.observed, decoder.logits(out.h)
    block = (decoder.config.model.layers - 1) // 2 if lens_block is None else lens_block
    lens = decoder.logits(decoder.before_head(seen["collapsed"][block]))
    found = {
        "output": entropy_bits(logits),
        "lens": entropy_bits(lens),
        "hidden": activation_entropy(last_activations(decoder, seen["u"][-1])),
        "log_probabilities": jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1),
    }
    if "prior" not in seen:
        return found
    cores: list[Any] = [blocks.attention.core for blocks, _, _ in decoder.stacks]
    projection = jnp.concatenate([core.out[...] for core in cores])  # [L, H, J, D]
    toward = jnp.einsum("lbtd,lhjd->lbhtj", seen["y"].astype(jnp.float32), projection)
    confidence = jnp.abs(jnp.einsum("lbhtj,lbthj->lbht", toward, seen["values"].astype(jnp.float32)))
    return found | {"prior": jnp.moveaxis(seen["prior"], 0, 1), "confidence": jnp.moveaxis(confidence, 0, 1)}


class Diagnosis(NamedTuple):
    """Holds the two signals of some positions on one scale, and what both say together.

    Attributes:
        prior: mean over layers and heads of the position's rank in its layer and head, from 0 (weakest) to 1.
        confidence: likewise.
        joint: confidence − prior: high where the prior is weak and the likelihood sure.
        marked: whether the prior is at or below its lower quantile and the confidence at or above its upper one.
    """

    prior: np.ndarray
    confidence: np.ndarray
    joint: np.ndarray
    marked: np.ndarray


def diagnose(prior: np.ndarray, confidence: np.ndarray, weak: float = WEAK, sure: float = SURE) -> Diagnosis:
    """Return the joint diagnosis of M positions, each [M].

    Ranks are taken within a layer and head, since sizes differ between them, and positions with equal values share
    theirs.

    Args:
        prior: [L, H, M] of `maps`.
        confidence: likewise.
        weak: quantile of the ranks up to which a prior is weak.
        sure: quantile of the ranks from which a likelihood is sure.
    """
    first, second = (_ranks(values).mean(axis=(0, 1)) for values in (prior, confidence))
    marked = (first <= np.quantile(first, weak)) & (second >= np.quantile(second, sure))
    return Diagnosis(first, second, second - first, marked)


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return the share of the other values below each along the last axis, equal ones counted half: 0 to 1."""
    from scipy import stats

    count = values.shape[-1]
    return (stats.rankdata(values, axis=-1) - 1) / max(count - 1, 1)
