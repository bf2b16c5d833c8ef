"""Provide prepared folders for the tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mhc.config import DataConfig
from tests.data.prepare.samples import content, copied, prepared, raw, write_lines


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, bpe: str) -> tuple[DataConfig, DataConfig]:
    """Return a corpus of two files as text and prepared in fifteen shards."""
    folder = tmp_path_factory.mktemp("small")
    for number in range(2):
        write_lines(folder / "corpus" / f"{number}.jsonl", 30, number)
    data = raw(folder, f"text:{folder}/corpus/*.jsonl", bpe)
    return data, prepared(data, folder / "out", shard_size=9000, workers=2)


@pytest.fixture
def begun(tmp_path: Path, small: tuple[DataConfig, DataConfig]) -> tuple[DataConfig, Path, dict[str, bytes]]:
    """Return a folder as a kill leaves it: the text it is made of, the folder, and the folder when it is finished."""
    data, out = copied(small, tmp_path)
    expected = content(out)
    manifest = json.loads((out / "manifest.json").read_text())
    shards = manifest.pop("shards")
    for name in ("documents", "tokens", "bytes"):
        del manifest[name]
    (out / "manifest.json").unlink()
    (out / "plan.json").write_text(json.dumps(manifest))
    for shard in shards[2:]:
        (out / f"{shard['name']}.array_record").unlink()  # the table alone is no shard
    (out / ".part-shard-00002.array_record").write_bytes(b"half of a")
    return data, out, expected
