"""Test that the train state is made in its shards, with the same bits on every mesh."""

from __future__ import annotations

import re
from typing import Any

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mhc.config import Config
from mhc.sharding import path_of
from mhc.train.step import Trainer
from tests.partition_specs import parts
from tests.small import assert_identical, small, trainer

MESH = {"data": 1, "fsdp": 2, "tensor": 2, "expert": 2}


def config_of(**groups: dict[str, Any]) -> Config:
    """Return a config with sizes by which an array and its part are never taken for one another."""
    return small(
        "mhc",
        model={"layers": 3, "width": 40, "vocab_size": 32},
        attention={"heads": 2, "head_dim": 14, "impl": "xla"},
        mlp={"width": 72},
        moe={"experts": 6, "width": 36},
        init={"kind": "fan_in"},
        residual={"kind": "mhc", "n": 2, "init": "fanin"},
        **groups,
    )


def initialiser(made: Trainer) -> jax.stages.Compiled:
    return made._jit_init.lower(jax.random.key(0)).compile()


def made_whole(made: Trainer, program: jax.stages.Compiled) -> list[str]:
    """Return the split leaves that the program holds somewhere as one array."""
    shapes = set(re.findall(r"\bf32\[([\d,]+)\]", program.as_text() or ""))
    leaves = jax.tree_util.tree_leaves_with_path(made.abstract)
    specs = [layout.spec for layout in jax.tree.leaves(made.layout)]
    sizes = dict(made.mesh.shape)
    return [
        path_of(path)
        for (path, leaf), spec in zip(leaves, specs, strict=True)
        if parts(spec, sizes) > 1 and ",".join(map(str, leaf.shape)) in shapes
    ]


@pytest.mark.long
def test_the_initial_state_is_made_in_its_shards_and_the_same_bits() -> None:
    made = trainer(config_of(mesh=MESH), 8)
    program = initialiser(made)
    assert made_whole(made, program) == []
    state = jax.block_until_ready(program(jax.random.key(0)))
    split = 0
    for leaf, layout in zip(jax.tree.leaves(state), jax.tree.leaves(made.layout), strict=True):
        assert leaf.sharding.is_equivalent_to(layout, leaf.ndim)
        shard = layout.shard_shape(leaf.shape)
        assert {part.data.shape for part in leaf.addressable_shards} == {shard}
        split += shard != leaf.shape
    assert split >= 3 * 10  # of parameters and both moments
    assert_identical(state, initialiser(trainer(config_of()))(jax.random.key(0)))


@pytest.mark.long
def test_a_state_made_whole_would_be_seen() -> None:
    made = Trainer(config_of(mesh=MESH), trainer(config_of(mesh=MESH), 8).mesh)
    made._jit_init = jax.jit(made._init, out_shardings=NamedSharding(made.mesh, PartitionSpec()))
    assert len(made_whole(made, initialiser(made))) >= 3 * 10
