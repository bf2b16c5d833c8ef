"""Test token files: their formats, where documents begin and end, the width of ids, and warnings about odd ones."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mhc.config import DataConfig
from mhc.data import tokenizers, warning
from mhc.data.corpus import token_ids
from mhc.data.corpus.sources import documents, open_source
from mhc.data.corpus.token_ids import TokenFiles
from mhc.data.pipeline import train_iterator
from mhc.data.rows.encoding import open_corpus
from mhc.errors import UserError
from tests.data.corpus import samples

BYTES = tokenizers.load("bytes")
BOS, EOS = 256, 257


def config(path: Path, **changes: Any) -> DataConfig:
    fields = {"sequence_length": 16, "prefetch": 0, "holdout": 0.1, "cache_dir": f"{path.parent}/cache", **changes}
    return DataConfig(source=f"tokens:{path}", **fields)


def write(path: Path, ids: Any, dtype: str = "<u2") -> Path:
    path.write_bytes(np.asarray(ids, dtype).tobytes())
    return path


def read(data: DataConfig) -> list[list[int]]:
    """Return the documents of a file."""
    source = TokenFiles(data, data.source.removeprefix("tokens:"), "train", whole=True)
    return [source[index].tolist() for index in range(len(source))]


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Return the warnings of a process that has given none yet."""
    warning.warn_once.cache_clear()
    caplog.set_level(logging.WARNING)
    return caplog


LLM_C = np.zeros(256, "<i4")
LLM_C[:3] = 20240520, 1, 1000


@pytest.mark.parametrize(
    ("header", "line"),
    [
        (LLM_C.tobytes(), r"is a data file of llm\.c, with a header before its ids; cut that off: tail -c \+1025 FILE"),
        (b"LITPKDS" + bytes(17), r"is a PackedDataset of lit-gpt, .*: tail -c \+25 FILE"),
        (b"PK\x03\x04" + bytes(20), "is a zip archive$"),
        (b"\x1f\x8b\x08\x00" + bytes(20), r"is a gzip file, whose name must end in \.gz"),
        (b"\x28\xb5\x2f\xfd" + bytes(20), r"is a zst file, whose name must end in \.zst"),
        (b"\x93NUMPY" + bytes(18), r"has a numpy header.*must end in \.npy"),
    ],
)
def test_a_bin_file_of_another_format_is_not_read_as_ids(tmp_path: Path, header: bytes, line: str) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(header + np.arange(1000, dtype="<u2").tobytes())
    with pytest.raises(UserError, match=line):
        read(config(path))
    path.write_bytes(path.read_bytes()[len(header) :])
    assert list(itertools.chain(*read(config(path)))) == list(range(1000))


@pytest.mark.parametrize("at_once", [1, 2, 3, 7, 1 << 22])
@given(
    ids=st.lists(st.sampled_from([1, 2, 3, BOS, EOS]), min_size=1, max_size=30),
    starts=st.booleans(),
    ends=st.booleans(),
)
def test_documents_lie_between_their_first_and_last_id(
    at_once: int, ids: list[int], starts: bool, ends: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """However much is read at once, a bos opens a document and an eos ends it if they are named."""
    path = write(tmp_path_factory.mktemp("ids") / "a.bin", ids)
    documents = [list(run) for is_end, run in itertools.groupby(ids, EOS.__eq__) if not is_end] if ends else [ids]
    documents = [document[starts and document[0] == BOS :] for document in documents]
    expected = [document for document in documents if document]
    data = config(path, start_token=BOS if starts else None, end_token=EOS if ends else None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_ids, "_AT_ONCE", at_once)
        if expected:
            assert read(data) == expected
        else:
            with pytest.raises(UserError, match="is empty"):
                read(data)


def test_blocks_do_not_depend_on_what_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.bin", np.random.default_rng(0).integers(0, 256, 5000))
    whole = read(config(path))
    assert len(whole) > 10
    for at_once in (1, 127, 128, 129):
        monkeypatch.setattr(token_ids, "_AT_ONCE", at_once)
        assert read(config(path)) == whole


def opened(data: DataConfig, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings of opening a corpus."""
    warning.warn_once.cache_clear()
    caplog.clear()
    open_corpus(data, BYTES, "train")
    return caplog.messages


def test_ids_that_would_be_twice_or_that_end_nothing_are_told(tmp_path: Path, warned: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 256, rng.integers(20, 60)) for _ in range(100)]
    path = write(tmp_path / "a.bin", np.concatenate([[BOS, *document, EOS] for document in documents]))
    twice = f"begin with the id {BOS} (bos), and every document is given one"
    unended = f"has the id {EOS} (eos) 100 times, which ends no document here, since data.end_token is"
    (line,) = opened(config(path, end_token=EOS), warned)
    assert twice in line and f"data.start_token={BOS} leaves out" in line
    first, second = opened(config(path), warned)
    assert f"{unended} None; set data.end_token={EOS}" in first and twice in second
    assert f"{unended} 10;" in opened(config(path, end_token=10, start_token=BOS), warned)[0]
    right = config(path, start_token=BOS, end_token=EOS)
    assert not opened(right, warned)
    assert read(right) == [document.tolist() for document in documents]
    iterator = train_iterator(right, BYTES, batch_size=4, seed=0)
    batches = [next(iterator) for _ in range(100)]
    iterator.close()
    assert not any((batch["targets"] == BOS).any() or (batch["tokens"] == EOS).any() for batch in batches)


def test_without_a_start_token_a_corpus_is_the_one_that_older_runs_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin", [BOS, 1, 2, EOS, BOS, 3, EOS] * 20)
    plain, starts = config(path, end_token=EOS), config(path, end_token=EOS, start_token=BOS)
    prints = [TokenFiles(data, str(path), "train", whole=True).fingerprint for data in (plain, starts)]
    assert prints[0] == "6f6be37d814bc187" and prints[0] != prints[1]


def test_token_files_of_both_kinds_are_cut_at_the_end_token(tmp_path: Path) -> None:
    docs = [np.arange(number % 7 + 1) + number for number in range(80)]
    ids = np.concatenate([np.append(doc, 250) for doc in docs])
    np.save(tmp_path / "a.npy", ids.astype(np.int64))
    ids.astype(np.uint16).tofile(tmp_path / "a.bin")
    ids.astype(np.uint32).tofile(tmp_path / "b.bin")
    found = []
    for name, token_dtype in (("a.npy", "uint16"), ("a.bin", "uint16"), ("b.bin", "uint32")):
        data = samples.config(tmp_path, f"tokens:{tmp_path}/{name}", end_token=250, token_dtype=token_dtype)
        sources = [open_source(data, "train"), open_source(data, "validation")]
        found.append(sorted(tuple(cast(np.ndarray, source[i])) for source in sources for i in range(len(source))))
        assert all(source.ends(0) for source in sources)
    assert found[0] == found[1] == found[2] == sorted(tuple(doc) for doc in docs)


def test_token_files_without_an_end_token_are_cut_and_lose_nothing(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 256, 10_000)
    ids.astype(np.uint16).tofile(tmp_path / "a.bin")
    data = samples.config(tmp_path, f"tokens:{tmp_path}/a.bin")
    sources = [open_source(data, "train"), open_source(data, "validation")]
    assert min(map(len, sources)) > 0
    found = np.concatenate([np.asarray(source[i]) for source in sources for i in range(len(source))])
    np.testing.assert_array_equal(np.sort(found), np.sort(ids))
    batch = next(train_iterator(data, BYTES, batch_size=4, seed=0))
    assert (batch["target_bytes"] == 1).mean() > 0.9
    held = b"".join(documents(dataclasses.replace(data, tokenizer="bytes"), "validation"))
    assert held.decode(errors="replace")


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
    data = samples.config(tmp_path, f"tokens:{tmp_path}/a.bin", token_dtype=read)
    with pytest.raises(UserError, match=rf"a.bin.*{message}"):
        open_corpus(data, BYTES, "train")


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
@pytest.mark.parametrize("vocabulary", [2, 16, 256])
def test_ids_of_their_own_width_are_read(tmp_path: Path, dtype: str, vocabulary: int) -> None:
    """Ids of the dtype's own width are read, however few and however small they are."""
    for count in (40, 4001):
        wide(np.random.default_rng(1), count, vocabulary, dtype, tmp_path / "a.bin")
        data = samples.config(tmp_path, f"tokens:{tmp_path}/a.bin", token_dtype=dtype, validation="stdlib")
        assert len(open_corpus(data, BYTES, "train"))
