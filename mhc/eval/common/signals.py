"""Look inside a model while it generates: entropies and norms of each row's last token, from a pass with a cache."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mhc.model.attention import Attention
from mhc.model.decoder import Decoder, SublayerView
from mhc.model.sampling import activation_entropy, entropy_bits

INSIDE = ("u", "end", "lens")
"""Names the arrays that are kept of a token beside its hidden state, [B, D] each: the input of the last feed-forward,
the collapsed stream behind the last block (the state before the last norm), and that behind the block of the lens."""


def observe(view: SublayerView) -> dict[str, jax.Array]:
    """Return the input of a feed-forward and the collapsed stream behind it, [B, T, D] each; of attention nothing."""
    if isinstance(view.sublayer.core, Attention):
        return {}
    return {"u": view.u, "collapsed": view.topology.collapse(view.state)}


def inside(observed: dict[str, jax.Array], lens_block: int | None) -> dict[str, jax.Array]:
    """Return what ``INSIDE`` lists, [B, T, D] each, of observations stacked over blocks."""
    u, collapsed = observed["u"], observed["collapsed"]
    return {"u": u[-1], "end": collapsed[-1], "lens": collapsed[-1 if lens_block is None else lens_block]}


def values(decoder: Decoder, last: dict[str, jax.Array], logits: jax.Array, lens: bool) -> dict[str, jax.Array]:
    """Return the values of each row's last token, float32 [B] each.

    - output: entropy of the model's distribution, bits.
    - hidden: H(p) / log F of the last block's feed-forward activations (`mhc.model.sampling.activation_entropy`).
    - lens: entropy of what the head makes of the stream behind the block of the lens, bits; only with ``lens``.
    - norm: Euclidean norm of the state before the last norm.

    Args:
      decoder: the model.
      last: ``h`` and what ``INSIDE`` lists, [B, D] each.
      logits: of the tokeniser's vocabulary [B, V].
      lens: whether the state behind a block is looked at through the head.
    """
    out = {
        "output": entropy_bits(logits),
        "hidden": activation_entropy(last_activations(decoder, last["u"][:, None]))[:, 0],
        "norm": jnp.linalg.norm(last["end"].astype(jnp.float32), axis=-1),
    }
    if lens:
        seen = decoder.logits(decoder.before_head(last["lens"][:, None]))[:, 0, : logits.shape[1]]
        out["lens"] = entropy_bits(seen)
    return out


def last_activations(decoder: Decoder, u: jax.Array) -> jax.Array:
    """Return the feed-forward activations [B, T, F] of the last block, whose feed-forward has the input u [B, T, D]."""
    graph, stacked = nnx.split(decoder.blocks)
    block: Any = nnx.merge(graph, jax.tree.map(lambda leaf: leaf[-1], stacked))
    return block.mlp.core.activations(block.mlp.before(u))
