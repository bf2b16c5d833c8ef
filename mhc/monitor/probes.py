"""Measures of the residual stream on a fixed batch, in one compiled forward pass apart from the train step."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mhc.config import Config
from mhc.data import pipeline, tokenizers
from mhc.model.decoder import DecoderDefinition, Params, SublayerView
from mhc.residual.functional import Maps, composite_gains, single_gains
from mhc.train.checkpoint import LoadedRun

BATCH_FIELDS = ("tokens", "segment_ids", "positions")


def probe_batch(config: Config) -> dict[str, np.ndarray]:
    """The fixed batch of a run's probes: the first ``monitor.probe_sequences`` rows of its validation set."""
    rows = config.monitor.probe_sequences
    tokenizer = tokenizers.load(config.data.tokenizer)
    batches = pipeline.validation_batches(config.data, tokenizer, batch_size=rows, batches=1)
    batch = next(iter(batches))
    return {name: batch[name] for name in BATCH_FIELDS}


def _maps(view: SublayerView) -> Maps:
    return view.connection.maps(view.context)


def measure(definition: DecoderDefinition, params: Params, batch: dict[str, Any]) -> dict[str, jax.Array]:
    """Per sublayer, arrays [S] float32: gains (mean and max over the tokens that are not padding) and marginal errors.

    Keys: gain/{forward,backward}_{single,composite}_{mean,max} (spec of ``functional.single_gains`` and
    ``functional.composite_gains``), ds_error/{rows,columns}: largest |marginal - 1| of H_res.
    """
    decoder = definition.bind(params)
    _, maps = decoder.hidden(batch["tokens"], batch["segment_ids"], batch["positions"], observe=_maps)
    valid = batch["segment_ids"] > 0  # [B, T]
    count = jnp.maximum(jnp.sum(valid), 1)
    out: dict[str, jax.Array] = {}

    def reduce(name: str, values: jax.Array) -> None:  # values [S, B, T]
        values = jnp.where(valid, values, 0.0)
        out[f"{name}_mean"] = jnp.sum(values, axis=(1, 2)) / count
        out[f"{name}_max"] = jnp.max(values, axis=(1, 2))

    for extent, gains in (("single", single_gains(maps.res)), ("composite", composite_gains(maps.res))):
        reduce(f"gain/forward_{extent}", gains.forward)
        reduce(f"gain/backward_{extent}", gains.backward)
    for name, axis in (("rows", -1), ("columns", -2)):
        error = jnp.max(jnp.abs(jnp.sum(maps.res, axis=axis) - 1.0), axis=-1)
        out[f"ds_error/{name}"] = jnp.max(jnp.where(valid, error, 0.0), axis=(1, 2))
    return out


def compile_probe(definition: DecoderDefinition) -> Any:
    """``probe(params, batch) -> {name: [S]}``, compiled."""
    return jax.jit(partial(measure, definition))


def probe_run(loaded: LoadedRun, sinkhorn: str | None = None) -> dict[str, np.ndarray]:
    """The probe of a loaded run on its own probe batch; ``sinkhorn`` projects with another preset's convention.

    The deepseek preset transposes, so under another preset the residual logits are transposed too: the same matrix is
    projected, only the order of the divisions differs.
    """
    config, params = loaded.config, loaded.params
    if sinkhorn is not None and sinkhorn != config.residual.sinkhorn:
        config = dataclasses.replace(config, residual=dataclasses.replace(config.residual, sinkhorn=sinkhorn))
        params = transpose_residual_logits(params, config)
    batch = probe_batch(config)
    result = compile_probe(DecoderDefinition(config))(params, batch)
    return {name: np.asarray(value) for name, value in result.items()}


def transpose_residual_logits(params: Params, config: Config) -> Params:
    """Parameters of mhc whose residual logits are transposed: the last N*N columns of phi and of the bias."""
    n = config.residual.n
    assert n is not None

    def swap(leaf: jax.Array) -> jax.Array:
        head, tail = leaf[..., : 2 * n], leaf[..., 2 * n :]
        square = tail.reshape(*tail.shape[:-1], n, n)
        return jnp.concatenate([head, jnp.swapaxes(square, -1, -2).reshape(tail.shape)], axis=-1)

    blocks = dict(params["blocks"])
    for name in ("attention_residual", "mlp_residual"):
        blocks[name] = {**blocks[name], **{leaf: swap(blocks[name][leaf]) for leaf in ("phi", "bias")}}
    return {**params, "blocks": blocks}
