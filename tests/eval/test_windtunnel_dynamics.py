"""Test time scales, ablations and gradient dynamics: closed forms against autodiff, planted changes, every kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhc import kinds
from mhc.config import Config, MeshConfig, from_config_dict
from mhc.data.windtunnel import Bijection, HiddenMarkov, Task, fields
from mhc.eval.common import checkpoints
from mhc.eval.common.ablation import Case
from mhc.eval.common.checkpoints import Checkpoint
from mhc.eval.common.program import Program
from mhc.eval.windtunnel import ablation, advantage, belief, gradients, scales
from mhc.eval.windtunnel.__main__ import main
from mhc.model.attention import HeadAttention, attend_xla
from mhc.rng import path_key
from mhc.sharding import make_mesh, shardings
from tests.small import VOCAB, ZOO, random_params, small
from tests.small_runs import on_demand, run

BIJECTION, HMM = Bijection(5), HiddenMarkov(observations=3, states=2, symbols=2)
SEQUENCES = 12
ATTENTION: dict[str, dict[str, Any]] = {
    "grouped": {"attention": {"heads": 4, "kv_heads": 2, "softcap": 5.0}, "positions": {"kind": "alibi"}},
    **ZOO,
}


def model(task: Task, kind: str = "plain", devices: int = 1, **groups: dict[str, Any]) -> Checkpoint:
    """Return a model with random parameters that no run keeps."""
    groups["model"] = {**groups.get("model", {}), "vocab_size": max(VOCAB, task.vocabulary)}
    if task.classes is not None:
        groups["head"] = {**groups.get("head", {}), "classes": task.classes, "tied": False}
    config: Config = small(kind, **groups, data={"sequence_length": task.length})
    mesh = make_mesh(MeshConfig(data=1, fsdp=devices), jax.devices()[:devices])
    params = random_params(config)
    return Checkpoint(kind, config, (0,), jax.device_put(params, shardings(params, mesh)), mesh)


# ----------------------------------------------------------------------------------------------------- the closed forms


def deviation(one: jax.Array, other: jax.Array) -> float:
    return float(jnp.abs(one - other).max() / jnp.abs(other).max())


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_closed_forms_are_the_gradients_in_float64(groups: int, softcap: float | None) -> None:
    """They equal autodiff through the model's attention: a bias is added to the logits, so its gradient is theirs."""
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(0), 5)
        q, target = (jax.random.normal(key, (2, 7, 4, 3), jnp.float64) for key in keys[:2])
        k, v = (jax.random.normal(key, (2, 7, groups, 3), jnp.float64) for key in keys[2:4])
        bias = jax.random.normal(keys[4], (2, 4, 7, 7), jnp.float64)
        mask = jnp.tril(jnp.ones((1, 7, 7), bool))

        def loss_of(results: jax.Array) -> jax.Array:
            return jnp.sum(jnp.tanh(results - target) ** 2)

        def loss(bias: jax.Array, v: jax.Array) -> jax.Array:
            return loss_of(attend_xla(q, k, v, mask, bias=bias, softcap=softcap))

        by_scores, by_values = jax.grad(loss, (0, 1))(bias, v)
        logits = jnp.einsum("bthk,buhk->bhtu", q, jnp.repeat(k, 4 // groups, axis=2)) / np.sqrt(3)
        logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
        scores = jnp.where(mask[:, None], logits + bias, -jnp.inf)
        results = advantage.contexts(scores, v)
        found = advantage.gradients(scores, v, jax.grad(loss_of)(results))
        assert found.scores.dtype == jnp.float64
        assert deviation(results, attend_xla(q, k, v, mask, bias=bias, softcap=softcap)) < 1e-12
        assert deviation(found.scores, by_scores) < 1e-9
        assert deviation(found.values, by_values) < 1e-9
        np.testing.assert_allclose((jax.nn.softmax(scores) * found.advantage).sum(axis=-1), 0.0, atol=1e-12)


def test_the_closed_forms_hold_within_a_models_layer_in_float64() -> None:
    """Heads are grouped-query, with norms of queries and keys, rotary positions and an output projection."""
    config = small(attention={"heads": 4, "kv_heads": 2, "qk_norm": True})
    with jax.enable_x64(True):
        layer = HeadAttention(config, key=path_key(jax.random.key(0)))
        x = jax.random.normal(jax.random.key(1), (2, 9, 16), jnp.float64)
        weights = jax.random.normal(jax.random.key(2), (2, 9, 16), jnp.float64)
        q, k, v = layer.project(x, jnp.broadcast_to(jnp.arange(9, dtype=jnp.int32), (2, 9)), None)
        mask, none = jnp.tril(jnp.ones((1, 9, 9), bool)), jnp.zeros((2, 4, 9, 9), jnp.float64)

        def loss_of(results: jax.Array) -> jax.Array:
            return jnp.sum(jnp.sin(layer.join(results)) * weights)

        def loss(bias: jax.Array, v: jax.Array) -> jax.Array:
            return loss_of(attend_xla(q, k, v, mask, scale=layer.scale, bias=bias))

        by_scores, by_values = jax.grad(loss, (0, 1))(none, v)
        scores = jnp.einsum("bthk,buhk->bhtu", q, jnp.repeat(k, 2, axis=2)) * layer.scale
        scores = jnp.where(mask[:, None], scores, -jnp.inf)
        found = advantage.gradients(scores, v, jax.grad(loss_of)(advantage.contexts(scores, v)))
        assert by_values.dtype == jnp.float64
        assert deviation(found.scores, by_scores) < 1e-9
        assert deviation(found.values, by_values) < 1e-9


def check_identities(checkpoint: Checkpoint, task: Task) -> None:
    found = gradients.deviations(checkpoint, task)
    assert found.keys() == {"scores", "values", "results"}
    for values in found.values():
        assert values.shape == (checkpoint.config.model.layers,)
        assert (values < 2e-5).all(), found


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if number == 0 else pytest.mark.product) for number, name in enumerate(ATTENTION)],
)
def test_the_identities_hold_in_models_of_every_attention(name: str) -> None:
    check_identities(model(BIJECTION, **ATTENTION[name]), BIJECTION)


@pytest.mark.parametrize(
    "kind",
    [name if name == "plain" else pytest.param(name, marks=pytest.mark.product) for name in kinds.names()],
)
def test_models_of_every_kind_are_measured(kind: str) -> None:
    checkpoint = model(HMM, kind)
    check_identities(checkpoint, HMM)
    assert scales.measure(checkpoint, HMM, SEQUENCES).json["steps"] == [0]
    left_out = ablation.measure(checkpoint, HMM, SEQUENCES)
    assert len(left_out.json["cases"]) == 2 * (2 + 3) and all(np.isfinite(value) for value in left_out.scalars.values())


@pytest.mark.product
def test_a_wrong_closed_form_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = advantage.gradients

    def without_the_mean(scores: jax.Array, values: jax.Array, u: jax.Array) -> advantage.Gradients:
        found = right(scores, values, u)
        return found._replace(scores=found.scores + 0.1 * jax.nn.softmax(scores, axis=-1))

    monkeypatch.setattr(advantage, "gradients", without_the_mean)
    jax.clear_caches()
    checkpoints_kept = model(BIJECTION, attention={"heads": 2, "scale": 0.3})  # a program of its own
    assert gradients.deviations(checkpoints_kept, BIJECTION)["scores"].min() > 1e-2


def test_the_loss_is_that_of_training() -> None:
    """It is the mean of the cross-entropies that the belief is measured by, of targets and of posteriors."""
    for task in (BIJECTION, HMM):
        checkpoint = model(task)
        config = checkpoint.config
        shape = (config.model.layers, SEQUENCES, task.length, config.attention.heads, config.value_dim)
        drawn = task.make(0, "validation", range(SEQUENCES))
        batch = {
            "tokens": jnp.asarray(drawn.tokens),
            "places": jnp.tile(jnp.asarray(task.places, jnp.int32), (SEQUENCES, 1)),
            "targets": jnp.asarray(gradients.targets(task, drawn)),
        }
        decoder = checkpoint.definition.bind(checkpoint.params)
        found = gradients.loss(decoder, batch, jnp.zeros(shape))
        log_p = np.asarray(belief.log_probabilities(decoder, batch), np.float64)[:, task.places]
        if task.classes is None:
            wanted = np.take_along_axis(log_p, np.asarray(batch["targets"])[..., None], axis=-1)[..., 0]
        else:
            wanted = (drawn.posterior * log_p).sum(axis=-1)
        np.testing.assert_allclose(found, -wanted.mean(axis=-1), rtol=1e-5)


# ----------------------------------------------------------------------------------------- advantages, responsibilities


def planted(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return logits [B, L, H, P, U] of a causal attention, and an advantage whose mean under their weights is 0."""
    rng = np.random.default_rng(seed)
    scores, gain = rng.standard_normal((2, 6, 2, 3, 5, 5))
    scores = np.where(np.tri(5, dtype=bool), scores, -np.inf)
    alpha = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    return scores, gain - (alpha * gain).sum(axis=-1, keepdims=True)


def test_an_advantage_that_is_the_change_correlates_with_it_wholly() -> None:
    scores, gain = planted()
    offset = np.random.default_rng(1).standard_normal((*scores.shape[:-1], 1))  # which the softmax does not see
    for sign in (1.0, -1.0):
        found = advantage.agreement(gain, scores, scores + sign * 0.01 * gain + offset)
        np.testing.assert_allclose(found.with_scores.correlation(), sign, atol=1e-12)
        assert (sign * found.with_weights.correlation() > 0.5).all()


def test_an_advantage_that_is_not_the_change_does_not_correlate() -> None:
    scores, gain = planted()
    other = np.random.default_rng(2).standard_normal(gain.shape)
    found = advantage.agreement(gain, scores, scores + other)
    assert np.abs(found.with_scores.correlation()).max() < 0.35  # 84 pairs a head
    still = advantage.agreement(gain, scores, scores)
    for moments in still:
        assert np.isnan(moments.correlation()).all()


def test_moments_add_up_over_batches() -> None:
    scores, gain = planted()
    later = scores + np.random.default_rng(3).standard_normal(gain.shape) + gain
    whole = advantage.agreement(gain, scores, later).with_weights
    parts = [advantage.agreement(gain[at], scores[at], later[at]).with_weights for at in (slice(2), slice(2, None))]
    np.testing.assert_allclose((parts[0] + parts[1]).correlation(), whole.correlation(), rtol=1e-12)


def test_responsibilities_count_queries() -> None:
    own = jnp.eye(4)[None, None]
    first = jnp.zeros((1, 1, 4, 4)).at[..., 0].set(1.0)
    assert float(advantage.queries_per_value(own)[0, 0]) == 1.0
    assert float(advantage.queries_per_value(first)[0, 0]) == 4.0
    there = jnp.array([[True, False, False, True]])
    assert float(advantage.responsibility_at(own, there)[0, 0]) == 0.5
    assert float(advantage.responsibility_at(first, there)[0, 0]) == 0.5
    assert float(advantage.responsibility_at(first, there.at[0, 3].set(False))[0, 0]) == 0.25


# ---------------------------------------------------------------------------------------------------------- time scales


def test_the_variation_of_attention() -> None:
    scores, _ = planted()
    np.testing.assert_allclose(scales.total_variation(scores, scores + 3.0), 0.0, atol=1e-12)
    one, other = (np.where(np.arange(4) == key, 0.0, -np.inf)[None, None, None, None] for key in (0, 2))
    assert scales.total_variation(one, other) == np.array([[1.0]])
    halves = np.where(np.arange(4) < 2, 0.0, -np.inf)[None, None, None, None]
    np.testing.assert_allclose(scales.total_variation(one, halves), 0.5)


def test_half_times() -> None:
    assert scales.half_time([10, 20, 30], [4.0, 1.0, 0.0]) == pytest.approx(10 + 10 * 2 / 3)
    assert scales.half_time([10, 20, 30, 40], [4.0, 1.0, 3.0, 0.0]) == pytest.approx(30 + 10 / 3)  # it went back
    assert scales.half_time([10, 20, 30], [4.0, np.nan, 0.0]) == 30
    assert scales.half_time([10, 20, 30], [5.0, -9.0, 1.0]) == pytest.approx(10 + 10 * 2 / 14)
    for series in ([4.0, 1.0], [1.0, 2.0, 3.0], [1.0, 0.5, 1.0], [np.inf, 1.0, 0.0], [1.0, 0.5, np.nan]):
        assert scales.half_time(range(len(series)), series) is None


def test_an_attention_that_does_not_change_has_change_0(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = model(BIJECTION)
    monkeypatch.setattr(checkpoints, "steps_until", lambda of: [1, 2, 3])
    monkeypatch.setattr(checkpoints, "at_step", lambda of, step: checkpoint)
    found = scales.follow(checkpoint, BIJECTION, SEQUENCES)
    assert found.change is not None and found.distance is not None
    assert found.change.shape == (2, 2, 2) and not found.change.any()
    assert found.distance.shape == (3, 2, 2) and not found.distance.any()
    assert len(set(found.kl)) == 1
    result = scales.measure(checkpoint, BIJECTION, SEQUENCES)
    assert result.scalars == {} and result.json["attention_half_time_by_head"] == [[None, None], [None, None]]
    followed = gradients.follow(checkpoint, BIJECTION, SEQUENCES)
    assert followed.with_scores.shape == (2, 2, 2) and np.isnan(followed.with_scores).all()


def test_a_change_of_attention_is_seen_in_its_head_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = model(BIJECTION)
    params = jax.tree.map(jnp.copy, checkpoint.params)
    query = params["blocks"]["attention"]["core"]["query"]  # [L, D, H, K]
    params["blocks"]["attention"]["core"]["query"] = query.at[1, :, 0].multiply(-1.0)
    steps = {1: checkpoint, 2: checkpoint._replace(params=params)}
    monkeypatch.setattr(checkpoints, "steps_until", lambda of: [1, 2])
    monkeypatch.setattr(checkpoints, "at_step", lambda of, step: steps[step])
    change = scales.follow(checkpoint, BIJECTION, SEQUENCES).change
    assert change is not None and change[0, 1, 0] > 0.05
    change[0, 1, 0] = 0.0
    assert np.abs(change).max() < 1e-6


# ------------------------------------------------------------------------------------------------------------ ablations


def by_case(result: Any, name: str) -> dict[tuple[str, int, int | None], float]:
    return {(case["kind"], case["layer"], case["head"]): case[name]["value"] for case in result.json["cases"]}


@pytest.mark.parametrize("kind", ["plain", "mhc"])
def test_a_part_that_gives_nothing_changes_nothing(kind: str) -> None:
    checkpoint = model(BIJECTION, kind)
    params = jax.tree.map(jnp.copy, checkpoint.params)
    blocks = params["blocks"]
    blocks["attention"]["core"]["out"] = blocks["attention"]["core"]["out"].at[1, 0].set(0.0)  # [L, H, K, D]
    blocks["mlp"]["core"]["down"] = blocks["mlp"]["core"]["down"].at[0].set(0.0)
    found = ablation.measure(checkpoint._replace(params=params), BIJECTION, SEQUENCES)
    for name in ablation.MEASURES:
        changes = by_case(found, name)
        nothing = {("head", 1, 0), ("feed-forward", 0, None)}
        assert all((abs(value) < 1e-7) == (case in nothing) for case, value in changes.items()), changes
        assert changes["block", 0, None] == pytest.approx(changes["attention", 0, None], abs=1e-6)
        # the other head is all of that attention
        assert changes["head", 1, 1] == pytest.approx(changes["attention", 1, None], abs=1e-6)


def test_what_is_left_out_is_the_model_without_it() -> None:
    """It equals the model with those weights set to 0."""
    checkpoint = model(HMM, "mhc")
    found = ablation.ablate(checkpoint, HMM, SEQUENCES)
    params = jax.tree.map(jnp.copy, checkpoint.params)
    out = params["blocks"]["attention"]["core"]["out"]
    params["blocks"]["attention"]["core"]["out"] = out.at[0, 1].set(0.0)
    program = Program(checkpoint._replace(params=params), belief.log_probabilities)
    without = belief.distances_of(program, HMM, belief.held_out(HMM, SEQUENCES))
    number = found.cases.index(Case("head", 0, ((0, 1),)))
    for name, field in (("entropy_mae_bits", "entropy_error"), ("kl_bits", "kl")):
        direct = float(getattr(without, field).mean())
        assert found.base[name] + found.change[name].value[number] == pytest.approx(direct, abs=1e-6)


@pytest.mark.product
def test_eight_devices_give_what_one_gives() -> None:
    one, eight = (model(BIJECTION, "mhc", devices) for devices in (1, 8))
    numbers = [
        np.array(list(by_case(ablation.measure(each, BIJECTION, SEQUENCES), "kl_bits").values()))
        for each in (one, eight)
    ]
    np.testing.assert_allclose(numbers[0], numbers[1], atol=1e-6)
    shares = [gradients.follow(each, BIJECTION, SEQUENCES) for each in (one, eight)]
    np.testing.assert_allclose(shares[0].queries_per_value, shares[1].queries_per_value, rtol=1e-5)
    check_identities(eight, BIJECTION)


# -------------------------------------------------------------------------------------------------------------- program


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function from a kind of attention to the folder of a run that keeps four checkpoints."""
    root = tmp_path_factory.mktemp("dynamics")

    @on_demand
    def make(attention: str = "heads") -> Path:
        groups: dict[str, dict[str, object]] = {
            "model": {"layers": 1, "width": 16},
            "residual": {"kind": "plain"},
            "attention": {"heads": 2, "kind": attention},
            "optimizer": {"lr": 1e-2},
            "schedule": {"kind": "constant"},
            "train": {"steps": 40, "batch_size": 16},
            "checkpoint": {"every": 10, "keep_every": 10, "keep": 1},
            "validation": {"every": 0},
            "monitor": {"tensorboard": False, "progress_every": 0, "probe_every": 0},
        }
        for field, value in fields("windtunnel:bijection,symbols=4").items():
            group, _, name = field.partition(".")
            groups.setdefault(group, {})[name] = value
        assert run(from_config_dict(groups), root / attention) == 0
        return root / attention

    return make


@pytest.mark.long
def test_the_program_follows_runs_over_their_checkpoints(
    trained: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(trained()), str(trained("tokenwise"))]
    measures = ["--measures", "scales", "ablation", "gradients"]
    assert main(["--checkpoint", *runs, "--sequences", "16", *measures, "--out", str(tmp_path)]) == 0
    capsys.readouterr()
    one, control = json.loads((tmp_path / "windtunnel.json").read_text())["checkpoints"]
    assert one["scales"]["steps"] == control["scales"]["steps"] == one["gradients"]["steps"] == [10, 20, 30, 40]
    for each in (one, control):
        assert each["scales"]["kl_bits"][-1] == pytest.approx(each["kl_bits"]["value"], rel=1e-6)
        assert each["ablation"]["base"]["kl_bits"] == pytest.approx(each["kl_bits"]["value"], rel=1e-6)
    change, to_end = (np.array(one["scales"][name]) for name in ("attention_change", "attention_to_end"))
    assert change.shape == (3, 1, 2) and (change > 0).all() and (change < 1).all()
    np.testing.assert_allclose(to_end[2], change[2], rtol=1e-6)
    assert not to_end[3].any()
    assert max(one["gradients"]["identities"][name]["largest"] for name in ("scores", "values", "results")) < 1e-4
    assert np.array(one["gradients"]["advantage_and_scores"], float).shape == (3, 1, 2)
    assert control["scales"]["attention_change"] is None
    for name in ("scales", "ablation", "gradients"):
        assert "has no attention" in control[name]["note"]
    page = (tmp_path / "windtunnel.html").read_text()
    for heading in ("Two time scales", "Without a head or a sublayer", "Gradient dynamics of attention"):
        assert heading in page
    assert (tmp_path / "scales.csv").is_file() and (tmp_path / "gradients.csv").is_file()


@pytest.mark.long
def test_a_checkpoint_is_followed_to_its_own_step(trained: Callable[..., Path]) -> None:
    """The mean of several checkpoints ends at the last of them, which is read by itself."""
    folder = trained()
    middle = checkpoints.load(f"{folder}/checkpoints/20")
    assert checkpoints.steps_until(middle) == [10, 20]
    first = checkpoints.load(f"{folder}/checkpoints/10")
    again = checkpoints.at_step(middle, 10)
    assert again.name == first.name and again.steps == (10,)
    jax.tree.map(np.testing.assert_array_equal, again.params, first.params)
    mean = checkpoints.load(str(folder), 20, average=2)
    last = checkpoints.at_step(mean, checkpoints.steps_until(mean)[-1])
    jax.tree.map(np.testing.assert_array_equal, last.params, middle.params)
    result = scales.measure(middle, Bijection(4), 8)
    assert result.scalars == {} and "needs 3 checkpoints" in result.json["note"]
