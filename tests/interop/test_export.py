"""Test export: a folder that others read, and the one file that runs what only we can name."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from mhc import interop, kinds
from mhc.config import Config, to_json
from mhc.data.tokenizers import ByteTokenizer, JsonTokenizer, load
from mhc.errors import UserError
from mhc.interop import HfFolder, export, hf
from mhc.model.block import build_topology
from mhc.model.decoder import DecoderDefinition, Params
from mhc.residual import StreamRunner
from mhc.residual.manifold import ManifoldHyperConnections
from mhc.rng import path_key
from mhc.train.checkpoint import load_run
from tests import small_runs
from tests.interop.models import GOLDEN
from tests.small import random_params, relative_error, small
from tests.small_runs import untrained

TOKENS = np.random.default_rng(0).integers(0, 32, (2, 16))


def exported(config: Config, params: Params, folder: Path, shard: int = export.SHARD) -> Path:
    """Write what the loader reads of an export, and return the folder."""
    places, leaf = export.our_names(config), hf.leaf_reader(params)

    def tensor(name: str) -> np.ndarray:
        path, layer, _ = places[name]
        return np.asarray(leaf(path) if layer is None else leaf(path)[layer])

    export.write_weights(folder, {name: shape for name, (_, _, shape) in places.items()}, tensor, {}, shard)
    (folder / "config.json").write_text(json.dumps({"model": export.function_fields(config)}))
    (folder / "model.py").write_text(export.model_file(config))
    return folder


def loaded(folder: Path) -> Any:
    """Load an exported model by its own model.py."""
    spec = importlib.util.spec_from_file_location("exported_model", folder / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load(folder)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("plain", {}),
    "mhc": ("mhc", {}),
    "mhc deepseek, learned collapse": ("mhc", {"residual": {"sinkhorn": "deepseek", "collapse": "head"}}),
    "mhc deepseek without eps": ("mhc", {"residual": {"sinkhorn": "deepseek", "sinkhorn_eps": 0.0, "iters": 3}}),
    "mhc of one stream": ("mhc", {"residual": {"n": 1}}),
    "hc": ("hc", {}),
    "hc static": ("hc", {"residual": {"dynamic": False, "collapse": "mean"}}),
    "hc without tanh": ("hc", {"residual": {"tanh": False, "n": 2}}),
    "mhc_lite": ("mhc_lite", {"residual": {"n": 3}}),
    "kromhc": ("kromhc", {}),
    "kromhc of one stream": ("kromhc", {"residual": {"n": 1}}),
    "identity": ("identity", {"residual": {"n": 3}}),
    "go_mhc": ("go_mhc", {"residual": {"n": 3}}),
    "go_mhc of one stream": ("go_mhc", {"residual": {"n": 1}}),
    "tbp_mhc": ("tbp_mhc", {}),
    "tbp_mhc without minorize": ("tbp_mhc", {"residual": {"n": 3, "minorize": False}}),
    "shc": ("shc", {}),
    "shc of two streams": ("shc", {"residual": {"n": 2}}),
    "iso": ("iso", {}),
    "iso of one stream": ("iso", {"residual": {"n": 1}}),
    "ortho": ("ortho", {"residual": {"n": 3}}),
    "circulant": ("circulant", {}),
    "single pass": ("mhc", {"residual": {"single_pass": True, "sinkhorn": "deepseek"}}),
    "single pass of shc": ("shc", {"residual": {"single_pass": True}}),
    "frac": ("frac", {"residual": {"n": 4}}),
    "frac static": ("frac", {"residual": {"dynamic": False}}),
    "gated_residual": ("gated_residual", {"residual": {"n": 3, "rank": 5}}),
    "attn_res": ("attn_res", {}),
    "attn_res in blocks": ("attn_res", {"residual": {"block": 3}}),
    "denseformer": ("denseformer", {"residual": {"dilation": 2}}),
    "laurel": ("laurel", {"residual": {"rank": 3}}),
    "laurel, shares alone": ("laurel", {"residual": {"variant": "rw"}}),
    "latent attention and experts": (
        "identity",
        {
            "attention": {"kind": "mla", "kv_rank": 8, "q_rank": 6, "head_dim": 8, "rope_dim": 4, "value_dim": 6},
            "moe": {"experts": 4, "shared": 1, "dense_layers": 1, "score": "sigmoid", "scale": 2.5},
        },
    ),
    "experts of softmax": (
        "plain",
        {"moe": {"experts": 4, "normalize": False, "balance": "none"}, "mlp": {"kind": "relu"}},
    ),
    "latent attention without positions": (
        "plain",
        {"attention": {"kind": "mla", "kv_rank": 8}, "positions": {"kind": "none"}},
    ),
    "relative bias": (
        "plain",
        {
            "positions": {"kind": "relative_bias", "buckets": 8, "max_distance": 12},
            "norm": {"kind": "layernorm", "placement": "sandwich", "embedding": True},
            "mlp": {"kind": "gelu", "bias": True},
            "attention": {"bias": True, "softcap": 5.0},
        },
    ),
    "sinusoidal, windows": (
        "plain",
        {
            "positions": {"kind": "sinusoidal"},
            "norm": {"placement": "post", "final": False},
            "mlp": {"kind": "geglu", "clamp": 0.1},
            "head": {"tied": True, "softcap": 3.0},
            "attention": {"window": 5, "global_every": 2, "kv_heads": 1, "qk_norm": True},
        },
    ),
    "learned": ("plain", {"positions": {"kind": "learned"}, "mlp": {"kind": "silu"}, "attention": {"scale": 0.3}}),
    "alibi": ("plain", {"positions": {"kind": "alibi"}, "attention": {"heads": 6, "head_dim": 4, "kv_heads": 3}}),
    "yarn, prefix": (
        "plain",
        {"positions": {"scaling": "yarn", "factor": 4.0, "original_length": 8}, "attention": {"prefix": 4}},
    ),
    "dynamic": ("plain", {"positions": {"scaling": "dynamic", "factor": 4.0, "original_length": 8}}),
    "llama3": ("plain", {"positions": {"scaling": "llama3", "factor": 4.0, "original_length": 8}}),
    "linear": ("plain", {"positions": {"scaling": "linear", "factor": 3.0}, "mlp": {"kind": "glu", "bias": True}}),
    "biases of rmsnorm, factors": (
        "mhc",
        {"norm": {"bias": True, "gamma_layers": (1,), "gamma_init": 0.5}, "update": {"scale": 0.5, "layers": (1,)}},
    ),
    "ntk": ("plain", {"positions": {"scaling": "ntk", "factor": 4.0}, "model": {"embed_scale": True}}),
}
FEW = (
    "mhc",
    "hc",
    "kromhc",
    "go_mhc",
    "tbp_mhc",
    "iso",
    "ortho",
    "circulant",
    "single pass of shc",
    "frac",
    "gated_residual",
    "attn_res",
    "denseformer",
    "laurel",
    "latent attention and experts",
    "relative bias",
    "sinusoidal, windows",
    "yarn, prefix",
    "biases of rmsnorm, factors",
)


@pytest.mark.parametrize(
    "case", [case if case in FEW else pytest.param(case, marks=pytest.mark.product) for case in CASES]
)
def test_the_short_file_gives_the_model_s_logits(case: str, tmp_path: Path) -> None:
    kind, groups = CASES[case]
    config = small(kind, **groups)
    # Unbounded maps at random are no model that float32 can compute to 1e-5: they begin closer to 0.
    params = random_params(config, std=0.1 if case == "hc without tanh" else 0.3)
    logits = DecoderDefinition(config).bind(params)(jnp.asarray(TOKENS))
    assert relative_error(loaded(exported(config, params, tmp_path))(TOKENS), logits) < 1e-5


def test_every_residual_of_this_project_is_known() -> None:
    assert set(kinds.names()) == {kind for kind, _ in CASES.values()}


def unlike(x):
    """Return a value; model.py does not have this helper of the test."""
    return x


def sigmoid(x):
    """Return something else than the sigmoid of model.py does."""
    return 0.25 + 0.0 * x


class Elsewhere(StreamRunner):
    def maps(self, x: jax.Array, name: str) -> Any:
        return unlike(x)


class Shadowed(StreamRunner):
    def maps(self, x: jax.Array, name: str) -> Any:
        return sigmoid(x)


class Annotated(StreamRunner):
    def maps(self, x: jax.Array, name: str) -> Any:
        half = np.full((*x.shape[:2], self.n), 1.0 / self.n)
        return half, half, np.broadcast_to(np.eye(self.n), (*half.shape, self.n))


@pytest.mark.parametrize(
    ("runner", "said"),
    [
        (None, r"residual\.kind=mhc: it cannot be exported in our names: it has no numpy form .*, allowed: plain, hc"),
        (Elsewhere, "its numpy form uses unlike, which model.py does not have"),
        (Shadowed, "its numpy form uses sigmoid, which model.py does not have"),
    ],
)
def test_a_kind_that_model_py_cannot_run_is_refused_by_name(
    runner: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ManifoldHyperConnections, "numpy_form", lambda self: runner)
    with pytest.raises(UserError, match=said):
        export.model_file(small("mhc"))


def test_annotations_of_a_numpy_form_need_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ManifoldHyperConnections, "numpy_form", lambda self: Annotated)
    config = small("mhc")
    assert np.isfinite(loaded(exported(config, random_params(config), tmp_path))(TOKENS)).all()


def test_shards_are_read_like_one_file(tmp_path: Path) -> None:
    config = small("mhc")
    params = random_params(config)
    for name in ("one", "many"):
        (tmp_path / name).mkdir()
    one = loaded(exported(config, params, tmp_path / "one"))
    many = loaded(exported(config, params, tmp_path / "many", shard=2000))
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    assert one.tensors.keys() == many.tensors.keys()
    for name, tensor in one.tensors.items():
        np.testing.assert_array_equal(tensor, many.tensors[name])


@pytest.mark.parametrize("kind", kinds.names())
def test_the_short_file_needs_numpy_alone(kind: str) -> None:
    """It holds the numpy form of its own residual and of no other."""
    source = export.model_file(small(kind))
    imports = {line.split()[1].split(".")[0] for line in source.splitlines() if line.startswith(("import ", "from "))}
    assert imports <= set(sys.stdlib_module_names) | {"numpy"}
    assert len(source.splitlines()) < 400
    forms = {build_topology(small(name), path_key(jax.random.key(0))).numpy_form() for name in kinds.names()}
    own = build_topology(small(kind), path_key(jax.random.key(0))).numpy_form()
    assert own is not None
    for form in forms:
        assert form is not None
        assert (f"class {form.__name__}(" in source) == issubclass(own, form), form


# Whole runs -----------------------------------------------------------------------------------------------------------


METRICS = (
    {"step": 1, "loss": 5.5123456, "tokens": 100},
    {"step": 2, "loss": 5.25, "tokens": 210, "val_loss": 5.4444444, "val_bits_per_byte": 7.75},
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an mHC run with a log of two steps and random weights."""
    config = small("mhc", residual={"iters": 3}, model={"vocab_size": 258})
    folder = untrained(config, random_params(config), tmp_path_factory.mktemp("export") / "run")
    (folder / "checkpoints" / "0").rename(folder / "checkpoints" / "2")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in METRICS))
    return folder


def test_an_exported_mhc_run_stands_alone(run: Path, tmp_path: Path) -> None:
    folder = export.export(run, tmp_path / "out")
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.py",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    tokens = [[72, 105, 32, 116]]
    script = f"import numpy, model; numpy.save('logits', model.load()({tokens}))"
    subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, '.'); {script}"], cwd=folder, check=True
    )
    logits = load_run(run).decoder()(jnp.asarray(tokens))
    assert relative_error(np.load(folder / "logits.npy"), logits) < 1e-5
    shown = subprocess.run(
        [sys.executable, "model.py", "72", "105"], cwd=folder, check=True, capture_output=True, text=True
    )
    assert len(shown.stdout.splitlines()) == 5


def test_the_card_says_what_was_measured(run: Path) -> None:
    config = load_run(run).config
    text = export.card(run, 2, config, None)
    assert "| training loss, nats per token | 2 | 5.25 |" in text
    assert "| validation loss, nats per token | 2 | 5.4444 |" in text
    assert "| validation, bits per byte | 2 | 7.75 |" in text
    assert "the residual `mhc`, 4 streams" in text and "210 target tokens in 2 steps" in text
    assert json.loads(text.split("```json\n")[1].split("```")[0]) == json.loads(to_json(config))
    earlier = export.card(run, 1, config, None).split("## Config")[0]
    assert "| training loss, nats per token | 1 | 5.5123 |" in earlier
    assert "100 target tokens in 1 steps" in earlier and "5.4444" not in earlier


@given(st.text())
def test_the_byte_tokeniser_is_written_as_a_file(byte_tokenizer: JsonTokenizer, text: str) -> None:
    np.testing.assert_array_equal(byte_tokenizer.encode(text), ByteTokenizer().encode(text))
    assert byte_tokenizer.decode(byte_tokenizer.encode(text)) == text


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> JsonTokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    export.write_tokenizer(path, "bytes")
    made = JsonTokenizer(path)
    assert (made.vocab_size, made.bos_id, made.eos_id) == (258, 256, 257)
    return made


@pytest.mark.parametrize("kind", ["bytes", "llama2", "bpe_no_unk", "beside"])
def test_the_special_tokens_are_named_beside_the_tokeniser(tmp_path: Path, kind: str) -> None:
    """Other tools find them, and so does this project: the exported folder's tokeniser has the ids of the run's."""
    spec = "bytes"
    if kind != "bytes":
        file = "llama2" if kind == "beside" else kind
        spec = str(tmp_path / "tokenizer.json")
        shutil.copy(Path(__file__).parents[1] / "data" / "tokenizers" / f"{file}.json", spec)
    if kind == "beside":
        given = {"bos_token": "</s>", "eos_token": {"content": "<s>"}, "chat_template": "{{ messages }}"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(given))
    ours = load(spec)
    config = small("plain", model={"vocab_size": ours.vocab_size}, data={"tokenizer": spec})
    run = untrained(config, random_params(config), tmp_path / "run")
    folder = export.export(run, tmp_path / "out")
    written = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    vocabulary = Library.from_file(str(folder / "tokenizer.json")).get_vocab()
    assert vocabulary[written["bos_token"]] == ours.bos_id and vocabulary[written["eos_token"]] == ours.eos_id
    assert vocabulary.get(written.get("unk_token"), -1) == ours.unknown_id
    assert written.get("chat_template") == ("{{ messages }}" if kind == "beside" else None)
    again = load(str(folder / "tokenizer.json"))
    assert (again.bos_id, again.eos_id, again.vocab_size) == (ours.bos_id, ours.eos_id, ours.vocab_size)


def test_a_plain_run_is_written_in_the_names_of_its_family(tmp_path: Path) -> None:
    config = small("plain", model={"layers": 2, "width": 16, "vocab_size": 258})
    run = untrained(config, random_params(config), tmp_path / "run")
    folder = export.export(run, tmp_path / "out")
    assert not (folder / "model.py").exists()
    written = HfFolder(folder)
    assert (written.config["model_type"], written.config["eos_token_id"]) == ("llama", 257)
    assert "model.layers.1.self_attn.q_proj.weight" in written
    tokens = jnp.asarray(TOKENS)
    np.testing.assert_array_equal(interop.load_hf(folder)(tokens), load_run(run).decoder()(tokens))
    card = (folder / "README.md").read_text()
    assert "the family llama" in card and "No step was trained" in card
    ours = export.export(run, tmp_path / "ours", names="ours")
    assert relative_error(loaded(ours)(TOKENS), load_run(run).decoder()(tokens)) < 1e-5


@pytest.mark.long
def test_what_was_imported_is_exported_as_it_was_published(tmp_path: Path) -> None:
    """The tensors of the folder come back through a run bit for bit."""
    from mhc.interop.import_hf import import_hf

    source = HfFolder(GOLDEN / "hf_published" / "qwen3_qknorm")
    config = load_run(import_hf(source.path, tmp_path / "run")).config
    assert config.model.vocab_size == 97
    folder = export.export(tmp_path / "run", tmp_path / "out")
    written = HfFolder(folder)
    assert written.keys() == source.keys()
    for name, weight in source.items():
        np.testing.assert_array_equal(written[name], weight)


REFUSED: list[tuple[Callable[[Path, Path], Any], str]] = [
    (lambda run, to: export.export(run / "no", to), "not a run folder"),
    (lambda run, to: export.export(run, to, step=7), "no checkpoint of step 7; there are 2"),
    (lambda run, to: export.export(run, run), "--to .*: holds something already"),
    (lambda run, to: export.export(run, to, names="hf"), "residual.kind=mhc: no family of Hugging Face has it"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_what_cannot_be_written_is_refused(
    call: Callable[[Path, Path], Any], words: str, run: Path, tmp_path: Path
) -> None:
    before = small_runs.snapshot(run)
    with pytest.raises(UserError, match=words):
        call(run, tmp_path / "out")
    assert not list(tmp_path.iterdir())
    assert small_runs.snapshot(run) == before
