"""Test that files of every format, here and in a store, give the same documents, and broken ones one line."""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from mhc.config import DataConfig
from mhc.data.corpus.sources import Split, documents, open_source
from mhc.data.user_files import local_copies
from mhc.data.user_files.globs import CorpusFile
from mhc.errors import UserError
from tests.object_store import ObjectStore, serving

TEXTS = [f"document {number}, naïve 深さ\nsecond “line”\n" for number in range(60)]
LINES = "\n".join(json.dumps({"body": text}) for text in TEXTS).encode()


def config(folder: Path, source: str, **changes: Any) -> DataConfig:
    changes = {"sequence_length": 16, "field": "body", "cache_dir": str(folder / "cache"), **changes}
    return DataConfig(source=source, **changes)


def split(data: DataConfig) -> dict[Split, list[bytes]]:
    return {"train": list(documents(data, "train")), "validation": list(documents(data, "validation"))}


def everything(folder: Path, source: str) -> list[bytes]:
    return list(documents(config(folder, source, holdout=0.0), "train"))


def frames(content: bytes) -> bytes:
    """Return the text compressed as parallel compressors do: several frames, one of them empty."""
    cut = len(content) // 3
    return b"".join(map(zstandard.compress, (content[:cut], b"", content[cut:])))


def parquet(kind: pyarrow.DataType | None = None, **options: Any) -> bytes:
    table = pyarrow.table({"id": range(len(TEXTS)), "body": pyarrow.array(TEXTS, kind or pyarrow.string())})
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, sink, **options)
    return sink.getvalue().to_pybytes()


FORMATS: dict[str, Callable[[], bytes]] = {
    "a.jsonl": lambda: LINES,
    "a.jsonl.gz": lambda: gzip.compress(LINES),
    "a.jsonl.zst": lambda: frames(LINES),
    "a.parquet": lambda: parquet(row_group_size=7),
    "b.parquet": lambda: parquet(pyarrow.large_string(), compression="zstd"),
    "c.parquet": lambda: parquet(pyarrow.dictionary(pyarrow.int32(), pyarrow.string())),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_documents_by_number(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FORMATS[name]())
    data = config(tmp_path, f"text:{tmp_path}/{name}", holdout=0.3)
    found = split(data)
    assert sorted(found["train"] + found["validation"]) == sorted(text.encode() for text in TEXTS)
    source = open_source(data, "train")
    place = source.name(3)
    number = int(re.search(r"document (\d+)", source[3].decode())[1])  # type: ignore[union-attr,index]
    wanted = f"row {number}" if name.endswith("parquet") else f"line {number + 1}"
    assert place == f"{tmp_path}/{name}, {wanted}"


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_a_byte_order_mark_is_no_part_of_a_line(tmp_path: Path, ending: str) -> None:
    packs: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": frames}
    pack = packs[ending]
    mark = "\ufeff".encode()
    for number, content in enumerate((LINES, mark + LINES, mark + b"\n" + LINES)):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / f"a.jsonl{ending}").write_bytes(pack(content))
    plain, marked, alone = (everything(tmp_path, f"text:{tmp_path}/{number}/*") for number in range(3))
    assert marked == plain == alone
    (tmp_path / "0" / f"a.jsonl{ending}").write_bytes(pack(LINES + b"\n" + mark + LINES))
    with pytest.raises(UserError, match=r"line 61: not JSON: Unexpected UTF-8 BOM"):
        open_source(config(tmp_path, f"text:{tmp_path}/0/*"), "train")
    (tmp_path / "0" / f"a.jsonl{ending}").write_bytes(pack(mark + b"{\xff}"))
    with pytest.raises(UserError, match=r"line 1: not UTF-8 at byte 4 of the file"):
        open_source(config(tmp_path, f"text:{tmp_path}/0/*"), "train")


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst", "a.jsonl.gz", "a.jsonl.zst"])
def test_an_empty_file_is_empty_whatever_its_ending(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(UserError, match=rf"text:.*/{name} is empty: 1 file\(s\) without any text$"):
        open_source(config(tmp_path, f"text:{tmp_path}/{name}"), "train")


def test_plain_text_and_token_files_may_be_packed(tmp_path: Path) -> None:
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(text)
        (tmp_path / f"{number}.txt.zst").write_bytes(frames(text.encode()))
    plain, packed = (split(config(tmp_path, f"text:{tmp_path}/*{ending}")) for ending in (".txt", ".zst"))
    assert sorted(plain["train"] + plain["validation"]) == sorted(packed["train"] + packed["validation"])
    ids = np.arange(5000, dtype=np.uint16) % 200
    np.save(tmp_path / "a.npy", ids)
    (tmp_path / "a.npy.gz").write_bytes(gzip.compress((tmp_path / "a.npy").read_bytes()))
    (tmp_path / "a.bin.zst").write_bytes(frames(ids.tobytes()))
    for name in ("a.npy", "a.npy.gz", "a.bin.zst"):
        source = open_source(config(tmp_path, f"tokens:{tmp_path}/{name}", holdout=0, validation="stdlib"), "train")
        np.testing.assert_array_equal(np.concatenate([source[i] for i in range(len(source))]), ids)


def test_a_changed_file_is_copied_again_and_an_unchanged_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(parquet())
    data = config(tmp_path, f"text:{path}")
    first = split(data)
    with monkeypatch.context() as patch:
        patch.setattr(local_copies, "_unpack", None)
        assert split(data) == first
    path.write_bytes(parquet(compression="none"))
    changed = dataclasses.replace(data, field="id")
    for again in (data, changed):  # another column is another copy, too
        monkeypatch.setattr(local_copies, "_unpack", lambda place, *_: pytest.fail(str(place)))
        with pytest.raises(pytest.fail.Exception, match=r"a\.parquet"):
            split(again)


def test_a_parquet_file_is_read_in_bounded_memory(tmp_path: Path) -> None:
    """Copying 48 MB of text in one row group takes no more than 100 MB beyond what the readers take by themselves."""
    text = "a line of text, and another one that is as long\n" * 200
    with pyarrow.parquet.ParquetWriter(
        tmp_path / "a.parquet", pyarrow.schema({"text": pyarrow.string()}), use_dictionary=False
    ) as file:
        file.write_table(pyarrow.table({"text": [f"{number} {text}" for number in range(5000)]}))
    program = (
        "import resource, sys\nfrom pathlib import Path\nimport pyarrow.parquet\n"
        "from mhc.config import DataConfig\nfrom mhc.data.user_files import globs, local_copies\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10\n"
        "before = peak()\n"
        "place = globs.match('text', sys.argv[1])[0]\n"
        "copy = local_copies.local_copy(place, DataConfig(cache_dir=sys.argv[2]))\n"
        "print(copy.stat().st_size >> 20, peak() - before)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "a.parquet"), str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])
    size, grown = map(int, done.stdout.split())
    assert size > 45
    assert grown < 100


def broken(content: bytes) -> bytes:
    return content[: len(content) * 2 // 3]


def of_bad_utf8() -> bytes:
    raw = pyarrow.array([b"good", b"\xff\xfe"], pyarrow.binary()).cast(pyarrow.string(), safe=False)
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"body": raw}), sink)
    return sink.getvalue().to_pybytes()


def of(column: list[Any], name: str = "body") -> Callable[[], bytes]:
    def make() -> bytes:
        sink = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(pyarrow.table({"id": range(len(column)), name: column}), sink)
        return sink.getvalue().to_pybytes()

    return make


MISTAKES: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "no zst": ("a.txt.zst", lambda: b"plain text", "a.txt.zst is not a readable zst file: "),
    "cut zst": ("a.txt.zst", lambda: broken(zstandard.compress(LINES)), "a.txt.zst is not a readable zst file: "),
    "zst that breaks off between frames' parts": (
        "a.txt.zst",
        lambda: zstandard.compress(LINES) + zstandard.compress(LINES)[:20],
        "a.txt.zst is not a readable zst file: it breaks off",
    ),
    "no parquet": ("a.parquet", lambda: b"plain text", "a.parquet is not a readable parquet file: "),
    "cut parquet": ("a.parquet", lambda: broken(parquet()), "a.parquet is not a readable parquet file: "),
    "no column": (
        "a.parquet",
        of(["x"], "boddy"),
        r"a.parquet: no column 'body' \(data.field\) among id, boddy \(did you mean boddy\?\)",
    ),
    "numbers": ("a.parquet", of([1, 2]), r"a.parquet: column 'body' \(data.field\) is not text but int64"),
    "null": ("a.parquet", of(["x", None]), "a.parquet, row 1: field 'body' is not a string but NoneType"),
    "not UTF-8": ("a.parquet", of_bad_utf8, "a.parquet, row 1: not UTF-8: invalid start byte"),
    "packed parquet": ("a.parquet.gz", lambda: gzip.compress(parquet()), "a.parquet.gz is not a text file; text: "),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_broken_file_is_one_line_and_leaves_nothing_in_the_cache(tmp_path: Path, case: str) -> None:
    name, make, message = MISTAKES[case]
    (tmp_path / name).write_bytes(make())
    with pytest.raises(UserError) as caught:
        open_source(config(tmp_path, f"text:{tmp_path}/{name}"), "train")
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)
    left = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert len(left) == (case == "null")  # found when its lines are read


@pytest.mark.parametrize("name", ["a.txt.gz", "a.parquet"])
def test_a_full_disk_is_a_line_and_leaves_nothing_in_the_cache(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on the size of files stands for the full disk, since the system reports both alike."""
    text = "a line of text\n" * 1000
    if name.endswith(".gz"):
        (tmp_path / name).write_bytes(gzip.compress(text.encode()))
    else:
        pyarrow.parquet.write_table(pyarrow.table({"text": [text]}), tmp_path / name)
    data = DataConfig(source=f"text:{tmp_path}/{name}", cache_dir=str(tmp_path / "cache"), holdout=0.0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(UserError, match=r"data\.cache_dir: cannot make .*/cache/unpacked/\w+\.\w+: File too large"):
            open_source(data, "train")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list((tmp_path / "cache" / "unpacked").iterdir())
    assert b"".join(documents(data, "train")).decode() == text


def test_a_folder_of_tokens_is_told_what_tokens_reads(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is a directory; name its files, as in tokens:.*/\*\*/\*\.npy"):
        open_source(DataConfig(source=f"tokens:{tmp_path}"), "train")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "a.txt.zst").write_bytes(zstandard.compress(b"text"))
    with pytest.raises(UserError, match=r"a\.txt\.zst needs zstandard: pip install 'mhc-jax\[corpora\]'"):
        open_source(config(tmp_path, f"text:{tmp_path}/*.zst"), "train")


# --- a store


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    if find_spec("gcsfs") is None:
        pytest.skip("pip install 'mhc-jax[gcs]'")
    with serving("corpora", "closed") as made:
        yield made


@pytest.mark.parametrize("name", FORMATS)
def test_a_store_gives_what_a_folder_gives(tmp_path: Path, store: ObjectStore, name: str) -> None:
    content = FORMATS[name]()
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / name).write_bytes(content)
    store.put("corpora", f"deep/{tmp_path.name}/{name}", content)
    ending = name.partition(".")[2]
    here = config(tmp_path, f"text:{tmp_path}/corpus/*.{ending}")
    there = config(tmp_path, f"text:gs://corpora/deep/{tmp_path.name}/*.{ending}")
    assert split(there) == split(here)
    one, other = open_source(here, "train"), open_source(there, "train")
    assert other.fingerprint == one.fingerprint
    assert other.name(1) == one.name(1).replace(f"{tmp_path}/corpus", f"gs://corpora/deep/{tmp_path.name}")


def test_many_files_of_a_store_are_split_by_their_names_and_copied_when_they_change(
    tmp_path: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(120):  # two pages of a listing
        folder = "even" if number % 2 == 0 else "odd/deeper"
        store.put("corpora", f"many/{folder}/{number}.txt", f"text {number}\n".encode() * 9)
        (tmp_path / "many" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "many" / folder / f"{number}.txt").write_text(f"text {number}\n" * 9)
    here = config(tmp_path, f"text:{tmp_path}/many/**/*.txt")
    there = config(tmp_path, "text:gs://corpora/many/**/*.txt")
    wanted = split(here)
    assert split(there) == wanted
    copied: list[str] = []
    unpack = local_copies._unpack

    def noted(place: CorpusFile, *rest: Any) -> None:
        copied.append(place.name)
        unpack(place, *rest)

    monkeypatch.setattr(local_copies, "_unpack", noted)
    assert split(there) == wanted
    assert not copied
    store.put("corpora", "many/even/4.txt", b"Text 4\n" * 9)  # of the same size, within the same second
    assert b"Text 4\n" * 9 in split(there)["train"] + split(there)["validation"]
    assert copied == ["even/4.txt"]


def test_tokens_of_a_store(tmp_path: Path, store: ObjectStore) -> None:
    ids = np.arange(5000, dtype=np.uint16) % 200
    store.put("corpora", "ids/a.bin", ids.tobytes())
    data = config(tmp_path, "tokens:gs://corpora/ids/*.bin", holdout=0, validation="stdlib")
    source = open_source(data, "train")
    np.testing.assert_array_equal(np.concatenate([source[i] for i in range(len(source))]), ids)
    assert source.name(0).startswith("gs://corpora/ids/a.bin, tokens 0–")


def test_what_is_wrong_with_a_store_is_one_line(tmp_path: Path, store: ObjectStore) -> None:
    for source, message in {
        "text:gs://corpora/none/*.txt": r"text:gs://corpora/none/\*\.txt matches no file",
        "text:gs://absent/*.txt": "gs://absent: no such bucket",
        "text:s3://bucket/*.txt": r"s3://bucket: allowed: a local path, or gs://BUCKET/PATH",
        "tokens:gs://corpora/a.txt": "tokens:gs://corpora/a.txt matches no file",
    }.items():
        with pytest.raises(UserError, match=message):
            open_source(config(tmp_path, source), "train")
    store.put("closed", "a/b.txt", b"text")
    store.failing = lambda method, bucket, name: 403 if (bucket, name) == ("closed", "a/b.txt") else None
    with pytest.raises(UserError, match=r"gs://closed/a.*: no permission"):
        open_source(config(tmp_path, "text:gs://closed/a/*.txt"), "train")
    store.failing = lambda *_: None


def test_a_parquet_column_of_two_is_refused_and_one_with_dots_is_itself(tmp_path: Path) -> None:
    """Joined tables may have a name twice, and parquet itself names nested columns with dots."""
    columns = [pyarrow.array([text] * 60) for text in ("a b", "c d")]
    twice = pyarrow.Table.from_arrays(columns, names=["text", "text"])
    pyarrow.parquet.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(UserError, match=r"twice\.parquet has 2 columns 'text' \(data\.field\)"):
        open_source(DataConfig(source=f"text:{tmp_path}/twice.parquet", cache_dir=f"{tmp_path}/cache"), "train")
    nested = {"meta": [{"text": "inside"}] * 60, "meta.text": ["beside"] * 60}
    pyarrow.parquet.write_table(pyarrow.table(nested), tmp_path / "nested.parquet")
    data = DataConfig(source=f"text:{tmp_path}/nested.parquet", field="meta.text", cache_dir=f"{tmp_path}/cache")
    assert set(documents(data, "train")) == {b"beside"}


def test_empty_row_groups_and_skippable_frames_are_passed_over(tmp_path: Path) -> None:
    """Writers of parquet and pzstd leave such groups and frames; they are skipped."""
    schema = pyarrow.schema([("text", pyarrow.string())])
    with pyarrow.parquet.ParquetWriter(tmp_path / "a.parquet", schema) as writer:
        for texts in ([], ["one"] * 40, [], ["two"] * 40, []):
            writer.write_table(pyarrow.table({"text": texts}, schema))
    lines = b"".join(json.dumps({"text": "one"}).encode() + b"\n" for _ in range(40))
    skipped = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"
    frames = [skipped, zstandard.compress(lines), skipped, skipped, zstandard.compress(lines), skipped]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    for name in ("a.parquet", "a.jsonl.zst"):
        data = DataConfig(source=f"text:{tmp_path}/{name}", cache_dir=f"{tmp_path}/cache")
        assert sum(1 for split in ("train", "validation") for _ in documents(data, split)) == 80
