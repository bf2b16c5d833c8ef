"""Test the names of files: usual endings in any case, and those of other kinds."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from mhc.data.corpus.sources import open_source
from mhc.errors import UserError
from tests.data.corpus.samples import config, everything


@pytest.mark.parametrize("name", ["a.JSONL", "a.ndjson", "a.jsonlines", "a.Jsonl", "a.ldjson", "a.jsonl.bak.jsonl"])
@pytest.mark.parametrize("packed", ["", ".gz", ".GZ", ".zst", ".zstd", ".ZSTD", ".gzip"])
def test_every_usual_name_of_lines_is_read_by_its_field(tmp_path: Path, name: str, packed: str) -> None:
    content = b'{"text": "one"}\n\n{"text": "two"}\n{"text": "three"}\n'
    packs: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.compress, "zs": zstandard.compress}
    pack = packs.get(packed[1:3].lower(), bytes)
    (tmp_path / f"{name}{packed}").write_bytes(pack(content))
    data = config(tmp_path, f"text:{tmp_path}/{name}{packed}")
    assert sorted(everything(data)) == [b"one", b"three", b"two"]


@pytest.mark.parametrize("name", ["a.PARQUET", "a.pq", "a.Parquet"])
def test_every_usual_name_of_parquet_is_read(tmp_path: Path, name: str) -> None:
    table = pyarrow.table({"text": ["one", "two", "three"]})
    pyarrow.parquet.write_table(table, tmp_path / name)
    assert sorted(everything(config(tmp_path, f"text:{tmp_path}/{name}"))) == [b"one", b"three", b"two"]


@pytest.mark.parametrize("name", ["a.NPY", "a.BIN", "a.Npy.GZ", "a.bin.ZSTD"])
def test_every_usual_name_of_ids_is_read(tmp_path: Path, name: str) -> None:
    ids = np.arange(200, dtype=np.uint16) % 250
    path = tmp_path / "plain.npy"
    np.save(path, ids)
    content = path.read_bytes() if "npy" in name.lower() else ids.tobytes()
    packs: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zstd": zstandard.compress}
    pack = packs.get(Path(name).suffix.lower(), bytes)
    (tmp_path / name).write_bytes(pack(content))
    source = open_source(config(tmp_path, f"tokens:{tmp_path}/{name}", validation="stdlib"), "train")
    np.testing.assert_array_equal(np.concatenate([cast(np.ndarray, source[n]) for n in range(len(source))]), ids)


@pytest.mark.parametrize("name", ["a.JSON", "a.XZ", "a.txt.BZ2", "a.lz4", "a.Zip", "a.tgz", "a.Arrow", "a.json.GZ"])
def test_a_file_of_another_kind_is_refused_whatever_the_case(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"words " * 99)
    with pytest.raises(UserError, match=f"{name} is not a text file"):
        open_source(config(tmp_path, f"text:{tmp_path}/{name}"), "train")


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_a_compressed_file_without_its_ending_is_named(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    (tmp_path / "a.txt").write_bytes(pack(b"words " * 99))
    with pytest.raises(UserError, match=r"a.txt: not UTF-8: it is compressed, and its name must end in \.(gz|zst)$"):
        open_source(config(tmp_path, f"text:{tmp_path}/a.txt"), "train")
