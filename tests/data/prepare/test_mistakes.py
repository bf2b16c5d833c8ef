"""Test that manifests tell corpora apart, and that a mistake in a folder or a command is one line."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
from pathlib import Path

import pytest

from mhc.config import DataConfig
from mhc.data.corpus.sources import open_source
from mhc.data.prepare import __main__ as program
from mhc.data.shards.manifest import manifest_hash
from mhc.errors import UserError
from tests.data.prepare.samples import changed, content, copied, prepared


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
