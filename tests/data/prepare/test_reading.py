"""Test that a prepared folder gives the batches that the text itself gives."""

from __future__ import annotations

import dataclasses
import logging
import random
import re
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mhc.config import DataConfig
from mhc.data import tokenizers
from mhc.data.corpus.prepared import Prepared
from mhc.data.corpus.sources import documents, open_source
from mhc.data.pipeline import train_iterator, validation_batches
from mhc.data.rows.encoding import open_corpus
from mhc.data.shards.manifest import manifest_hash
from mhc.data.shards.records import Tokenised, pack, unpack
from mhc.errors import UserError
from tests import small_runs
from tests.data.conftest import sentence
from tests.data.prepare.samples import content, equal_batches, prepared, raw, write_lines
from tests.data.test_pipeline import same
from tests.object_store import ObjectStore, serving
from tests.small import assert_identical


def test_batches_are_those_of_the_text_bit_for_bit(small: tuple[DataConfig, DataConfig]) -> None:
    text, made = small
    equal_batches(text, made, 300)  # over the end of an epoch
    source = open_source(made, "train")
    assert isinstance(source, Prepared)
    assert len(source.manifest["shards"]) > 5
    # The corpus tells pieces that are tokenised by themselves from a whole document that is cut afterwards.
    tokenizer = tokenizers.load(text.tokenizer)
    whole = [tokenizer.encode(document).tolist() for document in documents(text, "train")]
    assert [source[i].ids.tolist() for i in range(len(source))] != whole


@pytest.mark.parametrize("ending", ["txt", "parquet"])
def test_batches_are_those_of_the_text_for_the_other_formats(tmp_path: Path, bpe: str, ending: str) -> None:
    rng = random.Random(3)
    (tmp_path / "corpus").mkdir()
    for number in range(3):
        texts = ["\n\n".join(sentence(rng, 30) for _ in range(rng.randint(1, 30))) for _ in range(20)]
        path = tmp_path / "corpus" / f"{number}.{ending}"
        if ending == "txt":  # cut into blocks
            path.write_text("\n\n".join(texts), encoding="utf-8")
        else:
            pyarrow.parquet.write_table(pyarrow.table({"body": texts}), path)
    data = raw(tmp_path, f"text:{tmp_path}/corpus/*.{ending}", "bytes" if ending == "txt" else bpe, field="body")
    made = prepared(data, tmp_path / "out", workers=1)
    equal_batches(data, made)
    names = [open_source(each, "train").name(4).removeprefix(f"{made.source}, ") for each in (data, made)]
    assert names[0].replace(f"{tmp_path}/corpus/", "") == names[1]


def test_a_position_in_it_is_refused_where_another_share_is_held_out(small: tuple[DataConfig, DataConfig]) -> None:
    tokenizer = tokenizers.load(small[1].tokenizer)
    made = [dataclasses.replace(small[1], holdout=holdout) for holdout in (0.2, 0.4)]
    one, other = (train_iterator(data, tokenizer, batch_size=2, seed=0) for data in made)
    one.set_state(one.get_state())
    with pytest.raises(UserError, match=r"another data\.holdout; .* \(saved 0\.2, now 0\.4\)"):
        other.set_state(one.get_state())


def test_a_validation_set_of_its_own(tmp_path: Path, small: tuple[DataConfig, DataConfig]) -> None:
    write_lines(tmp_path / "held" / "a.jsonl", 20, 9)
    text = dataclasses.replace(small[0], validation=f"text:{tmp_path}/held/a.jsonl")
    alone = dataclasses.replace(text, source=str(text.validation), validation=None)
    made = dataclasses.replace(text, validation=prepared(alone, tmp_path / "out", whole=True, workers=1).source)
    tokenizer = tokenizers.load(text.tokenizer)
    same(*(list(validation_batches(data, tokenizer, batch_size=4, batches=0)) for data in (text, made)))


def test_texts_come_back_from_their_ids(small: tuple[DataConfig, DataConfig]) -> None:
    text, made = small
    for split in ("train", "validation"):
        assert list(documents(made, split)) == list(documents(text, split))


def test_other_lengths_and_shares_lose_no_token_and_are_told(
    small: tuple[DataConfig, DataConfig], caplog: pytest.LogCaptureFixture
) -> None:
    made = dataclasses.replace(small[1], sequence_length=24, holdout=0.4)
    tokenizer = tokenizers.load(made.tokenizer)
    with caplog.at_level(logging.WARNING):
        held = list(validation_batches(made, tokenizer, batch_size=4, batches=0))
    list(validation_batches(made, tokenizer, batch_size=4, batches=1))
    assert caplog.text.count("was prepared for") == 1  # once a folder
    assert re.search(r"prepared for data.sequence_length=16, data.holdout=0.2, this run has 24, 0.4", caplog.text)
    bytes_held = sum(map(len, documents(made, "validation")))
    assert sum(int(batch["target_bytes"].sum()) for batch in held) == bytes_held
    assert bytes_held > sum(map(len, documents(small[1], "validation")))
    assert set(documents(made, "validation")) | set(documents(made, "train")) == {
        text for split in ("train", "validation") for text in documents(small[0], split)
    }
    next(train_iterator(made, tokenizer, batch_size=4, seed=0))


def test_another_tokeniser_is_refused(small: tuple[DataConfig, DataConfig]) -> None:
    made = dataclasses.replace(small[1], tokenizer="bytes")
    with pytest.raises(
        UserError, match=r"was prepared with the tokeniser tokenizer\.json of hash .*bytes has the hash"
    ):
        open_corpus(made, tokenizers.load("bytes"), "train")


numbers = st.integers(0, 70_000)


@settings(deadline=None)
@given(
    pieces=st.lists(st.lists(st.tuples(numbers, numbers), max_size=9), min_size=1, max_size=5),
    known=st.booleans(),
    parts=st.integers(1, 6),
)
def test_a_record_gives_back_the_document_and_parts_add_up_to_it(
    pieces: list[list[tuple[int, int]]], known: bool, parts: int
) -> None:
    flat = np.array([pair for piece in pieces for pair in piece], np.int64).reshape(-1, 2)
    ends = np.cumsum([len(piece) for piece in pieces])
    rests = np.arange(len(pieces)) * 7
    document = unpack(pack(Tokenised(flat[:, 0], None if known else flat[:, 1], ends, rests)))
    cut = [document.part(number, parts) for number in range(parts)]
    for found in (document.ids, np.concatenate([part.ids for part in cut])):
        np.testing.assert_array_equal(found, flat[:, 0])
    if not known:
        np.testing.assert_array_equal(np.concatenate([part.lengths for part in cut]), flat[:, 1])
    assert (document.lengths is None) == known
    assert sum(part.rest for part in cut) == document.rest == rests.sum()
    if parts == len(pieces):
        assert [len(part.ids) for part in cut] == [len(piece) for piece in pieces]
        assert [part.rest for part in cut] == rests.tolist()


@pytest.mark.long
def test_a_run_from_prepared_data_is_the_run_from_the_text(tmp_path: Path) -> None:
    corpus = small_runs.write_corpus(tmp_path / "texts")
    text = small_runs.config(corpus, "mhc")
    made = small_runs.config(corpus, "mhc", data={"source": prepared(text.data, tmp_path / "out", workers=1).source})
    folders = [tmp_path / "text", tmp_path / "prepared"]
    assert [small_runs.run(config, folder) for config, folder in zip((text, made), folders, strict=True)] == [0, 0]
    for name in ("metrics", "probes"):
        assert small_runs.lines(folders[0], name) == small_runs.lines(folders[1], name)
    (_, state, host), (_, other, theirs) = map(small_runs.final_state, folders)
    assert_identical(state, other)
    assert host["data"].pop("corpus") != theirs["data"].pop("corpus")
    assert host == theirs


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    if find_spec("gcsfs") is None:
        pytest.skip("pip install 'mhc-jax[gcs]'")
    with serving("prepared") as made:
        yield made


def test_a_prepared_folder_in_a_store_and_a_corpus_there(
    tmp_path: Path, small: tuple[DataConfig, DataConfig], store: ObjectStore
) -> None:
    text, made = small
    out = Path(made.source.partition(":")[2])
    for name, stored in content(out).items():
        store.put("prepared", f"a/{name}", stored)
    there = dataclasses.replace(made, source="prepared:gs://prepared/a", cache_dir=str(tmp_path / "cache"))
    equal_batches(text, there, 20)
    assert manifest_hash(there) == manifest_hash(made)
    shard = store.read("prepared", "a/shard-00001.array_record")
    equal_batches(text, there, 2)  # from the copy
    store.put("prepared", "a/shard-00001.array_record", shard[::-1])
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(UserError, match=r"gs://prepared/a/shard-00001\.array_record is not what manifest\.json says"):
        open_source(there, "train")
    with pytest.raises(UserError, match=r"prepared:gs://prepared/b has no manifest\.json"):
        open_source(dataclasses.replace(there, source="prepared:gs://prepared/b"), "train")

    for path in Path(text.source[5:]).parent.iterdir():
        store.put("prepared", f"corpus/{path.name}", path.read_bytes())
    remote = dataclasses.replace(text, source="text:gs://prepared/corpus/*.jsonl", cache_dir=str(tmp_path / "cache"))
    equal_batches(text, prepared(remote, tmp_path / "out", workers=1), 20)
    store.put("prepared", "corpus/0.jsonl", b"{}")
    with pytest.raises(UserError, match=r"gs://prepared/corpus/0\.jsonl has changed since"):
        prepared(remote, tmp_path / "out")
