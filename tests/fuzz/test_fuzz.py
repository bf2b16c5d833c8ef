"""Test ten thousand damaged inputs: each is read, or refused by a UserError; a user would see any other as a traceback.

A hundredth of them, always the same, runs with the fast suite; all of them, others each time, with `make test-full`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from mhc import cli, provenance
from mhc import config as configs
from mhc.config import from_config_dict
from mhc.data import pipeline, tokenizers
from mhc.errors import UserError
from mhc.interop import hf
from mhc.interop.folder import HfFolder
from mhc.interop.safetensors import SafetensorsFile, write
from mhc.train.checkpoint import committed_steps, find_checkpoint
from tests.fuzz.mutations import ODD_NUMBERS, ODD_TEXTS, as_bytes, damaged_bytes, damaged_json, odd_json

ROOT = Path(__file__).parents[2]
WITNESS = ROOT / "tests/witnesses/mhc"
# Inputs of each kind that the long test tries; 10,000 in all.
BUDGET = {
    "overrides": 2500,
    "config files": 1000,
    "jsonl": 1500,
    "tokenizer.json": 1500,
    "safetensors": 1000,
    "Hugging Face folders": 500,
    "token files": 1000,
    "run folders": 1000,
}
shares = pytest.mark.parametrize("share", [0.01, pytest.param(1.0, marks=pytest.mark.product)])


def holds(
    kind: str,
    share: float,
    strategy: st.SearchStrategy[Any],
    read: Callable[[Any], object],
    record_property: Callable[[str, object], None],
) -> None:
    """Try the kind's share of inputs; an exception that is no UserError fails with the input as it was shrunk."""
    tried = 0

    @hypothesis.settings(
        max_examples=round(BUDGET[kind] * share),
        deadline=None,
        derandomize=share < 1,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    )
    @hypothesis.given(strategy)
    def check(value: Any) -> None:
        nonlocal tried
        tried += 1
        with contextlib.suppress(UserError):
            read(value)

    check()
    assert tried >= 0.9 * round(BUDGET[kind] * share)  # a strategy that runs dry tests nothing
    record_property("cases of damaged inputs", tried)


def test_another_exception_is_seen(record_property: Callable[[str, object], None]) -> None:
    def read(value: int) -> None:
        if value > 10:
            raise KeyError(value)
        raise UserError("a line")

    with pytest.raises(KeyError, match="11"):
        holds("jsonl", 0.1, st.integers(), read, record_property)


def test_the_budget_is_ten_thousand() -> None:
    assert sum(BUDGET.values()) == 10_000


# --------------------------------------------------------------------------------------------------------- the command


DEFAULT = runpy.run_path(str(ROOT / "configs/default.py"))["get_config"]().to_dict()
FIELDS = [f"{group}.{name}" for group, fields in DEFAULT.items() for name in fields]
VALUES = st.one_of(
    st.sampled_from([repr(number) for number in ODD_NUMBERS] + ODD_TEXTS),
    st.sampled_from(
        ["mhc", "hc", "plain", "auto", "True", "None", "(1,2)", "(64,)", "[1]", "text:*.txt", "mix:a=1*stdlib"]
    ),
    st.integers(-2, 5000).map(str),
    st.floats(0, 2).map(repr),
    st.text(max_size=8),
)


@st.composite
def override(draw: st.DrawFn) -> list[str]:
    name = draw(st.sampled_from(FIELDS) | st.text(max_size=12) | st.sampled_from(FIELDS).map(lambda name: name[:-1]))
    value = draw(VALUES)
    form = draw(
        st.sampled_from(
            ["--config.{}={}", "--config.{}={}", "--config.{} {}", "--{}={}", "config.{}={}", "--config.{}"]
        )
    )
    if form == "--config.{} {}":
        return [f"--config.{name}", value]
    return [form.format(name, value)]


OVERRIDES = st.lists(override(), min_size=1, max_size=4).map(
    lambda several: [word for words in several for word in words]
)


@shares
def test_overrides_on_the_command_line(share: float, record_property: Callable[[str, object], None]) -> None:
    def read(words: list[str]) -> None:
        parser = cli.Parser(prog="train.py", example="", fields=cli.EVERY_FIELD)
        _, rest = parser.parse_known_args(words)
        made = cli.load_config(str(ROOT / "configs/demo.py"), rest, parser)
        configs.from_json(configs.to_json(made))

    holds("overrides", share, OVERRIDES, read, record_property)


@shares
def test_values_in_a_config_file(share: float, record_property: Callable[[str, object], None]) -> None:
    """Fields and groups get Python values of any type."""

    def read(tree: Any) -> None:
        made = from_config_dict(tree)
        configs.resolve(made, 258)

    strategy = damaged_json(DEFAULT, most=3)
    holds("config files", share, strategy, read, record_property)


# ------------------------------------------------------------------------------------------------------------- corpora


def corpus_config(source: str, cache: Path, **fields: Any) -> configs.Config:
    """Return a config that reads `source` in sequences of 16 tokens."""
    data = {"source": source, "sequence_length": 16, "cache_dir": str(cache), "holdout": 0.2, **fields}
    return from_config_dict({"data": data, "validation": {"batches": 1}, "train": {"batch_size": 2}})


def read_corpus(made: configs.Config, tokenizer: tokenizers.Tokenizer) -> None:
    """Read a batch of training and one of validation."""
    train = pipeline.train_iterator(made.data, tokenizer, batch_size=2, seed=0)
    try:
        next(train)
    finally:
        train.close()
    for batches in pipeline.validation_sets(made.data, tokenizer, batch_size=2, count=2, spread=True).values():
        for _ in batches:
            pass


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[], Path]:
    """Return a function that empties a folder and returns it."""

    def empty() -> Path:
        place = tmp_path / "inputs"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        return place

    return empty


RECORDS = [{"text": f"the stream number {number} is wide and carries the norm\n", "id": number} for number in range(12)]


@st.composite
def jsonl(draw: st.DrawFn) -> bytes:
    lines = [as_bytes(record) for record in RECORDS]
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(lines) - 1))
        lines[at] = as_bytes(draw(damaged_json(RECORDS[at])))
    content = draw(st.sampled_from([b"\n", b"\n", b"\r\n", b"\n\n"])).join(lines) + b"\n"
    return draw(st.just(content) | damaged_bytes(content))


@shares
def test_jsonl(share: float, folder: Callable[[], Path], record_property: Callable[[str, object], None]) -> None:
    tokenizer = tokenizers.load("bytes")

    def read(content: bytes) -> None:
        place = folder()
        (place / "texts.jsonl").write_bytes(content)
        read_corpus(corpus_config(f"text:{place}/*.jsonl", place / "cache"), tokenizer)

    holds("jsonl", share, jsonl(), read, record_property)


NPY = (
    b"\x93NUMPY\x01\x00v\x00{'descr': '<u2', 'fortran_order': False, 'shape': (120,), }".ljust(127)
    + b"\n"
    + bytes(number % 7 for number in range(240))
)


@st.composite
def token_file(draw: st.DrawFn) -> tuple[str, bytes, dict[str, Any]]:
    ids = np.asarray(draw(st.lists(st.integers(0, 257), min_size=100, max_size=120)))
    dtype = draw(st.sampled_from(["uint16", "uint32", "uint8", "int64", "float32"]))
    raw = ids.astype(dtype).tobytes()
    ending = draw(st.sampled_from(["npy", "bin"]))
    content = draw(st.just(raw) | damaged_bytes(raw)) if ending == "bin" else draw(damaged_bytes(NPY))
    fields: dict[str, Any] = {}
    if draw(st.booleans()):
        fields["token_dtype"] = draw(st.sampled_from(["uint16", "uint32"]))
    if draw(st.booleans()):
        fields["end_token"] = draw(st.sampled_from([0, 1, 257, 300, -1]))
    return ending, content, fields


@shares
def test_token_files(share: float, folder: Callable[[], Path], record_property: Callable[[str, object], None]) -> None:
    tokenizer = tokenizers.load("bytes")

    def read(given: tuple[str, bytes, dict[str, Any]]) -> None:
        ending, content, fields = given
        place = folder()
        (place / f"ids.{ending}").write_bytes(content)
        read_corpus(corpus_config(f"tokens:{place}/*.{ending}", place / "cache", **fields), tokenizer)

    holds("token files", share, token_file(), read, record_property)


TOKENIZERS = sorted((ROOT / "tests/data/tokenizers").glob("*.json"))


@functools.cache
def described(path: Path) -> Any:
    """Return a tokeniser's JSON with at most forty pieces and merges, so that an edit often lands elsewhere."""
    whole = json.loads(path.read_text("utf-8"))
    model = whole["model"]
    if isinstance(model.get("vocab"), list):
        model["vocab"] = model["vocab"][:40]
    model["merges"] = model["merges"][:10] if "merges" in model else None
    return whole if model["merges"] else {**whole, "model": {k: v for k, v in model.items() if k != "merges"}}


@st.composite
def tokenizer_file(draw: st.DrawFn) -> tuple[bytes, bytes | None]:
    good = described(draw(st.sampled_from(TOKENIZERS)))
    content = draw(st.one_of(damaged_json(good, most=3).map(as_bytes), damaged_bytes(as_bytes(good))))
    beside = draw(st.none() | damaged_json({"bos_token": "<s>", "eos_token": {"content": "</s>"}}).map(as_bytes))
    return content, beside


@shares
def test_tokenizer_json(
    share: float, folder: Callable[[], Path], record_property: Callable[[str, object], None]
) -> None:
    """The file is loaded, encodes and decodes, or a line says why not."""

    def read(given: tuple[bytes, bytes | None]) -> None:
        content, beside = given
        place = folder()
        (place / "tokenizer.json").write_bytes(content)
        if beside is not None:
            (place / "tokenizer_config.json").write_bytes(beside)
        tokenizer = tokenizers.load(str(place / "tokenizer.json"))
        ids, lengths = tokenizer.encode_with_bytes("the stream is 🙂 wide\n")
        assert len(ids) == len(lengths)
        tokenizer.decode(ids)
        tokenizer.decode(np.arange(min(tokenizer.vocab_size, 50)))

    holds("tokenizer.json", share, tokenizer_file(), read, record_property)


# ------------------------------------------------------------------------------------------------------ other's weights


@st.composite
def safetensors(draw: st.DrawFn, good: bytes) -> bytes:
    length = int.from_bytes(good[:8], "little")
    if draw(st.booleans()):
        return draw(damaged_bytes(good))
    header = draw(damaged_json(json.loads(good[8 : 8 + length]), most=3))
    told = as_bytes(header)
    return len(told).to_bytes(8, "little") + told + good[8 + length :]


@shares
def test_safetensors(share: float, folder: Callable[[], Path], record_property: Callable[[str, object], None]) -> None:
    """The header is read, and then every tensor that it names."""
    file = folder() / "good.safetensors"
    tensors: dict[str, np.ndarray] = {
        "a": np.zeros((2, 3), np.float32),
        "b": np.ones(4, np.float16),
        "none": np.zeros((0, 2), np.float32),
    }
    write(file, {name: array.shape for name, array in tensors.items()}, tensors.__getitem__)
    good = file.read_bytes()

    def read(content: bytes) -> None:
        damaged = folder() / "model.safetensors"
        damaged.write_bytes(content)
        opened = SafetensorsFile(damaged)
        for name in opened.entries:
            opened.read(name)

    holds("safetensors", share, safetensors(good), read, record_property)


# --------------------------------------------------------------------------------------------------------- run folders

FILES = ("config.json", "run.json", "metrics.jsonl", "events.jsonl", "probes.jsonl", "summary.json")


@st.composite
def run_file(draw: st.DrawFn) -> tuple[str, bytes]:
    name = draw(st.sampled_from(FILES))
    good = (WITNESS / name).read_bytes()
    if draw(st.booleans()):
        return name, draw(damaged_bytes(good))
    if name.endswith(".json"):
        return name, as_bytes(draw(damaged_json(json.loads(good), most=3)))
    lines = good.splitlines() or [b'{"step":4,"event":"spike"}']
    at = draw(st.integers(0, len(lines) - 1))
    lines[at] = as_bytes(draw(damaged_json(json.loads(lines[at]), most=3) | odd_json))
    return name, b"\n".join(lines) + b"\n"


@shares
def test_run_folders(
    share: float,
    folder: Callable[[], Path],
    record_property: Callable[[str, object], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Programs look at a run: a comparison without figures, run.json as an origin, a checkpoint's config."""
    comparison = importlib.import_module("mhc.eval.compare.write")
    monkeypatch.setattr(comparison, "draw", lambda *arguments: [])

    def read(given: tuple[str, bytes]) -> None:
        name, content = given
        place = folder()
        run = place / "run"
        shutil.copytree(WITNESS, run)
        (run / name).write_bytes(content)
        for program in (
            lambda: comparison.compare([run], place / "out", recompute_gains=False),
            lambda: provenance.read(run / "run.json"),
            lambda: find_checkpoint(run, None),
            lambda: committed_steps(run),
        ):
            with contextlib.suppress(UserError):  # the next program reads the run all the same
                program()

    holds("run folders", share, run_file(), read, record_property)


HF_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "eos_token_id": [1, 2],
    "sliding_window": None,
}


@shares
def test_hugging_face_folders(
    share: float, folder: Callable[[], Path], record_property: Callable[[str, object], None]
) -> None:
    """config.json and the shards' index are read, up to the config of ours that they mean."""

    def read(given: tuple[Any, Any]) -> None:
        described, index = given
        place = folder()
        (place / "config.json").write_bytes(as_bytes(described))
        write(place / "model-1.safetensors", {"lm_head.weight": (32, 8)}, lambda name: np.zeros((32, 8), np.float32))
        if index is not None:
            (place / "model.safetensors.index.json").write_bytes(as_bytes(index))
        else:
            (place / "model-1.safetensors").rename(place / "model.safetensors")
        source = HfFolder(place)
        hf.merged(source.config, {})

    index = {"metadata": {"total_size": 1024}, "weight_map": {"lm_head.weight": "model-1.safetensors"}}
    kinds = st.sampled_from(["llama", "mistral", "qwen2", "qwen3", "gemma", "gpt2", "mixtral", "deepseek_v3"])
    described = kinds.flatmap(lambda kind: damaged_json({**HF_CONFIG, "model_type": kind}, most=3))
    holds("Hugging Face folders", share, st.tuples(described, st.none() | damaged_json(index)), read, record_property)
