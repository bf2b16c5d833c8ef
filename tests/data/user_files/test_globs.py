"""Test globs: which files they match, and what is said of links, folders, pipes and odd names."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from mhc.config import DataConfig
from mhc.data import warning
from mhc.data.corpus.prepared import Prepared
from mhc.data.corpus.sources import documents
from mhc.data.prepare import prepare
from mhc.data.user_files.globs import match
from mhc.errors import UserError
from mhc.monitor.train_log import TrainLog
from tests import small_runs


def write(path: Path, count: int = 40) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": f"{path.name}, some words, number {n}"}) + "\n" for n in range(count)))


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Return the warnings of a process that has given none yet."""
    warning.warn_once.cache_clear()
    caplog.set_level(logging.WARNING)
    return caplog


def test_files_are_sorted_and_named_below_the_fixed_part(tmp_path: Path) -> None:
    for name in ("b/2.jsonl", "b/1.jsonl", "a.jsonl"):
        write(tmp_path / name)
    assert [file.name for file in match("text", f"{tmp_path}/**/*.jsonl")] == ["a.jsonl", "b/1.jsonl", "b/2.jsonl"]


@pytest.mark.parametrize("pattern", ["*.jsonl", "**/*.jsonl", "b.jsonl"])
def test_a_link_to_nothing_is_refused_and_not_passed_over(tmp_path: Path, pattern: str) -> None:
    """git-annex, DVC and datalad leave such a link for each file whose content was not fetched."""
    write(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").symlink_to(".annex/objects/SHA256-e3b0c442")
    with pytest.raises(UserError, match=r"/b\.jsonl is a link to \.annex/objects/SHA256-e3b0c442, which is not there"):
        match("text", f"{tmp_path}/{pattern}")
    (tmp_path / "b.jsonl").unlink()
    (tmp_path / "b.jsonl").symlink_to("a.jsonl")
    assert match("text", f"{tmp_path}/{pattern}")


def test_a_file_of_several_names_is_told(tmp_path: Path, warned: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "a.jsonl")
    write(tmp_path / "c.jsonl")
    match("text", f"{tmp_path}/*.jsonl")
    assert not warned.messages
    (tmp_path / "b.jsonl").symlink_to("a.jsonl")
    os.link(tmp_path / "c.jsonl", tmp_path / "d.jsonl")
    assert len(match("text", f"{tmp_path}/*.jsonl")) == 4
    (line,) = warned.messages
    assert line.endswith(
        "/b.jsonl is the same file as "
        f"{tmp_path}/a.jsonl: its documents are read 2 times, and may be both trained on and held out; "
        "so it is with 1 more file(s)"
    )


def test_a_folder_that_holds_a_link_to_itself_is_told(tmp_path: Path, warned: pytest.LogCaptureFixture) -> None:
    """Python follows such a link some forty times; a warning says so."""
    write(tmp_path / "a.jsonl")
    (tmp_path / "again").symlink_to(".")
    (tmp_path / "b.jsonl").symlink_to("a.jsonl")
    assert len(match("text", f"{tmp_path}/**/*.jsonl")) > 40
    (line,) = warned.messages
    assert "is the same file as" in line


def test_folders_where_files_are_meant_are_told(tmp_path: Path, warned: pytest.LogCaptureFixture) -> None:
    """Spark and Dask write such folders, in parts; a warning names them."""
    write(tmp_path / "a.jsonl" / "part-0.jsonl")
    with pytest.raises(UserError, match=r"\*\.jsonl matches folders alone, as .*/a\.jsonl; name the files in them"):
        match("text", f"{tmp_path}/*.jsonl")
    write(tmp_path / "b.jsonl")
    assert len(match("text", f"{tmp_path}/*.jsonl")) == 1
    assert [line for line in warned.messages if "/a.jsonl matches" in line and "is a folder" in line]
    warned.clear()
    assert len(match("text", f"{tmp_path}/**")) == 2  # where folders are what it is about
    assert not warned.messages


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(UserError, match=r"/a\.jsonl, which is a pipe or a device: write it to a file first"):
        match("text", f"{tmp_path}/*.jsonl")


def test_a_file_that_goes_before_it_is_looked_at_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.jsonl")
    monkeypatch.setattr("mhc.data.user_files.globs.glob.glob", lambda *_, **__: [f"{tmp_path}/gone.jsonl"])
    with pytest.raises(UserError, match=r"gone\.jsonl cannot be read: No such file or directory"):
        match("text", f"{tmp_path}/*.jsonl")


@pytest.fixture
def odd(tmp_path: Path) -> str:
    """Return a corpus of a file whose name is not UTF-8 (Latin-1), and of another."""
    write(tmp_path / "corpus" / "a.jsonl")
    os.rename(os.fsencode(tmp_path / "corpus" / "a.jsonl"), os.fsencode(tmp_path / "corpus") + b"/caf\xe9.jsonl")
    write(tmp_path / "corpus" / "b.jsonl")
    return f"text:{tmp_path}/corpus/*.jsonl"


def test_a_name_that_is_not_utf8_is_read_and_prepared(odd: str, tmp_path: Path) -> None:
    data = DataConfig(source=odd, sequence_length=16, cache_dir=str(tmp_path / "cache"))
    made = prepare(odd, str(tmp_path / "made"), sequence_length=16, workers=1)
    assert made["documents"] == sum(1 for split in ("train", "validation") for _ in documents(data, split)) == 80
    assert [file["name"] for file in made["files"]] == ["b.jsonl", "caf\udce9.jsonl"]
    json.loads((tmp_path / "made" / "manifest.json").read_text(encoding="utf-8"))
    assert prepare(odd, str(tmp_path / "made"), sequence_length=16, workers=1) == made
    assert len(Prepared(data, str(tmp_path / "made"), "train", whole=True)) == 80


@pytest.mark.usefixtures("compiled_once")
def test_a_name_that_is_not_utf8_is_trained_on(odd: str, tmp_path: Path) -> None:
    """Its name stands in corpus.json, and in train.log where a line mentions it."""
    made = small_runs.config(odd, "plain")
    assert small_runs.run(made, tmp_path / "run") == 0
    (files,) = json.loads((tmp_path / "run" / "corpus.json").read_text(encoding="utf-8")).values()
    assert set(files) == {"b.jsonl", "caf\udce9.jsonl"}
    assert small_runs.run(made, tmp_path / "run") == 0
    log = TrainLog(tmp_path / "run" / "train.log")
    log.write("corpus/caf\udce9.jsonl, line 3\n")
    log.close()
    lines = (tmp_path / "run" / "train.log").read_text(encoding="utf-8").splitlines()
    assert lines[-1].endswith(r"corpus/caf\udce9.jsonl, line 3")
