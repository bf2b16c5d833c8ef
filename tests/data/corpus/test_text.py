"""Test text files: what their documents are, and how they are split."""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from mhc.data.corpus import indexed
from mhc.data.corpus.sources import documents, open_source
from mhc.data.corpus.text import TextFiles
from mhc.errors import UserError
from tests.data.corpus.samples import config, everything, text_of


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
    """A position must not go on in documents of other places, so it is refused; all other names behave as before."""
    content = (b'{"text": "' + b"word " * 20 + b'"}\n') * 40
    prints = {}
    for name in ("a.txt", "a.jsonl", "a.JSONL", "a.ndjson"):
        (tmp_path / name).write_bytes(content)
        prints[name] = open_source(config(tmp_path, f"text:{tmp_path}/{name}"), "train")
    settings = {name: cast(TextFiles, of)._settings() for name, of in prints.items()}
    assert settings["a.txt"] == settings["a.jsonl"] != settings["a.JSONL"] != settings["a.ndjson"]


def test_what_ends_a_line_elsewhere_is_text_in_a_line_of_json(tmp_path: Path) -> None:
    """Only a newline ends a line; line separators of Unicode and control characters are text."""
    texts = [f"one\u2028two\u2029three\x85four\x0bfive\x0csix\x1cseven {number}" for number in range(5)]
    lines = (json.dumps({"text": text}, ensure_ascii=False) for text in texts)
    (tmp_path / "a.jsonl").write_text("\r\n".join(lines), "utf-8", newline="")
    assert everything(config(tmp_path, f"text:{tmp_path}/a.jsonl")) == sorted(text.encode() for text in texts)


def test_an_integer_of_many_digits_beside_the_text_is_no_mistake(tmp_path: Path) -> None:
    """Such an integer is accepted, although Python parses no more than 4,300 digits; JSON has no bound."""
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
