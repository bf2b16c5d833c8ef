"""Test the embedded corpus and TFDS datasets."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mhc.config import DataConfig
from mhc.data.corpus import stdlib
from mhc.data.corpus.sources import documents, open_source
from mhc.errors import UserError
from tests.data.conftest import prepare_tfds
from tests.data.corpus.samples import config, everything


def fake_library(root: Path) -> None:
    for number in range(80):
        folder = root / ("package" if number % 2 else ".")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"m{number}.py").write_text(f"# module {number}, naïve\nx = {number}\n")
    for unwanted in ("test/a.py", "package/tests/b.py", "site-packages/c.py", "encodings/d.py", "_sysconfigdata_x.py"):
        (root / unwanted).parent.mkdir(exist_ok=True)
        (root / unwanted).write_text("unwanted = True\n")
    (root / "empty.py").touch()
    (root / "notes.txt").write_text("no source")
    (root / "latin.py").write_bytes("# caf\xe9".encode("latin-1"))


def test_the_builder_splits_a_tree_by_file_and_leaves_out_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_library(tmp_path / "lib")
    monkeypatch.setattr(stdlib.sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    data = config(tmp_path, "stdlib")
    train, held = list(documents(data, "train")), list(documents(data, "validation"))
    expected = {path.read_bytes() for path in (tmp_path / "lib").rglob("m*.py")}
    assert len(expected) == 80
    assert sorted(train + held) == sorted(expected)
    assert 1 <= len(held) < 20
    assert open_source(data, "train").holdout is None
    prepared = list((tmp_path / "cache").iterdir())
    assert len(prepared) == 1  # no half-prepared folder beside it
    assert prepared[0].name.startswith("stdlib-1-python3.")

    before = {path: path.stat().st_mtime_ns for path in prepared[0].rglob("*")}
    assert list(documents(data, "train")) == train
    assert {path: path.stat().st_mtime_ns for path in prepared[0].rglob("*")} == before
    (tmp_path / "lib" / "m1000.py").write_text("another = 1\n")
    assert len(everything(data)) == 81  # another library is another dataset
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_tree_too_small_to_hold_something_out_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(stdlib.sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    with pytest.raises(UserError, match=r"data.source: stdlib: found 1 source file\(s\) in .*/lib, too few"):
        open_source(config(tmp_path, "stdlib"), "train")


@pytest.mark.process
def test_two_processes_prepare_at_once_and_no_tensorflow_is_loaded(tmp_path: Path) -> None:
    """Both processes see the same batches of the real corpus, and prepare one folder between them."""
    program = (
        "import hashlib, sys\n"
        "from mhc.config import DataConfig\n"
        "from mhc.data import pipeline, tokenizers\nfrom mhc.data.corpus import sources\n"
        "data = DataConfig(cache_dir=sys.argv[1])\n"
        "tokenizer = tokenizers.load('bytes')\n"
        "iterator = pipeline.train_iterator(data, tokenizer, batch_size=8, seed=0)\n"
        "batches = [next(iterator) for _ in range(20)]\n"
        "held = list(pipeline.validation_batches(data, tokenizer, batch_size=8, batches=4))\n"
        "assert 'tensorflow' not in sys.modules\n"
        "sizes = [sum(map(len, sources.documents(data, split))) for split in ('train', 'validation')]\n"
        "digest = hashlib.sha256(b''.join(b['tokens'].tobytes() for b in batches + held)).hexdigest()\n"
        "print(*sizes, digest)\n"
    )
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", program, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for _ in range(2)
    ]
    (one, noise), (other, more) = [process.communicate(timeout=120) for process in running]
    assert (noise, more) == ("", "")
    assert one == other
    train, held, _ = one.split()
    assert 4e6 < int(train) < 12e6
    assert 0.01 < int(held) / int(train) < 0.1
    assert len(list(tmp_path.iterdir())) == 1


@pytest.fixture
def prepared(tmp_path: Path) -> Callable[..., DataConfig]:
    """Return a function that prepares a TFDS dataset of 100 texts a split and returns the config that reads it."""

    def make(splits: tuple[str, ...], field: str = "text", file_format: str = "array_record") -> DataConfig:
        texts = {split: [f"{split} tale {number}" for number in range(100)] for split in splits}
        prepare_tfds(tmp_path / "cache", texts, field, file_format)
        return config(tmp_path, "tfds:tales")

    return make


def test_tfds_splits(prepared: Callable[..., DataConfig]) -> None:
    data = prepared(("train", "test"))
    assert sorted(documents(data, "train")) == sorted(f"train tale {n}".encode() for n in range(100))
    assert sorted(documents(data, "validation")) == sorted(f"test tale {n}".encode() for n in range(100))
    for name in ("tfds:tales:1.2.3", "tfds:tales:1.*.*"):
        assert len(open_source(dataclasses.replace(data, source=name), "train")) == 100
    assert re.fullmatch(r"tfds:tales, split train, example \d+", open_source(data, "train").name(5))
    assert open_source(data, "train").holdout is None


def test_a_tfds_dataset_with_one_split_is_held_out_by_hash(prepared: Callable[..., DataConfig]) -> None:
    data = dataclasses.replace(prepared(("train",)), holdout=0.2)
    held = list(documents(data, "validation"))
    assert 5 < len(held) < 40
    assert open_source(data, "train").holdout == 0.2
    assert everything(data) == sorted(f"train tale {n}".encode() for n in range(100))


def test_tfds_mistakes(prepared: Callable[..., DataConfig]) -> None:
    data = prepared(("train",), field="texts")
    with pytest.raises(
        UserError, match=r"tfds:tales: no feature 'text' \(data.field\) among .*; did you mean 'texts'\?"
    ):
        open_source(data, "train")
    with pytest.raises(UserError, match=r"feature 'id' \(data.field\) is not text"):
        open_source(dataclasses.replace(data, field="id"), "train")
    with pytest.raises(UserError, match=r"tfds:tale is not prepared in .* \(has: tales\); did you mean 'tfds:tales'\?"):
        open_source(dataclasses.replace(data, source="tfds:tale"), "train")
