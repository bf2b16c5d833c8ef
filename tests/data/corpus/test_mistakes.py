"""Test wrong corpora: each mistake is one line."""

from __future__ import annotations

import dataclasses
import gzip
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mhc.config import DataConfig
from mhc.data import tokenizers
from mhc.data.corpus.sources import open_source
from mhc.data.pipeline import validation_batches
from mhc.data.rows.encoding import open_corpus
from mhc.errors import UserError
from tests.data.corpus.samples import BYTES, config


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


def test_a_user_without_a_home_reads_what_needs_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program runs as in a container whose user has a number and no home."""
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
