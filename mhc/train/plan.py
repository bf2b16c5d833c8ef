"""Compute what a run would be from its config alone: sizes, cost and layout, with nothing allocated."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import Mesh

from mhc import config as configs
from mhc.config import Config
from mhc.data import tokenizers
from mhc.model.decoder import DecoderDefinition
from mhc.model.flops import count_parameters, flops_per_token, leaf_sizes
from mhc.model.parameters import GROUPS, parameter
from mhc.sharding import check_batch, make_mesh, path_of
from mhc.train.step import Trainer


def dry_run(config: Config, *, shardings: bool = False) -> dict[str, Any]:
    """Return params, flops_per_token, tokens_per_step, residual and mesh of a run.

    Args:
      shardings: add how each leaf of the train state lies on the mesh, by path: its shape, over which of the mesh's
        axes each of its axes is split (null: it is whole), and the bytes that a device holds of it.

    Raises:
      UserError: the mesh does not fit the devices, the batch does not fit the mesh, or the tokeniser cannot be read.
    """
    config = configs.resolve(config, tokenizers.load(config.data.tokenizer).vocab_size)
    mesh = make_mesh(config.mesh)
    check_batch(config.train.batch_size // config.train.accumulation, mesh, "train.batch_size / train.accumulation")
    definition = DecoderDefinition(config)
    by_group = dict.fromkeys(GROUPS, 0)
    for path, size in leaf_sizes(definition).items():
        by_group[parameter(path).group] += size
    return {
        "params": {**count_parameters(definition), "by_group": {name: size for name, size in by_group.items() if size}},
        "flops_per_token": flops_per_token(config),
        "tokens_per_step": config.train.batch_size * config.data.sequence_length,
        "residual": configs.to_dict(config)["residual"],
        "mesh": dict(mesh.shape),
        **({"shardings": _shardings(config, mesh)} if shardings else {}),
    }


def _shardings(config: Config, mesh: Mesh) -> dict[str, dict[str, Any]]:
    trainer = Trainer(config, mesh)
    layouts = {path_of(path): layout for path, layout in jax.tree_util.tree_leaves_with_path(trainer.layout)}
    leaves = {path_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(trainer.abstract)}
    return {
        path: {
            "shape": list(leaf.shape),
            "split": [*layouts[path].spec, *[None] * (leaf.ndim - len(layouts[path].spec))],
            "bytes_per_device": math.prod(layouts[path].shard_shape(leaf.shape)) * leaf.dtype.itemsize,
        }
        for path, leaf in leaves.items()
    }
