"""Test programs over a checkpoint: rows come back as they went in, and a model's second checkpoint compiles nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhc.config import Config, MeshConfig
from mhc.eval.common.checkpoints import Checkpoint
from mhc.eval.common.program import Program, filled, multiple, shards
from mhc.sharding import make_mesh, shardings
from tests.small import random_params, small

TRACED: list[int] = []


def doubled(decoder: object, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    TRACED.append(1)
    return {"twice": 2 * batch["a"], "rows": jnp.sum(batch["a"], axis=1)}


def checkpoint(config: Config, seed: int, devices: int) -> Checkpoint:
    mesh = make_mesh(MeshConfig(data=1, fsdp=devices), jax.devices()[:devices])
    params = random_params(config, seed)
    return Checkpoint("a", config, (0,), jax.device_put(params, shardings(params, mesh)), mesh)


@pytest.mark.parametrize("devices", [1, 4])
def test_rows_come_back_as_they_went_in(devices: int) -> None:
    """Batches may have any number of rows, whatever the mesh divides them by; other arrays of a batch are kept."""
    program = Program(checkpoint(small(), 0, devices), doubled)
    assert program.shards == devices
    rng = np.random.default_rng(0)
    batches = [{"a": rng.integers(0, 9, (rows, 3)), "other": np.zeros(7)} for rows in (1, 4, 6, 4)]
    seen = list(program.each(iter(batches), ("a", "absent")))
    assert len(seen) == len(batches)
    for given, (batch, results) in zip(batches, seen, strict=True):
        assert batch is given
        np.testing.assert_array_equal(results["twice"], 2 * given["a"])
        np.testing.assert_array_equal(results["rows"], given["a"].sum(axis=1))


def test_checkpoints_of_one_model_share_a_program() -> None:
    batch = {"a": np.ones((2, 5), np.int32)}
    before = len(TRACED)
    for seed in (0, 1):
        program = Program(checkpoint(small(), seed, 1), doubled)
        program(program.put(batch))
    assert len(TRACED) == before + 1


def test_rows_are_filled_up_to_the_shards() -> None:
    mesh = make_mesh(MeshConfig(data=1, fsdp=4), jax.devices()[:4])
    assert shards(mesh) == 4 and shards(None) == 1
    assert [multiple(rows, mesh) for rows in (1, 4, 5)] == [4, 4, 8] and multiple(5, None) == 5
    batch = filled({"a": np.ones((2, 3)), "b": np.ones(4)}, 4)
    assert batch["a"].shape == (4, 3) and batch["a"].sum() == 6 and batch["b"].sum() == 4
