"""Test hyper-connections of deepseek_v4 folders: maps of both layouts, other folders, and what is refused."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mhc import interop
from mhc.errors import UserError
from mhc.interop.connections import ConnectionsFolder
from tests.interop import hyper_folders
from tests.interop.models import GOLDEN

V4 = GOLDEN / "v4_maps"
SUBLAYERS = ("attn", "ffn")


def near(actual: Any, wanted: np.ndarray, tolerance: float = 2e-5) -> None:
    """Check a value to a tolerance, relative to the largest magnitude."""
    np.testing.assert_allclose(np.asarray(actual), wanted, rtol=0, atol=tolerance * max(1.0, np.abs(wanted).max()))


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    with np.load(V4 / "expected.npz") as file:
        return dict(file)


@pytest.mark.parametrize("layout", ["hf", "published"])
def test_published_maps(layout: str, expected: dict[str, np.ndarray]) -> None:
    """Maps, reads and collapse are those that the model's modules computed for the same streams."""
    connections, x = interop.hyper_connections(V4 / layout), jnp.asarray(expected["streams"])
    assert len(connections) == 10
    for k, connection in enumerate(connections):
        key = f"layer{k // 2}_{SUBLAYERS[k % 2]}_hc"
        u, context = connection.read(x)
        maps = connection.maps(context)
        assert maps is not None
        near(u, expected[f"{key}_u"])
        near(maps.post, expected[f"{key}_post"])
        near(maps.res, np.swapaxes(expected[f"{key}_comb"], -1, -2))
    near(connections[-1].collapse(x), expected["head"])


@pytest.mark.parametrize("layout", ["hf", "published"])
def test_published_static_maps(layout: str, expected: dict[str, np.ndarray]) -> None:
    source, product = ConnectionsFolder(V4 / layout), np.eye(4)
    for k in range(len(source)):
        key = f"layer{k // 2}_{SUBLAYERS[k % 2]}_hc_static"
        maps = source.static_maps(source.weights(k).base)
        near(maps.post, expected[f"{key}_post"])
        near(maps.res, expected[f"{key}_H_res"])
        product = np.asarray(maps.res, np.float64) @ product
    near(product, expected["static_composite"])


def test_the_golden_maps_are_asymmetric(expected: dict[str, np.ndarray]) -> None:
    res = expected["layer0_attn_hc_static_H_res"]
    assert np.abs(res - res.T).max() > 0.01


FOLDERS: list[dict[str, Any]] = [
    {"layout": "published", "layers": 3, "n": 4, "width": 10, "dtype": "BF16", "shards": 1},
    {"layout": "hf", "layers": 2, "n": 2, "width": 7, "dtype": "F16", "shards": 5},
    {"layout": "published", "layers": 1, "n": 8, "width": 3, "dtype": "F32", "shards": 2},
    {"layout": "hf", "layers": 12, "n": 1, "width": 5, "dtype": "F32", "shards": 1},
    {"layout": "bare", "layers": 2, "n": 3, "width": 4, "dtype": "BF16", "shards": 3},
    {"layout": "mixed", "layers": 2, "n": 5, "width": 6, "dtype": "F16", "shards": 1},
]


@pytest.mark.product
@pytest.mark.parametrize("shape", FOLDERS, ids=lambda shape: f"{shape['layout']}-L{shape['layers']}-N{shape['n']}")
def test_other_folders_against_numpy(shape: dict[str, Any], tmp_path: Path) -> None:
    """Random folders give the maps of a float64 computation that shares no code, under other constants too."""
    layout, shards, dtype = shape["layout"], shape["shards"], shape["dtype"]
    sizes: dict[str, Any] = {name: shape[name] for name in ("layers", "n", "width")}
    constants: dict[str, Any] = {"iters": 3, "eps": 1e-3, "rms_eps": 0.1}
    fields: dict[str, Any] = {"hc_sinkhorn_iters": 3, "hc_eps": 1e-3, "rms_norm_eps": 0.1}
    tensors = hyper_folders.random_tensors(7, layout, **sizes, dtype=dtype)
    folder = hyper_folders.write_folder(tmp_path / "x", hyper_folders.config(**sizes, **fields), tensors, shards)
    connections, source = interop.hyper_connections(folder), ConnectionsFolder(folder)
    assert len(connections) == len(source) == 2 * shape["layers"]
    x = np.random.default_rng(1).standard_normal((2, 3, shape["n"], shape["width"]))
    in_layer, at_end, _ = hyper_folders.LAYOUTS[layout]
    for k, connection in enumerate(connections):
        names = [in_layer.format(k // 2, SUBLAYERS[k % 2], tensor) for tensor in ("fn", "base", "scale")]
        weights = [hyper_folders.value(tensors[name]) for name in names]
        pre, post, res = hyper_folders.maps_of(x, weights, **constants)
        u, context = connection.read(jnp.asarray(x, jnp.float32))
        maps = connection.maps(context)
        assert maps is not None
        for actual, wanted in zip(maps, (pre, post, res), strict=True):
            near(actual, wanted)
        near(u, np.einsum("...n,...nd->...d", pre, x))
        y = np.random.default_rng(k).standard_normal((2, 3, shape["width"]))
        after = connection.write(jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32), context)
        near(after, res @ x + post[..., None] * y[..., None, :])
        for actual, wanted in zip(
            source.static_maps(source.weights(k).base), hyper_folders.maps_of(None, weights, **constants), strict=True
        ):
            near(actual, wanted)
    head = [hyper_folders.value(tensors[at_end.format(tensor)]) for tensor in ("fn", "base", "scale")]
    near(connections[-1].collapse(jnp.asarray(x, jnp.float32)), hyper_folders.collapsed(x, head, eps=1e-3, rms_eps=0.1))


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sizes: dict[str, Any] = {"n": 2, "width": 4}
    tensors = hyper_folders.random_tensors(0, "hf", layers=3, **sizes)
    further = hyper_folders.random_tensors(1, "published", layers=2, **sizes)
    tensors |= {name.replace("layers.", "mtp."): tensor for name, tensor in further.items() if "head" not in name}
    tensors |= {f"mtp.0.{name}": tensor for name, tensor in further.items() if "head" in name}
    tensors |= {f"model.layers.2.{name}": tensor for name, tensor in further.items() if "head" in name}
    whole = hyper_folders.write_folder(tmp_path / "a", hyper_folders.config(2, **sizes), tensors, shards=2)
    alone = hyper_folders.write_folder(
        tmp_path / "b",
        hyper_folders.config(2, **sizes),
        hyper_folders.random_tensors(0, "hf", layers=2, **sizes, head=False),
    )
    with caplog.at_level(logging.WARNING):
        connections = interop.hyper_connections(whole)
    assert [record.getMessage() for record in caplog.records] == [
        f"{whole}: left out, after the last of num_hidden_layers: layers 2"
    ]
    caplog.clear()
    others = interop.hyper_connections(alone)
    assert [record.getMessage() for record in caplog.records] == [
        f"{alone}: no tensors hc_head: a collapse takes the mean of the streams"
    ]
    assert len(connections) == len(others) == 4
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 2, 4)), jnp.float32)
    for left, right in zip(connections, others, strict=True):
        np.testing.assert_array_equal(left.read(x)[0], right.read(x)[0])
    head = [hyper_folders.value(tensors[f"model.hc_head.hc_{tensor}"]) for tensor in ("fn", "base", "scale")]
    near(connections[-1].collapse(x), hyper_folders.collapsed(np.asarray(x, np.float64), head))
    near(others[-1].collapse(x), np.asarray(x).mean(axis=-2))


def test_only_the_needed_bytes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard of 400 GB, mostly a hole, is read as fast as a small one; one without such tensors is not opened."""
    sizes: dict[str, Any] = {"layers": 1, "n": 2, "width": 4}
    tensors = hyper_folders.random_tensors(0, "published", **sizes)
    folder = hyper_folders.write_folder(tmp_path / "x", hyper_folders.config(**sizes), {})
    (folder / "model.safetensors").unlink()
    large, header, at = 400 * 10**9, {}, 0
    for name, size in [("experts", large), *((name, len(tensor.raw)) for name, tensor in tensors.items())]:
        dtype, shape = ("U8", [size]) if name == "experts" else (tensors[name].dtype, list(tensors[name].shape))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with (folder / "a.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.seek(8 + len(text) + large)
        for tensor in tensors.values():
            file.write(tensor.raw)
    (folder / "b.safetensors").write_bytes(b"damaged")
    hyper_folders.write_index(folder, dict.fromkeys(header, "a.safetensors") | {"lm_head.weight": "b.safetensors"})
    x = np.random.default_rng(0).standard_normal((3, 2, 4))
    for k, connection in enumerate(interop.hyper_connections(folder)):
        weights = [
            hyper_folders.value(tensors[f"layers.0.hc_{SUBLAYERS[k]}_{tensor}"]) for tensor in ("fn", "base", "scale")
        ]
        near(
            connection.read(jnp.asarray(x, jnp.float32))[0],
            np.einsum("tn,tnd->td", hyper_folders.maps_of(x, weights)[0], x),
        )


def test_the_index_decides_between_two_copies(tmp_path: Path) -> None:
    folder = copy(tmp_path)
    expected = ConnectionsFolder(folder).weights(0)
    names = [f"layers.0.hc_attn_{tensor}" for tensor in ("fn", "base", "scale")]
    stale = {name: hyper_folders.stored(np.zeros(array.shape)) for name, array in zip(names, expected, strict=True)}
    hyper_folders.write_file(
        folder / "stale.safetensors", stale | {"layers.4.hc_ffn_fn": hyper_folders.stored(np.ones((24, 96)))}
    )
    index = json.loads((folder / INDEX).read_text())
    hyper_folders.write_index(folder, index["weight_map"] | {"layers.4.hc_ffn_fn": "stale.safetensors"})
    source = ConnectionsFolder(folder)
    for actual, wanted in zip(source.weights(0), expected, strict=True):
        np.testing.assert_array_equal(actual, wanted)
    np.testing.assert_array_equal(source.weights(9).fn, 1.0)


def test_a_missing_shard_without_such_tensors_is_no_matter(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = copy(tmp_path)
    (folder / "checkpoints").mkdir()  # of something else: the folder is no run
    index = json.loads((folder / INDEX).read_text())
    hyper_folders.write_index(folder, index["weight_map"] | {"head.weight": "gone.safetensors"})
    assert len(ConnectionsFolder(folder)) == 10
    assert "missing shards, without a tensor that is wanted here: gone.safetensors" in caplog.text


@pytest.mark.parametrize("layout", ["hf", "published"])
def test_what_can_be_inferred_is(layout: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = copy(tmp_path, layout)
    (folder / "config.json").write_text("{}")
    source = ConnectionsFolder(folder)
    assert (source.layers, source.n, source.width) == (5, 4, 24)
    assert (source.iters, source.eps, source.rms_eps) == (20, 1e-6, 1e-6)
    (record,) = caplog.records
    assert "defaults are taken: hc_sinkhorn_iters=20, hc_eps=1e-06, rms_norm_eps=1e-06" in record.getMessage()


def test_fields_of_the_text_part_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = copy(tmp_path)
    whole = json.loads((folder / "config.json").read_text()) | {"hc_sinkhorn_iters": 3}
    (folder / "config.json").write_text(json.dumps({"model_type": "another", "text_config": whole}))
    assert ConnectionsFolder(folder).iters == 3
    assert caplog.messages == [f"{folder}: model_type is 'another'; its maps are computed as those of deepseek_v4"]


INDEX = "model.safetensors.index.json"
FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))


def copy(tmp_path: Path, layout: str = "published") -> Path:
    return Path(shutil.copytree(V4 / layout, tmp_path / "model"))


def changed_config(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


def changed_tensors(
    change: Callable[[dict[str, hyper_folders.Stored]], object], **fields: Any
) -> Callable[[Path], None]:
    """Return a change of a folder into one of 2 layers, N = 2 and D = 3, whose tensors ``change`` has changed."""

    def rewrite(folder: Path) -> None:
        shutil.rmtree(folder)
        tensors = hyper_folders.random_tensors(0, "published", layers=2, n=2, width=3)
        change(tensors)
        hyper_folders.write_folder(folder, hyper_folders.config(2, 2, 3, **fields), tensors)

    return rewrite


def put(name: str, array: np.ndarray, dtype: str = "F32") -> Callable[[Path], None]:
    return put_raw(name, hyper_folders.stored(array, dtype))


def put_raw(name: str, tensor: hyper_folders.Stored) -> Callable[[Path], None]:
    return changed_tensors(lambda tensors: tensors.update({name: tensor}))


def without_fields(*fields: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        put("layers.0.hc_attn_base", np.zeros(7))(folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in fields}))

    return change


def renamed_in_index(folder: Path) -> None:
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text.replace(SECOND, "model-00002-of-00003.safetensors"))


def index_without(folder: Path) -> None:
    where = json.loads((folder / INDEX).read_text())["weight_map"]
    hyper_folders.write_index(folder, where | {"layers.1.hc_ffn_fn": SECOND})


def as_run(folder: Path) -> None:
    (folder / "checkpoints").mkdir()
    (folder / INDEX).unlink()


def cut(folder: Path) -> None:
    (folder / SECOND).write_bytes((folder / SECOND).read_bytes()[:-1])


MISTAKES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "model: no such folder"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json: cannot be read: No such file"),
    "a run": (as_run, "model: a run, allowed: a folder of Hugging Face"),
    "missing shard": (lambda folder: (folder / SECOND).unlink(), f"missing shards: {SECOND}, which {INDEX} names"),
    "renamed shard": (renamed_in_index, "missing shards: model-00002-of-00003.safetensors, which"),
    "wrong index": (index_without, "tensors that are not in the shard it names for them: layers.1.hc_ffn_fn"),
    "no index": (lambda folder: (folder / INDEX).unlink(), f"neither model.safetensors nor {INDEX}; there is {FIRST}"),
    "damaged index": (lambda folder: (folder / INDEX).write_text("{}"), "weight_map is missing"),
    "cut shard": (cut, f"{SECOND}: truncated: the header names"),
    "pointer": (
        lambda folder: (folder / FIRST).write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
        f"{FIRST}: a git-lfs pointer",
    ),
    "more layers": (changed_config(num_hidden_layers=6), "6 layers, but no tensor layers.5.hc_attn_fn, "),
    "very many layers": (changed_config(num_hidden_layers=10**12), "layers.5.hc_attn_fn, layers.5.hc_attn_base"),
    "other streams": (
        changed_config(hc_mult=2),
        "hc_head_base is [4], allowed: [2] for hc_mult=2 and hidden_size=24",
    ),
    "other width": (changed_config(hidden_size=12), "hc_head_fn is [4, 96], allowed: [4, 48] for hc_mult=4"),
    "words for a number": (
        changed_config(hc_mult="four"),
        "config.json: hc_mult: given 'four', allowed: a whole number from 1 on",
    ),
    "no iterations": (changed_config(hc_sinkhorn_iters=0), "hc_sinkhorn_iters: given 0, allowed: a whole number"),
    "half an iteration": (changed_config(hc_sinkhorn_iters=2.5), "hc_sinkhorn_iters: given 2.5, allowed: a whole"),
    "a negative eps": (changed_config(hc_eps=-1e-6), "hc_eps: given -1e-06, allowed: a number from 0.0 on"),
    "true": (changed_config(num_hidden_layers=True), "num_hidden_layers: given True, allowed: a whole number"),
    "one tensor lacks": (
        changed_tensors(lambda tensors: tensors.pop("layers.1.hc_ffn_base")),
        "2 layers, but no tensor layers.1.hc_ffn_base",
    ),
    "a part of the head lacks": (
        changed_tensors(lambda tensors: tensors.pop("hc_head_scale")),
        "2 layers, but no tensor hc_head_scale",
    ),
    "two names": (
        put("layers.0.attn_hc.base", np.zeros(8)),
        "tensors named in two ways: layers.0.attn_hc.base, layers.0.hc_attn_base",
    ),
    "wrong shape": (put("layers.1.hc_attn_scale", np.zeros(1)), "layers.1.hc_attn_scale is [1], allowed: [3]"),
    "transposed": (put("layers.1.hc_ffn_fn", np.zeros((6, 8))), "layers.1.hc_ffn_fn is [6, 8], allowed: [8, 6]"),
    "no N has this shape": (without_fields("hc_mult"), "layers.0.hc_attn_base is [7], allowed: [2N+N²]"),
    "float64": (put("layers.1.hc_attn_base", np.zeros(8), "F64"), "hc_attn_base is F64, allowed: F32, F16, BF16"),
    "8 bits": (
        put_raw("layers.0.hc_attn_fn", hyper_folders.Stored("F8_E4M3", (8, 6), bytes(48))),
        "layers.0.hc_attn_fn is F8_E4M3, allowed: F32, F16, BF16",
    ),
    "a dtype of tomorrow": (
        put_raw("layers.0.hc_attn_fn", hyper_folders.Stored("F3_X", (8, 6), bytes(18))),
        "layers.0.hc_attn_fn is F3_X, allowed: F32, F16, BF16",
    ),
    "not a number": (
        put("layers.1.hc_attn_base", np.full(8, np.nan)),
        "layers.1.hc_attn_base holds numbers that are not finite",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(mistake: str, tmp_path: Path) -> None:
    folder = copy(tmp_path)
    change, words = MISTAKES[mistake]
    change(folder)
    with pytest.raises(UserError, match=re.escape(words)) as raised:
        interop.hyper_connections(folder)
    assert "\n" not in str(raised.value) and str(folder) in str(raised.value) and len(str(raised.value)) < 400


def test_a_model_without_hyper_connections_is_named() -> None:
    with pytest.raises(
        UserError, match=r"llama: no tensors of hyper-connections \(.*\); model_type is 'llama', allowed"
    ):
        interop.hyper_connections(GOLDEN / "hf_published" / "llama")
