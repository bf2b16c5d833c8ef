"""Test the mixture of experts: routing, no dropped token, no order among experts, even loads, experts over devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhc.config import Config
from mhc.errors import UserError
from mhc.model.moe import Moe, route
from mhc.rng import PathKey
from mhc.sharding import put_batch
from mhc.train.record import router_summary
from tests.small import distance, packed, relative_error, small, trainer


def sparse(kind: str = "plain", **groups: dict[str, Any]) -> Config:
    """Return a config with four experts of width 12 in every block, two a token."""
    groups["moe"] = {"experts": 4, "width": 12, **groups.get("moe", {})}
    return small(kind, **groups)


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def layer(config: Config, seed: int = 0) -> Moe:
    made = Moe(config, key=PathKey(jax.random.key(seed)))
    made.router[...] = normal(*made.router[...].shape, seed=seed + 1)  # the initial one hardly tells tokens apart
    for matrix in ("gate", "up", "down"):
        leaf = getattr(made.experts, matrix)
        leaf[...] = normal(*leaf[...].shape, seed=seed + 2) / 4
    return made


def by_definition(made: Moe, x: np.ndarray) -> np.ndarray:
    """Compute the sum over experts token by token and expert by expert, in float64."""
    moe = made.config.moe
    router, bias = np.asarray(made.router[...], np.float64), np.zeros(moe.experts)
    if moe.balance == "loss_free":
        bias = np.asarray(made.router_bias[...], np.float64)
    gate, up, down = (np.asarray(getattr(made.experts, name)[...], np.float64) for name in ("gate", "up", "down"))

    def silu(z: np.ndarray) -> np.ndarray:
        return z / (1 + np.exp(-z))

    out = np.zeros(x.shape)
    for place in np.ndindex(x.shape[:2]):
        token = x[place].astype(np.float64)
        logits = token @ router
        raised = np.exp(logits - logits.max())
        scores = raised / raised.sum() if moe.score == "softmax" else 1 / (1 + np.exp(-logits))
        chosen = np.argsort(-(scores + bias), kind="stable")[: moe.top_k]
        weights = scores[chosen] / (scores[chosen].sum() if moe.normalize else 1.0) * moe.scale
        for expert, weight in zip(chosen, weights, strict=True):
            out[place] += weight * (silu(token @ gate[expert]) * (token @ up[expert])) @ down[expert]
        if moe.shared:
            g, u, d = (np.asarray(getattr(made.shared, name)[...], np.float64) for name in ("gate", "up", "down"))
            out[place] += (silu(token @ g) * (token @ u)) @ d
    return out


@pytest.mark.parametrize(
    "moe",
    [
        {},
        {"score": "sigmoid", "scale": 2.5, "shared": 2},
        {"normalize": False, "top_k": 1, "balance": "none"},
        {"top_k": 4, "balance": "auxiliary"},
    ],
    ids=str,
)
def test_the_layer_by_its_definition(moe):
    made, x = layer(sparse(moe=moe)), normal(2, 9, 16, seed=7)
    if made.config.moe.balance == "loss_free":
        made.router_bias[...] = jnp.asarray([0.3, -0.3, 0.0, 0.1])
    assert relative_error(jax.jit(made.with_statistics)(x)[0], by_definition(made, np.asarray(x))) <= 2e-6


def test_permuting_experts_changes_nothing():
    made, x = layer(sparse()), normal(2, 9, 16, seed=7)
    made.router_bias[...] = jnp.asarray([0.3, -0.3, 0.0, 0.1])
    run = jax.jit(lambda router, bias, matrices, x: _with(made, router, bias, matrices)(x))
    matrices = {name: getattr(made.experts, name)[...] for name in ("gate", "up", "down")}
    before = run(made.router[...], made.router_bias[...], matrices, x)
    order = jnp.asarray([2, 0, 3, 1])
    shuffled = {name: leaf[order] for name, leaf in matrices.items()}
    after = run(made.router[...][:, order], made.router_bias[...][order], shuffled, x)
    assert relative_error(after, before) <= 1e-6
    wrong = run(made.router[...], made.router_bias[...], shuffled, x)
    assert relative_error(wrong, before) > 0.1


def _with(made: Moe, router: jax.Array, bias: jax.Array, matrices: dict[str, jax.Array]) -> Moe:
    copy = Moe(made.config, key=PathKey(jax.random.key(0)))
    copy.router[...], copy.router_bias[...] = router, bias
    for name, leaf in matrices.items():
        getattr(copy.experts, name)[...] = leaf
    return copy


def test_no_token_is_dropped_on_the_most_skewed_routing():
    """All tokens go to the same two experts, 36 assignments where an even load would be 9."""
    made, x = layer(sparse(moe={"score": "sigmoid"})), normal(2, 9, 16, seed=7)
    made.router_bias[...] = jnp.asarray([-9.0, 9.0, -9.0, 9.0])
    y, statistics = jax.jit(made.with_statistics)(x)
    np.testing.assert_array_equal(statistics["load"], [0, 18, 0, 18])
    assert relative_error(y, by_definition(made, np.asarray(x))) <= 2e-6


def test_the_balancing_bias_chooses_and_does_not_weigh():
    """The bias moves the choice; the weights come from the scores, and no gradient reaches the bias."""
    logits = normal(1, 5, 4)
    config = sparse(moe={"score": "sigmoid", "normalize": False})
    bias = jnp.asarray([5.0, 5.0, 0.0, 0.0])
    chosen, weights, scores = route(config, logits, bias)
    assert set(np.asarray(chosen).ravel()) == {0, 1}
    np.testing.assert_allclose(weights, np.take_along_axis(np.asarray(scores), np.asarray(chosen), axis=-1))
    gradient = jax.grad(lambda bias: jnp.sum(route(config, logits, bias)[1]))(bias)
    np.testing.assert_array_equal(gradient, 0.0)


def test_padding_counts_in_no_load():
    made, x = layer(sparse()), normal(2, 9, 16, seed=7)
    valid = jnp.arange(9)[None] < jnp.asarray([[9], [4]])
    load = jax.jit(lambda x, valid: made.with_statistics(x, valid)[1]["load"])
    garbage = jnp.where(valid[..., None], x, 100.0 * normal(2, 9, 16, seed=8))
    np.testing.assert_array_equal(load(x, valid), load(garbage, valid))
    assert float(jnp.sum(load(x, valid))) == 2 * (9 + 4) < float(jnp.sum(load(x, jnp.ones_like(valid))))


def test_an_even_load_has_the_least_balance_loss():
    """The loss is 1 when even, and E / k when all scores and choices fall on the same k experts."""
    config = sparse(moe={"balance": "auxiliary"})
    x, even = jnp.abs(normal(1, 8, 16)), jnp.zeros((16, 4))

    @jax.jit
    def balance(router: jax.Array) -> jax.Array:
        made = Moe(config, key=PathKey(jax.random.key(0)))
        made.router[...] = router
        return made.with_statistics(x)[1]["balance"]

    assert float(balance(even)) == pytest.approx(1.0, rel=1e-5)
    assert float(balance(even.at[:, :2].set(100.0))) == pytest.approx(2.0, rel=1e-3)


# In training ----------------------------------------------------------------------------------------------------------


def run(config: Config, steps: int, devices: int = 1) -> tuple[Any, list[Any]]:
    made = trainer(config, devices)
    state = jax.device_put(made._init(jax.random.key(0)), made.layout)
    seen = []
    for seed in range(steps):
        state, metrics = made.step(state, put_batch(packed(8, seed), made.mesh))
        seen.append(jax.device_get(metrics))
    return jax.device_get(state), seen


@pytest.mark.long
def test_the_balancing_bias_evens_the_load():
    """From a router that sends most tokens to one expert, max / mean load falls below 1.3 and stays there."""
    config = sparse(moe={"balance_rate": 0.01, "score": "sigmoid"}, optimizer={"lr": 1e-4}, init={"kind": "fan_in"})
    made = trainer(config)
    state = jax.device_put(made._init(jax.random.key(0)), made.layout)
    params = state.params
    core = params["blocks"]["mlp"]["core"]
    skewed = {**core, "router_bias": core["router_bias"].at[:, 0].set(0.3)}
    state = state._replace(
        params={**params, "blocks": {**params["blocks"], "mlp": {**params["blocks"]["mlp"], "core": skewed}}}
    )
    seen = []
    for seed in range(60):
        state, metrics = made.step(state, packed(8, seed))
        seen.append(router_summary(jax.device_get(metrics["router"]))["expert_load_max"])
    assert seen[0] > 1.8
    assert np.mean(seen[-10:]) < 1.3


@pytest.mark.long
def test_each_balance_moves_what_it_should():
    """loss_free moves the bias by exactly its rate against the load; auxiliary moves the router by its gradient."""
    config = sparse(moe={"balance_rate": 0.01})
    state, seen = run(config, 1)
    bias = state.params["blocks"]["mlp"]["core"]["router_bias"]
    load = seen[0]["router"]["load"]
    np.testing.assert_allclose(bias, 0.01 * np.sign(load.mean(axis=1, keepdims=True) - load), atol=1e-8)
    gradients = {}
    for balance in ("none", "auxiliary"):
        config = sparse(
            moe={"balance": balance, "balance_loss": 5.0}, optimizer={"name": "sgd", "lr": 1.0, "weight_decay": 0.0}
        )
        core = run(config, 1)[0].params["blocks"]["mlp"]["core"]
        assert "router_bias" not in core
        gradients[balance] = core["router"]
    assert distance(gradients["auxiliary"], gradients["none"]) > 1e-2


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        pytest.param("plain", {"expert": 2, "tensor": 2}, marks=pytest.mark.product),  # fast: tests/multidevice
        pytest.param("mhc", {"expert": 4}, marks=pytest.mark.product),
        pytest.param("mhc", {"expert": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.product),
    ],
    ids=str,
)
def test_experts_over_eight_devices_equal_one_device(kind, mesh):
    """Two AdamW steps agree for a model with a leading dense block and a shared expert."""
    moe = {"shared": 1, "dense_layers": 1, "balance_rate": 0.01, "z_loss": 1e-3}
    one = run(sparse(kind, moe=moe), 2)
    eight = run(sparse(kind, moe=moe, mesh=mesh), 2, 8)
    np.testing.assert_allclose([m["loss"] for m in eight[1]], [m["loss"] for m in one[1]], rtol=1e-5)
    np.testing.assert_array_equal(eight[1][0]["router"]["load"], one[1][0]["router"]["load"])
    assert distance(eight[0].params, one[0].params) <= 1e-5


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"moe": {"experts": 4, "top_k": 5}}, "moe.top_k: given 5, allowed: at most moe.experts=4"),
        ({"moe": {"experts": 4, "dense_layers": 2}}, "moe.dense_layers: given 2, allowed: below model.layers=2"),
        ({"moe": {"experts": 6}, "mesh": {"expert": 4}}, "mesh.expert: given 4, allowed: a divisor of moe.experts=6"),
        ({"moe": {"shared": 1}}, "moe.shared: given 1, allowed: 0 with moe.experts=0"),
        ({"moe": {"experts": 4}, "mlp": {"bias": True}}, "mlp.bias: given True, allowed: False with moe.experts > 0"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(groups, message):
    with pytest.raises(UserError) as caught:
        small(**groups)
    assert message in str(caught.value)
