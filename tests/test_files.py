"""Test files of JSON and JSON lines: what is written is read back, whatever the crash."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mhc.errors import UserError
from mhc.files import JsonlWriter, read_json, read_jsonl, repair, write_json
from mhc.full_disk import DiskFull
from tests.small_runs import small_disk

numbers = st.floats() | st.integers(-(2**53), 2**53)
texts = st.text(max_size=8).filter(lambda text: text not in {"NaN", "Infinity", "-Infinity"})
values = numbers | st.none() | texts | st.lists(numbers, max_size=4) | st.dictionaries(texts, numbers, max_size=3)
records = st.lists(st.dictionaries(texts, values, max_size=4), max_size=6)


def write_all(path: Path, records: list[dict[str, Any]]) -> None:
    writer = JsonlWriter(path)
    for record in records:
        writer.write(record)
    writer.close()


def test_lines_without_room_are_kept_and_written_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.write({"step": 1})
    whole = path.read_bytes()
    for room_left in range(len(whole) + 3):
        with small_disk(len(path.read_bytes()) + room_left):
            before = len(read_jsonl(path))
            for step in range(3):
                writer.write({"step": before + 1 + step, "loss": "x" * 40})
            assert read_jsonl(path)[: before + 1] == read_jsonl(path)  # whole lines alone
            with pytest.raises(DiskFull, match=r"metrics\.jsonl: cannot be written: File too large; .* free"):
                writer.flush()
        writer.flush()
        assert [line["step"] for line in read_jsonl(path)] == list(range(1, before + 4))
    assert len(caplog.records) == len(whole) + 3  # one a full disk, not one a line
    with small_disk(1):
        writer.write({"step": 0})
        writer.close()


def test_a_document_without_room_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})
    with small_disk(20), pytest.raises(DiskFull, match=r"summary\.json: cannot be written"):
        write_json(path, {"a": "x" * 100})
    assert read_json(path) == {"a": 1} and [file.name for file in tmp_path.iterdir()] == ["summary.json"]


def strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@given(records)
@settings(deadline=None)
def test_round_trip_in_strict_json(tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, Any]]) -> None:
    path = tmp_path_factory.mktemp("jsonl") / "metrics.jsonl"
    write_all(path, records)
    assert len([strict(line) for line in path.read_text().split("\n")[:-1]]) == len(records)
    np.testing.assert_equal(read_jsonl(path), records)


def test_arrays_and_scalars_of_every_kind(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "probes.jsonl"
    write_all(
        path,
        [
            {
                "step": np.int64(3),
                "a": np.array([1.0, math.nan], np.float32),
                "b": jnp.float32(0.5),
                "c": jnp.bfloat16(1.5),
                "d": np.float64(math.inf),
                "e": np.bool_(True),
                "f": jnp.ones((2, 1)),
            }
        ],
    )
    assert strict(path.read_text())["d"] == "Infinity"
    (record,) = read_jsonl(path)
    assert record["a"][0] == 1.0 and math.isnan(record["a"][1])
    assert {key: record[key] for key in "bcdef"} == {"b": 0.5, "c": 1.5, "d": math.inf, "e": True, "f": [[1.0], [1.0]]}


def test_a_value_without_json_form_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "m.jsonl")
    with pytest.raises(TypeError, match="object"):
        writer.write({"step": 1, "x": object()})
    writer.close()
    assert (tmp_path / "m.jsonl").read_bytes() == b""


def test_lines_are_on_disk_before_close(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "m.jsonl")
    writer.write({"step": 1})
    assert read_jsonl(tmp_path / "m.jsonl") == [{"step": 1}]
    writer.close()


STEPS = [{"step": step, "text": "é\u2028\r", "loss": step / 3} for step in range(1, 8)]


def test_repair_after_a_tear_at_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write_all(path, STEPS)
    content = path.read_bytes()
    for cut in range(len(content) + 1):
        path.write_bytes(content[:cut])
        repair(path)
        repaired = path.read_bytes()
        whole = content[:cut].count(b"\n") + (content[cut : cut + 1] == b"\n")  # lacking only the newline is whole
        assert read_jsonl(path) == STEPS[:whole]
        assert content.startswith(repaired) and (not repaired or repaired.endswith(b"\n"))


def test_read_leaves_a_torn_tail_out_and_the_writer_cuts_it(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step":1}\n{"step":2,"lo')
    assert read_jsonl(path) == [{"step": 1}]
    write_all(path, [{"step": 2}])
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("last_step", range(9))
def test_repair_drops_later_steps_and_keeps_the_rest_byte_for_byte(tmp_path: Path, last_step: int) -> None:
    path = tmp_path / "m.jsonl"
    lines = [f'{{"step" :  {step}, "x": 1e0}}\n'.encode() for step in (1, 2, 3, 5, 4, 6)] + [b'{"event":"resume"}\n']
    path.write_bytes(b"".join(lines) + b'{"ste')
    kept = [line for line in lines if b"event" in line or int(line.split(b":")[1].split(b",")[0]) <= last_step]
    assert repair(path, last_step) == len(lines) + 1 - len(kept)
    assert path.read_bytes() == b"".join(kept)
    assert [p.name for p in tmp_path.iterdir()] == ["m.jsonl"]


def test_repair_cuts_zeros_that_a_power_cut_left(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step":1}\n{"st\0\0\0\n\0\0\0')
    assert repair(path, 5) == 2
    assert path.read_bytes() == b'{"step":1}\n'


def test_repair_leaves_a_whole_file_alone_and_a_missing_one_missing(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    assert repair(path, 3) == 0 and not path.exists()
    write_all(path, STEPS)
    before = path.stat()
    assert repair(path, 7) == 0
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_broken_line_in_the_middle_is_no_crash(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step":1}\nnonsense\n{"step":2}\n')
    for call in (repair, read_jsonl):
        with pytest.raises(UserError, match="line 2"):
            call(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_jsonl(tmp_path / "missing.jsonl")


def test_json_document_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})
    write_json(path, {"loss": math.nan, "gain": np.array([1.0, math.inf])})
    assert strict(path.read_text()) == {"loss": "NaN", "gain": [1.0, "Infinity"]}
    np.testing.assert_equal(read_json(path), {"loss": math.nan, "gain": [1.0, math.inf]})
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
    path.write_text("[1]")
    with pytest.raises(UserError, match="no JSON object"):
        read_json(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_json(tmp_path / "missing.json")
