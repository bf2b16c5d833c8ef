"""Test what the scales of norms, the factor of the feed-forward's output and the noise of positions do."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhc.config import Config
from mhc.model import block
from mhc.model.block import SublayerView
from mhc.model.edits import Edits
from mhc.sharding import put_batch
from mhc.train import scales
from mhc.train.step import norms
from tests.small import (
    LENGTH,
    VOCAB,
    assert_identical,
    by_path,
    definition,
    initial,
    packed,
    random_params,
    relative_error,
    small,
    trainer,
    with_fields,
)

LAYERS = 3
DEEP: dict[str, Any] = {"model": {"layers": LAYERS}, "moe": {"experts": 2, "dense_layers": 1}}  # of two stacks


def layers_of(config: Config, path: str, leaf: np.ndarray) -> list[int]:
    """Return the numbers of the layers of a stacked parameter."""
    first = 0 if path.startswith("leading") else config.leading_layers
    return [first + layer for layer in range(leaf.shape[0])]


# What is trained ------------------------------------------------------------------------------------------------------

# Fields -> for a path without its stack and a layer, whether no gradient moves it.
HELD: dict[str, tuple[dict[str, Any], Any]] = {
    "nothing": ({}, lambda rest, layer: False),
    "gamma frozen": ({"norm": {"gamma_frozen": True}}, lambda rest, layer: rest.endswith("norm/scale")),
    "gamma of two layers": (
        {"norm": {"gamma_schedule": 0.5, "gamma_layers": (0, 2), "placement": "sandwich"}},
        lambda rest, layer: rest.endswith("norm/scale") and layer in (0, 2),
    ),
    "beta of layernorm": (
        {"norm": {"kind": "layernorm", "beta_frozen": True}},
        lambda rest, layer: rest.endswith("norm/bias"),
    ),
    "beta of rmsnorm": ({"norm": {"bias": True, "beta_frozen": True}}, lambda rest, layer: rest.endswith("norm/bias")),
    "factor fixed": ({"update": {"scale": 0.5, "layers": (1,)}}, lambda rest, layer: rest == "mlp/update"),
    "factor scheduled": ({"update": {"schedule": 0.5}}, lambda rest, layer: rest == "mlp/update"),
    "factor trained": ({"update": {"trained": True}}, lambda rest, layer: False),
    "factor of two layers trained": (
        {"update": {"trained": True, "layers": (0, 2)}},
        lambda rest, layer: rest == "mlp/update" and layer == 1,
    ),
}


@pytest.mark.parametrize("name", HELD)
def test_gradients_reach_what_is_trained_and_nothing_else(name: str) -> None:
    """In every layer of both stacks a gradient of ones is zero where a scale is held, and one elsewhere."""
    groups, held = HELD[name]
    config = small(**DEEP, **groups)
    ones = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), definition(config).abstract())
    for path, leaf in by_path(scales.hold(config, ones)).items():
        stack, _, rest = path.partition("/")
        if "blocks" not in stack:
            assert np.all(leaf == 1.0), path
            continue
        for layer, values in zip(layers_of(config, path, leaf), leaf, strict=True):
            assert np.all(values == (0.0 if held(rest, layer) else 1.0)), (path, layer)


OPTIMIZERS = (
    "adamw",
    pytest.param("sgd", marks=pytest.mark.long),
    pytest.param("muon", marks=pytest.mark.long),
)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_is_held_has_zero_update_and_the_rest_moves(optimizer: str) -> None:
    config = small(
        norm={"gamma_init": 0.5, "gamma_frozen": True, "gamma_layers": (1,), "bias": True, "beta_frozen": True},
        update={"scale": 0.5, "trained": True, "layers": (0,)},
        optimizer={"name": optimizer, "lr": 1e-2},
    )
    made = trainer(config)
    state = jax.device_put(made._init(jax.random.key(0)), made.layout)
    before = by_path(state.params)
    after = by_path(made.step(state, packed(8))[0].params)
    assert before["blocks/mlp/norm/scale"][:, 0].tolist() == [1.0, 0.5]
    assert before["blocks/mlp/update"].tolist() == [0.5, 1.0]
    for path in before:
        moved = np.abs(after[path] - before[path]).reshape(len(before[path]), -1).max(axis=1) > 0
        if path.endswith("norm/bias") and path.startswith("blocks"):
            assert not moved.any(), path
        elif path == "blocks/mlp/update" or (path.endswith("norm/scale") and path.startswith("blocks")):
            assert moved.tolist() == [True, False], path
        elif path == "final_norm/bias" or path.startswith("blocks"):
            assert moved.all(), path


# Schedules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["linear", "cosine"])
@pytest.mark.parametrize("layers", [(), (0, 2)], ids=["all layers", "two layers"])
def test_schedules_start_and_end_at_their_values_and_stay_there(shape: str, layers: tuple[int, ...]) -> None:
    steps, first, last = 8, 0.75, 0.25
    config = small(
        **DEEP,
        train={"steps": steps},
        norm={"gamma_init": first, "gamma_schedule": last, "gamma_shape": shape, "gamma_layers": layers},
        update={"scale": first, "schedule": last, "shape": shape, "layers": layers},
    )
    params = initial(config)
    for path, leaf in by_path(params).items():  # those of the initialiser are those of step 0
        if path.endswith(("blocks/mlp/update", "blocks/mlp/norm/scale")):
            assert_identical({path: leaf}, {path: by_path(scales.scheduled(config, params, jnp.int32(0)))[path]})
    way = {0: 0.0, steps // 2: 0.5, steps: 1.0, steps + 3: 1.0}
    way[1] = 1 / steps if shape == "linear" else 0.5 * (1 - math.cos(math.pi / steps))
    for completed, share in way.items():
        for path, leaf in by_path(scales.scheduled(config, params, jnp.int32(completed))).items():
            if not path.endswith(("blocks/mlp/update", "mlp/norm/scale", "attention/norm/scale")):
                continue
            for layer, values in zip(layers_of(config, path, leaf), leaf, strict=True):
                expected = first + share * (last - first) if not layers or layer in layers else 1.0
                np.testing.assert_allclose(values, expected, rtol=1e-6, err_msg=f"{path} {layer} {completed}")


def test_a_fixed_factor_is_that_of_the_config_whatever_the_weights_brought() -> None:
    """Weights of another run hold that run's factor; a trained one is taken over."""
    fixed, trained = (small(update={"scale": 0.5, **more}) for more in ({}, {"trained": True}))
    params = random_params(fixed)
    assert np.all(by_path(scales.begin(fixed, params))["blocks/mlp/update"] == 0.5)
    assert_identical(scales.begin(trained, params), params)


# The factor -----------------------------------------------------------------------------------------------------------


def logits(config: Config, params: Any, edits: Edits | None = None) -> np.ndarray:
    decoder, tokens = definition(config).bind(params), packed(2)["tokens"]
    return np.asarray(decoder.logits(decoder.forward(tokens, edits=edits).h))


@pytest.mark.parametrize("kind", ["plain", "hc", "mhc"])
@pytest.mark.parametrize("layers", [(), (1,)], ids=["all layers", "one layer"])
def test_a_factor_of_zero_leaves_the_feed_forward_out(kind: str, layers: tuple[int, ...]) -> None:
    """The logits are those of outputs that are cut, and no weight of such a feed-forward can change them."""
    config, without = small(kind, update={"scale": 0.0, "layers": layers}), small(kind)
    params = random_params(without)
    chosen = layers or (0, 1)
    factor = jnp.asarray([0.0 if layer in chosen else 1.0 for layer in (0, 1)])
    scaled = {**params, "blocks": {**params["blocks"], "mlp": {**params["blocks"]["mlp"], "update": factor}}}
    cut = Edits(output_scale=jnp.stack([jnp.ones(2), factor], axis=1))
    found = logits(config, scaled)
    assert relative_error(found, logits(without, params, cut)) <= 1e-5
    assert relative_error(found, logits(without, params)) > 1e-3
    other = jax.tree.map(
        lambda leaf: jnp.where(factor.reshape(-1, *(1,) * (leaf.ndim - 1)) == 0, leaf + 1, leaf),
        params["blocks"]["mlp"]["core"],
    )
    scaled["blocks"]["mlp"]["core"] = other
    np.testing.assert_array_equal(logits(config, scaled), found)


@pytest.mark.parametrize("placement", ["pre", "sandwich"])
def test_the_factor_multiplies_the_output_behind_its_norms(placement: str) -> None:
    config = small(update={"scale": 3.0}, norm={"placement": placement, "bias": True})
    params, batch = random_params(config), packed(2)

    def observe(view: SublayerView) -> dict[str, jax.Array]:
        return {"u": view.u, "y": view.y}

    def first(value: float) -> dict[str, np.ndarray]:
        mlp = {**params["blocks"]["mlp"], "update": jnp.full(2, value)}
        changed = {**params, "blocks": {**params["blocks"], "mlp": mlp}}
        seen = definition(config).bind(changed).hidden(batch["tokens"], observe=observe)[1]
        return {name: np.asarray(leaf[1]) for name, leaf in seen.items()}  # feed-forward of block 0

    one, three = first(1.0), first(3.0)
    np.testing.assert_array_equal(one["u"], three["u"])
    assert relative_error(three["y"], 3.0 * one["y"]) <= 1e-6


# Off ------------------------------------------------------------------------------------------------------------------

KNOBS: dict[str, dict[str, Any]] = {
    "norm.gamma_frozen": {"norm": {"gamma_frozen": True}},
    "norm.gamma_schedule": {"norm": {"gamma_schedule": 0.5}},
    "norm.bias": {"norm": {"bias": True}},
    "norm.beta_frozen": {"norm": {"kind": "layernorm", "beta_frozen": True}},
    "update.scale": {"update": {"scale": 0.5}},
    "update.trained": {"update": {"trained": True}},
    "update.schedule": {"update": {"schedule": 0.5}},
    "positions.noise": {"positions": {"noise": 0.5}},
    "monitor.gamma": {"monitor": {"gamma": True, "probe_every": 5}},
}


def lowered(config: Config) -> str:
    """Return the text of the step's program, which decides its bits."""
    trainer.cache_clear()
    made = trainer(config)
    program: Any = made.step
    return str(program.lower(made.abstract, packed(8)).as_text())


def test_off_the_step_has_no_trace_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its program is the one that is traced where their functions do nothing."""
    with_them = lowered(small("mhc"))
    monkeypatch.setattr(scales, "hold", lambda config, gradients: gradients)
    monkeypatch.setattr(scales, "scheduled", lambda config, params, completed: params)
    monkeypatch.setattr(scales, "begin", lambda config, params: params)
    monkeypatch.setattr(scales, "with_noise", lambda config, batch, step: batch)
    monkeypatch.setattr(scales, "gamma_norms", None)
    monkeypatch.setattr(block, "in_layers", lambda value, layers, layer: 1.0)
    assert lowered(small("mhc")) == with_them


@pytest.mark.parametrize("name", KNOBS)
def test_each_of_them_changes_the_program(name: str) -> None:
    """Else the test above would compare nothing."""
    beside: dict[str, dict[str, Any]] = {
        "norm.beta_frozen": {"norm": {"kind": "layernorm"}},
        "monitor.gamma": {"monitor": {"probe_every": 5}},
    }
    assert lowered(small(**KNOBS[name])) != lowered(small(**beside.get(name, {})))


# Noise of positions ---------------------------------------------------------------------------------------------------


def test_noise_depends_on_seed_step_and_place_alone() -> None:
    config = small(positions={"noise": 0.5})
    batch = {name: jnp.asarray(leaf) for name, leaf in packed(64).items()}

    def noise(config: Config, step: int) -> np.ndarray:
        return np.asarray(scales.with_noise(config, batch, step)["position_noise"])

    first = noise(config, 3)
    np.testing.assert_array_equal(noise(config, 3), first)
    assert not np.any(noise(config, 4) == first)
    assert not np.any(noise(with_fields(config, seed={"noise": 1}), 3) == first)
    np.testing.assert_allclose(noise(with_fields(config, positions={"noise": 1.0}), 3), 2 * first, rtol=1e-6)
    assert abs(first.std() / 0.5 - 1) < 0.1 and abs(first.mean()) < 0.1
    assert "position_noise" not in scales.with_noise(small(), batch, 3)


@pytest.mark.parametrize("kind", ["rope", "sinusoidal", "alibi"])
def test_noise_moves_what_positions_encode_and_no_mask(kind: str) -> None:
    """Later tokens stay unseen; the same shift of all positions changes nothing where they are relative."""
    config, batch = small(positions={"kind": kind}), packed(4)
    params = random_params(config)
    program = jax.jit(
        lambda tokens, noise: (
            definition(config).bind(params).forward(tokens, batch["segment_ids"], batch["positions"], noise=noise).h
        )
    )
    rng = np.random.default_rng(0)
    noise = rng.normal(0.0, 0.5, batch["tokens"].shape).astype(np.float32)
    tokens, half = jnp.asarray(batch["tokens"]), LENGTH // 2
    plain, noisy = (np.asarray(program(tokens, n)) for n in (jnp.zeros_like(noise), jnp.asarray(noise)))
    assert relative_error(noisy, plain) > 1e-3
    later = tokens.at[:, half:].set((tokens[:, half:] + 1) % VOCAB)
    np.testing.assert_array_equal(np.asarray(program(later, jnp.asarray(noise)))[:, :half], noisy[:, :half])
    shifted = np.asarray(program(tokens, jnp.full_like(noise, 2.5)))
    assert (relative_error(shifted, plain) <= 1e-4) == (kind != "sinusoidal")


# Accumulated, over devices --------------------------------------------------------------------------------------------

ALL: dict[str, Any] = {
    "norm": {
        "gamma_init": 0.8,
        "gamma_schedule": 0.4,
        "gamma_shape": "cosine",
        "gamma_layers": (1,),
        "bias": True,
        "beta_frozen": True,
    },
    "update": {"scale": 0.5, "trained": True, "layers": (0,)},
    "positions": {"noise": 0.3},
    "monitor": {"probe_every": 5, "gamma": True},
    "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.0},
    "init": {"kind": "fan_in"},
}


def after_two_steps(config: Config, devices: int) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    made = trainer(config, devices)
    params = jax.tree.map(lambda leaf, to: jax.device_put(leaf.copy(), to), initial(config), made.layout.params)
    state, shares = made.begin(params), []
    for seed in range(2):
        state, metrics = made.step(state, put_batch(packed(8, seed, padding=True), made.mesh))
        jax.block_until_ready(state)
        shares.append(np.asarray(metrics["gamma"]))
    return by_path(state.params), shares


@pytest.fixture(scope="module")
def one_device() -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    return after_two_steps(small("mhc", **ALL), 1)


@pytest.mark.product
@pytest.mark.parametrize(
    "other",
    [
        pytest.param(({"mesh": {"data": 2, "fsdp": 2, "tensor": 2}}, 8), id="eight devices"),
        pytest.param(({"train": {"accumulation": 2}}, 1), id="two micro-batches"),
    ],
)
def test_devices_and_micro_batches_change_nothing(one_device: Any, other: tuple[dict[str, Any], int]) -> None:
    groups, devices = other
    found, shares = after_two_steps(small("mhc", **ALL, **groups), devices)
    expected, of_one = one_device
    for path, leaf in expected.items():
        assert np.abs(found[path] - leaf).max() <= 2e-5 * max(np.abs(leaf).max(), 1e-3), path
    for a, b in zip(shares, of_one, strict=True):
        assert relative_error(a, b) <= 1e-4
        assert np.all(b > 0)  # also of the layer whose scale is scheduled


# The probe ------------------------------------------------------------------------------------------------------------


def test_the_gradient_in_gamma_is_that_of_each_sublayer() -> None:
    config = small("mhc", **DEEP, norm={"placement": "sandwich", "gamma_frozen": True})
    grads = random_params(config)
    found, leaves = np.asarray(scales.gamma_norms(grads)), by_path(grads)
    expected = []
    for stack, count in (("leading_blocks", 1), ("blocks", LAYERS - 1)):
        for layer in range(count):
            for part in ("attention", "mlp"):
                both = [leaves[f"{stack}/{part}/{norm}/scale"][layer] for norm in ("norm", "post_norm")]
                expected.append(np.sqrt(sum(np.sum(leaf.astype(np.float64) ** 2) for leaf in both)))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert np.all(found < np.asarray(norms(grads).sublayers))
    assert not np.any(np.asarray(scales.gamma_norms(scales.hold(config, grads))))
