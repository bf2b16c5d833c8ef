"""Test pictures of the maps: the gains of the run's probes, products in the right order, means that keep the sums."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from mhc import cli, kinds
from mhc.eval import mappings
from mhc.eval.common import checkpoints
from mhc.eval.mappings.published import streams_used
from mhc.files import read_json, read_jsonl
from tests.interop import hyper_folders
from tests.interop.models import GOLDEN
from tests.small import random_params
from tests.small_runs import config, on_demand, resolved, run, snapshot, untrained, write_corpus
from tests.state_forms import has_maps

KINDS = ("plain", "hc", "mhc")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that makes, when first asked, a run of 12 steps of a kind at a rate at which HC's maps move."""
    corpus = write_corpus(tmp_path_factory.mktemp("corpus") / "texts")
    root = tmp_path_factory.mktemp("runs")

    @on_demand
    def of(kind: str) -> Path:
        assert run(config(corpus, kind, optimizer={"lr": 3e-2}), root / kind) == 0
        return root / kind

    return of


@pytest.mark.long
def test_the_page_shows_the_gains_of_the_probes(trained, tmp_path, capsys):
    folders = [trained(kind) for kind in KINDS]
    before = [snapshot(folder) for folder in folders]
    out = tmp_path / "out"
    assert mappings.main(["--checkpoint", *map(str, folders), "--out", str(out)]) == 0
    assert [snapshot(folder) for folder in folders] == before
    found = read_json(out / "mappings.json")["checkpoints"]
    assert [one["kind"] for one in found] == list(KINDS)
    for one, folder in zip(found, folders, strict=True):
        probe = read_jsonl(folder / "probes.jsonl")[-1]
        assert probe["step"] == 12
        for name in ("forward_single", "backward_single", "forward_composite", "backward_composite"):
            np.testing.assert_allclose(one["by_sublayer"][name], probe[f"gain/{name}_mean"], rtol=1e-4)
        np.testing.assert_allclose(one["by_sublayer"]["pre"], probe["maps/pre_mean"], rtol=1e-4)
        np.testing.assert_allclose(one["by_sublayer"]["post"], probe["maps/post_mean"], rtol=1e-4)
    page = (out / "mappings.html").read_text()
    pictures = {path.name for path in out.glob("*.png")}
    assert pictures == {"maps_2.png", "maps_3.png", "gains.png", "distances.png", "weights.png"}  # none of plain
    assert page.count("data:image/png;base64,") == len(pictures) and "http" not in page.replace("http-equiv", "")
    assert "hc, step 12 (hc): peak gain of a sublayer" in capsys.readouterr().out


@pytest.mark.long
def test_products_are_in_the_order_of_depth(trained):
    """For a single token, the products of its maps from the start and to the end are those of the definition."""
    checkpoint = checkpoints.load(str(trained("hc")), devices=jax.devices()[:1])
    one = mappings.measure(checkpoint)
    depth, n = len(one.single), one.single.shape[-1]
    assert one.single.shape == one.from_start.shape == one.to_end.shape == (depth, n, n) == (4, 4, 4)
    np.testing.assert_allclose(one.from_start[0], one.single[0], rtol=1e-6)
    np.testing.assert_allclose(one.to_end[-1], one.single[-1], rtol=1e-6)
    np.testing.assert_allclose(one.from_start[-1], one.to_end[0], rtol=1e-4, atol=1e-6)
    # Static maps (no projection) are the same for every token, so that means of products are products of means.
    static = jax.tree_util.tree_map_with_path(
        lambda path, leaf: 0 * leaf if "alpha" in str(path) else leaf, checkpoint.params
    )
    one = mappings.measure(checkpoint._replace(params=static))
    forward, backward = np.eye(n), np.eye(n)
    for k in range(depth):
        forward = one.single[k] @ forward
        np.testing.assert_allclose(one.from_start[k], forward, rtol=1e-4, atol=1e-6)
        backward = backward @ one.single[depth - 1 - k]
        np.testing.assert_allclose(one.to_end[depth - 1 - k], backward, rtol=1e-4, atol=1e-6)
    assert np.abs(one.single[1] @ one.single[2] - one.single[2] @ one.single[1]).max() > 1e-4  # so that order matters


@pytest.mark.long
def test_means_of_doubly_stochastic_maps_are_doubly_stochastic(trained):
    one = mappings.measure(checkpoints.load(str(trained("mhc")), devices=jax.devices()[:1]))
    probe = read_jsonl(trained("mhc") / "probes.jsonl")[-1]
    np.testing.assert_allclose(
        one.probe["gain/backward_composite_mean"], probe["gain/backward_composite_mean"], rtol=1e-4
    )
    for matrices in (one.single, one.from_start, one.to_end):
        np.testing.assert_allclose(matrices.sum(axis=-1), 1.0, atol=1e-5)
        np.testing.assert_allclose(matrices.sum(axis=-2), 1.0, atol=2e-2)  # what 20 Sinkhorn iterations leave


@pytest.mark.parametrize(
    "kind", [pytest.param(name, marks=() if name == "attn_res" else pytest.mark.product) for name in kinds.names()]
)
def test_maps_of_every_kind_are_drawn_or_the_kind_is_refused_by_name(kind, tmp_path, capsys):
    made = resolved(config(write_corpus(tmp_path / "texts"), kind))
    folder = untrained(made, random_params(made, std=0.1), tmp_path / "run")
    out = tmp_path / "out"
    given = ["--checkpoint", str(folder), "--sequences", "2", "--out", str(out)]
    if not has_maps(made):
        with pytest.raises(SystemExit) as left:
            cli.run_main(mappings.main, given)
        *before, line = capsys.readouterr().err.splitlines()  # before: what is said of a corpus that is read anew
        assert not any(word in said for said in before for word in ("error", "Traceback")), before
        assert left.value.code == 2 and f"residual.kind={kind} has no maps between streams to draw" in line
        assert not out.exists()
        return
    assert mappings.main(given) == 0
    (found,) = read_json(out / "mappings.json")["checkpoints"]
    assert found["kind"] == kind
    sublayers = 2 * made.model.layers
    for name, values in found["by_sublayer"].items():
        assert len(values) == sublayers and np.isfinite(values).all(), name
    drawn = {path.name for path in out.glob("*.png")}
    assert drawn >= {"gains.png", "weights.png"} and ("maps_1.png" in drawn) == (kind != "plain")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--sequences", "0"], "--sequences: given 0, allowed: 1 or more"),
        (["--step", "5"], "no checkpoint of step 5; there are 8, 12"),
        (["--checkpoint", *["a"] * 9], "--checkpoint: given 9, allowed: at most 8 side by side"),
        (["--checkpoint", "nowhere"], "nowhere: not a run folder"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(given, message, trained, tmp_path, capsys):
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as left:
        cli.run_main(mappings.main, ["--checkpoint", str(trained("plain")), "--out", str(out), *given])
    (line,) = capsys.readouterr().err.splitlines()
    assert left.value.code == 2 and message in line and not out.exists()


V4 = GOLDEN / "v4_maps"


def test_the_page_of_a_published_model(tmp_path, capsys):
    """Both layouts give the static maps, products and gains that the model's own modules do."""
    before, out = snapshot(V4), tmp_path / "out"
    assert mappings.main(["--hf", str(V4 / "hf"), str(V4 / "published"), "--out", str(out)]) == 0
    assert snapshot(V4) == before
    with np.load(V4 / "expected.npz") as file:
        expected = dict(file)
    keys = [f"layer{layer}_{name}_hc_static" for layer in range(5) for name in ("attn", "ffn")]
    entries = read_json(out / "mappings.json")["checkpoints"]
    for entry in entries:
        assert (entry["kind"], entry["sublayers"], entry["streams"]) == ("mhc", 10, 4)
        by_sublayer = entry["by_sublayer"]
        np.testing.assert_allclose(by_sublayer["single"], [expected[f"{key}_H_res"] for key in keys], atol=2e-5)
        np.testing.assert_allclose(by_sublayer["post"], [expected[f"{key}_post"] for key in keys], atol=2e-5)
        for product in (by_sublayer["from_start"][-1], by_sublayer["to_end"][0]):
            np.testing.assert_allclose(product, expected["static_composite"], atol=2e-5)
        np.testing.assert_allclose(by_sublayer["forward_composite"][-1], expected["static_forward_gain"], atol=2e-5)
        np.testing.assert_allclose(by_sublayer["backward_composite"][0], expected["static_backward_gain"], atol=2e-5)
    pictures = {path.name for path in out.glob("*.png")}
    figures = ("maps_1", "maps_2", "gains", "distances", "streams", "dynamic", "weights")
    assert pictures == {f"{name}.png" for name in figures} == {f"{path.stem}.png" for path in out.glob("*.csv")}
    page = (out / "mappings.html").read_text()
    assert page.count("data:image/png;base64,") == len(pictures) and "http" not in page.replace("http-equiv", "")
    assert "probe batch" not in page and "Mean over tokens" not in page
    for line, layout in zip(capsys.readouterr().out.splitlines(), ("hf", "published"), strict=False):
        assert line.startswith(f"{V4 / layout} (mhc): peak gain of a sublayer, forward 1, ")


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_numbers_of_a_published_model_against_numpy(dtype, tmp_path):
    """Distances, the size of the dynamic part and the streams used are those of their definitions, in float64."""
    layers, n, width = 2, 3, 5
    tensors = hyper_folders.random_tensors(3, "published", layers=layers, n=n, width=width, dtype=dtype)
    folder = hyper_folders.write_folder(tmp_path / "x", hyper_folders.config(layers, n, width), tensors, shards=3)
    maps = mappings.measure_published(str(folder))
    assert maps.dynamic is not None
    used = streams_used(maps)
    rng, product = np.random.default_rng(0), np.eye(n)
    m = rng.standard_normal((50_000, n * width))
    m /= np.sqrt(np.mean(m**2, axis=1, keepdims=True))
    for k in range(2 * layers):
        names = [f"layers.{k // 2}.hc_{('attn', 'ffn')[k % 2]}_{tensor}" for tensor in ("fn", "base", "scale")]
        fn, _, scale = weights = [hyper_folders.value(tensors[name]) for name in names]
        pre, post, res = hyper_folders.maps_of(None, weights)
        product = res @ product
        for name, wanted in (("pre", pre), ("post", post), ("single", res), ("from_start", product)):
            np.testing.assert_allclose(getattr(maps, name)[k], wanted, atol=2e-5)
        for target, matrix in (("identity", np.eye(n)), ("uniform", np.full((n, n), 1 / n))):
            for extent, given in (("single", res), ("composite", product)):
                distance = np.sqrt(np.sum((given - matrix) ** 2) / n)
                np.testing.assert_allclose(maps.probe[f"mix/to_{target}_{extent}"][k], distance, atol=2e-5)
        parts = np.split(fn, [n, 2 * n])
        np.testing.assert_allclose(maps.dynamic.scale[k], scale, rtol=1e-6)
        np.testing.assert_allclose(maps.dynamic.norm[k], [np.linalg.norm(part) for part in parts], rtol=1e-6)
        measured = [np.sqrt(np.mean((gate * (m @ part.T)) ** 2)) for gate, part in zip(scale, parts, strict=True)]
        np.testing.assert_allclose(maps.dynamic.logit_rms[k], measured, rtol=0.02)
        np.testing.assert_allclose(used["read"][k], pre.sum() ** 2 / (pre**2).sum(), rtol=1e-4)
        np.testing.assert_allclose(used["written"][k], post.sum() ** 2 / (post**2).sum(), rtol=1e-4)
        gram = product @ product.T
        np.testing.assert_allclose(used["told_apart"][k], np.trace(gram) ** 2 / (gram**2).sum(), rtol=1e-4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--hf", str(V4 / "hf"), "--checkpoint", "a"], "--hf and --checkpoint: both given, allowed: one of them"),
        (["--hf", str(V4 / "hf"), "--step", "5"], "--step: given with --hf, allowed: with --checkpoint"),
        (["--hf", str(V4 / "hf"), "--sequences", "2"], "--sequences: given with --hf, allowed: with --checkpoint"),
        (["--hf", "a", "--config.data.source=stdlib"], "--config.data.source: given with --hf, allowed: with"),
        (["--hf", *["a"] * 9], "--hf: given 9, allowed: at most 8 side by side"),
        (["--hf"], "argument --hf: expected at least one argument"),
        (["--hf", ""], "--hf: given '', allowed: the path of a folder"),
        ([], "required: --checkpoint RUN, or --hf FOLDER"),
        (["--hf", str(V4)], "v4_maps/config.json: cannot be read: No such file"),
        (["--hf", str(GOLDEN / "hf_published" / "llama")], "llama: no tensors of hyper-connections"),
    ],
)
def test_a_mistake_with_a_published_model_is_one_line(given, message, tmp_path, capsys):
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as left:
        cli.run_main(mappings.main, ["--out", str(out), *given])
    line = capsys.readouterr().err.splitlines()[-1]
    assert left.value.code == 2 and line.startswith("error: ") and message in line and not out.exists()


def test_names_lose_the_folders_that_they_share():
    short = checkpoints.short_names
    assert short(["runs/a/hc, step 3", "runs/a/mhc, step 3"]) == ["hc, step 3", "mhc, step 3"]
    assert short(["runs/a, step 3"]) == ["a, step 3"]
    assert short(["x/a, step 3", "y/a, step 3", "y/b, step 3"]) == ["x/a, step 3", "y/a, step 3", "y/b, step 3"]
    assert short(["gs://b/a, step 1", "gs://b/a, step 2"]) == ["a, step 1", "a, step 2"]
