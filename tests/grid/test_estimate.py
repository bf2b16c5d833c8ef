"""Test that a dry run's figures for an arm are those that the arm then has."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jax
import pytest

from mhc import config as configs
from mhc.grid import estimate, plan
from mhc.grid.estimate import Speed
from mhc.model.flops import flops_per_token
from mhc.sharding import make_mesh
from mhc.train.step import Trainer
from tests.small import small, with_fields

SPEED = Speed(None, "a chip", 0.5, 1e12)
GRID = """from mhc.grid import *
def get_grid():
    kinds = axis('residual.kind', 'plain', 'mhc')
    return Grid('base.py', product(kinds, axis('optimizer.lr', 0.1, 0.2)))
"""
BASE = """from ml_collections import ConfigDict
def get_config():
    return ConfigDict({
        'model': {'layers': 2, 'width': 16}, 'attention': {'heads': 2}, 'data': {'sequence_length': 16},
        'train': {'steps': 10, 'batch_size': 8}, 'checkpoint': {'every': 3, 'keep': 2, 'keep_every': 6},
        'mesh': {'fsdp': 8, 'data': 1},
    })
"""


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> plan.Plan:
    """Return the plan of a small grid."""
    folder = tmp_path_factory.mktemp("grid")
    (folder / "base.py").write_text(BASE)
    (folder / "g.py").write_text(GRID)
    return plan.load(str(folder / "g.py"), ())


def test_costs_are_those_of_the_run(planned: plan.Plan) -> None:
    costs = estimate.costs(planned, SPEED)
    assert list(costs) == list(planned.arms)
    for arm, cost in costs.items():
        config = configs.resolve(planned.config(arm), 258)
        state = Trainer(config, make_mesh(config.mesh, jax.devices())).abstract
        assert cost.params == sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params))
        assert cost.checkpoint_bytes == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
        assert cost.kept_bytes == 3 * cost.checkpoint_bytes  # of steps 3, 6, 9, 10: the last two, and step 6
        assert cost.tokens == 10 * 8 * 16
        assert cost.flops == flops_per_token(config) * cost.tokens
        assert cost.device_hours == pytest.approx(cost.flops / 0.5e12 / 3600, rel=1e-12)
    measured = estimate.costs(planned, Speed(640.0, "a chip", 0.5, 1e12))
    assert {cost.device_hours for cost in measured.values()} == {2 / 3600}


@pytest.mark.parametrize("kind", ["plain", "hc", "mhc"])
def test_arms_that_are_counted_together_have_one_size(kind: str) -> None:
    """They stay so when every field that the count takes for shapeless is changed at once."""
    config = small(kind)
    other = with_fields(
        config,
        optimizer={"lr": 0.3, "b1": 0.5, "b2": 0.6, "eps": 1e-3, "weight_decay": 0.0, "clip_norm": None},
        residual={"rms_eps": 1e-3, "map_eps": 1e-3, "sinkhorn_eps": 1e-3, "res_gap": 1.0, "iters": 3}
        | ({"scale": 0.0} if kind == "plain" else {"alpha": 0.5}),
        init={"kind": "fan_in", "std": 0.5, "scale_residual": False},
        seed={"init": 5, "data": 6},
    )
    assert estimate._shape_key(config) == estimate._shape_key(other)
    keys = [json.dumps(configs.to_dict(one)) for one in (config, other)]
    assert keys[0] != keys[1]
    assert estimate._sizes(keys[0]) == estimate._sizes(keys[1])


def test_the_assumption_is_said() -> None:
    assert SPEED.words() == "50% of the 1 TFLOP/s (bfloat16, dense) of one a chip"
    assert Speed(1234.0, "a chip", 0.5, 1e12).words() == "1,234 tokens/s a device, as given"


def test_a_dry_run_writes_nothing(planned: plan.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mhc.grid.__main__ import main

    file = tmp_path / "g.py"
    file.write_text(GRID)
    (tmp_path / "base.py").write_text(BASE)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(Trainer, "init", None)  # nothing may be made
    assert main(["run", str(file), "--dry_run", "--workdir", str(tmp_path / "w")]) == 0
    assert [path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in str(path)] == before
