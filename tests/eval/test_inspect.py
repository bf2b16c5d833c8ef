"""Test looking inside a checkpoint: profiles are the probes', vital heads are found, patches carry what differs."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mhc import cli, kinds
from mhc.eval.common import checkpoints
from mhc.eval.common import rows as corpora
from mhc.eval.common.ablation import Case, cases
from mhc.eval.common.checkpoints import Checkpoint
from mhc.eval.common.statistics import ratio
from mhc.eval.inspect import __main__ as inspect
from mhc.eval.inspect import ablation, patching
from mhc.eval.inspect import patterns as attention_patterns
from mhc.eval.inspect import profile as profiles
from mhc.eval.inspect import rows as inspected
from mhc.eval.inspect.views.attention import NOTE
from mhc.eval.perplexity.score import score
from mhc.monitor import probes
from mhc.sharding import make_mesh
from tests.small import VOCAB, random_params, relative_error, small
from tests.small_runs import config, resolved, run, snapshot, untrained, write_corpus


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of one step of three plain blocks on a corpus of texts."""
    corpus = write_corpus(tmp_path_factory.mktemp("corpus") / "texts")
    folder = tmp_path_factory.mktemp("runs") / "a"
    steps = {"train": {"steps": 1}, "validation": {"every": 0}, "monitor": {"probe_every": 0, "tensorboard": False}}
    assert run(config(corpus, "plain", model={"layers": 3}, **steps), folder) == 0
    return folder


@pytest.fixture(scope="module")
def loaded(trained: Path) -> Checkpoint:
    """Return the checkpoint with weights that are nowhere special, on one device."""
    checkpoint = checkpoints.load(str(trained), devices=jax.devices()[:1])
    return checkpoint._replace(params=random_params(checkpoint.config))


def made(kind: str = "mhc", **groups: Any) -> Checkpoint:
    """Return a checkpoint of three blocks with random weights, which has no run."""
    config = small(kind, **{**groups, "model": {"layers": 3, **groups.get("model", {})}})
    return Checkpoint("random", config, (0,), random_params(config), make_mesh(config.mesh, jax.devices()[:1]))


# Profile --------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_profile_is_that_of_the_probes(loaded):
    batch = probes.probe_batch(loaded.config)
    probe = probes.compile_probe(loaded.definition, loaded.mesh)(loaded.params, batch)
    # The probes take the first rows of the validation set, where a validation spreads its rows over the whole of it.
    validation = dataclasses.replace(loaded.config.validation, rule="first")
    first = loaded._replace(config=dataclasses.replace(loaded.config, validation=validation))
    rows = inspected.read_rows(first, "validation", len(batch["tokens"]), 1)
    one = profiles.profile(loaded, rows)
    assert one.tokens == (batch["segment_ids"] > 0).sum()
    for found, name in (
        (one.residual.value, "activation/residual_rms"),
        (one.output.value, "activation/sublayer_out_rms"),
        (one.logit_max.max(axis=1), "activation/attention_logit_max"),
        (one.entropy_by_layer.value, "activation/attention_entropy"),
    ):
        np.testing.assert_allclose(found, probe[name], rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(one.entropy.value.mean(axis=1), one.entropy_by_layer.value, rtol=1e-12)
    assert np.all(one.entropy.low < one.entropy.value) and np.all(one.entropy.value < one.entropy.high)
    assert np.all((one.first.value > 0) & (one.first.value < 1))


def test_an_estimate_is_a_ratio_with_the_interval_of_its_rows():
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 50, 400)
    sums = counts * 3.0 + rng.standard_normal(400) * np.sqrt(counts)
    one = ratio(sums[:, None], counts)
    exact = 1.0 / np.sqrt(counts.sum())  # each token has noise of its own
    np.testing.assert_allclose(one.error, exact, rtol=0.1)
    np.testing.assert_allclose(one.high - one.low, 2 * 1.96 * exact, rtol=0.1)
    assert one.value[0] == sums.sum() / counts.sum()
    alone = ratio(sums[:1, None], counts[:1])
    assert alone.at(0) == {"value": sums[0] / counts[0], "low": None, "high": None}


# Ablation -------------------------------------------------------------------------------------------------------------


def test_dead_heads_change_nothing_and_the_one_that_lives_is_found(loaded):
    """Only one of six heads writes. One program serves zeros, means and scales."""
    attention = loaded.params["blocks"]["attention"]["core"]
    dead = np.ones(attention["out"].shape, np.float32)
    dead[1, 1] = 0.0
    core = {**attention, "out": attention["out"] * (1.0 - dead)}
    blocks = {**loaded.params["blocks"], "attention": {**loaded.params["blocks"]["attention"], "core": core}}
    checkpoint = loaded._replace(params={**loaded.params, "blocks": blocks})
    rows = inspected.read_rows(checkpoint, "validation", 0, 8)
    ablater = ablation.Ablater(checkpoint, rows)
    which = [*cases(checkpoint.config), Case("heads", None, ((0, 1), (1, 1)))]
    zero = ablater.ablate(which)
    corpus = corpora.packed(checkpoint.config, "validation", rows=0, batch_size=8)
    sums = score(checkpoint, corpus).sums
    np.testing.assert_allclose(zero.base, sums.nll.sum() / sums.tokens.sum(), rtol=1e-6)
    assert zero.tokens == sums.tokens.sum()

    change = {case.name: value for case, value in zip(which, zero.change.value, strict=True)}
    lives = change.pop("head 1.1")
    assert abs(lives) > 1e-3
    assert [name for name, value in change.items() if name.startswith("head ") and value != 0.0] == []
    # Without norms behind the heads, a layer's attention is its heads.
    np.testing.assert_allclose([change["attention 1"], change["heads 0.1 1.1"]], lives, rtol=1e-5)
    assert change["attention 0"] == change["attention 2"] == 0.0
    assert change["block 0"] == change["feed-forward 0"] != 0.0
    marked = ablation.differs(zero.change, 6)
    assert not {case.name for case, mark in zip(which[:6], marked, strict=False) if mark} - {"head 1.1"}

    compiled: Any = ablater.program.compiled
    programs = compiled._cache_size()
    head = [which[3]]
    assert head[0].name == "head 1.1"
    means = ablation.mean_outputs(checkpoint, rows)
    for factor, given in ((0.5, None), (0.0, means)):
        assert ablater.ablate(head, factor, given).change.value[0] not in (0.0, lives)
    assert ablater.ablate(head, 1.0).change.value[0] == 0.0
    assert compiled._cache_size() == programs == 1
    # A sublayer that is nothing is nothing in the mean, and means of heads and of their attention are the same thing.
    np.testing.assert_array_equal(means.outputs[0, 0], 0.0)
    joined = np.einsum("hj,hjd->d", means.heads[1], np.asarray(core["out"][1], np.float64))
    np.testing.assert_allclose(means.outputs[1, 0], joined, rtol=1e-4, atol=1e-6)
    # Padding counts nowhere.
    padded = rows._replace(batches=[*rows.batches, {name: 0 * array for name, array in rows.batches[0].items()}])
    np.testing.assert_array_equal(ablation.mean_outputs(checkpoint, padded).heads, means.heads)


def test_a_mark_is_for_what_noise_does_not_do():
    """A thousand changes are noise, one is of ten standard errors; of a single row nothing can be said."""
    sums = np.random.default_rng(0).standard_normal((64, 1000))
    sums[:, 7] += 10 / 8
    change = ratio(sums, np.ones(64))
    np.testing.assert_array_equal(np.flatnonzero(ablation.differs(change, 1000)), [7])
    assert 20 < ablation.differs(change, 1).sum() < 100  # one at a time, noise would be marked
    assert not ablation.differs(ratio(sums[:1], np.ones(1)), 1).any()


def test_the_control_is_of_other_heads():
    config = small(model={"layers": 3}, attention={"heads": 4})
    without = [(0, 0), (2, 3)]
    draws = ablation.random_heads(config, 3, 50, seed=1, without=without)
    assert len(draws) == 50 and {len(set(case.heads)) for case in draws} == {3}
    drawn = {head for case in draws for head in case.heads}
    assert drawn == {(layer, head) for layer in range(3) for head in range(4)} - set(without)
    assert draws == ablation.random_heads(config, 3, 50, seed=1, without=without)
    assert draws != ablation.random_heads(config, 3, 50, seed=2, without=without)
    assert ablation.random_heads(config, 11, 5, seed=1, without=without) == []
    control = np.arange(19.0)
    assert [ablation.chance(value, control) for value in (-1.0, 18.0, 19.0)] == [1.0, 0.1, 0.05]


# Patching -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "groups"),
    [
        ("plain", {}),
        pytest.param(
            "hc", {"attention": {"kind": "mla", "kv_rank": 8}, "model": {"scan": False}}, marks=pytest.mark.product
        ),
        pytest.param("mhc", {"attention": {"window": 4, "global_every": 2}}, marks=pytest.mark.product),
        *(pytest.param(kind, {}, marks=pytest.mark.product) for kind in kinds.names() if kind != "plain"),
        pytest.param("mhc", {"residual": {"single_pass": True}}, marks=pytest.mark.product),
        pytest.param("attn_res", {"residual": {"block": 3}}, marks=pytest.mark.product),
        pytest.param("plain", {"residual": {"value_residual": True}}, marks=pytest.mark.product),
    ],
)
def test_a_patch_recovers_what_lies_where_the_prompts_differ(kind, groups):
    """Before block 0 it lies at the token that differs; earlier positions never carry it, finally the last one does."""
    checkpoint = made(kind, **{**groups, "residual": {"kind": kind, **groups.get("residual", {})}})
    rng = np.random.default_rng(0)
    clean = rng.integers(0, VOCAB, 6).tolist()
    corrupted = [*clean[:2], (clean[2] + 1) % VOCAB, *clean[3:]]
    # Of other random models some follow both prompts with one token: these two are named, to differ in any case.
    first = "attention" in groups or (kind == "plain" and not groups)
    answer, other = (None, None) if first else (1, 2)
    rounding = 0.0 if first else 1e-5  # some programs round the rows of a batch differently
    state = patching.patch(checkpoint, clean, corrupted, "state", answer=answer, other=other, batch_size=5)
    assert state.everything == pytest.approx(1.0, abs=1e-5)
    assert state.share.shape == (3, 6)
    np.testing.assert_allclose(state.share[:, :2], 0.0, atol=rounding)
    np.testing.assert_allclose(state.share[0], [0, 0, 1, 0, 0, 0], atol=1e-5)
    assert np.abs(state.share[1:, 3:]).max() > 1e-3
    assert state.difference[0, 2] == pytest.approx(state.clean, rel=1e-5)
    # The last block's feed-forward writes to the stream that is read out at the last position, and to no other.
    output = patching.patch(
        checkpoint, clean, corrupted, "feed-forward", answer=state.answer, other=state.other, batch_size=64
    )
    ends = [output.clean, output.corrupted], [state.clean, state.corrupted]
    assert relative_error(*ends) <= 1e-5 or np.allclose(*ends, rtol=0, atol=rounding)  # of logits of about 1
    np.testing.assert_allclose(output.share[-1, :-1], 0.0, atol=rounding)
    assert output.share[-1, -1] != 0.0
    head = patching.patch(checkpoint, clean, corrupted, "head", answer=state.answer, other=state.other)
    assert head.share.shape == (3, 2) and np.all(head.share != 0.0)


def test_each_variant_is_one_activation_of_its_row():
    config = small(model={"layers": 3})
    variants = [None, (2, 1), (0, 0)]
    for what, field, places in (
        ("state", "state_patch", [(2, 2, 1), (0, 3, 0)]),
        ("attention", "output_patch", [(2, 0, 2, 1), (0, 0, 3, 0)]),
        ("feed-forward", "output_patch", [(2, 1, 2, 1), (0, 1, 3, 0)]),
        ("head", "head_patch", [(2, 2, at, 1) for at in range(5)] + [(0, 3, at, 0) for at in range(5)]),
    ):
        edits = patching._patches(variants, what, config, 6, 5)._asdict()
        assert set(zip(*np.nonzero(edits.pop(field)), strict=True)) == set(places)
        assert set(edits.values()) == {None}
    everything = patching._patches(["all"], "state", config, 6, 5)._asdict()["state_patch"]
    assert set(zip(*np.nonzero(everything), strict=True)) == {(0, 1, at) for at in range(5)}


# Over a mesh ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_mesh_changes_nothing(trained):
    """Eight devices agree with one on profile, ablation with means, patches and patterns."""
    found = []
    for devices in (jax.devices()[:1], jax.devices()):
        checkpoint = checkpoints.load(str(trained), devices=devices, changes={"mesh.fsdp": 2 if devices[1:] else 1})
        rows = inspected.read_rows(checkpoint, "validation", 11, 3)
        one = profiles.profile(checkpoint, rows)
        means = ablation.mean_outputs(checkpoint, rows)
        cut = ablation.Ablater(checkpoint, rows).ablate(cases(checkpoint.config), 0.0, means)
        clean, corrupted = list(b"width of"), list(b"width or")
        moved = patching.patch(checkpoint, clean, corrupted, "state", answer=32, other=101)
        patterns = attention_patterns.patterns(checkpoint, clean, [(0, 1), (2, 0)])
        found.append((one, means, cut, moved, [pattern.weights for pattern in patterns]))
    (one, means, cut, moved, seen), (one_8, means_8, cut_8, moved_8, seen_8) = found
    for name in ("residual", "output", "entropy", "first"):
        np.testing.assert_allclose(getattr(one_8, name).value, getattr(one, name).value, rtol=1e-4, err_msg=name)
    np.testing.assert_allclose(means_8.heads, means.heads, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(cut_8.base, cut.base, rtol=1e-6)
    np.testing.assert_allclose(cut_8.change.value, cut.change.value, rtol=1e-3, atol=2e-6)
    np.testing.assert_allclose(moved_8.difference, moved.difference, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(seen_8, seen, rtol=1e-4, atol=1e-6)


# The command line -----------------------------------------------------------------------------------------------------


def check_profile(text: str, found: dict[str, Any]) -> None:
    assert len(found["sublayers"]) == 6 and len(found["layers"]) == 3 and len(found["heads"]) == 6
    assert f"{found['layers'][2]['entropy']['value']:.4g}" in text and "4 rows" in text


def check_ablation(text: str, found: dict[str, Any]) -> None:
    kinds = [case["kind"] for case in found["cases"]]
    assert kinds == [*["head"] * 6, *["attention"] * 3, *["feed-forward"] * 3, *["block"] * 3]
    assert len(found["control"]["changes"]) == found["control"]["draws"] == 3 and found["reference_rows"] == 2
    assert all(case["change_low"] <= case["change"] <= case["change_high"] for case in found["cases"])
    heads = [(case["change"], case["chance"]) for case in found["cases"] if case["kind"] == "head"]
    assert max(heads)[1] == 1 / 6 and min(heads)[1] == 1.0  # of it and five others
    assert f"loss {found['loss']:.4f}" in text and "3 draws of 2 random head(s)" in text


def check_set(text: str, found: dict[str, Any]) -> None:
    (case,) = found["cases"]
    assert case["heads"] == [[0, 1], [2, 0]] and case["name"] == "heads 0.1 2.0"
    draws = [tuple(map(tuple, draw["heads"])) for draw in found["control"]["changes"]]
    assert len(draws) == 2 and not {head for draw in draws for head in draw} & {(0, 1), (2, 0)}
    assert f"p = {case['chance']:.3g}" in text and case["chance"] * 3 in (1, 2, 3)


def check_patch(text: str, found: dict[str, Any]) -> None:
    assert np.array(found["share"]).shape == (3, 10) and found["everything"] == pytest.approx(1.0, abs=1e-3)
    assert found["answer"]["text"] == "x" and "must be 1" in text


def check_attention(text: str, found: dict[str, Any]) -> None:
    assert NOTE in text and [(one["layer"], one["head"]) for one in found["heads"]] == [(2, 0), (2, 1)]
    weights = np.array(found["heads"][1]["weights"])
    assert weights.shape == (len(found["tokens"]),) * 2 and np.all(np.triu(weights, 1) == 0.0)
    np.testing.assert_allclose(weights.sum(axis=1), 1.0, rtol=1e-6)


PAIR = ["--clean", "the width", "--corrupted", "the norms", "--answer", "x", "--other", "y"]


@pytest.mark.parametrize(
    ("given", "stem", "check"),
    [
        pytest.param(["profile", "--rows", "4"], "profile", check_profile, marks=pytest.mark.product),
        (
            ["ablate", "--how", "mean", "--rows", "4", "--reference", "2", "--draws", "3"],
            "ablation",
            check_ablation,
        ),
        pytest.param(
            ["ablate", "--heads", "0.1", "2.0", "--draws", "2"], "ablation", check_set, marks=pytest.mark.product
        ),
        pytest.param(["patch", *PAIR, "--batch_size", "16"], "patch", check_patch, marks=pytest.mark.product),
        (["attention", "--prompt", "is the $ —", "--layers", "2"], "attention_2", check_attention),
    ],
    ids=lambda given: given[0] if isinstance(given, list) else None,
)
def test_a_view_says_what_it_found_and_leaves_the_run_alone(given, stem, check, trained, tmp_path, capsys, monkeypatch):
    # On one device: eight of two cores take long, and have a test of their own.
    monkeypatch.setattr(checkpoints, "load", functools.partial(checkpoints.load, devices=jax.devices()[:1]))
    before = snapshot(trained)
    out, file = tmp_path / "out", tmp_path / "found.json"
    assert inspect.main([*given, "--checkpoint", str(trained), "--out", str(out), "--json", str(file)]) == 0
    assert snapshot(trained) == before
    found = json.loads(file.read_text())
    assert (found["view"], found["kind"], found["steps"]) == (given[0], "plain", [1])
    assert {path.name for path in out.iterdir()} == {f"{stem}.png", f"{stem}.csv"}
    check(capsys.readouterr().out, found)


@pytest.mark.product
@pytest.mark.parametrize("kind", kinds.names())
def test_every_kind_is_profiled_and_ablated(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "load", functools.partial(checkpoints.load, devices=jax.devices()[:1]))
    settings = resolved(config(write_corpus(tmp_path / "texts"), kind))
    folder = untrained(settings, random_params(settings, std=0.1), tmp_path / "run")
    file = tmp_path / "found.json"
    for view in (["profile"], ["ablate", "--draws", "0", "--units", "layers"]):
        assert inspect.main([*view, "--checkpoint", str(folder), "--rows", "4", "--json", str(file)]) == 0
        found = json.loads(file.read_text())
        assert (found["view"], found["kind"]) == (view[0], kind)
        assert len(found["sublayers"] if view[0] == "profile" else found["cases"]) == (4 if view[0] == "profile" else 6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["profil"], "profil: allowed: profile, ablate, patch, attention, belief (did you mean profile?)"),
        (["profile", "--how", "mean"], "--how: not an option of profile, allowed with ablate"),
        (["profile", "--rows", "-1"], "--rows: given -1, allowed: 0 or more"),
        (["ablate", "--heads", "3"], "--heads: given 3, allowed: LAYER.HEAD, e.g. 3.1"),
        (["ablate", "--heads", "3.0"], "--heads: given 3.0, allowed: layers 0 to 2, heads 0 to 1"),
        (["ablate", "--factor", "2"], "--factor: given 2.0, allowed with --how scale"),
        (["ablate", "--reference", "8"], "--reference: given 8, allowed with --how mean"),
        (["ablate", "--heads", "1.0", "--units", "layers"], "--units and --heads: one of the two"),
        (["ablate", "--how", "mean", "--reference", "-2"], "--reference: given -2, allowed: 0 or more"),
        (["patch", "--clean", "a"], "patch: --corrupted TEXT is needed"),
        (["patch", "--clean", "a", "--corrupted", "bcd"], "--clean has 2 tokens and --corrupted 4 (bos included)"),
        (["patch", "--clean", "a", "--corrupted", "a"], "--clean and --corrupted: the same tokens"),
        (
            ["patch", "--clean", "a", "--corrupted", "b", "--answer", "cd"],
            "--answer: 'cd' is 2 tokens after the prompt, allowed: one",
        ),
        (["attention", "--prompt", "a", "--layers", "3"], "--layers: given 3, allowed: 0 to 2"),
        (["attention"], "attention: --prompt TEXT is needed"),
        (["attention", "--prompt", "a" * 300], "--prompt: 301 tokens, allowed: 256"),
        (["profile", "--step", "3"], "no checkpoint of step 3; there are 1"),
        (["profile", "--config.model.width=3"], "--config.model.width: the weights fix it"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(given, message, trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(checkpoints, "load", lambda *_, **__: pytest.fail("refused before weights are loaded"))
    out, file = tmp_path / "out", tmp_path / "found.json"
    with pytest.raises(SystemExit) as left:
        cli.run_main(inspect.main, [*given, "--checkpoint", str(trained), "--out", str(out), "--json", str(file)])
    (line,) = capsys.readouterr().err.splitlines()
    assert left.value.code == 2 and message in line and not out.exists() and not file.exists()
