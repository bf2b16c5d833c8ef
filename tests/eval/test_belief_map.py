"""Test maps of prior and likelihood, their joint diagnosis, and how signals are scored against the truth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mhc.config import from_config_dict, resolve
from mhc.data import tokenizers
from mhc.data.windtunnel import fields, task
from mhc.errors import UserError
from mhc.eval.common import statistics
from mhc.eval.common.belief_map import diagnose, key_cosine_variance, maps
from mhc.eval.common.checkpoints import Checkpoint
from mhc.eval.inspect import __main__ as inspect
from mhc.eval.windtunnel import belief, signals
from mhc.eval.windtunnel.sections import Shown
from mhc.sharding import make_mesh
from tests.small import definition, random_params, relative_error, small
from tests.small_runs import untrained

# The maps -------------------------------------------------------------------------------------------------------------


def test_the_variance_of_cosines_is_over_the_keys_that_are_seen() -> None:
    """It knows no length of queries and keys, no key that is not seen, and is 0 for one key or equal ones."""
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(2, 5, 3, 4)).astype(np.float32) for _ in range(2))
    visible = jnp.asarray(np.tril(np.ones((5, 5), bool))[None, None].repeat(2, 0).repeat(3, 1))

    def variance(q: np.ndarray, k: np.ndarray) -> np.ndarray:
        return np.asarray(key_cosine_variance(jnp.asarray(q, jnp.float32), jnp.asarray(k, jnp.float32), visible))

    found = variance(q, k)
    for t in range(5):
        cosines = [
            np.sum(q[:, t] * k[:, u], -1) / (np.linalg.norm(q[:, t], axis=-1) * np.linalg.norm(k[:, u], axis=-1))
            for u in range(t + 1)
        ]
        np.testing.assert_allclose(found[:, :, t], np.var(cosines, axis=0), atol=1e-6)
    np.testing.assert_allclose(variance(9.0 * q, 0.1 * k), found, rtol=1e-4, atol=1e-7)
    unseen = k.copy()
    unseen[:, 3:] += 1.0
    np.testing.assert_array_equal(variance(q, unseen)[:, :, :3], found[:, :, :3])
    assert np.all(variance(q, np.ones_like(k)) < 1e-12) and np.all(found[:, :, 0] == 0)


@pytest.mark.parametrize("groups", [{}, {"attention": {"kv_heads": 1}}], ids=["heads", "grouped"])
def test_maps_are_those_of_their_definition(groups: dict[str, Any]) -> None:
    """Confidence is recomputed from the weights; the entropies are those of the distributions that the model gives."""
    config = small("plain", **groups)
    params, tokens = random_params(config), jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 16)))
    decoder = definition(config).bind(params)
    found = {name: np.asarray(leaf, np.float64) for name, leaf in maps(decoder, tokens).items()}
    assert found["prior"].shape == found["confidence"].shape == (2, 2, 2, 16)
    seen = decoder.hidden(tokens, observe=lambda view: {"u": view.u, "y": view.y})[1]
    blocks = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params["blocks"])
    for layer in range(2):
        u = np.asarray(seen["u"][2 * layer], np.float64)
        x = u / np.sqrt((u * u).mean(-1, keepdims=True) + config.norm.eps) * blocks["attention"]["norm"]["scale"][layer]
        core = {name: leaf[layer] for name, leaf in blocks["attention"]["core"].items()}
        values = np.einsum("btd,dgj->btgj", x, core["value"]).repeat(2 // config.kv_heads, axis=2)
        written = np.einsum("bthj,hjd->bthd", values, core["out"])
        expected = np.abs(np.einsum("bthd,btd->bht", written, np.asarray(seen["y"][2 * layer + 1], np.float64)))
        assert relative_error(found["confidence"][:, layer], expected) < 1e-4
    p = np.exp(found["log_probabilities"])
    np.testing.assert_allclose(found["output"], -(p * np.log2(p)).sum(-1), rtol=1e-4)
    assert np.all((found["hidden"] > 0) & (found["hidden"] < 1)) and np.all(found["lens"] > 0)


@given(st.integers(0, 2**32 - 1))
def test_the_diagnosis_is_of_ranks(seed: int) -> None:
    """No size of a layer or head counts, and the weakest prior with the surest likelihood is marked with score 1."""
    rng = np.random.default_rng(seed)
    prior, confidence = rng.gamma(1.0, size=(2, 2, 3, 20))
    found = diagnose(prior, confidence)
    sizes = rng.gamma(1.0, size=(2, 3, 1)) + 0.1
    other = diagnose(sizes * prior, np.exp(confidence))
    for a, b in zip(found, other, strict=True):
        np.testing.assert_allclose(a, b)
    assert np.all(np.abs(found.joint) <= 1) and found.joint.mean() == pytest.approx(0.0, abs=1e-12)
    assert np.all(found.prior[found.marked] <= np.quantile(found.prior, 0.25))
    prior[..., 7], confidence[..., 7] = -1.0, 1e9
    planted = diagnose(prior, confidence)
    assert planted.joint[7] == 1.0 and planted.marked[7] and int(np.argmax(planted.joint)) == 7


# Scores ---------------------------------------------------------------------------------------------------------------


def test_the_area_is_that_of_all_pairs() -> None:
    rng = np.random.default_rng(0)
    scores, positive = rng.integers(0, 6, (9, 7)).astype(float), rng.random((9, 7)) < 0.3
    a, b = scores[positive][:, None], scores[~positive][None]
    expected = np.mean((a > b) + 0.5 * (a == b))
    found = statistics.auc(scores, positive)
    assert float(found.value) == pytest.approx(expected) and float(found.low) < expected < float(found.high)
    for values, area in ((positive * 1.0, 1.0), (-1.0 * positive, 0.0), (np.zeros((9, 7)), 0.5)):
        assert float(statistics.auc(values, positive).value) == area
    nothing = statistics.auc(2 * scores, positive, scores)
    assert (float(nothing.value), float(nothing.low), float(nothing.high)) == (0.0, 0.0, 0.0)


def test_samples_are_drawn_whole() -> None:
    """Places of one sequence that say the same are no more than one: the interval does not shrink with them."""
    rng = np.random.default_rng(0)
    scores, positive = rng.normal(size=(40, 1)), rng.random((40, 1)) < 0.5
    one, many = (statistics.auc(np.repeat(scores, n, 1), np.repeat(positive, n, 1)) for n in (1, 8))
    assert float(one.low) == pytest.approx(float(many.low)) and float(one.high) == pytest.approx(float(many.high))


def test_a_planted_signal_beats_the_baseline_and_a_rare_class_is_not_judged() -> None:
    rng = np.random.default_rng(0)
    kl = rng.gamma(0.3, 0.3, (60, 10))
    noise = rng.normal(size=kl.shape)
    found = signals.score({"output": noise, "joint": kl + 0.05 * rng.normal(size=kl.shape)}, kl)
    assert 0.05 <= found.far == float((kl > signals.FAR).mean()) <= 0.95
    assert float(found.auc["joint"].low) > 0.9 and float(found.gain["joint"].low) > 0.2
    assert float(found.auc["output"].low) < 0.5 < float(found.auc["output"].high) and "output" not in found.gain
    assert signals.score({"output": noise}, np.zeros_like(kl)) == signals.Scores(0.0, {}, {})
    assert signals.score({"output": noise}, np.ones_like(kl)).auc == {}
    shown = Shown("runs/a", "mhc", None, signals.Result({}, signals.as_json(found, 60)))  # type: ignore[arg-type]
    assert "[+0." in signals.page([shown], Path()) and "not judged" not in signals.page([shown], Path())


@pytest.mark.parametrize("attention", ["heads", pytest.param("tokenwise", marks=pytest.mark.long)])
def test_signals_are_taken_at_the_supervised_places(attention: str) -> None:
    source = "windtunnel:bijection,symbols=5"
    groups: dict[str, Any] = {
        "model": {"layers": 2, "width": 16},
        "residual": {"kind": "plain"},
        "attention": {"kind": attention, "heads": 2, "impl": "xla"},
    }
    for name, value in fields(source).items():
        group, _, field = name.partition(".")
        groups.setdefault(group, {})[field] = value
    config = resolve(from_config_dict(groups), task(source).vocabulary)
    checkpoint = Checkpoint("random", config, (0,), random_params(config), make_mesh(config.mesh, jax.devices()[:1]))
    chosen = task(source)
    found, kl = signals.signals_at_places(checkpoint, chosen, 6)
    measured = belief.measure(checkpoint, 6)
    np.testing.assert_allclose(kl, measured.distances.kl, rtol=1e-4, atol=1e-5)
    assert set(found) == set(signals.SIGNALS if attention == "heads" else ("output", "hidden", "lens"))
    assert all(values.shape == kl.shape and np.isfinite(values).all() for values in found.values())


# The command ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = small("mhc", model={"vocab_size": tokenizers.load("bytes").vocab_size})
    return untrained(config, random_params(config), tmp_path_factory.mktemp("runs") / "run")


def test_the_map_of_a_text(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["belief", "--checkpoint", str(folder), "--prompt", "a <b> & c", "--weak", "0.5", "--sure", "0.5"]
    assert inspect.main([*words, "--json", str(tmp_path / "a.json"), "--out", str(tmp_path / "out")]) == 0
    told, record = capsys.readouterr().out, json.loads((tmp_path / "a.json").read_text())
    assert np.array(record["prior"]).shape == (2, 2, 10) and record["view"] == "belief" and record["layers"] == [0, 1]
    marked = [at for at, mark in enumerate(record["marked"]) if mark]
    assert marked and 0 not in marked and told.count("[[") == len(marked)
    assert told.startswith(f"{len(marked)} of 9 positions marked")
    page = (tmp_path / "out" / "belief.html").read_text()
    assert page.count("<mark>") == len(marked) and "&lt;" in page and "<b>" not in page
    assert {"belief.html", "belief.png", "belief.csv"} <= {path.name for path in (tmp_path / "out").iterdir()}
    other = diagnose(np.array(record["prior"])[..., 1:], np.array(record["confidence"])[..., 1:], 0.5, 0.5)
    np.testing.assert_allclose(record["joint"][1:], other.joint)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "belief: --prompt TEXT is needed"),
        (["--prompt", "a"], "--prompt: 2 tokens (bos included), allowed: 3 or more"),
        (["--prompt", "ab", "--layers", "2"], "--layers: given 2, allowed: 0 to 1"),
        (["--prompt", "ab", "--weak", "1.5"], "--weak: given 1.5, allowed: from 0 to 1"),
        (["--prompt", "ab", "--heads", "0.1"], "--heads: not an option of belief"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line(folder: Path, options: list[str], words: str) -> None:
    with pytest.raises(UserError) as caught:
        inspect.main(["belief", "--checkpoint", str(folder), *options])
    assert words in str(caught.value) and "\n" not in str(caught.value)
