"""Measure the residual stream on a fixed batch, in one compiled forward pass apart from the train step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mhc.config import Config
from mhc.data import pipeline, tokenizers
from mhc.model.attention import Attention
from mhc.model.decoder import DecoderDefinition, Params, SublayerView
from mhc.residual.functional import composite_gains, composite_maps, single_gains
from mhc.sharding import jit, replicated, tracing_for

OWN = "residual/"  # what the names of a topology's own measures begin with
BATCH_FIELDS = ("tokens", "segment_ids", "positions")


def probe_batch(config: Config) -> dict[str, np.ndarray]:
    """Return the fixed batch of a run's probes: the first ``monitor.probe_sequences`` rows of its validation set."""
    rows = config.monitor.probe_sequences
    tokenizer = tokenizers.load(config.data.tokenizer)
    batches = pipeline.validation_batches(config.data, tokenizer, batch_size=rows, batches=1)
    batch = next(iter(batches))
    return {name: batch[name] for name in BATCH_FIELDS}


class _Tokens:
    """Holds which tokens of a probe batch count: those that are not padding."""

    def __init__(self, segment_ids: jax.Array):
        self.valid = segment_ids > 0  # [B, T]
        self.count = jnp.maximum(jnp.sum(self.valid), 1)

    def mean(self, values: jax.Array) -> jax.Array:
        """Return the mean over tokens: [..., B, T] -> [...]."""
        return jnp.sum(jnp.where(self.valid, values, 0.0), axis=(-2, -1)) / self.count

    def measured(self, measures: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Return a topology's own measures, [B, T] or [B, T, K] each, as means over tokens [] or [K]."""
        first = {name: jnp.moveaxis(leaf, (0, 1), (-2, -1)).astype(jnp.float32) for name, leaf in measures.items()}
        return {f"{OWN}{name}": self.mean(leaf) for name, leaf in first.items()}

    def max(self, values: jax.Array) -> jax.Array:
        """Return the largest of non-negative values over tokens: [..., B, T] -> [...]."""
        return jnp.max(jnp.where(self.valid, values, 0.0), axis=(-2, -1))

    def min(self, values: jax.Array) -> jax.Array:
        """Return the smallest value over tokens: [..., B, T] -> [...]; infinity where no token counts."""
        return jnp.min(jnp.where(self.valid, values, jnp.inf), axis=(-2, -1))

    def zero_padding(self, x: jax.Array) -> jax.Array:
        """Return x [B, T, ...] in float32 with padding at 0."""
        shape = (*self.valid.shape, *(1,) * (x.ndim - 2))
        return jnp.where(self.valid.reshape(shape), x.astype(jnp.float32), 0.0)


def _observer(tokens: _Tokens) -> Callable[[SublayerView], dict[str, jax.Array]]:
    def observe(view: SublayerView) -> dict[str, jax.Array]:
        maps, measures = view.connection.maps(view.context), view.connection.measures(view.context)
        streams = tokens.zero_padding(view.topology.streams(view.state))  # [B, T, N, D]
        n, d = streams.shape[-2:]
        gram = jnp.einsum("btnd,btmd->nm", streams, streams)
        out = tokens.measured(measures)
        if maps is not None:
            out |= {
                "res": maps.res,
                "maps/pre_mean": tokens.mean(jnp.moveaxis(maps.pre, -1, 0)),
                "maps/post_mean": tokens.mean(jnp.moveaxis(maps.post, -1, 0)),
            }
        out |= {
            "stream/rms": jnp.sqrt(jnp.diagonal(gram) / (tokens.count * d)),
            "stream/effective": participation_ratio(gram),
            "activation/residual_rms": jnp.sqrt(jnp.trace(gram) / (tokens.count * n * d)),
            "activation/sublayer_out_rms": jnp.sqrt(tokens.mean(jnp.mean(jnp.square(view.y.astype(jnp.float32)), -1))),
        }
        if isinstance(view.sublayer.core, Attention):
            for name, link in view.sublayer.core.named_links():
                out |= {f"attention/{name}_{constant}": value for constant, value in link.constants().items()}
            (context,) = view.args
            logit_max, entropy = view.sublayer.core.statistics(view.sublayer.before(view.u), context, view.memory)
            out["activation/attention_logit_max"] = logit_max
            out["activation/attention_entropy"] = jnp.mean(tokens.mean(jnp.moveaxis(entropy, 1, 0)))
        else:  # the end of a block
            hidden = tokens.zero_padding(view.topology.collapse(view.state))
            out["representation/rank"] = _rank(hidden, tokens)
            out["representation/mean_cosine"] = _mean_cosine(hidden, tokens)
        return out

    return observe


def participation_ratio(matrix: jax.Array) -> jax.Array:
    """Return (tr A)^2 / tr A^2 of a symmetric matrix [n, n]: 1 for rank one, n for a multiple of the identity."""
    return jnp.square(jnp.trace(matrix)) / jnp.maximum(jnp.sum(jnp.square(matrix)), 1e-30)


def _rank(hidden: jax.Array, tokens: _Tokens) -> jax.Array:
    """Return the participation ratio of the covariance over tokens of hidden [B, T, D] (padding at 0)."""
    mean = jnp.sum(hidden, axis=(0, 1)) / tokens.count
    centred = tokens.zero_padding(hidden - mean[None, None])
    return participation_ratio(jnp.einsum("btd,bte->de", centred, centred))


def _mean_cosine(hidden: jax.Array, tokens: _Tokens) -> jax.Array:
    """Return the mean cosine between the hidden states of two different tokens."""
    unit = hidden / jnp.maximum(jnp.linalg.norm(hidden, axis=-1, keepdims=True), 1e-30)
    # The sum over all pairs is |sum of the unit vectors|^2; what a token has with itself is 1.
    total = jnp.sum(jnp.square(jnp.sum(unit, axis=(0, 1))))
    return (total - tokens.count) / jnp.maximum(tokens.count * (tokens.count - 1), 1)


def measure(definition: DecoderDefinition, params: Params, batch: dict[str, Any]) -> dict[str, jax.Array]:
    """Measure the residual stream on a batch: float32 arrays over sublayers [S], unless another shape is given.

    - gain/{forward,backward}_{single,composite}_{mean,max}: ``functional.single_gains`` and ``composite_gains``, over
      tokens; gain/worst_case_{mean,max}: max_i sum_j abs(H[i, j]).
      gain/composite_norm_{mean,max}, gain/composite_smallest_{mean,min}: the largest and the smallest singular value of
      the product H_k ... H_0.
    - ds_error/{rows,columns}: largest abs(marginal - 1) of H_res.
    - mix/to_identity_{single,composite}, mix/to_uniform_{single,composite}: Frobenius distance of H_res, and of the
      product H_k ... H_0, to I and to J/N, over sqrt(N); mix/frozen: share of entries off the diagonal below 1e-6;
      mix/negative: the share of the negative entries in the sum of abs(H[i, j]).
    - residual/NAME: what the topology's connections measure themselves (``Connection.measures``), token mean, [S] or
      [S, K]; where the last read measures it too, with one more row for it; and learned constants of any shape.
    - attention/NAME [L, K]: learned constants of the links between layers.
    - maps/pre_mean, maps/post_mean [S, N]; stream/rms [S, N]; stream/effective: participation ratio of the streams'
      Gram matrix, 1 (all alike) to N (orthogonal and equal).
    - activation/{residual,sublayer_out}_rms; activation/attention_{logit_max,entropy} [L], entropy in nats.
    - representation/{rank,mean_cosine} [L]: of the collapsed stream after each block, over tokens.

    A topology without maps of streams (``Connection.maps`` is None) has no gains, errors, distances and maps. They are
    left out, since a gain of 1 would be a claim. Padding tokens do not count.
    """
    decoder = definition.bind(params)
    tokens = _Tokens(batch["segment_ids"])
    out = decoder.forward(batch["tokens"], batch["segment_ids"], batch["positions"], _observer(tokens))
    seen = dict(out.observed)
    for name, value in tokens.measured(decoder.residual.end_measures(out.state)).items():
        seen[name] = jnp.concatenate([seen[name], value[None]]) if name in seen else value
    seen |= {f"{OWN}{name}": value for name, value in decoder.residual.constants().items()}
    res = seen.pop("res", None)
    return seen if res is None else map_measures(res, tokens) | seen


def map_measures(res: jax.Array, tokens: _Tokens) -> dict[str, jax.Array]:
    """Return gains, errors and distances of the maps H_res [S, B, T, N, N] in depth order; see ``measure``."""
    out: dict[str, jax.Array] = {}

    def over_tokens(name: str, values: jax.Array) -> None:
        out[f"{name}_mean"], out[f"{name}_max"] = tokens.mean(values), tokens.max(values)

    for extent, gains in (("single", single_gains(res)), ("composite", composite_gains(res))):
        over_tokens(f"gain/forward_{extent}", gains.forward)
        over_tokens(f"gain/backward_{extent}", gains.backward)
    over_tokens("gain/worst_case", jnp.max(jnp.sum(jnp.abs(res), axis=-1), axis=-1))
    for name, axis in (("rows", -1), ("columns", -2)):
        out[f"ds_error/{name}"] = tokens.max(jnp.max(jnp.abs(jnp.sum(res, axis=axis) - 1.0), axis=-1))

    n = res.shape[-1]
    identity, products = jnp.eye(n), composite_maps(res)
    singular = jnp.linalg.svd(products, compute_uv=False)  # the largest first
    over_tokens("gain/composite_norm", singular[..., 0])
    smallest = singular[..., -1]
    out["gain/composite_smallest_mean"], out["gain/composite_smallest_min"] = (
        tokens.mean(smallest),
        tokens.min(smallest),
    )
    weight = jnp.maximum(jnp.sum(jnp.abs(res), axis=(-2, -1)), 1e-30)
    out["mix/negative"] = tokens.mean(jnp.sum(jnp.maximum(-res, 0.0), axis=(-2, -1)) / weight)
    for extent, matrices in (("single", res), ("composite", products)):
        for name, target in (("identity", identity), ("uniform", jnp.full((n, n), 1.0 / n))):
            difference = matrices - jax.lax.broadcast_to_rank(target, matrices.ndim)
            distance = jnp.sqrt(jnp.sum(jnp.square(difference), axis=(-2, -1)) / n)
            out[f"mix/to_{name}_{extent}"] = tokens.mean(distance)
    off_diagonal = (jnp.abs(res) < 1e-6) & jax.lax.broadcast_to_rank(identity == 0, res.ndim)
    out["mix/frozen"] = tokens.mean(jnp.sum(off_diagonal, axis=(-2, -1)) / max(n * (n - 1), 1))
    return out


def static_measures(res: jax.Array) -> dict[str, jax.Array]:
    """Return ``map_measures`` of maps [S, N, N] that are the same for every token; each is [S]."""
    return map_measures(res[:, None, None], _Tokens(jnp.ones((1, 1), jnp.int32)))


def compile_probe(definition: DecoderDefinition, mesh: Mesh | None = None) -> Any:
    """Return the compiled ``probe(params, batch) -> {name: array}``; ``mesh``: that of the parameters, if any."""

    def probe(params: Params, batch: dict[str, Any]) -> dict[str, jax.Array]:
        with tracing_for(mesh):
            return measure(definition, params, batch)

    everywhere = replicated(mesh) if mesh is not None else None
    return jit(probe, mesh, out_shardings=everywhere)
