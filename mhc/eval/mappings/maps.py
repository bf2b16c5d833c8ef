"""Measure the residual maps of a checkpoint on its run's probe batch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mhc.errors import UserError
from mhc.eval.common import checkpoints

if TYPE_CHECKING:
    import jax

    from mhc.model.decoder import Decoder, SublayerView

MAPS = ("pre", "post", "res")


class Dynamic(NamedTuple):
    """Describes the part of each map's logits that depends on the token, scale · (φ m); [S, 3] each, as ``MAPS``."""

    scale: np.ndarray
    norm: np.ndarray  # Frobenius norm of the map's rows of φ
    logit_rms: np.ndarray  # of scale · (φ m) where every direction of m is equally likely: abs(scale) norm / √rows


class Mappings(NamedTuple):
    """Holds maps as float64 with S sublayers and N streams (1 of plain).

    They are a checkpoint's, as means over the tokens of a batch, or the static maps of a published model.
    """

    name: str
    kind: str
    single: np.ndarray  # H_k [S, N, N]
    from_start: np.ndarray  # H_k ... H_0 [S, N, N]
    to_end: np.ndarray  # H_{S-1} ... H_k [S, N, N]
    pre: np.ndarray  # [S, N]
    post: np.ndarray  # [S, N]
    probe: dict[str, np.ndarray]  # mhc.monitor.probes.measure of the same batch, or map_measures of the static maps
    dynamic: Dynamic | None = None  # of a published model


def measure(checkpoint: checkpoints.Checkpoint, sequences: int | None = None) -> Mappings:
    """Return the maps of a checkpoint on its run's probe batch.

    Args:
      sequences: of the validation set; None: monitor.probe_sequences.
    """
    import jax

    from mhc.eval.common.program import Program
    from mhc.monitor import probes

    config = checkpoint.config
    if sequences is not None:
        monitor = dataclasses.replace(config.monitor, probe_sequences=sequences)
        config = dataclasses.replace(config, monitor=monitor)
    batch = probes.probe_batch(config)
    try:
        means = jax.block_until_ready(Program(checkpoint, _means)(batch))
    except UserError as error:
        raise UserError(f"{checkpoint.name}: {error}") from None
    arrays: dict[str, Any] = {name: np.asarray(value, np.float64) for name, value in means.items()}
    probe = probes.compile_probe(checkpoint.definition, checkpoint.mesh)(checkpoint.params, batch)
    return Mappings(
        checkpoint.name,
        config.residual.kind,
        **arrays,
        probe={name: np.asarray(value) for name, value in jax.device_get(probe).items()},
    )


def _means(decoder: Decoder, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the maps of ``Mappings``, as means over the tokens of a batch."""
    import jax.numpy as jnp

    kind = decoder.config.residual.kind

    def observe(view: SublayerView) -> dict[str, jax.Array]:
        maps = view.connection.maps(view.context)
        if maps is None:
            raise UserError(f"residual.kind={kind} has no maps between streams to draw")
        return {"res": maps.res, "pre": maps.pre, "post": maps.post}

    _, seen = decoder.hidden(batch["tokens"], batch["segment_ids"], batch["positions"], observe=observe)
    every = {**with_products(seen["res"]), "pre": seen["pre"], "post": seen["post"]}
    valid = (batch["segment_ids"] > 0).astype(jnp.float32)
    return {name: jnp.einsum("sbt...,bt->s...", value, valid) / jnp.sum(valid) for name, value in every.items()}


def with_products(res: jax.Array) -> dict[str, jax.Array]:
    """Return maps [S, ..., N, N] in depth order with their products from the start and to the end."""
    import jax.numpy as jnp

    from mhc.residual.functional import composite_maps

    # Products from the end are those from the start of the transposed maps in reverse order, transposed.
    backwards = composite_maps(jnp.swapaxes(res, -1, -2)[::-1])
    return {"single": res, "from_start": composite_maps(res), "to_end": jnp.swapaxes(backwards, -1, -2)[::-1]}
