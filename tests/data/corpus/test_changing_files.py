"""Test a corpus whose files change while they are read: the same batches as without the change, or one line."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from mhc.config import DataConfig
from mhc.data import tokenizers
from mhc.data.corpus import indexed
from mhc.data.corpus.indexed import IndexedFiles
from mhc.data.pipeline import TrainIterator, train_iterator, validation_batches
from mhc.data.prepare import prepare
from mhc.data.rows.packing import Batch
from mhc.errors import UserError
from tests.data.conftest import prepare_tfds, sentence
from tests.data.test_pipeline import same

BYTES = tokenizers.load("bytes")


def lines(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    return [sentence(rng, rng.randint(5, 40)) for _ in range(count)]


def write_jsonl(path: Path, pack: Callable[[bytes], bytes] = bytes) -> None:
    path.write_bytes(pack("".join(json.dumps({"text": line}) + "\n" for line in lines(0, 200)).encode()))


def write_parquet(path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": lines(0, 200)}), path)


def ids() -> np.ndarray:
    return np.random.default_rng(0).integers(1, 256, 6000)


def make(kind: str, folder: Path) -> DataConfig:
    """Write a corpus of a kind below ``folder``, and return the config that reads it."""
    text = folder / "text"
    text.mkdir(parents=True)
    fields: dict[str, Any] = {"sequence_length": 16, "prefetch": 0, "cache_dir": str(folder / "cache"), "holdout": 0.1}
    if kind == "txt":
        (text / "a.txt").write_text("\n\n".join(lines(0, 200)), encoding="utf-8")
        return DataConfig(source=f"text:{text}/*", **fields)
    if kind in ("bin", "npy", "cut"):
        if kind == "npy":
            np.save(text / "a.npy", ids())
        else:
            ids().astype("<u2").tofile(text / "a.bin")
        return DataConfig(source=f"tokens:{text}/*", end_token=32 if kind == "cut" else None, **fields)
    if kind == "tfds":
        prepare_tfds(folder / "cache", {"train": lines(0, 200)})
        return DataConfig(source="tfds:tales", **fields)
    if kind == "parquet":
        write_parquet(text / "a.parquet")
    elif kind == "gz":
        write_jsonl(text / "a.jsonl.gz", gzip.compress)
    elif kind == "zst":
        write_jsonl(text / "a.jsonl.zst", zstandard.compress)
    else:
        write_jsonl(text / "a.jsonl")
    if kind == "prepared":
        prepare(f"text:{text}/*", str(folder / "made"), sequence_length=16, holdout=0.1, workers=1, shard_size=3000)
        return DataConfig(source=f"prepared:{folder}/made", **fields)
    return DataConfig(source=f"text:{text}/*", **fields)


def shrink(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 3)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b'{"text": "one more line"}\n' * 400)


def grow_in_front(path: Path) -> None:
    path.write_bytes(b'{"text": "one more line"}\n' * 4 + path.read_bytes())


def edit(path: Path) -> None:
    """Change some bytes in place, and leave the size and the time of change as they are."""
    state = path.stat()
    content = bytearray(path.read_bytes())
    content[state.st_size // 4 : -state.st_size // 4] = b"e" * len(content[state.st_size // 4 : -state.st_size // 4])
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes()[::-1])
    other.replace(path)


def vanish(path: Path) -> None:
    path.unlink()


CHANGES = [shrink, empty, grow, grow_in_front, edit, replace, vanish]
COUNT = 60  # batches
KINDS = ["txt", "jsonl", "gz", "zst", "parquet", "bin", "npy", "cut", "prepared", "tfds"]


def files_read(folder: Path) -> list[Path]:
    """Return the files that lie behind the documents: those of the corpus, of the cache and of the prepared folder."""
    found = [path for name in ("text", "cache", "made") for path in (folder / name).rglob("*") if path.is_file()]
    return [path for path in found if path.suffix != ".json"]


def read(iterator: TrainIterator, count: int) -> tuple[list[Batch], str]:
    """Return up to ``count`` batches, and the line that ended them or ""."""
    batches: list[Batch] = []
    try:
        for _ in range(count):
            batches.append(next(iterator))
    except UserError as error:
        return batches, str(error)
    return batches, ""


def opened_and_read(data: DataConfig, count: int) -> tuple[list[Batch], str]:
    """Return the first batches of a corpus without workers, and the line that ended them or ""."""
    try:
        iterator = train_iterator(dataclasses.replace(data, workers=0), BYTES, batch_size=4, seed=0)
    except UserError as error:
        return [], str(error)
    try:
        return read(iterator, count)
    finally:
        iterator.close()


def check(folder: Path, kind: str, change: Callable[[Path], None], *, before: int, workers: int = 0) -> None:
    """Read some batches, change every file and read on; check that batches are unchanged and that the end is a line."""
    data = make(kind, folder)
    expected, line = opened_and_read(data, COUNT)
    assert not line
    iterator = train_iterator(dataclasses.replace(data, workers=workers), BYTES, batch_size=4, seed=0)
    try:
        first, line = read(iterator, before)
        assert not line
        for path in files_read(folder):
            change(path)
        rest, line = read(iterator, COUNT - before)
    finally:
        iterator.close()
    same(first + rest, expected[: len(first + rest)])
    assert_told(line, complete=len(first + rest) == COUNT)


def assert_told(line: str, complete: bool) -> None:
    """Check that a read which ended early says so in one line that names a file or the corpus."""
    assert bool(line) != complete
    assert "\n" not in line and "Traceback" not in line
    if line:
        assert any(name in line for name in ("/text/a.", "shard-00", "tfds:", "text:", "tokens:")), line


def fast(kind: str, change: Callable[[Path], None]) -> bool:
    return change in (shrink, vanish) or (kind in ("jsonl", "bin") and change is not empty)


CASES = [
    pytest.param(kind, change, marks=[] if fast(kind, change) else pytest.mark.product)
    for kind in KINDS
    for change in CHANGES
]


@pytest.mark.parametrize(("kind", "change"), CASES)
def test_a_change_in_mid_epoch(kind: str, change: Callable[[Path], None], tmp_path: Path) -> None:
    check(tmp_path, kind, change, before=7)


@pytest.mark.product
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_change_before_the_first_batch(kind: str, change: Callable[[Path], None], tmp_path: Path) -> None:
    check(tmp_path, kind, change, before=0)


@pytest.mark.process
@pytest.mark.parametrize(("change", "before"), [(shrink, 7), (grow, 0), (vanish, 0)])
@pytest.mark.parametrize("kind", ["jsonl", "gz", "npy", "prepared", "tfds"])
def test_a_change_under_worker_processes(
    kind: str, change: Callable[[Path], None], before: int, tmp_path: Path
) -> None:
    """Worker processes open the corpus themselves, with their first batch."""
    check(tmp_path, kind, change, before=before, workers=2)


FAST = ["jsonl", "gz", "npy"]
OTHERS = [pytest.param(kind, marks=pytest.mark.product) for kind in ("txt", "parquet", "bin", "cut")]
STEPS = {  # of opening a corpus: the function after which the change comes
    "matched": (indexed, "match"),
    "copied": (IndexedFiles, "_local"),
    "scanned": (IndexedFiles, "_index_of"),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("change", [shrink, grow, vanish])
@pytest.mark.parametrize("kind", [*FAST, *OTHERS])
def test_a_change_while_the_corpus_is_opened(
    kind: str, change: Callable[[Path], None], step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The corpus is read as a whole, either as it is now or as it was."""
    data = make(kind, tmp_path)
    before, _ = opened_and_read(data, COUNT)
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    place, name = STEPS[step]
    usual = getattr(place, name)

    def and_change(*arguments: Any) -> Any:
        result = usual(*arguments)
        monkeypatch.setattr(place, name, usual)
        change(next(path for path in (tmp_path / "text").iterdir()))
        return result

    monkeypatch.setattr(place, name, and_change)
    batches, line = opened_and_read(data, COUNT)
    assert getattr(place, name) is usual
    after, _ = opened_and_read(data, COUNT)
    assert_told(line, complete=len(batches) == COUNT)
    if batches:
        assert any(len(batches) <= len(whole) and equal(batches, whole[: len(batches)]) for whole in (before, after))


def equal(one: list[Batch], other: list[Batch]) -> bool:
    return all(np.array_equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in a)


@pytest.mark.parametrize("change", [shrink, vanish])
@pytest.mark.parametrize("kind", ["jsonl", "npy", "prepared", "tfds"])
def test_a_change_under_validation(kind: str, change: Callable[[Path], None], tmp_path: Path) -> None:
    data = make(kind, tmp_path)
    expected = list(validation_batches(data, BYTES, batch_size=1))
    batches, line = [], ""
    try:
        for batch in validation_batches(data, BYTES, batch_size=1):
            batches.append(batch)
            if len(batches) == 2:
                for path in files_read(tmp_path):
                    change(path)
    except UserError as error:
        line = str(error)
    same(batches, expected[: len(batches)])
    assert_told(line, complete=len(batches) == len(expected))


@pytest.mark.parametrize("change", [empty, grow, vanish])
@pytest.mark.parametrize("kind", ["prepared", "tfds"])
def test_a_change_before_what_was_prepared_is_opened(kind: str, change: Callable[[Path], None], tmp_path: Path) -> None:
    data = make(kind, tmp_path)
    for path in files_read(tmp_path):
        change(path)
    batches, line = opened_and_read(data, COUNT)
    assert_told(line, complete=len(batches) == COUNT)


def test_a_damaged_index_in_the_cache_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed, "_CACHED_FROM", 1)
    data = make("jsonl", tmp_path)
    expected, _ = opened_and_read(data, COUNT)
    (kept,) = (tmp_path / "cache" / "index").iterdir()
    whole = kept.read_bytes()
    for content in (b"", b"not an index", whole[: len(whole) // 2]):
        kept.write_bytes(content)
        same(opened_and_read(data, COUNT)[0], expected)
        assert len(kept.read_bytes()) == len(whole)
