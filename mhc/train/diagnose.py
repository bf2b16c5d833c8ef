"""Find the first tensor of a step that is not finite, and the operation that gave it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mhc.model.decoder import DecoderDefinition, Params, SublayerView
from mhc.monitor import nan
from mhc.sharding import batch_sharding, jit, replicated, traced_for
from mhc.train.scales import with_noise
from mhc.train.step import Batch, Trainer, counted, loss_and_gradients, loss_parts, micro_batches


def sublayer_name(k: int) -> str:
    """Return the words for sublayer k of the depth order."""
    return f"sublayer {k} ({'feed-forward' if k % 2 else 'attention'} of block {k // 2})"


def _with_faults(trainer: Trainer, params: Params, completed: jax.Array | int) -> Params:
    faulty = trainer.faults.params
    return params if faulty is None else faulty(jnp.asarray(completed), params)


def finite_outputs(trainer: Trainer, params: Params, batch: Batch, completed: int) -> jax.Array:
    """Return [S] bool: whether the output of each sublayer, and the streams after it, are finite.

    Args:
      batch: as ``trainer.step`` takes it.
      completed: the steps before this one.
    """

    def run(params: Params, batch: Batch) -> jax.Array:
        def observe(view: SublayerView) -> dict[str, jax.Array]:
            streams = view.topology.streams(view.state)
            return {"finite": jnp.all(jnp.isfinite(view.y)) & jnp.all(jnp.isfinite(streams))}

        decoder = trainer.definition.bind(_with_faults(trainer, params, completed))
        noise = with_noise(trainer.config, batch, completed).get("position_noise")
        rows = (batch["tokens"], batch["segment_ids"], batch["positions"])
        return decoder.forward(*rows, observe, noise=noise).observed["finite"]

    return jit(traced_for(run, trainer.mesh), trainer.mesh, out_shardings=replicated(trainer.mesh))(params, batch)


def first_nonfinite(trainer: Trainer, params: Params, batch: Batch, completed: int, metrics: Mapping[str, Any]) -> str:
    """Return the first non-finite tensor of a step: forward in depth order, the loss, then gradients from the end.

    The step left the parameters as they were, so its forward pass can be run again.

    Args:
      batch: as ``trainer.step`` takes it.
      completed: the steps before this one.
      metrics: what the step gave, on the host.
    """
    finite = jax.device_get(finite_outputs(trainer, params, batch, completed))
    if not finite.all():
        return f"output of {sublayer_name(int(np.argmin(finite)))}, forward"
    if not math.isfinite(metrics["loss"]):
        return "loss, forward"
    bad = np.flatnonzero(~np.isfinite(metrics["grad"].sublayers))
    groups = [name for name, norm in metrics["grad"].groups.items() if not math.isfinite(norm)]
    if "head" in groups:
        return "gradient of the head"
    if bad.size:
        return f"gradient of {sublayer_name(int(bad[-1]))}"
    return f"gradient of {', '.join(groups) or 'all parameters together'}"


def first_nan(trainer: Trainer, params: Params, batch: Batch, completed: int) -> tuple[str, nan.Origin] | None:
    """Return ("forward" or "backward", the first operation of the step's loss or gradient that gives a NaN).

    None where there is none. The programs are compiled for this alone, with a check of every operation, and so they
    round differently from the step's. Over several devices the compiler splits them as it likes, since checkify takes
    no second shard_map: they may hold more than the step does. Attention is the reference implementation, whose
    operations can be told apart.

    Args:
      batch: as ``trainer.step`` takes it.
      completed: the steps before this one.
    """
    config, mesh = trainer.config, trainer.mesh
    attention = dataclasses.replace(config.attention, impl="xla")
    definition = DecoderDefinition(dataclasses.replace(config, attention=attention))
    one_device = Mesh(mesh.devices.reshape(-1)[:1].reshape((1,) * mesh.devices.ndim), mesh.axis_names)
    accumulation = config.train.accumulation

    def forward(params: Params, batch: Batch) -> jax.Array:
        micro = micro_batches(counted(config, with_noise(config, batch, completed)), accumulation)

        def objective(rows: Batch) -> jax.Array:
            return loss_parts(definition, _with_faults(trainer, params, completed), rows).sums.objective

        return jax.lax.map(objective, micro)

    def backward(params: Params, batch: Batch) -> Params:
        noisy = with_noise(config, batch, completed)
        return loss_and_gradients(definition, _with_faults(trainer, params, completed), noisy, accumulation)[1]

    for name, function in (("forward", forward), ("backward", backward)):
        layouts = (trainer.layout.params, batch_sharding(mesh))
        program = jit(traced_for(nan.checked(function), one_device), mesh, in_shardings=layouts)
        origin = nan.origin(program(params, batch))
        if origin is not None:
            return name, origin
    return None
