"""Test a corpus file that shrinks, grows or vanishes under a run: one line, and the run goes on once it is back."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mhc.config import Config
from mhc.errors import UserError
from mhc.train.record import Record
from tests.small_runs import assert_equal_runs, config, run

pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture
def made(tmp_path: Path) -> Config:
    """Return the config of a run over one file of lines."""
    (tmp_path / "corpus").mkdir()
    rng = random.Random(0)
    texts = (" ".join(rng.choices(["stream", "width", "of", "—"], k=rng.randint(5, 60))) for _ in range(300))
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "corpus" / "a.jsonl").write_text(lines, encoding="utf-8")
    return config(f"text:{tmp_path}/corpus/*.jsonl", "plain")


def at_step(step: int, action: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run an action before the line of a step is written."""
    write = Record.step

    def act_and_write(self: Record, at: int, *arguments: Any, **named: Any) -> Any:
        if at == step:
            monkeypatch.setattr(Record, "step", write)
            action()
        return write(self, at, *arguments, **named)

    monkeypatch.setattr(Record, "step", act_and_write)


@pytest.mark.parametrize("change", ["shrinks", "vanishes"])
def test_the_run_ends_with_a_line_and_goes_on_bit_for_bit(
    made: Config, change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(made, tmp_path / "whole") == 0
    file = tmp_path / "corpus" / "a.jsonl"
    content, state = file.read_bytes(), file.stat()
    kept = content.index(b"\n", len(content) // 2) + 1  # whole lines
    at_step(6, file.unlink if change == "vanishes" else lambda: os.truncate(file, kept), monkeypatch)
    with pytest.raises(UserError, match=r"corpus/a\.jsonl (cannot be read|has changed since it was indexed)") as caught:
        run(made, tmp_path / "run")
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=rf"a\.jsonl has {kept:,} bytes, it had|matches no file"):
        run(made, tmp_path / "run")
    file.write_bytes(content)
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert run(made, tmp_path / "run") == 0
    assert_equal_runs(tmp_path / "run", tmp_path / "whole")


def test_lines_that_are_appended_do_not_change_a_run_that_has_begun(
    made: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(made, tmp_path / "whole") == 0
    file = tmp_path / "corpus" / "a.jsonl"
    more = file.read_bytes()

    def append() -> None:
        with file.open("ab") as handle:
            handle.write(more)

    at_step(3, append, monkeypatch)
    assert run(made, tmp_path / "run") == 0
    assert file.stat().st_size == 2 * len(more)
    assert_equal_runs(tmp_path / "run", tmp_path / "whole")
