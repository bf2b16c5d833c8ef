"""Test what a preparation does about obstacles: full disks, other processes, files that change."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mhc.config import DataConfig
from mhc.data.prepare import folder, progress, run, shards
from mhc.data.shards.manifest import manifest_hash
from mhc.errors import UserError
from tests.data.prepare.samples import content, copied, prepared, raw, write_lines


@contextlib.contextmanager
def small_disk(size: int) -> Iterator[None]:
    """Limit the size of files, which is to a program what a full disk is, with another reason."""
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
    """The disk is full at the first file, at the second, or at a shard."""
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
def test_a_full_disk_is_the_line_of_the_process_that_found_it(
    tmp_path: Path, small: tuple[DataConfig, DataConfig]
) -> None:
    text, _ = copied(small, tmp_path)
    with small_disk(30_000), pytest.raises(UserError, match=r"cannot write .*/new/shard-.*: File too large"):
        prepared(text, tmp_path / "new", workers=2, shard_size=9000)
    assert not (tmp_path / "new").exists()


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
    """The file system has no locks, as NFS and Lustre may be mounted; a line says so, and the preparation goes on."""
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
    """A process sees a file that changed after its lines were found."""
    data, _ = copied(small, tmp_path)

    def change_and_run(*arguments: Any) -> Any:
        (tmp_path / "corpus" / "1.jsonl").write_text("[" * 10**6)
        return make_shards(*arguments)

    make_shards = run.make_shards
    monkeypatch.setattr(run, "make_shards", change_and_run)
    with pytest.raises(UserError, match=r"1\.jsonl has changed while it was prepared: (remove .*, and )?start again$"):
        prepared(data, tmp_path / "new", workers=2)
    assert not (tmp_path / "new" / "manifest.json").exists()
