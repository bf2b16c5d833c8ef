"""Test that damage to any of the files is one line, and that preparing again mends it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mhc.config import DataConfig
from mhc.data import tokenizers
from mhc.data.corpus.sources import documents, open_source
from mhc.data.pipeline import train_iterator
from mhc.data.prepare import run
from mhc.errors import UserError
from tests.data.prepare.samples import changed, content, copied, line, prepared
from tests.data.test_pipeline import take

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
    """Yield the value with one key gone or one value of another kind, at every depth; of a list, in its first item."""
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
    """Whatever was edited, a reader of the folder goes on or ends with a line."""
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
    """A changed count, of a shard, of all or of both alike, is one line; so is a file that is gone from the list."""
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
