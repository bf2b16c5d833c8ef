"""Sources: what they read, how they split, and the one line that each mistake gives."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from mhc.config import DataConfig
from mhc.data import tokenizers
from mhc.data.corpus import indexed, stdlib
from mhc.data.corpus.sources import Source, documents, open_source
from mhc.data.corpus.text import TextFiles
from mhc.data.pipeline import train_iterator, validation_batches
from mhc.data.rows.encoding import open_corpus
from mhc.errors import UserError
from tests.data.conftest import prepare_tfds

BYTES = tokenizers.load("bytes")


def config(folder: Path, source: str, **changes: Any) -> DataConfig:
    changes = {"sequence_length": 16, "prefetch": 0, "cache_dir": str(folder / "cache"), **changes}
    return DataConfig(source=source, **changes)


def text_of(source: Source, index: int) -> bytes:
    document = source[index]
    assert isinstance(document, bytes)
    return document


def everything(data: DataConfig) -> list[bytes]:
    return sorted([*documents(data, "train"), *documents(data, "validation")])


# --- text


def test_text_files_and_their_gzip_twins_give_the_same_documents(tmp_path: Path) -> None:
    for number in range(50):
        text = f"document {number}, naïve\nsecond line\n".encode()
        (tmp_path / f"{number}.txt").write_bytes(text)
        (tmp_path / f"{number}.txt.gz").write_bytes(gzip.compress(text))
    plain = config(tmp_path, f"text:{tmp_path}/*.txt")
    packed = config(tmp_path, f"text:{tmp_path}/*.gz")
    assert everything(plain) == everything(packed) == sorted(path.read_bytes() for path in tmp_path.glob("*.txt"))
    assert re.search(r"\d+\.txt\.gz, bytes 0–\d+$", open_source(packed, "train").name(3))


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz"])
def test_jsonl_lines_are_documents_and_blank_ones_are_skipped(tmp_path: Path, ending: str) -> None:
    lines = [json.dumps({"id": number, "body": f"text {number} – é\n"}) for number in range(50)]
    content = "\n".join([*lines[:20], "", "  ", '{"body": ""}', *lines[20:]]).encode()  # no newline at the end
    (tmp_path / f"a{ending}").write_bytes(gzip.compress(content) if ending.endswith("gz") else content)
    data = config(tmp_path, f"text:{tmp_path}/a{ending}", field="body")
    assert everything(data) == sorted(f"text {number} – é\n".encode() for number in range(50))
    source = open_source(data, "train")
    names = {text_of(source, index): source.name(index) for index in range(len(source))}
    for text, name in names.items():
        number = int(text.split()[1])
        assert name == f"{tmp_path}/a{ending}, line {number + 1 + 3 * (number >= 20)}"


def test_a_long_file_is_cut_into_blocks_that_add_up_to_it(tmp_path: Path) -> None:
    text = "".join(f"paragraph {number} — naïve\nits second line\n\n" for number in range(400)).encode()
    (tmp_path / "book.txt").write_bytes(text)
    data = config(tmp_path, f"text:{tmp_path}/book.txt")
    train, held = open_source(data, "train"), open_source(data, "validation")
    placed = []
    for source in (train, held):
        for index in range(len(source)):
            start = int(source.name(index).split()[-1].split("–")[0])
            placed.append((start, text_of(source, index), source.ends(index)))
    placed.sort()
    assert b"".join(piece for _, piece, _ in placed) == text
    assert all(piece.endswith(b"\n\n") for _, piece, _ in placed)
    assert [ends for *_, ends in placed] == [False] * (len(placed) - 1) + [True]
    assert 0.01 < len(held) / len(placed) < 0.15


def test_few_files_are_held_out_by_document_and_many_by_file(tmp_path: Path) -> None:
    for count in (3, 60):
        folder = tmp_path / str(count)
        folder.mkdir()
        for number in range(count):
            lines = [json.dumps({"text": f"{number} {line}"}) for line in range(40)]
            (folder / f"{number}.jsonl").write_text("\n".join(lines))
        data = config(tmp_path, f"text:{folder}/*.jsonl")
        train, held = ({doc.split()[0] for doc in documents(data, split)} for split in ("train", "validation"))
        assert held
        assert bool(train & held) == (count == 3)


def test_the_split_stays_when_the_corpus_moves_and_changes_with_nothing_but_names(tmp_path: Path) -> None:
    for place in ("one", "deeper/two"):
        folder = tmp_path / place / "sub"
        folder.mkdir(parents=True)
        for number in range(60):
            (folder / f"{number}.txt").write_text(f"{number}")
    first = config(tmp_path, f"text:{tmp_path}/one/**/*.txt", sequence_length=1)
    second = config(tmp_path, f"text:{tmp_path}/deeper/two/**/*.txt", sequence_length=1)
    assert sorted(documents(first, "validation")) == sorted(documents(second, "validation"))


def test_a_validation_corpus_of_its_own_is_taken_whole_and_so_is_the_training_one(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": f"{name}{n}"}) for n in range(100)))
    data = config(tmp_path, f"text:{tmp_path}/a.jsonl", validation=f"text:{tmp_path}/b.jsonl")
    assert sorted(documents(data, "train")) == sorted(f"a{n}".encode() for n in range(100))
    assert sorted(documents(data, "validation")) == sorted(f"b{n}".encode() for n in range(100))
    assert everything(dataclasses.replace(data, validation=data.source)) == sorted(f"a{n}".encode() for n in range(100))


def test_the_index_of_a_large_corpus_is_kept_and_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed, "_CACHED_FROM", 1)
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"text {n}"}) for n in range(100)))
    data = config(tmp_path, f"text:{path}")
    first = everything(data)
    scans = []

    def scan(self: TextFiles, *_: object) -> Iterator[tuple[int, int, int]]:
        scans.append(self.label)
        return iter(())

    monkeypatch.setattr(TextFiles, "_scan_lines", scan)
    assert everything(data) == first
    assert not scans
    path.write_text(path.read_text() + "\n")
    with pytest.raises(UserError, match="empty"):
        everything(data)
    assert scans


# --- tokens


def test_token_files_of_both_kinds_are_cut_at_the_end_token(tmp_path: Path) -> None:
    docs = [np.arange(number % 7 + 1) + number for number in range(80)]
    ids = np.concatenate([np.append(doc, 250) for doc in docs])
    np.save(tmp_path / "a.npy", ids.astype(np.int64))
    ids.astype(np.uint16).tofile(tmp_path / "a.bin")
    ids.astype(np.uint32).tofile(tmp_path / "b.bin")
    found = []
    for name, token_dtype in (("a.npy", "uint16"), ("a.bin", "uint16"), ("b.bin", "uint32")):
        data = config(tmp_path, f"tokens:{tmp_path}/{name}", end_token=250, token_dtype=token_dtype)
        sources = [open_source(data, "train"), open_source(data, "validation")]
        found.append(sorted(tuple(cast(np.ndarray, source[i])) for source in sources for i in range(len(source))))
        assert all(source.ends(0) for source in sources)
    assert found[0] == found[1] == found[2] == sorted(tuple(doc) for doc in docs)


def test_token_files_without_an_end_token_are_cut_and_lose_nothing(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 256, 10_000)
    ids.astype(np.uint16).tofile(tmp_path / "a.bin")
    data = config(tmp_path, f"tokens:{tmp_path}/a.bin")
    sources = [open_source(data, "train"), open_source(data, "validation")]
    assert min(map(len, sources)) > 0
    found = np.concatenate([np.asarray(source[i]) for source in sources for i in range(len(source))])
    np.testing.assert_array_equal(np.sort(found), np.sort(ids))
    batch = next(train_iterator(data, BYTES, batch_size=4, seed=0))
    assert (batch["target_bytes"] == 1).mean() > 0.9
    held = b"".join(documents(dataclasses.replace(data, tokenizer="bytes"), "validation"))
    assert held.decode(errors="replace")


# --- errors


def jsonl(content: bytes | str) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        (folder / "a.jsonl").write_bytes(content.encode() if isinstance(content, str) else content)
        return f"text:{folder}/a.jsonl"

    return make


def file(name: str, content: bytes, kind: str = "text") -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        (folder / name).write_bytes(content)
        return f"{kind}:{folder}/{name}"

    return make


def npy(array: np.ndarray) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        np.save(folder / "a.npy", array)
        return f"tokens:{folder}/a.npy"

    return make


def cut_npy(folder: Path) -> str:
    np.save(folder / "a.npy", np.arange(99))
    content = (folder / "a.npy").read_bytes()
    (folder / "a.npy").write_bytes(content[:20])
    return f"tokens:{folder}/a.npy"


def npz(folder: Path) -> str:
    np.savez(folder / "a.npz", np.arange(99))
    (folder / "a.npz").rename(folder / "a.npy")
    return f"tokens:{folder}/a.npy"


def renamed_npy(folder: Path) -> str:
    np.save(folder / "a.npy", np.arange(99))
    (folder / "a.npy").rename(folder / "a.bin")
    return f"tokens:{folder}/a.bin"


POINTERS = {
    "git-lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n",
    "git-annex": b"/annex/objects/SHA256E-s12345--" + b"0" * 64 + b".npy\n",
}
GOOD = b'{"text": "good"}\n'
MISTAKES: dict[str, tuple[Callable[[Path], str] | str, str]] = {
    "missing": (lambda f: f"text:{f}/no/*.txt", r"text:.*/no/\*.txt matches no file"),
    "missing tokens": (lambda f: f"tokens:{f}/no.bin", "tokens:.*/no.bin matches no file"),
    "directory": (lambda f: f"text:{f}", r"is a directory; name its files, as in text:.*/\*\*/\*.txt"),
    "empty": (file("a.txt", b""), r"text:.*a.txt is empty: 1 file\(s\) without any text"),
    "blank": (file("a.txt", b" \n\n "), "is empty"),
    "no lines": (jsonl("\n\n"), "is empty"),
    "no tokens": (npy(np.zeros(0, np.int32)), r"is empty: 1 file\(s\) without any token"),
    "single document": (jsonl(GOOD), r"nothing is left for train of 1 document\(s\) at data.holdout=0.05"),
    "short": (
        jsonl(GOOD * 2),
        r"5 tokens in its 1 training document\(s\), fewer than one sequence \(data.sequence_length=16\)",
    ),
    "not UTF-8": (
        file("a.txt", b"line one\nline \xff two\n"),
        r"a.txt, byte 14: not UTF-8 \(0xff: invalid start byte\)",
    ),
    "far not UTF-8": (file("a.txt", b"some words\n" * 999 + b"\xc3("), r"a.txt, byte 10989: not UTF-8"),
    "jsonl not UTF-8": (jsonl(GOOD + b'{"text": "\xff"}'), "a.jsonl, line 2: not UTF-8 at byte 27 of the file"),
    "not JSON": (jsonl(GOOD * 2 + b"{oops}\n"), "a.jsonl, line 3: not JSON: Expecting property name"),
    "no object": (jsonl(GOOD + b"[1]\n"), "a.jsonl, line 2: not a JSON object but list"),
    "no field": (
        jsonl(GOOD + b'{"body": "x"}\n'),
        r"a.jsonl, line 2: no field 'text' \(data.field\); the line's fields: 'body'",
    ),
    "no string": (jsonl(GOOD + b'{"text": 3}\n'), "a.jsonl, line 2: field 'text' is not a string but int"),
    "surrogate": (jsonl(GOOD + b'{"text": "\\ud800"}\n'), "a.jsonl, line 2: field 'text' has an unpaired surrogate"),
    "no gzip": (file("a.txt.gz", b"plain"), "a.txt.gz is not a readable gzip file: Not a gzipped file"),
    "broken gzip": (file("a.txt.gz", gzip.compress(b"abc" * 999)[:-12]), "a.txt.gz is not a readable gzip file: "),
    "no text file": (file("a.arrow", b"ARROW"), "a.arrow is not a text file; text: reads plain text and .jsonl"),
    "token too large": (
        npy(np.array([5] * 300 + [258])),
        "a.npy, token 300: id 258 is not of 0 to 257, the ids",
    ),
    "negative token": (npy(np.array([5] * 300 + [-1])), "a.npy, token 300: id -1 is not of 0 to 257"),
    "two axes": (npy(np.zeros((2, 2), np.int32)), r"a.npy: wanted one axis of integers, found shape \(2, 2\) of int32"),
    "floats": (npy(np.zeros(3)), r"a.npy: wanted one axis of integers, found shape \(3,\) of float64"),
    "no npy": (
        file("a.npy", b"xx", "tokens"),
        "a.npy is not a readable .npy file: it has no numpy header; raw ids are",
    ),
    "raw ids as npy": (
        file("a.NPY", np.arange(999, dtype=np.uint16).tobytes(), "tokens"),
        r"a.NPY is .*: it has no numpy header; raw ids are read from files whose names end in .bin, of data.token_d",
    ),
    "cut npy": (cut_npy, "a.npy is not a readable .npy file: "),
    "objects": (npy(np.array([1, "a", None], object)), "a.npy is not a readable .npy file: it holds Python objects"),
    "npz as npy": (npz, "a.npy is not a readable .npy file: it has no numpy header"),
    "npy as bin": (renamed_npy, "a.bin has a numpy header, which raw ids have not; its name must end in .npy"),
    **{
        f"{kind} pointer as {name}": (
            file(name, content, reader),
            rf"{name} is a {kind} pointer, not the file itself: ",
        )
        for name, reader in (
            *((name, "text") for name in ("a.txt", "a.jsonl", "a.parquet", "a.txt.gz", "a.jsonl.ZST")),
            *((name, "tokens") for name in ("a.npy", "a.bin", "a.bin.zst")),
        )
        for kind, content in POINTERS.items()
    },
    "odd bin": (file("a.bin", b"xxx", "tokens"), "a.bin: 3 bytes are no multiple of the 2 of data.token_dtype=uint16"),
    "no token file": (file("a.txt", b"xxx", "tokens"), "a.txt: tokens: reads .npy and .bin files, not .txt"),
    "no dataset": (
        lambda f: "tfds:wikipedia/en",
        "tfds:wikipedia/en is not prepared in .*; to prepare it: tfds build wikipedia/en --data_dir=",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line_that_names_file_and_place(tmp_path: Path, case: str) -> None:
    source, message = MISTAKES[case]
    (tmp_path / "corpus").mkdir()
    data = config(tmp_path, source if isinstance(source, str) else source(tmp_path / "corpus"))
    with pytest.raises(UserError) as caught:
        open_corpus(data, BYTES, "train")
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


def wide(rng: np.random.Generator, count: int, vocabulary: int, dtype: str, path: Path) -> None:
    rng.integers(0, vocabulary, count).astype(dtype).tofile(path)


@pytest.mark.parametrize(
    ("written", "read", "vocabulary", "message"),
    [
        (
            "uint32",
            "uint16",
            258,
            r"ids of 32 bits or more, read as data.token_dtype=uint16 \(every second id is 0\); set",
        ),
        ("int64", "uint16", 258, r"set data.token_dtype=uint32"),
        (
            "int64",
            "uint32",
            258,
            r"of 64 bits or more, read as data.token_dtype=uint32 .* set data.token_dtype=int64",
        ),
        ("uint32", "uint16", 200_000, r"read as data.token_dtype=uint16; set data.token_dtype=uint32"),
        ("uint16", "uint32", 258, r"several ids of 16 bits seem to be read as one of data.token_dtype=uint32"),
    ],
)
def test_ids_of_another_width_are_named(tmp_path: Path, written: str, read: str, vocabulary: int, message: str) -> None:
    wide(np.random.default_rng(0), 4000, vocabulary, written, tmp_path / "a.bin")
    data = config(tmp_path, f"tokens:{tmp_path}/a.bin", token_dtype=read)
    with pytest.raises(UserError, match=rf"a.bin.*{message}"):
        open_corpus(data, BYTES, "train")


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
@pytest.mark.parametrize("vocabulary", [2, 16, 256])
def test_ids_of_their_own_width_are_read(tmp_path: Path, dtype: str, vocabulary: int) -> None:
    """However few of them there are, and however small."""
    for count in (40, 4001):
        wide(np.random.default_rng(1), count, vocabulary, dtype, tmp_path / "a.bin")
        data = config(tmp_path, f"tokens:{tmp_path}/a.bin", token_dtype=dtype, validation="stdlib")
        assert len(open_corpus(data, BYTES, "train"))


# Names of files -------------------------------------------------------------------------------------------------------


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


def test_lines_of_json_in_a_text_file_are_worth_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    line = json.dumps({"text": "some words"}) + "\n"
    for name, content, told in (
        ("a.txt", line * 99, True),
        ("b.log", "\n" + line * 9999, True),
        ("c", "\ufeff" + line, True),
        ("d.txt", json.dumps({"body": "x"}) + "\n", False),
        ("e.txt", "{ not json }\n" * 9, False),
        ("f.txt", "[" * 99_999, False),
        ("g.py", 'x = {"text": 1}\n', False),
        ("h.jsonl", line * 99, False),
    ):
        caplog.clear()
        (tmp_path / name).write_text(content, "utf-8")
        open_source(config(tmp_path, f"text:{tmp_path}/{name}", holdout=0.0, validation="stdlib"), "train")
        assert [name in record.getMessage() for record in caplog.records] == [True] * told
        if told:
            assert "its lines are JSON objects with the field 'text'" in caplog.text


def test_lines_that_were_read_as_text_are_another_corpus(tmp_path: Path) -> None:
    """A position in them must not go on in documents of other places; of all other names nothing has changed."""
    content = (b'{"text": "' + b"word " * 20 + b'"}\n') * 40
    prints = {}
    for name in ("a.txt", "a.jsonl", "a.JSONL", "a.ndjson"):
        (tmp_path / name).write_bytes(content)
        prints[name] = open_source(config(tmp_path, f"text:{tmp_path}/{name}"), "train")
    settings = {name: cast(TextFiles, of)._settings() for name, of in prints.items()}
    assert settings["a.txt"] == settings["a.jsonl"] != settings["a.JSONL"] != settings["a.ndjson"]


def test_further_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD * 50)
    data = config(tmp_path, f"text:{tmp_path}/a.jsonl")
    with pytest.raises(UserError, match=r"nothing is left for validation of 50 document\(s\) at data.holdout=0.0; "):
        validation_batches(dataclasses.replace(data, holdout=0.0), BYTES, batch_size=2, batches=0)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"text"))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"data\.cache_dir: cannot write to"):
        open_source(config(tmp_path, f"text:{tmp_path}/b.txt.gz", cache_dir=str(tmp_path / "file")), "train")
    with pytest.raises(UserError, match=r"data\.cache_dir: cannot write to"):
        open_source(config(tmp_path, "stdlib", cache_dir=str(tmp_path / "file")), "train")


def test_half_a_file_never_stays_in_the_cache(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(os.urandom(1 << 16))[:-9])
    with pytest.raises(UserError, match="gzip"):
        open_source(config(tmp_path, f"text:{tmp_path}/a.txt.gz"), "train")
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


# --- stdlib and tfds


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
    """The real corpus, end to end: both processes see the same batches, and prepare one folder between them."""
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
    root = Path(__file__).parents[2]
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
    """Prepare a TFDS dataset of 100 short texts a split, and give the config that reads it."""

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


def test_what_ends_a_line_elsewhere_is_text_in_a_line_of_json(tmp_path: Path) -> None:
    """Line separators of Unicode and control characters: a newline alone ends a line."""
    texts = [f"one\u2028two\u2029three\x85four\x0bfive\x0csix\x1cseven {number}" for number in range(5)]
    lines = (json.dumps({"text": text}, ensure_ascii=False) for text in texts)
    (tmp_path / "a.jsonl").write_text("\r\n".join(lines), "utf-8", newline="")
    assert everything(config(tmp_path, f"text:{tmp_path}/a.jsonl")) == sorted(text.encode() for text in texts)


def test_an_integer_of_many_digits_beside_the_text_is_no_mistake(tmp_path: Path) -> None:
    """Python turns no more than 4,300 digits into a number; JSON has no such bound."""
    lines = [f'{{"id": {"9" * 5000}, "text": "text {number}"}}' for number in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    data = config(tmp_path, f"text:{tmp_path}/a.jsonl")
    assert everything(data) == sorted(f"text {number}".encode() for number in range(40))
    with pytest.raises(UserError, match=r"line 1: field 'id' is not a string but int"):
        open_source(dataclasses.replace(data, field="id"), "train")


@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_of_objects_is_told_how_to_become_lines(tmp_path: Path, indent: int | None) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps([{"text": "one"}, {"text": "two"}], indent=indent))
    with pytest.raises(
        UserError, match=r"line 1: not .*; each line must be a JSON object, as jq -c '\.\[\]' makes them"
    ):
        open_source(config(tmp_path, f"text:{tmp_path}/a.jsonl"), "train")


def test_a_user_without_a_home_reads_what_needs_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers whose user has a number alone."""
    import pwd

    def unknown(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    (tmp_path / "a.txt").write_text("some text\n\n" * 400)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"some text\n\n" * 400))
    for name in ("HOME", "MHC_CACHE", "TFDS_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    data = DataConfig(source=f"text:{tmp_path}/a.txt", sequence_length=16)
    assert len(open_source(data, "train")) > 1
    for source in (f"text:{tmp_path}/b.txt.gz", "stdlib", "tfds:tales"):
        with pytest.raises(UserError, match=r"no home directory is known; set data\.cache_dir, or"):
            open_source(dataclasses.replace(data, source=source), "train")
    with pytest.raises(UserError, match=r"neither 'bytes' nor an existing tokenizer\.json"):
        tokenizers.load("~nobody-of-this-name/tokenizer.json")
