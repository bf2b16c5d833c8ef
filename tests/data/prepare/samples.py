"""Make corpora for the tests of preparing, and compare two folders."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mhc.config import DataConfig
from mhc.data import tokenizers
from mhc.data.pipeline import train_iterator, validation_batches
from mhc.data.prepare import prepare
from mhc.errors import UserError
from tests.data.conftest import sentence
from tests.data.test_pipeline import same, take

ROOT = Path(__file__).parents[3]


def write_lines(path: Path, count: int, seed: int, most: int = 40) -> None:
    """Write ``count`` texts of up to so many lines; the longest has several pieces, a few are cut within words."""
    rng = random.Random(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = []
    for _ in range(count):
        lines = [sentence(rng, 12) for _ in range(rng.randint(1, most))]
        texts.append("\n".join(lines) if rng.random() < 0.8 else "".join(lines).replace(" ", ""))
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def raw(folder: Path, source: str, tokenizer: str, **changes: Any) -> DataConfig:
    changes = {"sequence_length": 16, "prefetch": 0, "cache_dir": str(folder / "cache"), "holdout": 0.2, **changes}
    return DataConfig(source=source, tokenizer=tokenizer, **changes)


def prepared(data: DataConfig, out: Path, **options: Any) -> DataConfig:
    """Prepare a corpus, and return the config that reads it prepared."""
    fields = ("tokenizer", "field", "sequence_length", "holdout", "cache_dir")
    prepare(data.source, str(out), **{name: getattr(data, name) for name in fields}, **options)
    return dataclasses.replace(data, source=f"prepared:{out}")


def copied(small: tuple[DataConfig, DataConfig], tmp_path: Path) -> tuple[DataConfig, Path]:
    """Copy corpus and prepared folder for one test; return what is prepared, and the folder."""
    text, made = small
    corpus, out = (Path(data.source.partition(":")[2]) for data in (text, made))
    shutil.copytree(corpus.parent, tmp_path / "corpus")
    shutil.copytree(out, tmp_path / "out")
    origin = json.loads((tmp_path / "out" / "origin.json").read_text())
    for name, place in origin["files"].items():
        place["path"] = str(tmp_path / "corpus" / name)
    (tmp_path / "out" / "origin.json").write_text(json.dumps(origin))
    return dataclasses.replace(text, source=f"text:{tmp_path}/corpus/*.jsonl"), tmp_path / "out"


def equal_batches(one: DataConfig, other: DataConfig, count: int = 60) -> None:
    tokenizer = tokenizers.load(one.tokenizer)
    training = [train_iterator(data, tokenizer, batch_size=4, seed=1) for data in (one, other)]
    same(*(take(iterator, count) for iterator in training))
    same(*(list(validation_batches(data, tokenizer, batch_size=4, batches=0)) for data in (one, other)))


def changed(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"stream", b"Stream", 1))


def line(read: Callable[[], Any]) -> str:
    """Return the line of the UserError; "" for none."""
    try:
        read()
    except UserError as error:
        return str(error)
    return ""
