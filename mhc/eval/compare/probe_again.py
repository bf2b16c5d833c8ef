"""The probe of a run, taken again from a checkpoint, also under the other Sinkhorn preset."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from mhc.config import Config
from mhc.model.decoder import STACKS, DecoderDefinition, Params
from mhc.monitor.probes import compile_probe, probe_batch
from mhc.residual.manifold import transpose_res_logits
from mhc.train.checkpoint import LoadedRun


def probe_run(loaded: LoadedRun, sinkhorn: str | None = None) -> dict[str, np.ndarray]:
    """Return what the probe measures of a loaded run on the run's own probe batch, see `mhc.monitor.probes.measure`.

    Args:
      sinkhorn: project with this preset instead of the run's own. The ``deepseek`` preset transposes, so the residual
        logits are transposed too: the same matrix is projected, and only the order of the divisions differs.
    """
    config, params = loaded.config, loaded.params
    if sinkhorn is not None and sinkhorn != config.residual.sinkhorn:
        config = dataclasses.replace(config, residual=config.residual.changed(sinkhorn=sinkhorn))
        params = transpose_all(params, config)
    measured = compile_probe(DecoderDefinition(config))(params, probe_batch(config))
    return {name: np.asarray(value) for name, value in jax.device_get(measured).items()}


def transpose_all(params: Params, config: Config) -> Params:
    """Return the parameters of a model of kind mhc with every connection's residual logits transposed."""
    n = config.residual.n
    assert n is not None
    changed = dict(params)
    for stack in STACKS:
        if stack in params:
            connections = {
                name: {**params[stack][name], **transpose_res_logits(params[stack][name], n)}
                for name in ("attention_residual", "mlp_residual")
            }
            changed[stack] = {**params[stack], **connections}
    return changed
