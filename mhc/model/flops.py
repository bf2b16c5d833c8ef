"""Count parameters by kind and matrix FLOPs per token, from shapes alone."""

from __future__ import annotations

import math

import jax

from mhc.config import GATED, Config
from mhc.model.block import build_topology
from mhc.model.decoder import DecoderDefinition
from mhc.rng import path_key
from mhc.sharding import path_of


def leaf_sizes(definition: DecoderDefinition) -> dict[str, int]:
    """Return the number of elements of each parameter, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(definition.abstract())
    return {path_of(path): math.prod(leaf.shape) for path, leaf in leaves}


def count_parameters(definition: DecoderDefinition) -> dict[str, int]:
    """Return the numbers of a model's parameters: {total, active, vocabulary, maps}.

    ``active`` are those that a token uses. An untied input embedding, of which a token takes one row, and the routed
    experts that are not chosen do not count. ``vocabulary`` is the embedding and the head, ``maps`` everything that the
    residual connections own.
    """
    sizes, moe = leaf_sizes(definition), definition.config.moe
    embedding, head = sizes["embed/table"], sizes.get("head/kernel", 0)
    total = sum(sizes.values())
    routed = sum(size for path, size in sizes.items() if "/experts/" in path)
    idle = routed * (moe.experts - moe.top_k) // moe.experts if moe.experts else 0
    return {
        "total": total,
        "active": total - idle - (embedding if head else 0),
        "vocabulary": embedding + head,
        "maps": sum(size for path, size in sizes.items() if "residual/" in path),
    }


def _attention_multiplies(config: Config) -> int:
    """Return a token's multiply-adds in one layer's attention, the mean over layers where windows differ."""
    a, d, length = config.attention, config.model.width, config.data.sequence_length
    query, values = config.head_dim + config.rope_dim, config.value_dim
    if a.kind == "mla":
        queries = d * a.heads * query if a.q_rank is None else a.q_rank * (d + a.heads * query)
        latent = d * (a.kv_rank + config.rope_dim) + a.kv_rank * a.heads * (config.head_dim + values)
        projections = queries + latent + a.heads * values * d
    else:
        projections = d * (2 * a.heads * query + 2 * config.kv_heads * query)
    if a.kind == "tokenwise":
        return projections
    attended = length / 2  # positions that a query sees on average
    if a.window is not None and a.window < length:
        windowed = a.window - a.window * a.window / (2 * length)
        share = sum(config.local_layers) / config.model.layers
        attended = share * windowed + (1 - share) * attended
    return round(projections + a.heads * (query + values) * attended)


def flops_per_token(config: Config) -> int:
    """Return the matrix FLOPs of one token in training, forward and backward.

    A multiply-add counts as 2, and the backward pass as twice the forward pass. Counted are: every weight matrix that
    the token uses (the chosen and the shared experts), attention scores and values over the positions that a query sees
    on average (half the sequence, or the window), the output head, and the topology's map projections, reads, mixing
    and writes. Norms, softmax, Sinkhorn, the embedding look-up and recomputation under remat are not counted.
    """
    d, moe = config.model.width, config.moe
    layers, dense = config.model.layers, config.leading_layers if config.moe.experts else config.model.layers
    matrices = 3 if config.mlp.kind in GATED else 2
    feed_forward = dense * d * config.mlp_width * matrices
    if moe.experts:
        sparse = d * config.expert_width * matrices * (moe.top_k + moe.shared) + d * moe.experts
        feed_forward += (layers - dense) * sparse
    topology = build_topology(config, path_key(jax.random.key(0)))
    connections = sum(topology.multiplies(k) for k in range(2 * layers)) + topology.end_multiplies()
    blocks = layers * _attention_multiplies(config) + connections + feed_forward
    return 3 * 2 * (blocks + d * config.outputs)
