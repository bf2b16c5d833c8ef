"""Test regression: equal models differ by nothing, a changed weight is named with its place, misfits are reported."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhc import cli
from mhc import config as configs
from mhc.config import Config
from mhc.errors import UserError
from mhc.eval.common.checkpoints import Checkpoint
from mhc.eval.regression import __main__ as regression
from mhc.eval.regression import comparison
from mhc.eval.regression import golden as golden_files
from mhc.eval.regression import outputs as model_outputs
from mhc.eval.regression import rows as fixed_rows
from mhc.eval.regression.outputs import Logits, Outputs
from mhc.eval.regression.rows import Rows
from mhc.files import read_json
from mhc.model.decoder import Params
from mhc.sharding import make_mesh, path_of
from mhc.train.start import preserving
from tests.small import initial, random_params, small
from tests.small_runs import snapshot, untrained, write_corpus

V, LAYERS = 258, 3


def config_of(kind: str = "plain", **groups: dict[str, Any]) -> Config:
    model = {"layers": LAYERS, "vocab_size": V, **groups.pop("model", {})}
    return small(kind, model=model, **groups)


def checkpoint(config: Config, params: Params, devices: int = 1) -> Checkpoint:
    return Checkpoint("a", config, (0,), params, make_mesh(config.mesh, jax.devices()[:devices]))


def prompts(config: Config, count: int = len(fixed_rows.PROMPTS)) -> Rows:
    return fixed_rows.make_rows(config, fixed_rows.PROMPTS[:count], 0, config.data.sequence_length)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return run folders by kind, with random weights and a corpus of forty texts."""
    root = tmp_path_factory.mktemp("runs")
    corpus = write_corpus(root / "texts")

    def of(kind: str) -> Path:
        folder = root / kind
        if not folder.exists():
            made = config_of(kind, data={"source": corpus, "cache_dir": str(root / "cache"), "holdout": 0.2})
            untrained(made, random_params(made), folder)
        return folder

    return of


def regress(run: Path, *arguments: object) -> int:
    return regression.main(["--checkpoint", str(run), *map(str, arguments)])


# Equal models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", pytest.param("mhc", marks=pytest.mark.product)])
def test_a_checkpoint_differs_from_its_golden_file_by_nothing(kind, runs, tmp_path, capsys):
    run, golden, file = runs(kind), tmp_path / "golden.npz", tmp_path / "found.json"
    before = snapshot(run)
    assert regress(run, "--save", golden, "--activations") == 0
    # Bos and six prompts, four rows of the validation set, none longer than T.
    assert "10 rows, " in capsys.readouterr().out and golden.stat().st_size > 0
    assert regress(run, "--against", golden, "--json", file, "--tolerance", 0) == 0
    assert snapshot(run) == before and {path.name for path in tmp_path.iterdir()} == {"golden.npz", "found.json"}
    found = read_json(file)
    assert found["within"] and found["first_above"] is None and found["config"] == {} and found["notes"] == []
    assert found["largest"] == found["mean"]["value"] == found["kl"]["largest"] == found["top1_changed"]["tokens"] == 0
    assert [one["where"] for one in found["layers"]] == [*model_outputs.points(LAYERS), "logits"]
    assert all(one["largest"] == 0 and one["scale"] > 0 for one in found["layers"])
    said = capsys.readouterr().out
    assert (
        said.endswith("logits within 0 of the largest\nfirst above 0: nothing\n") and "logits of all 258 tokens" in said
    )


def test_what_a_golden_file_holds(runs, tmp_path):
    """It holds rows as pipeline and tokeniser give them, and logits and hidden states of the model's own pass."""
    run, golden = runs("plain"), tmp_path / "golden.npz"
    assert regress(run, "--save", golden, "--activations", "--rows", 2, "--length", 12) == 0
    made = golden_files.read(golden)
    config = config_of()
    assert made.rows.tokens.shape == (len(fixed_rows.PROMPTS) + 2, 12)
    first = [256, *fixed_rows.PROMPTS[0].encode()][:12]
    assert made.rows.tokens[0].tolist() == first and made.rows.valid[0].all()
    assert made.rows.valid[len(fixed_rows.PROMPTS) - 1].tolist() == [True] + [False] * 11  # the empty prompt
    decoder = checkpoint(config, random_params(config)).definition.bind(random_params(config))
    out = jax.jit(lambda: decoder(*map(jnp.asarray, made.rows)))()
    np.testing.assert_allclose(made.logits.values, np.asarray(out)[made.rows.valid], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(made.logits.best, made.logits.values.argmax(-1))
    assert made.hidden is not None and made.hidden.shape == (2 * LAYERS + 2, made.rows.valid.sum(), 16)
    table = np.asarray(random_params(config)["embed"]["table"])
    np.testing.assert_allclose(made.hidden[0], table[made.rows.tokens[made.rows.valid]], rtol=1e-6)


def test_a_model_without_its_tokenizer_reads_ids_that_it_has():
    config = config_of(model={"vocab_size": 300})
    whole = prompts(config).tokens
    small_one = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=97))
    np.testing.assert_array_equal(prompts(small_one).tokens, whole % 97)
    assert whole.max() == 256


KINDS = [pytest.param(kind, marks=pytest.mark.product) for kind in ("mhc", "hc", "mhc_lite", "kromhc", "identity")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_topology_that_begins_as_plain_differs_by_rounding_in_every_layer(kind):
    plain, other = config_of(), config_of(kind, residual=preserving(kind))
    source = random_params(plain)
    params = initial(other)

    def taken(theirs: Any, ours: Any) -> Any:
        if not isinstance(ours, dict):
            return theirs
        return {name: taken(theirs[name], leaf) if name in theirs else leaf for name, leaf in ours.items()}

    rows = prompts(plain, 2)
    reference = model_outputs.compute(checkpoint(plain, source), rows)
    found = comparison.compare(model_outputs.compute(checkpoint(other, taken(source, params)), rows), reference, 1e-5)
    assert found["within"] and found["first_above"] is None and len(found["layers"]) == 2 * LAYERS + 3
    assert found["config"]["residual.kind"] == ["plain", kind]


# Changed ones ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "mhc"])
def test_the_first_place_that_differs_is_named(kind):
    config = config_of(kind)
    params, rows = random_params(config), prompts(config, 2)
    reference = model_outputs.compute(checkpoint(config, params), rows)
    cases: list[tuple[str, str, tuple[int, ...]]]
    cases = [("embedding", "embed/table", (256, 0))]  # of a token that every prompt has
    for k in range(LAYERS):
        cases.append((f"block {k}, attention", "blocks/attention/core/out", (k, 0, 0, 0)))
        cases.append((f"block {k}, feed-forward", "blocks/mlp/core/down", (k, 0, 0)))
        if kind == "mhc":  # H_post: a map belongs to the sublayer that it serves
            cases.append((f"block {k}, attention", "blocks/attention_residual/phi", (k, 0, 0, 4)))
            cases.append((f"block {k}, feed-forward", "blocks/mlp_residual/bias", (k, 4)))
    cases += [("head input", "final_norm/scale", (0,)), ("logits", "head/kernel", (0, 0))]
    for place, path, index in cases:
        other = model_outputs.compute(checkpoint(config, changed(params, path, index)), rows)
        found = comparison.compare(other, reference, 1e-6)
        assert found["first_above"] == place, path
        assert not found["within"] and found["relative"] > 1e-6
        before = found["layers"][: [one["where"] for one in found["layers"]].index(place)]
        assert all(one["largest"] == 0 for one in before)
        assert comparison.text(found).endswith(f"logits not within 1e-06 of the largest\nfirst above 1e-06: {place}")


def changed(params: Params, path: str, index: tuple[int, ...]) -> Params:
    """Return the arrays with one number larger by 0.05."""
    return jax.tree_util.tree_map_with_path(
        lambda at, leaf: leaf.at[index].add(0.05) if path_of(at) == path else leaf, params
    )


def test_another_dtype_differs_in_every_layer(runs, tmp_path, capsys):
    """The reference stays in its own dtype; the tolerance decides the exit code."""
    run, file = runs("plain"), tmp_path / "found.json"
    given = ["--against", run, "--dtype", "bfloat16", "--rows", 0, "--json", file]
    assert regress(run, *given) == 1
    found = read_json(file)
    assert found["config"] == {"model.dtype": ["float32", "bfloat16"]}
    assert found["first_above"] == "embedding" and all(1e-4 < one["relative"] < 0.2 for one in found["layers"])
    assert found["mean"]["low"] < found["mean"]["value"] < found["mean"]["high"]
    assert 0 < found["kl"]["value"] < found["kl"]["largest"]
    said = capsys.readouterr().out
    line = next(line for line in said.splitlines() if line.startswith("block 0, attention")).split()
    by_name = {one["where"]: one["relative"] for one in found["layers"]}
    np.testing.assert_allclose(
        float(line[-1]), by_name["block 0, attention"] / by_name["embedding"], rtol=1e-2
    )  # the growth
    assert regress(run, *given, "--tolerance", 0.5) == 0


def test_another_implementation_and_another_mesh_agree(runs, tmp_path):
    run, golden, file = runs("plain"), tmp_path / "golden.npz", tmp_path / "found.json"
    assert regress(run, "--save", golden, "--activations", "--rows", 0) == 0
    given = ["--config.attention.impl=sdpa", "--config.model.scan=False", "--config.mesh.fsdp=8"]
    assert regress(run, "--against", golden, "--json", file, *given) == 0
    found = read_json(file)
    assert set(found["config"]) == {"attention.impl", "model.scan"} and found["relative"] < 1e-5
    one = model_outputs.compute(checkpoint(config_of(), random_params(config_of())), golden_files.read(golden).rows)
    assert comparison.compare(one, golden_files.read(golden), 1e-5)["within"]


# The measures ---------------------------------------------------------------------------------------------------------


def outputs(values: np.ndarray, config: Config | None = None, **about: Any) -> Outputs:
    """Return outputs of one row of as many tokens as ``values`` has rows, without hidden states."""
    tokens = len(values)
    rows = Rows(*(np.ones((1, tokens), np.int32) for _ in range(3)))
    made = config or config_of()
    told = {
        "checkpoint": "a",
        "config": configs.to_dict(made),
        "vocabulary": values.shape[-1],
        "points": model_outputs.points(made.model.layers),
        "device": "cpu",
        "versions": {},
    }
    shifted = values.astype(np.float64)
    log_z = np.log(np.exp(shifted - shifted.max(-1, keepdims=True)).sum(-1)) + shifted.max(-1)
    logits = Logits(values, None, log_z.astype(np.float32), values.argmax(-1).astype(np.int32))
    return Outputs({**told, **about}, rows, logits, None)


def draw(seed: int, scale: float = 3.0, tokens: int = 50, vocabulary: int = 40) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal((tokens, vocabulary))).astype(np.float32)


def top(one: Outputs, ids: np.ndarray) -> Outputs:
    kept = one.logits._replace(values=np.take_along_axis(one.logits.values, ids, -1), ids=ids.astype(np.int32))
    return one._replace(logits=kept)


def test_the_divergence():
    """It equals its definition; from some of the logits it is a lower bound, which is exact when all are kept."""
    one, other = draw(0), draw(1)
    p, q = (np.exp(a.astype(np.float64)) / np.exp(a.astype(np.float64)).sum(-1, keepdims=True) for a in (other, one))
    exact = (p * np.log(p / q)).sum(-1)
    a, b = outputs(one), outputs(other)
    np.testing.assert_allclose(comparison.divergence(a.logits, b.logits), exact, rtol=1e-10)
    order = np.argsort(-other, axis=-1)
    below = np.zeros(len(exact))
    for k in (1, 5, 20, 40):
        found = comparison.divergence(top(a, order[:, :k]).logits, top(b, order[:, :k]).logits)
        assert (found <= exact + 1e-4).all() and (found >= below - 1e-4).all()
        below = found
    np.testing.assert_allclose(below, exact, atol=1e-4)
    # Adding a constant to all logits of a token changes its logits, not what it predicts.
    shifted = comparison.compare(outputs(other + np.float32(2)), b, 1e-5)
    np.testing.assert_allclose(shifted["largest"], 2, rtol=1e-5)
    assert shifted["kl"]["largest"] < 1e-9 and shifted["top1_changed"]["tokens"] == 0 and not shifted["within"]


def test_what_is_counted():
    one = draw(0)
    other = one.copy()
    best = one.argmax(-1)
    for token in (3, 7):  # two tokens predict another
        other[token, best[token]] -= 50
    found = comparison.compare(outputs(other), outputs(one), 1e-5)
    assert found["top1_changed"]["tokens"] == 2 and found["top1_changed"]["value"] == 2 / 50
    assert found["top1_changed"]["low"] is None  # one row has no interval
    np.testing.assert_allclose(found["largest"], 50, rtol=1e-6)
    assert found["largest_at"]["row"] == 0 and found["largest_at"]["place"] in (3, 7)
    np.testing.assert_allclose(found["relative"], 50 / np.abs(one).max(), rtol=1e-6)
    np.testing.assert_allclose(found["mean"]["value"], 100 / one.size, rtol=1e-6)
    for bad in (np.nan, np.inf):
        worse = outputs(other)
        worse.logits.values[11, 0] = bad
        found = comparison.compare(worse, outputs(one), 1e9)
        assert not found["within"] and found["first_above"] == "logits" and found["largest_at"]["place"] == 11
        worse.logits.values[11, 0] = one[11, 0]


def test_top_k_keeps_the_most_probable():
    config = config_of()
    params, rows = random_params(config), prompts(config, 2)
    whole = model_outputs.compute(checkpoint(config, params), rows, activations=False)
    kept = model_outputs.compute(checkpoint(config, params), rows, activations=False, top_k=7)
    assert kept.logits.ids is not None and kept.logits.values.shape[-1] == 7 and kept.hidden is None
    np.testing.assert_array_equal(kept.logits.ids, np.argsort(-whole.logits.values, -1, kind="stable")[:, :7])
    np.testing.assert_array_equal(kept.logits.values, -np.sort(-whole.logits.values, -1)[:, :7])
    params = changed(params, "head/kernel", (0, 0))
    again = model_outputs.compute(checkpoint(config, params), rows, activations=False, ids=kept.logits.ids)
    np.testing.assert_array_equal(again.logits.ids, kept.logits.ids)
    found = comparison.compare(again, kept, 1e-5)
    assert found["logits_a_token"] == 7 and "nothing by layer" in found["notes"][0]
    assert "the reference's 7 most probable of 258 tokens" in comparison.text(found)


def test_means_have_intervals_over_rows():
    """Tokens of a row are no independent samples: equal rows leave no doubt, whatever their tokens do."""
    row = np.repeat([0, 2, 5], 4)
    same = comparison.mean_by_row(np.tile([0.0, 1.0, 2.0, 5.0], 3), row)
    assert same == {"value": 2.0, "low": 2.0, "high": 2.0}
    apart = comparison.mean_by_row(row.astype(float), row)
    assert apart["low"] == 0.0 and apart["high"] == 5.0
    assert apart["value"] == 28 / 12


# What cannot be compared ----------------------------------------------------------------------------------------------


def test_models_of_other_depth_or_width_are_compared_as_far_as_they_go():
    rows = prompts(config_of(), 1)

    def made(**model: int) -> Outputs:
        config = config_of(model=model)
        size, depth = config.model.width, config.model.layers
        hidden = np.zeros((2 * depth + 2, rows.valid.sum(), size), np.float32)
        return outputs(draw(0, tokens=int(rows.valid.sum())), config)._replace(hidden=hidden)

    found = comparison.compare(made(layers=2), made(), 1e-5)
    assert [one["where"] for one in found["layers"]] == [*model_outputs.points(2), "logits"]
    assert found["notes"] == ["2 and 3 blocks: those after the first 2 have no counterpart"]
    assert found["config"] == {"model.layers": [3, 2]}
    found = comparison.compare(made(width=32), made(), 1e-5)
    assert [one["where"] for one in found["layers"]] == ["logits"] and "widths 32 and 16" in found["notes"][0]
    summed = outputs(draw(0), config_of("hc"))._replace(hidden=np.zeros((8, 50, 16), np.float32))
    plain = outputs(draw(0))._replace(hidden=np.zeros((8, 50, 16), np.float32))
    assert "one sums its streams" in comparison.compare(summed, plain, 1e-5)["notes"][0]


@pytest.fixture(scope="module")
def golden(runs: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("golden") / "golden.npz"
    assert regress(runs("plain"), "--save", file, "--rows", 0) == 0
    return file


def refusal(arguments: Sequence[object], capsys: Any) -> str:
    with pytest.raises(SystemExit) as left:
        cli.run_main(regression.main, [str(argument) for argument in arguments])
    said = capsys.readouterr()
    assert left.value.code == 2 and said.out == ""
    (line,) = said.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "--save FILE or --against FILE|RUN: one of the two is needed"),
        (["--save", "a.npz", "--against", "b"], "one of the two is needed"),
        (["--save", "/nowhere/a.npz"], "--save: cannot write /nowhere/a.npz"),
        (["--save", "a.npz", "--json", "a.json"], "--json: only with --against"),
        (["--save", "a.npz", "--length", "17"], "--length: given 17, allowed: 1 to data.sequence_length=16"),
        (["--save", "a.npz", "--top_k", "-1"], "--top_k: given -1, allowed: 0 or more"),
        (["--save", "a.npz", "--prompts", "/nowhere"], "--prompts: cannot read /nowhere"),
        (["--against", "nowhere"], "--against: no golden file, and as a run: nowhere: not a run folder"),
        (["--against", "nowhere", "--tolerance", "-1"], "--tolerance: given -1"),
        (["--against", "nowhere", "--activations"], "--activations: only with --save"),
        (["--against", "GOLDEN", "--rows", "3"], "--rows: the golden file has settled it"),
        (
            ["--against", "GOLDEN", "--config.norm.eps=1"],
            "--config.norm.eps: the weights fix it; allowed: --config.{mesh",
        ),
        (["--against", "GOLDEN", "--dtype", "float16"], "invalid choice: 'float16'"),
        (["--against", "GOLDEN", "--step", "9"], "no checkpoint of step 9"),
    ],
)
def test_a_mistake_is_one_line(given, message, runs, golden, capsys):
    given = [golden if argument == "GOLDEN" else argument for argument in given]
    assert message in refusal(["--checkpoint", runs("plain"), *given], capsys)


def test_half_a_character_in_a_prompt_is_named_by_its_line(runs, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b\\udcff"}\n')
    said = refusal(["--checkpoint", runs("plain"), "--save", tmp_path / "a.npz", "--prompts", file], capsys)
    assert f"{file}, line 2: not UTF-8: character 2 is an unpaired surrogate (U+DCFF)" in said
    assert not (tmp_path / "a.npz").exists()


def test_a_golden_file_that_does_not_fit(runs, golden, tmp_path, capsys):
    """It is refused for another vocabulary or tokeniser, rows longer than the positions, damage, or another content."""
    run = runs("plain")
    whole = golden.read_bytes()
    bad = tmp_path / "bad.npz"
    half = len(whole) // 2  # among the logits, which are most of it
    flipped = whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :]
    for content in (b"", b"no zip", whole[:half], whole[:-30], flipped):
        bad.write_bytes(content)
        assert f"--against {bad}: no golden file, or not whole" in refusal(
            ["--checkpoint", run, "--against", bad], capsys
        )
    np.savez(bad, a=np.zeros(3))
    assert "no golden file, or not whole" in refusal(["--checkpoint", run, "--against", bad], capsys)

    made = golden_files.read(golden)

    def refused(**about: Any) -> str:
        size = about.get("vocabulary", V)
        rows = made.rows._replace(tokens=made.rows.tokens % size)
        logits = made.logits._replace(values=made.logits.values[:, :size])
        golden_files.save(bad, made._replace(about=made.about | about, rows=rows, logits=logits))
        return refusal(["--checkpoint", run, "--against", bad], capsys)

    assert "of format 2, allowed: 1; save it again" in refused(format=2)
    assert "a vocabulary of 99, --checkpoint has one of 258: their logits are of other tokens" in refused(vocabulary=99)
    assert "tokeniser 0123abcd, --checkpoint has bytes-258 (bytes); allowed: the same" in refused(tokenizer="0123abcd")
    learned = config_of(positions={"kind": "learned"}, data={"sequence_length": 8})
    other = untrained(learned, random_params(learned), tmp_path / "learned")
    line = refusal(["--checkpoint", other, "--against", golden], capsys)
    assert "rows of 16 tokens, --checkpoint has learned positions for 8" in line


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("tokens", lambda a: a[:-1], "tokens, segments and positions differ in shape"),
        ("tokens", lambda a: a + 10_000, "a token is not among its"),
        ("values", lambda a: a[:-1], "values is not of"),
        ("values", lambda a: a[:, :-1], "values does not have 258 logits a token"),
        ("log_z", lambda a: a[1:], "log_z is not of"),
    ],
)
def test_what_was_changed_in_a_golden_file_is_named(golden, tmp_path, name, change, message):
    with np.load(golden) as opened:
        arrays = {key: opened[key] for key in opened.files}
    arrays[name] = change(arrays[name])
    np.savez(tmp_path / "changed.npz", **arrays)
    with pytest.raises(UserError, match=rf"--against .*changed.npz: no golden file, or not whole \({message}"):
        golden_files.read(tmp_path / "changed.npz")


def test_a_file_is_written_whole_or_not_at_all(golden, tmp_path, monkeypatch):
    file = tmp_path / "golden.npz"
    made = golden_files.read(golden)

    def fails(stream: Any, **arrays: Any) -> None:
        stream.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez", fails)
    with pytest.raises(OSError, match="no space left"):
        golden_files.save(file, made)
    assert list(tmp_path.iterdir()) == []
