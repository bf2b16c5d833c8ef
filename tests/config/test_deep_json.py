"""Test that JSON that is nested absurdly deep is refused in one line, wherever the project reads JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mhc import config, provenance
from mhc.data import tokenizers
from mhc.data.corpus.prepared import Prepared
from mhc.data.shards.manifest import MANIFEST
from mhc.errors import UserError
from mhc.eval.common import prompts
from mhc.eval.regression import golden as golden_files
from mhc.files import read_json, read_jsonl
from mhc.grid import folder as grid_folder
from mhc.interop import HfFolder
from mhc.interop.safetensors import SafetensorsFile
from mhc.train.checkpoint import find_checkpoint
from tpu import table

DEEP = "[" * 100_000 + "]" * 100_000
OBJECT = '{"a":' * 100_000 + "1" + "}" * 100_000


def written(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def golden(path: Path, content: str) -> Path:
    with path.open("wb") as file:
        np.savez(file, about=np.frombuffer(content.encode(), np.uint8))
    return path


def safetensors(path: Path, content: str) -> Path:
    path.write_bytes(len(content).to_bytes(8, "little") + content.encode())
    return path


READERS: dict[str, Callable[[Path, str], Any]] = {
    "config": lambda folder, text: config.from_json(text),
    "run": lambda folder, text: find_checkpoint(written(folder / "config.json", text).parent),
    "run.json": lambda folder, text: provenance.read(written(folder / "run.json", text)),
    "read_json": lambda folder, text: read_json(written(folder / "a.json", text)),
    "read_jsonl": lambda folder, text: read_jsonl(written(folder / "a.jsonl", f'{text}\n{{"step": 1}}\n')),
    "tokenizer.json": lambda folder, text: tokenizers.load(str(written(folder / "tokenizer.json", text))),
    "tokenizer_config.json": lambda folder, text: tokenizers.declared_special(
        written(folder / tokenizers.SPECIAL, text).with_name("tokenizer.json")
    ),
    "prompts": lambda folder, text: prompts.read_prompts(str(written(folder / "a.jsonl", text)), "prompt"),
    "prepared": lambda folder, text: Prepared(
        config.DataConfig(), str(written(folder / MANIFEST, text).parent), "train", whole=True
    ),
    "golden": lambda folder, text: golden_files.read(golden(folder / "a.npz", text)),
    "safetensors": lambda folder, text: SafetensorsFile(safetensors(folder / "a.safetensors", text)),
    "hugging face": lambda folder, text: HfFolder(written(folder / "config.json", text).parent).config,
    "table": lambda folder, text: table.main([str(written(folder / "a.json", text))]),
}


@pytest.mark.parametrize("text", [DEEP, OBJECT], ids=["lists", "objects"])
@pytest.mark.parametrize("name", READERS)
def test_json_nested_too_deep_is_a_line(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(UserError) as caught:
        READERS[name](tmp_path, text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_json_that_is_read_but_nested_is_read(tmp_path: Path) -> None:
    content = '{"a":' * 300 + "1" + "}" * 300
    assert read_json(written(tmp_path / "a.json", content)) == json.loads(content)


def test_the_last_line_of_an_arm_may_be_anything(tmp_path: Path) -> None:
    written(tmp_path / "metrics.jsonl", '{"step": 3}\n' + "[" * 9000 + "\n")
    assert grid_folder.last_metrics(tmp_path)["step"] == 3
