"""Counting: parameters by kind and matrix FLOPs per token, from shapes alone."""

from __future__ import annotations

import math

import jax

from mhc.config import Config
from mhc.model.decoder import DecoderDefinition, build_topology
from mhc.rng import path_key
from mhc.sharding import path_of


def leaf_sizes(definition: DecoderDefinition) -> dict[str, int]:
    """Number of elements of each parameter, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(definition.abstract())
    return {path_of(path): math.prod(leaf.shape) for path, leaf in leaves}


def count_parameters(definition: DecoderDefinition) -> dict[str, int]:
    """{total, active, vocabulary, maps} of a model.

    ``vocabulary`` is the embedding and the head; ``active`` leaves out an untied input embedding, of which a token
    uses one row; ``maps`` is everything the residual connections own.
    """
    sizes = leaf_sizes(definition)
    embedding, head = sizes["embed/table"], sizes.get("head/kernel", 0)
    total = sum(sizes.values())
    return {
        "total": total,
        "active": total - (embedding if head else 0),
        "vocabulary": embedding + head,
        "maps": sum(size for path, size in sizes.items() if "residual/" in path),
    }


def flops_per_token(config: Config) -> int:
    """Matrix FLOPs of one token in training: forward plus backward (twice the forward), a multiply-add counted as 2.

    Counted: every weight matrix, attention scores and values over half the sequence (causal), the output head, and the
    topology's map projections, reads, mixing and writes. Not counted: norms, softmax, Sinkhorn, the embedding look-up,
    recomputation under remat.
    """
    a, d = config.attention, config.model.width
    heads, length = a.heads * config.head_dim, config.data.sequence_length
    projections = d * (2 * heads + 2 * config.kv_heads * config.head_dim)
    feed_forward = d * config.mlp_width * (3 if config.mlp.kind == "swiglu" else 2)
    attended = heads * length  # scores and values, each length / 2 positions on average
    topology = build_topology(config.residual, d, path_key(jax.random.key(0)))
    block = projections + feed_forward + attended + 2 * topology.multiplies()
    return 3 * 2 * (config.model.layers * block + d * config.vocab_size)
