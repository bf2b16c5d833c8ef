"""Test the contract through the decoder and the compiled step: kind × init preset × N.

`make test` holds it at one preset a kind and N = 4, `make test-full` over the whole product. The cases of a group share
their programs: presets differ in values alone.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mhc.config import Config
from mhc.model.decoder import Params, SublayerView
from mhc.monitor import guard
from mhc.train.checkpoint import Checkpoints
from mhc.train.standing import Standing
from mhc.train.step import LossParts, Trainer, TrainState, loss_and_gradients
from tests.contracts.cases import SLOTS, Case, Group, every_case, is_fast
from tests.contracts.test_functional import separation
from tests.small import assert_identical, by_path, initial, packed, relative_error, small, trainer

MESH = {"data": 2, "fsdp": 2, "tensor": 2}


_latest: Group | None = None


@pytest.fixture(autouse=True)
def programs_of_one_group(case: Case) -> None:
    """Drop the programs of the group before: each maps some memory, and a process may hold few maps (65530)."""
    global _latest
    if case.group != _latest:
        _latest = case.group
        jax.clear_caches()
        gc.collect()


class Variant(NamedTuple):
    """Describes another way to compute the same step."""

    model: dict[str, Any]
    devices: int = 1


TOGETHER = Variant({"remat": "full"}, 8)
APART = {
    "on one device": Variant({}),
    "unrolled": Variant({"scan": False}),
    "recomputed": Variant({"remat": "full"}),
    "recomputed but for products": Variant({"remat": "dots"}),
    "on eight devices": Variant({}, 8),
}


def config_of(group: Group, init: str | None = None, **groups: dict[str, Any]) -> Config:
    options = group.options | ({"init": init} if init else {})
    base: dict[str, dict[str, Any]] = {
        "residual": {"kind": group.kind, **options},
        # Under sgd an update is the gradient, while Adam's first one is its sign, which rounding decides at zero.
        "optimizer": {"name": "sgd", "lr": 0.1, "clip_norm": None, "weight_decay": 0.0},
        # At a width of 16 a standard deviation of 0.02 would make sublayers that add next to nothing.
        "init": {"kind": "fan_in"},
    }
    return small(group.kind, **{**base, **groups})


def trainer_of(group: Group, variant: Variant) -> Trainer:
    mesh = MESH if variant.devices == 8 else {}
    return trainer(config_of(group, model=variant.model, mesh=mesh), variant.devices)


@functools.cache
def initial_of(case: Case, layers: int = 2) -> Params:
    """Return the case's initial parameters; they are not compiled, see ``tests.small.initial``."""
    return initial(config_of(case.group, case.init, model={"layers": layers}))


def fresh(made: Trainer, case: Case) -> TrainState:
    """Return the state of step 0 in its layout, from the case's preset."""
    params = initial_of(case, made.config.model.layers)
    zero = jnp.zeros((), jnp.int32)
    state = TrainState(zero, params, made.optimizer.init(params), zero, zero, guard.initial(made.config))
    return jax.tree.map(lambda leaf, layout: jax.device_put(jnp.array(leaf), layout), state, made.layout)


def one_step(case: Case, variant: Variant) -> tuple[TrainState, dict[str, Any]]:
    made = trainer_of(case.group, variant)
    return made.step(fresh(made, case), packed(8, padding=True))


@functools.cache
def gradient(group: Group) -> Callable[[Params], tuple[LossParts, Params]]:
    """Return loss and gradient by their definition: blocks scanned, nothing recomputed, one device."""
    definition, batch = trainer(config_of(group)).definition, packed(8, padding=True)
    return jax.jit(lambda params: loss_and_gradients(definition, params, batch, 1))


@every_case
def test_the_step_is_the_same_however_it_is_computed(case: Case) -> None:
    """Steps agree: kept or recomputed, scanned or unrolled, on one device or a data × fsdp × tensor mesh of eight."""
    start = initial_of(case)
    parts, grads = gradient(case.group)(start)
    loss, norm = parts.sums.nll / parts.weight, optax.tree.norm(grads)
    assert np.isfinite(float(norm))
    assert float(norm) > 0
    before, slope = by_path(start), by_path(grads)
    for name, variant in ({"all at once": TOGETHER} | ({} if is_fast(case) else APART)).items():
        state, metrics = one_step(case, variant)
        assert relative_error(metrics["loss"], loss) <= 1e-5, name
        assert relative_error(metrics["grad_norm"], norm) <= 1e-5, name
        for path, leaf in by_path(state.params).items():
            assert leaf.dtype == np.float32
            update = 0.1 * slope[path]
            # Rounding of the gradient, and of a parameter to which it is added.
            allowed = 1e-4 * np.max(np.abs(update)) + 1e-6 * np.max(np.abs(before[path])) + 1e-9
            assert np.max(np.abs(leaf - (before[path] - update))) <= allowed, f"{name}: {path}"


@every_case
def test_a_checkpoint_gives_the_state_back(case: Case, tmp_path: Path) -> None:
    """A checkpoint of eight devices gives the state back bit for bit, to eight devices and to one."""
    many, one = trainer_of(case.group, TOGETHER), trainer_of(case.group, Variant({}))
    state, _ = one_step(case, TOGETHER)
    checkpoints = Checkpoints(tmp_path, many.config.checkpoint)
    standing = Standing(step=1, tokens=5, data={"position": 3})
    checkpoints.save(state, standing, many.config)
    checkpoints.wait()
    assert checkpoints.latest() == 1
    for made in (many, one):
        restored, found = checkpoints.restore(1, made.abstract, made.layout)
        assert found == standing
        assert_identical(restored, state, f"{len(made.mesh.devices.flat)} devices")
        for leaf, layout in zip(jax.tree.leaves(restored), jax.tree.leaves(made.layout), strict=True):
            assert leaf.sharding.is_equivalent_to(layout, leaf.ndim)
    checkpoints.close()


@every_case
def test_the_decoder_starts_as_plain_where_it_must(case: Case) -> None:
    if not case.starts_plain:
        return
    preserving = case.group.spec.preserving
    residual = {"kind": case.group.kind, **case.group.options, **preserving, "init": case.init}
    # Attention over depth reads means, in which an eps would count J^2 times; a kind that owns the norm has its eps.
    eps = 1e-12 if case.group.kind == "attn_res" else 1e-6
    batch = packed(2)

    def logits(config: Config) -> np.ndarray:
        definition, params = trainer(config).definition, initial(config)
        run = jax.jit(lambda params: definition.bind(params)(batch["tokens"], batch["segment_ids"], batch["positions"]))
        return np.asarray(run(params))

    groups: dict[str, Any] = {"model": {"layers": 4}, "norm": {"eps": eps}}
    plain = logits(small("plain", **groups))
    assert relative_error(logits(small(case.group.kind, residual=residual, **groups)), plain) <= case.group.tolerance


@functools.cache
def deep(group: Group) -> tuple[Trainer, Callable[[Params], jax.Array]]:
    """Return (Adam steps at 1e-3 on as many sublayers as the largest N, the streams after the last of them)."""
    adam = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.0}
    layers = max(4, -(-group.n // 2))  # two sublayers a block
    made, batch = trainer(config_of(group, optimizer=adam, model={"layers": layers})), packed(8)

    def last(view: SublayerView) -> dict[str, jax.Array]:
        return {"streams": view.topology.streams(view.state)}

    @jax.jit
    def streams(params: Params) -> jax.Array:
        decoder = made.definition.bind(params)
        return decoder.hidden(batch["tokens"], batch["segment_ids"], batch["positions"], observe=last)[1]["streams"][-1]

    return made, streams


@pytest.mark.product
@every_case
def test_streams_separate_in_a_decoder(case: Case) -> None:
    """After ten Adam steps no two streams after the last block are the same."""
    if case.group.n == 1 or case.group.kind in SLOTS:
        return
    made, streams = deep(case.group)
    state, batch = fresh(made, case), packed(8)
    if case.starts_plain:
        assert separation(streams(state.params))[1] < 1e-6
    after = []
    for step in range(10):
        state, _ = made.step(state, batch)
        if step >= 7:  # a gate of 0.01 that ten steps at 1e-3 carry down stands at zero after the tenth
            after.append(separation(streams(state.params))[0])
    assert max(after) > 1e-4, after
