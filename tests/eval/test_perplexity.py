"""Test perplexity: the validation loss of the run, whatever the batch and the mesh; windows, documents, averages."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mhc import cli
from mhc.config import from_json
from mhc.errors import UserError
from mhc.eval.common import checkpoints
from mhc.eval.common import rows as corpora
from mhc.eval.perplexity import __main__ as perplexity
from mhc.eval.perplexity.score import Scored, Sums, estimates, measures, score, summary
from mhc.files import read_jsonl
from tests.small_runs import config, run, snapshot


@pytest.fixture(scope="module")
def trained(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of 12 steps with checkpoints at 8 and 12, validated on two batches of eight rows."""
    folder = tmp_path_factory.mktemp("runs") / "a"
    assert run(config(corpus), folder) == 0
    return folder


def found(checkpoint: checkpoints.Checkpoint, batch_size: int = 8, rows: int = 16) -> Scored:
    corpus = corpora.packed(checkpoint.config, "validation", rows=rows, batch_size=batch_size)
    return score(checkpoint, corpus)


def loss(one: Scored) -> float:
    return float(one.sums.nll.sum() / one.sums.tokens.sum())


def test_it_is_the_validation_loss_of_the_run(trained, tmp_path, capsys):
    before = snapshot(trained)
    file, out = tmp_path / "found.json", tmp_path / "out"
    assert perplexity.main(["--checkpoint", str(trained), "--json", str(file), "--out", str(out)]) == 0
    assert snapshot(trained) == before
    (one,) = json.loads(file.read_text())["checkpoints"]
    last = read_jsonl(trained / "metrics.jsonl")[-1]
    np.testing.assert_allclose(one["loss"]["value"], last["val_loss"], rtol=1e-6)
    np.testing.assert_allclose(one["bits_per_byte"]["value"], last["val_bits_per_byte"], rtol=1e-6)
    np.testing.assert_allclose(one["perplexity"]["value"], math.exp(last["val_loss"]), rtol=1e-5)
    for name in ("loss", "perplexity", "bits_per_token", "bits_per_byte"):
        if one["documents"] == 1:  # nothing to draw from
            assert one[name]["low"] is one[name]["high"] is None
        else:
            assert one[name]["low"] <= one[name]["value"] <= one[name]["high"]
    said = capsys.readouterr()
    assert f"{one['loss']['value']:.4f}" in said.out and "step 12" in said.out
    assert {path.name for path in out.iterdir()} == {"perplexity.png", "perplexity.csv"}


@pytest.mark.long
def test_neither_batch_nor_mesh_matters(trained):
    alone = checkpoints.load(str(trained), devices=jax.devices()[:1])
    eight = checkpoints.load(str(trained))
    assert eight.mesh.size == 8
    whole = found(alone, rows=0)
    for checkpoint, batch_size in ((alone, 1), (alone, 7), (alone, 64), (eight, 7)):
        other = found(checkpoint, batch_size, rows=0)
        np.testing.assert_array_equal(other.documents, whole.documents)
        np.testing.assert_array_equal(other.sums.tokens, whole.sums.tokens)
        np.testing.assert_allclose(other.sums.nll, whole.sums.nll, rtol=1e-6)
        np.testing.assert_allclose(other.by_position, whole.by_position, rtol=1e-6)


def test_a_uniform_model_gives_log_v(trained):
    checkpoint = checkpoints.load(str(trained), devices=jax.devices()[:1])
    uniform = checkpoint._replace(params=jax.tree.map(lambda leaf: 0 * leaf, checkpoint.params))
    one = found(uniform)
    np.testing.assert_allclose(loss(one), math.log(checkpoint.config.vocab_size), rtol=1e-6)
    said = summary(one, None)
    np.testing.assert_allclose([row["loss"] for row in said["by_context"]], math.log(258), rtol=1e-6)


def test_every_token_of_a_document_is_counted_once(trained):
    """Packed or by windows of any stride, each document counts as many targets and bytes as it has."""
    checkpoint = checkpoints.load(str(trained), devices=jax.devices()[:1])
    source, encode = corpora._open(checkpoint.config, "validation")
    sizes = [len(encode(number).target_bytes) for number in range(len(source))]
    size = [int(encode(number).target_bytes.sum()) for number in range(len(source))]
    every = [corpora.packed(checkpoint.config, "validation", rows=0, batch_size=5)]
    every += [
        corpora.sliding(checkpoint.config, "validation", rows=0, batch_size=5, stride=stride) for stride in (1, 5, 16)
    ]
    for corpus in every:
        tokens, text = np.zeros(len(sizes)), np.zeros(len(sizes))
        for batch in corpus.batches:
            counted = batch["weights"] > 0
            tokens += np.bincount(batch["documents"][counted], minlength=len(sizes))
            text += np.bincount(batch["documents"][counted], batch["target_bytes"][counted], len(sizes))
        np.testing.assert_array_equal(tokens, sizes)
        np.testing.assert_array_equal(text, size)


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.product), 5])
def test_a_window_scores_what_a_forward_of_it_alone_does(trained, stride):
    """Scores equal those of each window by itself; all but a document's first targets have T - S tokens of context."""
    checkpoint = checkpoints.load(str(trained), devices=jax.devices()[:1])
    length = checkpoint.config.data.sequence_length
    rows = 12
    corpus = corpora.sliding(checkpoint.config, "validation", rows=rows, batch_size=4, stride=stride)
    one = score(checkpoint, corpus)
    _, encode = corpora._open(checkpoint.config, "validation")
    decoder = checkpoint.definition.bind(checkpoint.params)
    full = jax.jit(lambda tokens: jax.nn.log_softmax(decoder(tokens)[0]))
    expected, left, number = np.zeros(len(one.documents)), rows, 0
    while left:
        tokens = encode(number).tokens
        pairs, start = len(tokens) - 1, 0
        while start < pairs and left:
            end = min(length if start == 0 else start + stride, pairs)
            first = max(end - length, 0)
            window = np.zeros(length, np.int32)
            window[: end - first] = tokens[first:end]
            scores = np.asarray(full(window[None]))
            expected[number] -= sum(scores[at - first, tokens[at + 1]] for at in range(start, end))
            start, left = end, left - 1
        number += 1
    np.testing.assert_allclose(one.sums.nll, expected, rtol=1e-5)
    context = np.flatnonzero(one.by_position[:, 1]) + 1
    assert context.max() == length
    assert one.by_position[length - stride :, 1].sum() >= one.sums.tokens.sum() - length * len(one.documents)


def test_weights_are_averaged_over_the_last_checkpoints(trained):
    one, two = (checkpoints.load(str(trained), step) for step in (8, 12))
    both = checkpoints.load(str(trained), average=2)
    assert both.steps == (8, 12) and both.name.endswith("mean of steps 8, 12")
    for mean, a, b in zip(*(jax.tree.leaves(c.params) for c in (both, one, two)), strict=True):
        np.testing.assert_allclose(mean, (np.asarray(a) + np.asarray(b)) / 2, rtol=1e-6, atol=1e-7)
    with pytest.raises(UserError, match=r"--average: given 3, but .* keeps 2 checkpoint\(s\) up to 12: 8, 12"):
        checkpoints.load(str(trained), average=3)


def test_several_checkpoints_are_paired_by_document(trained, corpus, tmp_path, capsys):
    file = tmp_path / "found.json"
    other = f"{trained}/checkpoints/8"
    names = [str(trained), other, str(trained)]
    assert perplexity.main(["--checkpoint", *names, "--rows", "0", "--json", str(file)]) == 0
    first, second, third = json.loads(file.read_text())["checkpoints"]
    assert "minus_first" not in first and second["steps"] == [8]
    gap = second["minus_first"]
    assert gap["measure"] == "bits_per_byte" and gap["low"] < gap["value"] < gap["high"]
    expected = second["bits_per_byte"]["value"] - first["bits_per_byte"]["value"]
    np.testing.assert_allclose(gap["value"], expected, atol=1e-9)
    assert third["minus_first"] == {"measure": "bits_per_byte", "value": 0.0, "low": 0.0, "high": 0.0}
    assert capsys.readouterr().out.count("\n") == 4


def test_intervals_cover_and_equal_documents_have_none():
    """In 200 corpora of 100 documents, about 95 of 100 intervals hold the true loss."""
    rng, held = np.random.default_rng(0), 0
    for _ in range(200):
        tokens = rng.integers(5, 50, 100).astype(float)
        means = rng.gamma(4.0, 0.5, 100)  # of mean 2
        loss = estimates(Sums(means * tokens, tokens, tokens))["loss"]
        held += bool(loss.low <= 2.0 <= loss.high)
    assert 180 <= held <= 197
    same = Sums(np.full(9, 6.0), np.full(9, 3.0), np.full(9, 4.0))
    for estimate in estimates(same).values():
        np.testing.assert_allclose(estimate.low, estimate.high)
    assert measures(np.array(6.0), np.array(3.0), np.array(4.0)).loss == 2.0


def arguments(*given: str, **named: str) -> list[str]:
    return [*given, *(f"--{name}={value}" for name, value in named.items())]


# What orbax had begun to read besides fails too, after its event loop is gone.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_checkpoint_is_named_with_the_others(trained, tmp_path):
    run_ = Path(shutil.copytree(trained, tmp_path / "damaged"))
    files = [file for file in (run_ / "checkpoints" / "12" / "state").rglob("d/*") if file.is_file()]
    assert files
    for file in files:
        file.write_bytes(b"")
    with pytest.raises(UserError, match=r"checkpoint 12 is damaged: .*; other steps: 8"):
        checkpoints.load(str(run_), devices=jax.devices()[:1])
    checkpoints.load(str(run_), 8, devices=jax.devices()[:1])
    with pytest.raises(UserError, match=r"checkpoint 12 is damaged: .*; other steps: 8"):
        _resume(run_)


BREAKS: dict[str, tuple[Any, str]] = {
    "another kind": (
        lambda run_: _edit(run_, lambda stored: stored | {"residual": {"kind": "plain"}}),
        r"config.json: it is not of the checkpoint of step 12, which was written with residual.kind='mhc', not 'plain'",
    ),
    "another theta": (  # the shapes are the same
        lambda run_: _edit(run_, lambda stored: stored | {"positions": stored["positions"] | {"theta": 5.0}}),
        r"it is not of the checkpoint of step 12, which was written with positions.theta=",
    ),
    "another width": (
        lambda run_: _edit(run_, lambda stored: stored | {"mlp": stored["mlp"] | {"width": 24}}),
        r"written with mlp.width=16, not 24",
    ),
    "not UTF-8": (
        lambda run_: (run_ / "config.json").write_bytes(b"\xff\xfe{"),
        r"config.json: it is not UTF-8 \(byte 0\)",
    ),
    "an empty folder": (
        lambda run_: (run_ / "checkpoints" / "20").mkdir(),
        r"checkpoint 20 is damaged: .*config is missing; other steps: 8, 12",
    ),
    "no state": (
        lambda run_: shutil.rmtree(run_ / "checkpoints" / "12" / "state"),
        r"checkpoint 12 is damaged: .*state is missing; other steps: 8",
    ),
    "cut metadata": (
        lambda run_: (run_ / "checkpoints" / "12" / "state" / "_METADATA").write_text("{"),
        r"checkpoint 12 is damaged: .*; other steps: 8",
    ),
    "its data files are gone": (  # of one alone it is chance whether it has parameters, or the optimiser's state
        lambda run_: shutil.rmtree(run_ / "checkpoints" / "12" / "state" / "ocdbt.process_0" / "d"),
        r"checkpoint 12 is damaged: .*; other steps: 8",
    ),
}


def _edit(run_: Path, change: Any) -> None:
    file = run_ / "config.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


@pytest.mark.parametrize("name", BREAKS)
def test_what_does_not_belong_together_or_is_not_whole_is_one_line(trained, tmp_path, name):
    run_ = Path(shutil.copytree(trained, tmp_path / "broken"))
    damage, message = BREAKS[name]
    damage(run_)
    with pytest.raises(UserError, match=message):
        checkpoints.load(str(run_), devices=jax.devices()[:1])
    gc.collect()  # what is left of reads that failed must say nothing


def _resume(damaged: Path) -> None:
    stored = from_json((damaged / "config.json").read_text())
    run(dataclasses.replace(stored, train=dataclasses.replace(stored.train, steps=13)), damaged)


def test_a_config_of_another_version_is_named(trained, tmp_path):
    run_ = Path(shutil.copytree(trained, tmp_path / "newer"))
    stored = json.loads((run_ / "config.json").read_text())
    (run_ / "config.json").write_text(json.dumps({**stored, "shiny": {"new": 1}}))
    with pytest.raises(UserError, match=r"newer/config.json: .*shiny.*; was it written by another version\?"):
        checkpoints.load(str(run_))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--step", "7"], "no checkpoint of step 7; there are 8, 12"),
        (["--stride", "17"], "--stride: given 17, allowed: 1 to data.sequence_length=16"),
        (["--stride", "0"], "--stride: given 0, allowed: 1 to"),
        (["--rows", "-1"], "--rows: given -1, allowed: 0 (all) or more"),
        (["--batch_size", "0"], "--batch_size: given 0, allowed: 1 or more"),
        (["--average", "0"], "--average: given 0, allowed: 1 or more"),
        (["--config.model.width=16"], "--config.model.width: the weights fix it; allowed: --config.{mesh,data,"),
        (["--config.mesh.fsdp=3"], "does not fit 8 devices"),
        (["--json", "/nowhere/at/all.json"], "--json: cannot write /nowhere/at/all.json, allowed: a file in a folder"),
        (["--strid", "3"], "unknown argument --strid (did you mean --stride?)"),
        (["--config.data.validation=text:/nowhere/*.txt"], "/nowhere"),
    ],
)
def test_a_mistake_is_one_line(given: list[str], message: str, trained: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit) as left:
        cli.run_main(perplexity.main, ["--checkpoint", str(trained), *given])
    said = capsys.readouterr()
    assert left.value.code == 2 and said.out == ""
    (line,) = [line for line in said.err.splitlines() if line.startswith("error:")]
    assert message in line
