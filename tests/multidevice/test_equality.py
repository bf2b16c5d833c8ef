"""Test that eight devices train as one: initial state (bit for bit), losses, expert choices, parameters under SGD."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhc.config import Config
from mhc.model.decoder import SublayerView
from mhc.sharding import put_batch
from mhc.train.optimizer import map_paths
from mhc.train.step import Trainer, TrainState
from tests.covering import product
from tests.small import by_path, definition, initial, packed, random_params, relative_error, small, trainer

MESHES = {  # data × fsdp × tensor × expert
    "8x1x1x1": {"data": 8},
    "1x8x1x1": {"data": 1, "fsdp": 8},
    "2x2x2x1": {"data": 2, "fsdp": 2, "tensor": 2},
    "1x2x2x2": {"data": 1, "fsdp": 2, "tensor": 2, "expert": 2},
}
FACTORS = {
    "kind": ("plain", "hc", "mhc"),
    "feed_forward": ("dense", "moe"),
    "optimizer": ("adamw", "sgd"),
    "mesh": tuple(MESHES),
}
# For `make test`: every axis, feed-forward and optimiser. A step of hc and of mhc on 2x2x2x1 is in tests/contracts.
FAST = (
    ("mhc", "moe", "sgd", "1x2x2x2"),
    ("plain", "dense", "adamw", "2x2x2x1"),
)
STEPS = 20
LOSS, PARAMETERS = 1e-5, 2e-5  # largest relative differences


def config_of(kind: str, feed_forward: str, optimizer: str, mesh: str | None = None, *, leading: int = 1) -> Config:
    """Return a config of two blocks of width 16 in float32; without a mesh it is for one device.

    If blocks have experts, the first ``leading`` ones are dense, and as many experts are shared.
    """
    optimizers: dict[str, dict[str, Any]] = {
        "adamw": {"name": "adamw", "lr": 1e-3},
        # A rate at which twenty steps move every parameter.
        "sgd": {"name": "sgd", "lr": 0.1, "momentum": 0.0},
    }
    experts = {"moe": {"experts": 4, "shared": leading, "dense_layers": leading}} if feed_forward == "moe" else {}
    return small(
        kind,
        mesh=MESHES[mesh] if mesh else {},
        mlp={"kind": "swiglu" if leading else "relu", "width": 24},  # without a gate there is less to compile
        optimizer={"weight_decay": 0.1, **optimizers[optimizer]},
        init={"kind": "fan_in"},
        **experts,
    )


class Training(NamedTuple):
    """Holds what is compared of twenty steps."""

    initial: dict[str, np.ndarray]  # the whole train state by path
    losses: np.ndarray  # [STEPS]
    loads: np.ndarray  # tokens by step, layer and expert [STEPS, L', E]; [STEPS, 0] without experts
    parameters: dict[str, np.ndarray]  # after the last step


def train(config: Config, devices: int, start: Callable[[Trainer], TrainState]) -> Training:
    made = trainer(config, devices)
    state = start(made)
    first = by_path(state)
    losses, loads = [], []
    for step in range(STEPS):
        state, metrics = made.step(state, put_batch(packed(8, seed=step, padding=True), made.mesh))
        jax.block_until_ready(state)  # devices that are threads: one program at a time
        losses.append(float(metrics["loss"]))
        loads.append(np.asarray(metrics["router"]["load"]) if "router" in metrics else np.zeros(0))
    return Training(first, np.array(losses), np.stack(loads), by_path(state.params))


def from_seed(made: Trainer) -> TrainState:
    """Start as a run does, from the compiled initialiser."""
    return made.init(0)


def from_one_draw(made: Trainer) -> TrainState:
    """Start from parameters that are drawn without a program, which spares its compilation."""
    # Copies: what it begins with is donated, and one draw serves several runs.
    params = jax.tree.map(lambda leaf, to: jax.device_put(leaf.copy(), to), initial(made.config), made.layout.params)
    return made.begin(params)


def off_symmetry(made: Trainer) -> TrainState:
    """Start near the initial parameters.

    At hc's own the streams are equal, and a norm takes from F's input the scale that w_pre gives it: its gradient is
    zero, and what rounding leaves of it would be compared.
    """
    config = made.config
    params = jax.tree.map(lambda leaf, noise: leaf + noise, initial(config), random_params(config, std=0.05))
    params = map_paths(lambda path, leaf: leaf - 1.0 if "norm/scale" in path else leaf, params)
    return made.begin(jax.tree.map(jax.device_put, params, made.layout.params))


@functools.lru_cache(maxsize=2)
def reference(kind: str, feed_forward: str, optimizer: str, leading: int, start: Callable[..., TrainState]) -> Training:
    """Return the training on one device."""
    return train(config_of(kind, feed_forward, optimizer, leading=leading), 1, start)


def margin(config: Config, params: Any, batch: dict[str, Any]) -> float:
    """Return by how much, at least, a token's last chosen expert outscores the first one not chosen."""

    def observe(view: SublayerView) -> dict[str, jax.Array]:
        core: Any = view.sublayer.core
        if not hasattr(core, "router"):
            return {"margin": jnp.full(view.u.shape[:2], jnp.inf)}
        scores = jax.nn.softmax(view.sublayer.before(view.u) @ core.router[...], axis=-1)
        ordered = jax.lax.top_k(scores, config.moe.top_k + 1)[0]
        return {"margin": ordered[..., -2] - ordered[..., -1]}

    decoder = definition(config).bind(params)
    return float(decoder.hidden(batch["tokens"], batch["segment_ids"], batch["positions"], observe)[1]["margin"].min())


def compare(kind: str, feed_forward: str, optimizer: str, mesh: str, leading: int, start: Callable[..., Any]) -> None:
    expected = reference(kind, feed_forward, optimizer, leading, start)
    found = train(config_of(kind, feed_forward, optimizer, mesh, leading=leading), 8, start)
    assert found.initial.keys() == expected.initial.keys()
    differing = [path for path, leaf in found.initial.items() if leaf.tobytes() != expected.initial[path].tobytes()]
    assert not differing, "not the same bits at the start"
    apart = np.nonzero((found.loads != expected.loads).reshape(STEPS, -1).any(axis=1))[0]
    if apart.size:
        step = int(apart[0])
        moved = np.abs(found.loads[step] - expected.loads[step]).sum() / 2
        tie = near_tie(kind, optimizer, leading, step, start)
        pytest.fail(f"step {step}: {moved:.0f} choices of experts differ; {tie}")
    error = np.abs(found.losses / expected.losses - 1.0).max()
    assert error <= LOSS, f"loss curves differ by {error:.1e}"
    assert expected.losses[-1] < expected.losses[0]
    if optimizer == "sgd":
        start_params = {p.removeprefix("params/"): a for p, a in expected.initial.items() if p.startswith("params/")}
        for path, leaf in expected.parameters.items():
            if np.array_equal(leaf, start_params[path]):  # that nothing moves: the gain of a logit that is zero
                np.testing.assert_array_equal(found.parameters[path], leaf, path)
            else:
                assert relative_error(found.parameters[path], leaf) <= PARAMETERS, path


def near_tie(kind: str, optimizer: str, leading: int, step: int, start: Callable[..., Any]) -> str:
    """Return words on how close one device's scores are before ``step``."""
    config = config_of(kind, "moe", optimizer, leading=leading)
    made = trainer(config)
    state = start(made)
    for number in range(step):
        state, _ = made.step(state, put_batch(packed(8, seed=number, padding=True), made.mesh))
    closest = margin(config, state.params, packed(8, seed=step, padding=True))
    return f"the closest scores of one device are {closest:.1e} apart"


@pytest.mark.parametrize(("kind", "feed_forward", "optimizer", "mesh"), FAST)
def test_training_on_a_mesh(kind: str, feed_forward: str, optimizer: str, mesh: str) -> None:
    compare(kind, feed_forward, optimizer, mesh, 0, from_one_draw)


def test_the_fast_cases_split_every_axis_and_have_every_value() -> None:
    for number, (name, values) in enumerate(FACTORS.items()):
        if name != "mesh":
            assert {case[number] for case in FAST} >= set(values) - {"hc"}
    assert all(any(int(case[3].split("x")[axis]) > 1 for case in FAST) for axis in range(4))


@pytest.mark.product
@pytest.mark.parametrize("case", product(FACTORS), ids=lambda case: "-".join(case.values()))
def test_whole_product(case: dict[str, str], record_property: Callable[[str, object], None]) -> None:
    """Models have a leading dense block and a shared expert beside the experts, and train under AdamW from the seed."""
    off = off_symmetry if case["kind"] == "hc" else from_one_draw
    start = from_seed if case["optimizer"] == "adamw" else off
    compare(case["kind"], case["feed_forward"], case["optimizer"], case["mesh"], 1, start)
    record_property(f"cases of training on eight devices ({' × '.join(FACTORS)})", 1)


@pytest.mark.long
def test_a_near_tie_of_experts_is_seen() -> None:
    """A failure would report it: with two equal columns of the router no choice is clear."""
    config = config_of("mhc", "moe", "adamw")
    params, batch = initial(config), packed(8)
    assert margin(config, params, batch) > 1e-6
    router = params["blocks"]["mlp"]["core"]["router"]
    params["blocks"]["mlp"]["core"]["router"] = router.at[..., 1].set(router[..., 0])
    assert margin(config, params, batch) == 0.0
