"""Test what the objective and the step do beyond cross-entropy: z-loss, prefixes, norm scales without a gradient."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhc.config import Config
from mhc.train.step import loss_and_gradients, loss_parts
from tests.small import by_path, distance, initial, packed, small, trainer


def gradients(config: Config, params: Any, batch: dict[str, Any]) -> tuple[Any, Any]:
    made = trainer(config)
    run = jax.jit(lambda p, b: loss_and_gradients(made.definition, p, b, config.train.accumulation))
    return run(params, batch)


@pytest.mark.long
def test_z_loss_is_part_of_the_objective_and_not_of_the_loss():
    """Its gradient is that of the mean of log_z^2, and the loss that is reported stays cross-entropy."""
    batch, coefficient = packed(8, padding=True), 0.1
    plain, capped = small(), small(head={"z_loss": coefficient})
    params = initial(plain)
    parts, base = gradients(plain, params, batch)
    with_z, both = gradients(capped, params, batch)
    assert float(with_z.sums.nll) == pytest.approx(float(parts.sums.nll), rel=1e-6)

    def square(params: Any) -> jax.Array:
        parts = loss_parts(trainer(plain).definition, params, jax.tree.map(jnp.asarray, batch))
        return coefficient * parts.sums.log_z_square / parts.weight

    assert distance(jax.tree.map(jnp.subtract, both, base), jax.jit(jax.grad(square))(params)) <= 1e-4


def test_targets_within_the_prefix_do_not_count():
    """Every document's first 4 positions see one another, so its first 3 targets are given away."""
    config, batch = small(attention={"prefix": 4}), packed(8)
    made = trainer(config)
    params = initial(config)
    parts, _ = gradients(config, params, batch)
    counted = np.where(batch["positions"] + 1 < 4, 0.0, batch["weights"])
    assert 0 < counted.sum() < batch["weights"].sum()
    assert float(parts.weight) == counted.sum()
    validated = made.validate(params, {**batch, "target_bytes": np.ones_like(batch["targets"])})
    assert int(validated["bytes"]) == int(counted.sum()) and float(validated["weight"]) == counted.sum()
    assert float(validated["nll"]) == pytest.approx(float(parts.sums.nll), rel=1e-5)


def scales(params: Any) -> dict[str, np.ndarray]:
    return {path: np.asarray(leaf) for path, leaf in by_path(params).items() if path.endswith("norm/scale")}


def steps(config: Config, count: int) -> list[Any]:
    made = trainer(config)
    state = jax.device_put(made._init(jax.random.key(0)), made.layout)
    seen = [jax.device_get(state.params)]
    for seed in range(count):
        state, _ = made.step(state, packed(8, seed))
        seen.append(jax.device_get(state.params))
    return seen


def test_frozen_scales_stay_and_the_rest_is_trained():
    before, after = steps(small(norm={"gamma_init": 0.5, "gamma_frozen": True, "placement": "sandwich"}), 1)
    for path, scale in scales(before).items():
        final = path == "final_norm/scale"
        assert np.all(scale == (1.0 if final else 0.5)), path
        assert np.array_equal(scale, scales(after)[path]) != final, path
    assert distance(after["blocks"]["mlp"]["core"], before["blocks"]["mlp"]["core"]) > 1e-4


def test_scheduled_scales_go_linearly_to_their_last_value_and_stay_there():
    config = small(norm={"gamma_init": 1.0, "gamma_schedule": 0.2}, train={"steps": 4})
    for step, params in enumerate(steps(config, 5)):
        expected = 1.0 - 0.8 * min(step / 4, 1.0)
        for path, scale in scales(params).items():
            if path != "final_norm/scale":
                np.testing.assert_allclose(scale, expected, rtol=1e-6, err_msg=f"{path} after {step}")
