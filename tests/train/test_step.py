"""Test the compiled step: accumulation, devices, non-finite values, what is measured and what leaves no trace."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhc.config import Config
from mhc.sharding import batch_sharding, path_of, put_batch
from mhc.train.step import Trainer
from tests.small import assert_identical, by_path, distance, packed, small, trainer, with_fields

KINDS = ("plain", "hc", "mhc")


def start(made: Trainer) -> Any:
    """Return the state before the first step. Only tests of the initialiser compile it, which takes a second each."""
    return jax.device_put(made._init(jax.random.key(0)), made.layout)


def train(made: Trainer, batches: list[dict[str, Any]]) -> tuple[Any, list[dict[str, Any]]]:
    """Return (state after one step a batch, metrics of each). It waits for every step: CPU devices deadlock on many."""
    state = start(made)
    seen = []
    for batch in batches:
        state, metrics = made.step(state, put_batch(batch, made.mesh))
        seen.append(jax.device_get(metrics))
    return state, seen


def column(seen: list[dict[str, Any]], name: str) -> np.ndarray:
    return np.asarray([metrics[name] for metrics in seen], np.float64)


# Accumulation ---------------------------------------------------------------------------------------------------------

STEPS = 20


@pytest.fixture(scope="module")
def accumulated() -> tuple[tuple[Any, Any, list[Any]], tuple[Any, Any, list[Any]]]:
    """Return (gradients of the first batch, state after 20 steps, metrics) of 32 rows at once and of 4 times 8.

    SGD whose momentum starts at 0: after the first step the momentum is the gradient. Rows are padded to unequal
    lengths, one is nothing but padding, so that micro-batches have unequal numbers of targets.
    """
    batches = [packed(32, seed, padding=True) for seed in range(STEPS)]
    counts = {int(batches[0]["weights"][part::4].sum()) for part in range(4)}
    assert len(counts) > 1
    results = []
    for parts in (1, 4):
        config = small(
            "plain",
            optimizer={"name": "sgd", "lr": 0.5, "weight_decay": 0.0, "clip_norm": None},
            train={"batch_size": 32, "accumulation": parts, "steps": STEPS},
        )
        made = trainer(config)
        momentum = train(made, batches[:1])[0].opt_state
        results.append((momentum, *train(made, batches)))
    return results[0], results[1]


def test_accumulated_loss_equals_the_big_batch_s(accumulated):
    (*_, whole), (*_, parts) = accumulated
    np.testing.assert_allclose(column(parts, "loss"), column(whole, "loss"), rtol=1e-6)
    for name in ("target_tokens", "logit_max"):
        np.testing.assert_allclose(column(parts, name), column(whole, name), rtol=1e-5, err_msg=name)


def test_accumulated_gradients_equal_the_big_batch_s(accumulated):
    (whole, *_), (parts, *_) = accumulated
    assert len(jax.tree.leaves(whole)) == len(jax.tree.leaves(trainer_params())) > 0
    assert distance(parts, whole) <= 1e-6


def test_parameters_after_twenty_accumulated_steps_equal_the_big_batch_s(accumulated):
    (_, whole, _), (_, parts, _) = accumulated
    assert distance(parts.params, whole.params) <= 1e-6
    moved = distance(whole.params, trainer_params())
    assert moved > 0.1  # or their equality would mean little


def trainer_params() -> Any:
    return start(trainer(small("plain"))).params


def test_the_loss_is_the_mean_over_valid_targets():
    """Padding rows weigh nothing: the loss is the same with and without them."""
    made = trainer(small("plain"))
    batch = packed(8, padding=True)
    loss = float(train(made, [batch])[1][0]["loss"])
    moved = {name: np.roll(array, 3, axis=0) for name, array in batch.items()}
    garbage = {**moved, "targets": np.where(moved["weights"] > 0, moved["targets"], 7)}
    assert float(train(made, [garbage])[1][0]["loss"]) == pytest.approx(loss, rel=1e-6)


# Devices --------------------------------------------------------------------------------------------------------------

# Training on meshes of eight equals training on one: tests/multidevice.


@pytest.mark.long
def test_parameters_and_moments_lie_in_their_shards():
    made = trainer(with_fields(small("mhc"), mesh={"fsdp": 2, "tensor": 2}), 8)
    state = start(made)
    query = state.params["blocks"]["attention"]["core"]["query"]  # [L, D, H, K]
    assert query.addressable_shards[0].data.shape == (2, 8, 1, 8)
    moments = [leaf for path, leaf in leaves(state.opt_state).items() if path.endswith("attention/core/query")]
    assert len(moments) == 2 and all(leaf.sharding == query.sharding for leaf in moments)
    batch = put_batch(packed(8), made.mesh)
    state, _ = made.step(state, batch)
    assert state.params["blocks"]["attention"]["core"]["query"].sharding == query.sharding
    assert batch["tokens"].sharding == batch_sharding(made.mesh)
    assert batch["tokens"].addressable_shards[0].data.shape[0] == 2  # 8 rows over data 2 x fsdp 2


def leaves(tree: Any) -> dict[str, Any]:
    return {path_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


# One program ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.product if kind == "hc" else ()) for kind in KINDS]
)
def test_a_step_is_compiled_once(kind):
    """A state made by `init` and one made by `step` have the same types, weak ones included."""
    made = trainer(small(kind))
    assert not [path for path, leaf in leaves(made.abstract).items() if leaf.weak_type]
    step: Any = made.step
    train(made, [packed(8, seed) for seed in range(3)])
    assert step._cache_size() == 1


def test_the_state_is_donated():
    made = trainer(small("plain"))
    state = start(made)
    table = state.params["embed"]["table"]
    made.step(state, put_batch(packed(8), made.mesh))
    assert table.is_deleted()


def test_metrics():
    """The numbers of one step equal their definitions: rate, norms, cross-entropy at init."""
    made = trainer(small("plain"))
    before = jax.device_get(start(made).params)
    state, (metrics,) = train(made, [packed(8)])
    change = jax.tree.map(lambda a, b: np.asarray(a) - b, state.params, before)

    def norm(tree: Any) -> float:
        return float(np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in by_path(tree).values())))

    assert metrics["lr"] == pytest.approx(1e-3)
    assert metrics["loss"] == pytest.approx(np.log(32), rel=0.01)
    assert metrics["log_z"] == pytest.approx(np.log(32), rel=0.01)
    assert metrics["target_tokens"] == packed(8)["weights"].sum() and metrics["target_tokens"].dtype == jnp.int32
    assert metrics["update_norm"] == pytest.approx(norm(change), rel=1e-3)
    assert metrics["param_norm"] == pytest.approx(norm(state.params), rel=1e-6)
    assert (metrics["skipped"], metrics["nonfinite"], int(state.step)) == (0, 0, 1)


def test_clipping_scales_the_gradient_to_the_largest_norm():
    sgd = {"name": "sgd", "lr": 1.0, "weight_decay": 0.0, "momentum": 0.0}
    clipped = trainer(small("plain", optimizer={**sgd, "clip_norm": 1e-3}))
    _, (metrics,) = train(clipped, [packed(8)])
    _, (free,) = train(trainer(small("plain")), [packed(8)])
    assert metrics["grad_norm"] == pytest.approx(float(free["grad_norm"]), rel=1e-6)  # of the gradient as it was
    assert metrics["grad_norm"] > 1e-2
    assert metrics["update_norm"] == pytest.approx(1e-3, rel=1e-5)


# Non-finite values ----------------------------------------------------------------------------------------------------


def nan_weight(state: Any, batch: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a loss that is NaN."""
    weights = batch["weights"].copy()
    weights[0, 0] = np.nan
    return state, {**batch, "weights": weights}


def infinite_logit(state: Any, batch: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a loss that overflows to infinity, or to NaN in the logsumexp."""
    return scaled_norm(state, 3e38), batch


def infinite_gradient(state: Any, batch: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a finite loss whose gradient's square overflows."""
    return scaled_norm(state, 1e25), batch


def scaled_norm(state: Any, scale: float) -> Any:
    return state._replace(params={**state.params, "final_norm": {"scale": jnp.full((16,), scale, jnp.float32)}})


@pytest.mark.parametrize(
    "fault",
    [pytest.param(nan_weight, marks=pytest.mark.product), infinite_logit, infinite_gradient],
    ids=lambda fault: fault.__name__,
)
def test_a_step_that_is_not_finite_changes_no_parameter_and_no_moment(fault):
    made = trainer(small("plain", guard={"on_nonfinite": "skip"}))
    state, _ = train(made, [packed(8, 0), packed(8, 1)])
    healthy = jax.device_get(state)
    bad, batch = fault(state, packed(8, 2))
    held = jax.device_get(bad)
    bad, metrics = made.step(bad, put_batch(batch, made.mesh))
    assert np.isfinite(metrics["loss"]) == (fault is infinite_gradient)
    assert not np.isfinite(metrics["grad_norm"])
    assert_identical(bad.params, held.params)
    assert_identical(bad.opt_state, held.opt_state)
    assert (int(bad.step), int(bad.skipped), int(bad.nonfinite)) == (3, 1, 1)
    assert float(metrics["update_norm"]) == 0.0
    # Training goes on, as though the step had not been: the same batch gives the same parameters as without it.
    resumed = bad._replace(params=jax.tree.map(jnp.asarray, healthy.params))
    after, metrics = made.step(resumed, put_batch(packed(8, 3), made.mesh))
    assert np.isfinite(metrics["loss"]) and (int(after.step), int(after.skipped)) == (4, 1)
    expected, _ = train(made, [packed(8, 0), packed(8, 1), packed(8, 3)])
    assert_identical(after.params, expected.params)
    assert_identical(after.opt_state, expected.opt_state)


# No trace -------------------------------------------------------------------------------------------------------------


def lowered(config: Config, made: Trainer | None = None) -> tuple[str, Any]:
    """Return (HLO text of the step, shapes of its outputs)."""
    made = made or trainer(config)
    batch = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in packed(8).items()}
    step: Any = made.step
    done = step.lower(made.abstract, batch)
    return done.as_text(), done.out_info


def test_without_probes_the_step_has_no_trace_of_them():
    """At probe_every=0 the step is that of a config with other fields of monitoring, and has no more outputs."""
    off = small("plain", monitor={"probe_every": 0})
    other = with_fields(off, monitor={"probe_sequences": 7, "progress_every": 3, "tensorboard": False})
    on = with_fields(off, monitor={"probe_every": 5})
    text, (state, metrics) = lowered(off)
    assert text == lowered(other, Trainer(other, trainer(off).mesh))[0]
    traced, (traced_state, traced_metrics) = lowered(on)
    assert text != traced and len(text) < len(traced)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), (state, traced_state, trainer(off).abstract))
    assert shapes[0] == shapes[1] == shapes[2]
    assert set(metrics) < set(traced_metrics)


def test_validation_and_step_agree_on_the_loss():
    made = trainer(small("plain"))
    batch = packed(8, padding=True)
    parts = jax.device_get(made.validate(start(made).params, put_batch(batch, made.mesh)))
    loss = float(train(made, [batch])[1][0]["loss"])
    assert parts["nll"] / parts["weight"] == pytest.approx(loss, rel=1e-6)
    assert parts["weight"] == batch["weights"].sum() == parts["bytes"]
