"""Test that a preparation goes on where it was killed, and notices files that changed."""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mhc.config import DataConfig
from mhc.data.corpus.sources import documents, open_source
from mhc.errors import UserError
from tests.data.prepare.samples import ROOT, changed, content, copied, prepared, raw, write_lines


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


def test_a_folder_goes_on_after_files_were_touched(begun: tuple[DataConfig, Path, dict[str, bytes]]) -> None:
    data, out, expected = begun
    os.utime(Path(data.source[5:]).parent / "0.jsonl", (1, 1))
    prepared(data, out, workers=1)
    assert content(out) == expected
    lines: list[str] = []
    prepared(data, out, tell=lines.append)
    assert lines[-1] == f"{out} is prepared already"
    assert content(out) == expected


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
    """It reports them from any working directory, below a folder whose name looks like a pattern too, and no others."""
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
