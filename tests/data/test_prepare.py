"""A corpus tokenised once is read as the text itself would be, and is the same bytes however it came about."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import glob
import hashlib
import itertools
import json
import logging
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mhc import cli
from mhc.config import DataConfig
from mhc.data import tokenizers
from mhc.data.corpus.prepared import Prepared
from mhc.data.corpus.sources import documents, open_source
from mhc.data.pipeline import train_iterator, validation_batches
from mhc.data.prepare import __main__ as program
from mhc.data.prepare import folder, prepare, progress, run, shards
from mhc.data.rows.encoding import open_corpus
from mhc.data.shards.manifest import MANIFEST, manifest_hash
from mhc.data.shards.records import Tokenised, pack, unpack
from mhc.errors import UserError
from tests import small_runs
from tests.data.conftest import sentence
from tests.data.test_pipeline import same, take
from tests.object_store import ObjectStore, serving
from tests.small import assert_identical

ROOT = Path(__file__).parents[2]


def write_lines(path: Path, count: int, seed: int, most: int = 40) -> None:
    """``count`` texts of up to so many lines, the longest of several pieces, a few cut in the middle of words."""
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
    """The same data, prepared."""
    fields = ("tokenizer", "field", "sequence_length", "holdout", "cache_dir")
    prepare(data.source, str(out), **{name: getattr(data, name) for name in fields}, **options)
    return dataclasses.replace(data, source=f"prepared:{out}")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, bpe: str) -> tuple[DataConfig, DataConfig]:
    """A corpus of two files as text and prepared in fifteen shards."""
    folder = tmp_path_factory.mktemp("small")
    for number in range(2):
        write_lines(folder / "corpus" / f"{number}.jsonl", 30, number)
    data = raw(folder, f"text:{folder}/corpus/*.jsonl", bpe)
    return data, prepared(data, folder / "out", shard_size=9000, workers=2)


def copied(small: tuple[DataConfig, DataConfig], tmp_path: Path) -> tuple[DataConfig, Path]:
    """Corpus and prepared folder as a test's own: what is prepared, and the folder."""
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


# --- what a run reads


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


# --- how it is made


@pytest.mark.process
def test_killed_three_times_it_ends_with_the_same_bytes_whatever_the_workers(tmp_path: Path, bpe: str) -> None:
    for number in range(3):
        write_lines(tmp_path / "corpus" / f"{number}.jsonl", 80, number)
    data = raw(tmp_path, f"text:{tmp_path}/corpus/*.jsonl", bpe)
    prepared(data, tmp_path / "undisturbed", workers=1, shard_size=8000)
    expected = content(tmp_path / "undisturbed")
    shards = sum(name.endswith(".array_record") for name in expected)
    out = tmp_path / "out"
    command = [sys.executable, "-W", "error", "-m", "mhc.data.prepare", "--source", data.source, "--out", str(out)]
    command += ["--tokenizer", bpe, "--sequence_length", "16", "--holdout", "0.2"]
    for part, workers in ((0.1, "2"), (0.4, "1"), (0.7, "1")):
        running = subprocess.Popen(
            [*command, "--shard_size", "8KB", "--workers", workers], cwd=ROOT, stderr=subprocess.DEVNULL
        )
        while len(list(out.glob("*.array_record"))) < shards * part:
            assert running.poll() is None
            time.sleep(0.003)
        running.send_signal(signal.SIGKILL)
        running.wait()
        assert not (out / "manifest.json").exists()
    with pytest.raises(UserError, match=r"prepared:.*/out is not prepared to the end \(no manifest.json\)"):
        open_source(dataclasses.replace(data, source=f"prepared:{out}"), "train")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.search(r" MB from before\), [\d.]+ MB/s, 0 min 00 s left", done.stderr)
    assert re.fullmatch(
        rf"{out}: 240 documents, [\d,]+ tokens, [\d,]+ bytes of text in {shards} shard\(s\)\n", done.stdout
    )
    assert content(out) == expected
    manifest = json.loads(expected["manifest.json"])
    for shard in manifest["shards"]:
        for ending, about in shard["files"].items():
            assert about["sha256"] == hashlib.sha256(expected[f"{shard['name']}.{ending}"]).hexdigest()
    texts = [*documents(data, "train"), *documents(data, "validation")]
    assert manifest["bytes"] == sum(map(len, texts))
    assert manifest["documents"] == len(texts) == 240


@pytest.fixture
def begun(tmp_path: Path, small: tuple[DataConfig, DataConfig]) -> tuple[DataConfig, Path, dict[str, bytes]]:
    """A folder as a kill leaves it: the text it is made of, the folder, and what the folder becomes."""
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


def test_a_folder_goes_on_after_files_were_touched(begun: tuple[DataConfig, Path, dict[str, bytes]]) -> None:
    data, out, expected = begun
    os.utime(Path(data.source[5:]).parent / "0.jsonl", (1, 1))
    prepared(data, out, workers=1)
    assert content(out) == expected
    lines: list[str] = []
    prepared(data, out, tell=lines.append)
    assert lines[-1] == f"{out} is prepared already"
    assert content(out) == expected


def changed(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"stream", b"Stream", 1))


CHANGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "content": (
        lambda corpus: changed(corpus / "1.jsonl"),
        r"corpus/1\.jsonl has changed since .*/out was begun: name",
    ),
    "size": (
        lambda corpus: (corpus / "1.jsonl").write_text("{}"),
        r"corpus/1\.jsonl has changed since .*/out was begun",
    ),
    "new": (lambda corpus: (corpus / "2.jsonl").write_text("{}"), r"corpus/2\.jsonl is new since .*/out was begun"),
    "gone": (lambda corpus: (corpus / "0.jsonl").unlink(), r"0\.jsonl of the corpus is gone since .*/out was begun"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_changed_file_is_named_before_anything_is_written(
    begun: tuple[DataConfig, Path, dict[str, bytes]], case: str
) -> None:
    data, out, _ = begun
    (out / ".part-shard-00002.array_record").unlink()
    before = content(out)
    change, message = CHANGES[case]
    change(Path(data.source[5:]).parent)
    with pytest.raises(UserError, match=message):
        prepared(data, out)
    assert content(out) == before


def test_a_run_notices_a_changed_file(
    tmp_path: Path, small: tuple[DataConfig, DataConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    text, out = copied(small, tmp_path)
    data = dataclasses.replace(text, source=f"prepared:{out}")
    corpus = tmp_path / "corpus"
    with monkeypatch.context() as patch:  # what did not change is not read
        patch.setattr("mhc.data.corpus.prepared.sha256", None)
        open_source(data, "train")
    os.utime(corpus / "0.jsonl", (1, 1))
    open_source(data, "train")  # another time, the same content
    changed(corpus / "1.jsonl")
    with pytest.raises(UserError, match=r"corpus/1\.jsonl has changed since prepared:.*/out was prepared from it"):
        open_source(data, "train")
    (corpus / "1.jsonl").unlink()
    open_source(data, "train")
    (corpus / "0.jsonl").write_text("")
    with pytest.raises(UserError, match=r"corpus/0\.jsonl has changed .* or remove .*/origin\.json"):
        open_source(data, "train")
    (out / "origin.json").unlink()
    assert open_source(data, "train").fingerprint == open_source(small[1], "train").fingerprint


@pytest.mark.parametrize("relative", [False, True])
def test_a_run_tells_of_files_that_came_to_the_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, relative: bool
) -> None:
    """Also where it starts elsewhere, below a folder that looks like a pattern; other files are none of its."""
    here = tmp_path / "h[1]"
    for name in ("corpus/a/0.jsonl", "corpus/b/c/0.jsonl"):
        write_lines(here / name, 20, 0)
    monkeypatch.chdir(here)
    source = f"text:{'' if relative else glob.escape(str(here)) + '/'}corpus/**/*.jsonl"
    data = prepared(raw(tmp_path, source, "bytes"), here / "out", workers=1)
    monkeypatch.chdir(tmp_path)

    def told() -> list[str]:
        caplog.clear()
        open_source(data, "train")
        open_source(data, "validation")
        return caplog.messages

    (here / "corpus" / "notes.txt").write_text("no text of the corpus")
    assert told() == []
    (here / "corpus" / "b" / "1.jsonl").write_text("not even a text")
    (line,) = told()
    assert line.startswith(f"{here}/corpus/b/1.jsonl came to the corpus after {data.source} was prepared: not read")
    assert told() == []  # once
    (here / "corpus" / "2.jsonl").write_text("")
    (line,) = told()
    assert line.startswith(f"{here}/corpus/2.jsonl and 1 more file(s) came to")
    shutil.rmtree(here / "corpus")
    assert told() == []


def test_the_manifest_tells_corpora_apart_but_not_their_places(
    tmp_path: Path, small: tuple[DataConfig, DataConfig]
) -> None:
    text, made = small
    assert manifest_hash(text) is None
    assert manifest_hash(DataConfig()) is None
    corpus, out = copied(small, tmp_path)
    shutil.rmtree(out)
    os.utime(tmp_path / "corpus" / "0.jsonl", (1, 1))
    again = prepared(corpus, out, shard_size=9000, workers=1)
    assert manifest_hash(again) == manifest_hash(made) == manifest_hash(text, made.source)
    shutil.rmtree(out)
    changed(tmp_path / "corpus" / "1.jsonl")
    assert manifest_hash(prepared(corpus, out, shard_size=9000, workers=1)) != manifest_hash(made)


def test_what_is_wrong_with_a_prepared_folder_is_one_line(tmp_path: Path, small: tuple[DataConfig, DataConfig]) -> None:
    data = dataclasses.replace(small[1], source=f"prepared:{tmp_path}/out")

    def says(message: str) -> None:
        with pytest.raises(UserError, match=message) as caught:
            open_source(data, "train")
        assert "\n" not in str(caught.value)

    says(r"out has no manifest\.json; prepare it: python -m mhc\.data\.prepare --source … --out .*/out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a.txt").write_text("a")
    says(r"out has no manifest\.json; prepare it: .* --out DIR \(a new folder\), and name that")
    shutil.rmtree(tmp_path / "out")
    _, out = copied(small, tmp_path)
    manifest = (out / "manifest.json").read_text()
    shard = out / "shard-00003.array_record"
    shard.write_bytes(shard.read_bytes()[:-1])
    says(r"prepared:.*/out: shard-00003\.array_record is damaged \(not of the size in manifest\.json\); prepare it")
    shard.unlink()
    says(r"shard-00003\.array_record is missing; prepare it again")
    (out / "manifest.json").write_text(manifest.replace('"format": 1', '"format": 9'))
    says(r"out/manifest\.json has the format 9, this version reads 1; prepare it again")
    (out / "manifest.json").write_text("[]")
    says(r"out/manifest\.json is damaged \(it is not an object\): remove the folder .*/out, and prepare it again")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--source", "tokens:a.npy"], "--source: given 'tokens:a.npy', allowed: text:<glob>"),
        (["--source", "text:{}/none/*"], r"text:.*none/\* matches no file"),
        (["--tokenizer", "none.json"], "^--tokenizer: 'none.json' is neither"),
        (
            ["--sequence_length", "8"],
            r"out was begun with --sequence_length 16, now it is 8: name a new folder",
        ),
        (["--holdout", "0.1"], r"was begun with --holdout 0\.2, now it is 0\.1"),
        (["--tokenizer", "bytes"], r"was begun with --tokenizer \w{16}, now it is bytes-258"),
        (["--validation"], "was begun without --validation, now it is with"),
        (["--shard_size", "10KB"], "was begun with --shard_size 9000, now it is 10000"),
        (["--shard_size", "lots"], "--shard_size: given 'lots', allowed: bytes, or as in 64MB"),
        (["--shard_size", "0.1"], "--shard_size: given '0.1', allowed"),
        (["--shard_size", "99999999999999999999GB"], "--shard_size: given .* up to 1,000,000TB"),
        (["--shard_size", "1TB"], "was begun with --shard_size 9000, now it is 1000000000000"),
        (["--out", "/proc/x"], "--out: cannot write /proc/x: No such file or directory|--out /proc/x: no permission"),
        (["--workers", "0"], "--workers: given 0, allowed: 1 or more"),
        (["--out", "{}/corpus"], "--out .*/corpus: holds other files; name a new folder"),
        (["--out", "gs://bucket/a"], "--out gs://bucket/a: a URL, allowed: the path of a folder"),
        (["--worker", "1"], r"unknown argument --worker \(did you mean --workers\?\)"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(
    tmp_path: Path, small: tuple[DataConfig, DataConfig], arguments: list[str], message: str
) -> None:
    data, out = copied(small, tmp_path)
    before = content(out)
    base = {"--source": data.source, "--out": str(out), "--tokenizer": data.tokenizer, "--holdout": "0.2"}
    base["--sequence_length"] = "16"
    given = [value.format(tmp_path) for value in arguments]
    with pytest.raises(UserError, match=message):
        program.main([*itertools.chain(*base.items()), *given])
    assert content(out) == before


# --- damage


def line(read: Callable[[], Any]) -> str:
    """The line of the UserError; "" for none."""
    try:
        read()
    except UserError as error:
        return str(error)
    return ""


Damage = tuple[str, Callable[[bytes], bytes]]
DAMAGES: dict[str, Damage] = {
    "flipped records": ("shard-00003.array_record", lambda b: b[:100] + bytes(255 - x for x in b[100:400]) + b[400:]),
    "zeros for records": ("shard-00003.array_record", lambda b: bytes(len(b))),
    "records cut short": ("shard-00003.array_record", lambda b: b[:-1]),
    "no records": ("shard-00003.array_record", lambda b: b""),
    "head of a table": ("shard-00003.npy", lambda b: b"\x00" * 6 + b[6:]),
    "middle of a table": ("shard-00003.npy", lambda b: b[:-60] + bytes(255 - x for x in b[-60:-59]) + b[-59:]),
    "ids in a table": ("shard-00003.npy", lambda b: b[:-8] + bytes([b[-8] ^ 1]) + b[-7:]),
    "bytes in a table": ("shard-00003.npy", lambda b: b[:-4] + bytes([b[-4] ^ 1]) + b[-3:]),
    "table cut short": ("shard-00003.npy", lambda b: b[:-8]),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damage_is_a_line_in_a_run_and_preparing_again_mends_it(
    tmp_path: Path, small: tuple[DataConfig, DataConfig], case: str
) -> None:
    text, out = copied(small, tmp_path)
    expected = content(out)
    name, damage = DAMAGES[case]
    (out / name).write_bytes(damage(expected[name]))
    data = dataclasses.replace(text, source=f"prepared:{out}")
    said = line(lambda: [list(documents(data, split)) for split in ("train", "validation")])
    assert re.fullmatch(
        rf"prepared:.*/out: {re.escape(name)} is damaged \(.*\); prepare it again, which makes it anew", said
    )
    lines: list[str] = []
    prepared(text, out, workers=1, tell=lines.append)
    assert lines[0].startswith("checking 15 shard(s), ")
    assert lines[1] == "1 shard(s) are damaged or missing and are made anew: shard-00003"
    assert lines[-1] == f"{out} is whole again"
    assert content(out) == expected


def test_records_of_another_shard_are_noticed(tmp_path: Path, small: tuple[DataConfig, DataConfig]) -> None:
    text, out = copied(small, tmp_path)
    manifest = json.loads((out / "manifest.json").read_text())
    same_count: dict[int, list[str]] = {}
    for shard in manifest["shards"]:
        same_count.setdefault(shard["documents"], []).append(shard["name"])
    one, other, *_ = next(names for names in same_count.values() if len(names) > 1)
    (out / f"{one}.array_record").write_bytes((out / f"{other}.array_record").read_bytes())
    data = dataclasses.replace(text, source=f"prepared:{out}")
    with pytest.raises(UserError, match=rf"{one}\.array_record is damaged"):
        list(documents(data, "train"))


@pytest.mark.parametrize("case", DAMAGES)
def test_a_half_done_folder_keeps_whole_shards_only(
    begun: tuple[DataConfig, Path, dict[str, bytes]], case: str
) -> None:
    data, out, expected = begun
    name, damage = DAMAGES[case]
    name = name.replace("00003", "00001")
    (out / name).write_bytes(damage(expected[name]))
    kept = (out / "shard-00000.array_record").stat().st_mtime_ns
    prepared(data, out, workers=1)
    assert content(out) == expected
    assert (out / "shard-00000.array_record").stat().st_mtime_ns == kept


def edits(value: Any) -> Iterator[Any]:
    """The value with one key gone or one value of another kind, at every depth; of a list, its first item."""
    keys = list(value) if isinstance(value, dict) else range(min(len(value), 1)) if isinstance(value, list) else []
    for key in keys:
        if isinstance(value, dict):
            yield {name: of for name, of in value.items() if name != key}
        for other in (None, -1, "x", [], {}, *edits(value[key])):
            made = list(value) if isinstance(value, list) else dict(value)
            made[key] = other
            yield made


@pytest.mark.parametrize("name", ["manifest.json", "origin.json", "plan.json"])
def test_a_file_of_the_folder_that_was_edited_is_a_line(
    tmp_path: Path, small: tuple[DataConfig, DataConfig], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was edited: what reads the folder goes on or says a line."""
    text, out = copied(small, tmp_path)

    def nothing(*_: Any) -> list[dict[str, Any]]:
        raise UserError("nothing is made here")

    monkeypatch.setattr(run, "make_shards", nothing)
    data = dataclasses.replace(text, source=f"prepared:{out}")
    first = json.loads((out / ("origin.json" if name == "origin.json" else "manifest.json")).read_text())
    if name == "plan.json":
        (out / "manifest.json").unlink()
        for key in ("shards", "documents", "tokens", "bytes"):
            del first[key]
    refused = 0
    contents = [b"", b"\xff", b"[" * 100_000, b"[]", b"null", *(json.dumps(one).encode() for one in edits(first))]
    for each in contents:
        (out / name).write_bytes(each)
        for read in (lambda: open_source(data, "train"), lambda: prepared(text, out)):
            said = line(read)
            assert "\n" not in said
            refused += f"{name} is damaged (" in said
    assert refused > len(contents) * (0.5 if name == "plan.json" else 0.9)


def test_a_manifest_that_does_not_go_with_its_tables_is_a_line(
    tmp_path: Path, small: tuple[DataConfig, DataConfig]
) -> None:
    """Any count that was edited, of a shard or of all, or of both alike; and a file that is gone from the list."""
    text, out = copied(small, tmp_path)
    data = dataclasses.replace(text, source=f"prepared:{out}")
    manifest = json.loads((out / "manifest.json").read_text())

    def edited(name: str, of_shard: int, of_all: int) -> dict[str, Any]:
        made = json.loads(json.dumps(manifest))
        made["shards"][2][name] += of_shard
        made[name] += of_all
        return dict(made)

    def refused(content: dict[str, Any], by: Callable[[], Any]) -> None:
        (out / "manifest.json").write_text(json.dumps(content))
        assert re.search(r"manifest\.json is damaged \(\d+ \w+(,| in shard-00002,) \w.*\): remove the folder", line(by))

    for name in ("documents", "tokens", "bytes"):
        for more in ((1, 0), (0, 1), (1, 1), (-1, -1)):
            for by in (lambda: open_source(data, "train"), lambda: prepared(text, out)):
                refused(edited(name, *more), by)
    fewer = {**manifest, "files": manifest["files"][:1]}
    (out / "manifest.json").write_text(json.dumps(fewer))
    with pytest.raises(UserError, match=r"manifest\.json is damaged \(1 files, the table of shard-\d+ has more\)"):
        open_source(data, "train")
    (out / "manifest.json").write_text(json.dumps(manifest))
    open_source(data, "train")


def test_without_its_origin_a_folder_is_compared_by_content(
    tmp_path: Path, small: tuple[DataConfig, DataConfig]
) -> None:
    text, out = copied(small, tmp_path)
    (out / "origin.json").unlink()
    lines: list[str] = []
    prepared(text, out, tell=lines.append)
    assert lines[-1] == f"{out} is prepared already"
    assert json.loads((out / "origin.json").read_text())["files"].keys() == {"0.jsonl", "1.jsonl"}
    changed(tmp_path / "corpus" / "1.jsonl")
    with pytest.raises(UserError, match=r"1\.jsonl has changed since .*/out was begun"):
        prepared(text, out)


@contextlib.contextmanager
def small_disk(size: int) -> Iterator[None]:
    """No file may become larger: what a full disk is to a program, with another reason."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 300, 30_000])
def test_a_full_disk_is_a_line_and_the_same_command_goes_on(
    tmp_path: Path, small: tuple[DataConfig, DataConfig], size: int
) -> None:
    """At the first file, at the second, at a shard."""
    text, _ = copied(small, tmp_path)
    out = tmp_path / "new"
    where = "shard-0000\\d.array_record" if size > 300 else "(origin|plan).json"
    with (
        small_disk(size),
        pytest.raises(UserError, match=rf"--out: cannot write .*/new/{where}: File too large; once it can, the same"),
    ):
        prepared(text, out, workers=1, shard_size=9000)
    assert not out.exists()
    prepared(text, out, workers=1, shard_size=9000)
    assert {k: v for k, v in content(out).items() if k != "origin.json"} == {
        k: v for k, v in content(tmp_path / "out").items() if k != "origin.json"
    }


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 2])
def test_damage_is_the_line_of_the_run(tmp_path: Path, small: tuple[DataConfig, DataConfig], workers: int) -> None:
    text, out = copied(small, tmp_path)
    shard = out / "shard-00003.array_record"
    stored = shard.read_bytes()
    shard.write_bytes(stored[:100] + bytes(len(stored) - 100))
    data = dataclasses.replace(text, source=f"prepared:{out}", workers=workers, holdout=0.0)
    iterator = train_iterator(data, tokenizers.load(text.tokenizer), batch_size=4, seed=1)
    said = line(lambda: take(iterator, 500))
    iterator.close()
    assert re.fullmatch(r"prepared:.*/out: shard-00003\.array_record is damaged \(.*\); prepare it again.*", said)


@pytest.mark.process
def test_a_full_disk_is_the_line_of_the_process_that_found_it(
    tmp_path: Path, small: tuple[DataConfig, DataConfig]
) -> None:
    text, _ = copied(small, tmp_path)
    with small_disk(30_000), pytest.raises(UserError, match=r"cannot write .*/new/shard-.*: File too large"):
        prepared(text, tmp_path / "new", workers=2, shard_size=9000)
    assert not (tmp_path / "new").exists()


# --- what stands in the way


def test_a_preparation_that_made_nothing_leaves_nothing(tmp_path: Path, small: tuple[DataConfig, DataConfig]) -> None:
    text, _ = copied(small, tmp_path)
    broken = tmp_path / "corpus" / "1.jsonl"
    good = broken.read_bytes()
    broken.write_bytes(good + b"\n{")
    with pytest.raises(UserError, match="not JSON"):
        prepared(text, tmp_path / "new", workers=1)
    assert not (tmp_path / "new").exists()
    (tmp_path / "own").mkdir()
    with pytest.raises(UserError, match="not JSON"):
        prepared(text, tmp_path / "own", workers=1)
    assert not list((tmp_path / "own").iterdir())
    # As a kill leaves it: a plan for another text without a shard.
    plan = {**json.loads((tmp_path / "out" / "manifest.json").read_text()), "files": []}
    (tmp_path / "own" / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "own" / "origin.json").write_text("{}")
    (tmp_path / "own" / "shard-00000.npy").write_bytes(b"")
    broken.write_bytes(good)
    prepared(text, tmp_path / "own", workers=1, shard_size=9000)
    assert manifest_hash(dataclasses.replace(text, source=f"prepared:{tmp_path}/own")) == manifest_hash(small[1])


@pytest.mark.parametrize(
    ("pattern", "out", "inside"),
    [
        ("corpus/**", "corpus/out", True),
        ("corpus/**/*", "corpus/a/out", True),
        ("corpus/*/*", "corpus/out", True),
        ("corpus/*/*", "corpus/a/out", False),
        ("corpus/*", "corpus/out", False),
        ("corpus/**/*.jsonl", "corpus/out", False),
        ("corpus/**", "out", False),
        ("corpus/**", "corpus/.out", False),
    ],
)
def test_a_folder_that_the_source_matches_is_refused(tmp_path: Path, pattern: str, out: str, inside: bool) -> None:
    write_lines(tmp_path / "corpus" / "0.jsonl", 3, 0, most=2)
    write_lines(tmp_path / "corpus" / "a" / "0.jsonl", 3, 0, most=2)
    data = raw(tmp_path, f"text:{tmp_path}/{pattern}", "bytes")
    for _ in range(1 if inside else 2):
        with contextlib.ExitStack() as stack:
            if inside:
                stack.enter_context(pytest.raises(UserError, match=r"--out .* matches what is written there; name a"))
            prepared(data, tmp_path / out, workers=1)
    assert (tmp_path / out).exists() != inside


def test_a_file_that_changes_meanwhile_ends_the_shard_that_reads_it(
    tmp_path: Path, small: tuple[DataConfig, DataConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, _ = copied(small, tmp_path)
    made: list[str] = []
    make = shards.make_shard

    def make_and_touch(job: Any) -> dict[str, Any]:
        made.append(job.name)
        if len(made) == 2:
            os.utime(tmp_path / "corpus" / "0.jsonl", (1, 1))
        return make(job)

    monkeypatch.setattr(shards, "make_shard", make_and_touch)
    with pytest.raises(UserError, match=r"corpus/0\.jsonl has changed while it was prepared: remove .*/new, and"):
        prepared(data, tmp_path / "new", workers=1, shard_size=9000)
    assert len(made) < 5  # of fifteen


def test_where_nothing_is_left_of_it_nothing_is_to_be_removed(
    tmp_path: Path, small: tuple[DataConfig, DataConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, _ = copied(small, tmp_path)
    make = shards.make_shard

    def touch_and_make(job: Any) -> dict[str, Any]:
        os.utime(tmp_path / "corpus" / "0.jsonl", (1, 1))
        return make(job)

    monkeypatch.setattr(shards, "make_shard", touch_and_make)
    with pytest.raises(UserError, match=r"corpus/0\.jsonl has changed while it was prepared: start again$"):
        prepared(data, tmp_path / "new", workers=1)
    assert not (tmp_path / "new").exists()


@pytest.fixture
def _heeds_interrupts() -> Iterator[None]:
    """As a program in the foreground does; one that a shell began in the background inherits that they are ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_heeds_interrupts")
@pytest.mark.parametrize(
    ("number", "complete"),
    [
        (signal.SIGTERM, 0),
        (signal.SIGINT, 3),
        pytest.param(signal.SIGTERM, 3, marks=pytest.mark.process),
        pytest.param(signal.SIGINT, 0, marks=pytest.mark.process),
    ],
)
def test_a_signal_ends_it_as_any_error_does(
    tmp_path: Path,
    small: tuple[DataConfig, DataConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
    complete: int,
) -> None:
    """One line, its exit code, and whole shards or nothing; then the same command goes on."""
    text, made = copied(small, tmp_path)
    out = tmp_path / "new"
    arguments = ["--source", text.source, "--out", str(out), "--tokenizer", text.tokenizer, "--sequence_length", "16"]
    arguments += ["--holdout", "0.2", "--shard_size", "9000", "--workers", "1", "--cache_dir", str(text.cache_dir)]
    make = shards._make_files

    def make_and_signal(job: Any, paths: dict[str, Path]) -> Any:
        if job.name == f"shard-{complete:05d}":
            os.kill(os.getpid(), number)
        return make(job, paths)

    class Left(Exception):
        pass

    def leave(code: int) -> None:
        raise Left(code)

    monkeypatch.setattr(cli, "_leave", leave)
    handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    with monkeypatch.context() as patch:
        patch.setattr(shards, "_make_files", make_and_signal)
        with pytest.raises(Left, match=f"^{128 + number}$"):
            cli.run_main(program.main, arguments)
    assert handlers == {each: signal.getsignal(each) for each in handlers}
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"
    # The signal comes to the main thread while another makes the shard: whether it is still finished is a race.
    finished = {f"shard-{number:05d}.array_record" for number in range(complete)}
    if complete or out.exists():
        left = content(out)
        assert {"plan.json", "origin.json"} | finished < set(left)
        assert not [name for name in left if name.startswith(".part-")]
    assert program.main(arguments) == 0
    assert {**content(out), "origin.json": b""} == {**content(made), "origin.json": b""}


@pytest.mark.process
@pytest.mark.parametrize("after", [0.0, 0.7, 1.5, 2.5, 3.5])  # seconds; imports, processes that begin, shards
def test_sigterm_to_it_and_its_processes_at_any_time_is_one_line(tmp_path: Path, bpe: str, after: float) -> None:
    write_lines(tmp_path / "corpus" / "0.jsonl", 3000, 0)
    out = tmp_path / "out"
    command = [sys.executable, "-W", "error", "-m", "mhc.data.prepare", "--source", f"text:{tmp_path}/corpus/*.jsonl"]
    command += ["--tokenizer", bpe, "--out", str(out), "--shard_size", "8KB", "--workers", "2"]
    running = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert running.stderr is not None
    said = [running.stderr.readline()]  # it hashes: the program is there
    time.sleep(after)
    os.killpg(running.pid, signal.SIGTERM)
    with running:
        said += running.stderr.readlines()
    if running.returncode == 0:  # a fast machine was done by then
        assert (out / MANIFEST).is_file() and after >= 2.5
        return
    assert running.returncode == 128 + signal.SIGTERM
    assert said[-1] == "interrupted\n" and not [
        each for each in said[:-1] if "MB" not in each and "finding" not in each
    ]
    left = [path.name for path in out.iterdir()] if out.exists() else []
    assert not left or any(name.endswith(".array_record") for name in left)
    assert not [name for name in left if name.startswith(".part-")]


def test_speed_and_time_left_are_those_of_the_last_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    lines: list[str] = []
    clock = progress.SpeedMeter(1000 * 10**6, lines.append)
    size = 0
    for second in range(1, 401):
        now, size = float(second), size + (4 if second <= 100 else 1) * 10**6
        clock.tell([0, 0, size])
    assert len(lines) == 80  # every five seconds
    assert ", 4.00 MB/s, 2 min 30 s left" in lines[19]  # 600 MB left
    assert ", 2.50 MB/s, " in lines[25]  # half a minute after it became slower
    assert ", 1.00 MB/s, 9 min 00 s left" in lines[31]  # a minute
    now += 60.0
    clock.tell([0, 0, size])  # it stands still
    assert lines[80].endswith(" 0.00 MB/s, time left unknown")
    clock.tell([0, 0, 1000 * 10**6], last=True)
    assert ", 2.17 MB/s, 0 min 00 s left" in lines[81]  # in all


def test_two_processes_do_not_prepare_the_same_folder(tmp_path: Path, small: tuple[DataConfig, DataConfig]) -> None:
    data, out = copied(small, tmp_path)
    with (
        folder.lock(out, print),
        pytest.raises(UserError, match=r"--out .*/out: another process is preparing this folder"),
    ):
        prepared(data, out)


def test_a_file_system_without_locks_is_told_and_no_error(
    tmp_path: Path, small: tuple[DataConfig, DataConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS and Lustre may be mounted."""
    data, out = copied(small, tmp_path)

    def none_available(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("mhc.data.prepare.folder.fcntl.flock", none_available)
    lines: list[str] = []
    prepared(data, out, tell=lines.append)
    assert lines[0] == f"{out} cannot be locked (No locks available): start no second preparation of it meanwhile"


def test_a_mistake_in_a_document_is_one_line_of_the_process_that_found_it(
    tmp_path: Path, small: tuple[DataConfig, DataConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that changes after its lines were found, as a process sees it."""
    data, _ = copied(small, tmp_path)

    def change_and_run(*arguments: Any) -> Any:
        (tmp_path / "corpus" / "1.jsonl").write_text("[" * 10**6)
        return make_shards(*arguments)

    make_shards = run.make_shards
    monkeypatch.setattr(run, "make_shards", change_and_run)
    with pytest.raises(UserError, match=r"1\.jsonl has changed while it was prepared: (remove .*, and )?start again$"):
        prepared(data, tmp_path / "new", workers=2)
    assert not (tmp_path / "new" / "manifest.json").exists()


# --- a store


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
