"""Test curves for TensorBoard and Weights & Biases."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mhc.errors import UserError
from mhc.monitor.boards import TensorBoardWriter, WandbWriter
from mhc.monitor.writers import Writer
from tests.small_runs import small_disk


def test_tensorboard_without_room_holds_nobody_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Records go to a thread through a queue that holds ten."""
    for size in (40, 200):
        caplog.clear()
        with small_disk(size):
            writer = TensorBoardWriter(tmp_path / str(size))
            for step in range(60):
                writer.write({"step": step, "loss": 1.0})
            writer.close()
        (said,) = [record.getMessage() for record in caplog.records]
        assert said.endswith("cannot be written: File too large; training goes on without it")


def test_tensorboard_writes_numbers_arrays_and_mappings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboardX.writer import FileWriter

    seen: list[tuple[str, float, int]] = []

    def add(self: Any, summary: Any, step: int) -> None:
        seen.extend((one.tag, one.simple_value, step) for one in summary.value)

    monkeypatch.setattr(FileWriter, "add_summary", add)
    writer: Writer = TensorBoardWriter(tmp_path)
    writer.write(
        {"step": 4, "loss": np.float32(2.5), "gain": [1.0, 3.0], "grad/norm": {"head": 0.5}, "x": None, "y": "s"}
    )
    writer.close()
    assert seen == [("loss", 2.5, 4), ("gain", 3.0, 4), ("grad/norm/head", 0.5, 4)]


def test_tensorboard_leaves_an_event_file(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path, purge_step=2)
    writer.write({"step": 2, "loss": 1.0})
    writer.close()
    (file,) = tmp_path.glob("events.out.tfevents.*")
    assert b"loss" in file.read_bytes()


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two starts of a run keep one id; all records are in the files, and nothing goes over the network."""
    pytest.importorskip("wandb", reason="the extra [wandb] is not installed")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    for loss in (2.515625, 2.265625):
        writer: Writer = WandbWriter(tmp_path, mode="offline", config={"train": {"steps": 987}})
        writer.write({"step": 4, "loss": loss, "gain": [1.0, 3.0], "grad/norm": {"head": 0.5}, "x": None})
        writer.close()
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert {file.stem for file in files} == {f"run-{(tmp_path / 'wandb' / 'id').read_text()}"}
    content = b"".join(file.read_bytes() for file in files)
    assert all(text in content for text in (b"2.265625", b"grad/norm/head", b"gain", b"987"))


def test_wandb_that_is_not_installed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"monitor.wandb: given 'offline'.*pip install 'mhc-jax\[wandb\]'"):
        WandbWriter(tmp_path, mode="offline", config={})
    assert not list(tmp_path.iterdir())
