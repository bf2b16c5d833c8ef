"""Test grids that train: small models on a small text, through the commands that a user types."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mhc.files import read_jsonl
from mhc.train.record import CLOCK

ROOT = Path(__file__).parents[2]
ARMS = ("plain,seed=0", "hc,seed=0")
STEPS = 200
# What differs between two runs of the same numbers.
CLOCKS = (*CLOCK, "time")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a grid file of two arms of 2 blocks and width 16, on a text of its own."""
    folder = tmp_path_factory.mktemp("grid")
    words = [f"word{number * number % 97} goes where word{number % 13} went.\n" for number in range(4000)]
    for part in range(4):
        (folder / f"{part}.txt").write_text("".join(words[part::4]))
    base = {
        "model": {"layers": 2, "width": 16},
        "attention": {"heads": 2},
        "data": {
            "source": f"text:{folder}/*.txt",
            "sequence_length": 16,
            "holdout": 0.3,
            "cache_dir": f"{folder}/cache",
        },
        "train": {"steps": STEPS, "batch_size": 8},
        "checkpoint": {"every": 20},
        "validation": {"every": 50, "batches": 2},
        "monitor": {"probe_every": 50, "tensorboard": False},
    }
    (folder / "base.py").write_text(
        f"from ml_collections import ConfigDict\ndef get_config():\n    return ConfigDict({base!r})\n"
    )
    (folder / "two.py").write_text(
        "from mhc.grid import *\ndef get_grid():\n"
        "    return Grid('base.py', product(seeds(0), axis('residual.kind', 'plain', 'hc')))\n"
    )
    (folder / "one.py").write_text((folder / "two.py").read_text().replace("'plain', 'hc'", "'plain'"))
    return folder


@pytest.fixture(scope="module")
def calm(files: Path) -> Path:
    """Return the folder of the grid of two arms, run without disturbance."""
    assert start("run", str(files / "two.py"), "--workdir", str(files / "calm")).wait(timeout=600) == 0
    return files / "calm"


def start(*arguments: str) -> subprocess.Popen[bytes]:
    """Start ``python -m mhc.grid`` in a process of its own."""
    return subprocess.Popen([sys.executable, "-m", "mhc.grid", *arguments], cwd=ROOT, stdout=subprocess.DEVNULL)


def numbers(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the records of a run, without clocks."""
    records = read_jsonl(folder / f"{name}.jsonl")
    return [{key: value for key, value in record.items() if key not in CLOCKS} for record in records]


def record(folder: Path) -> dict[str, Any]:
    """Return the content of arm.json."""
    return json.loads((folder / "arm.json").read_text())


@pytest.mark.process
def test_an_arm_trains_and_is_collected(files: Path, tmp_path: Path) -> None:
    workdir = tmp_path / "w"
    assert (
        start("run", str(files / "one.py"), "--workdir", str(workdir), "--config.train.steps=3").wait(timeout=300) == 0
    )
    assert start("collect", "--workdir", str(workdir)).wait(timeout=60) == 0
    with (workdir / "results.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert (row["arm"], row["state"], row["residual.kind"], row["steps"]) == (ARMS[0], "finished", "plain", "3")
    assert float(row["final_loss"]) == read_jsonl(workdir / ARMS[0] / "metrics.jsonl")[-1]["loss"]


@pytest.mark.process
@pytest.mark.parametrize("orphan", ["lives", "dies"])
def test_a_grid_killed_in_the_middle_ends_as_an_undisturbed_one(
    orphan: str, files: Path, calm: Path, tmp_path: Path
) -> None:
    """After kill -9 of the runner while the first arm trains, the same command finishes every arm once."""
    killed = tmp_path / "killed"
    command = ("run", str(files / "two.py"), "--workdir", str(killed))
    runner = start(*command)
    metrics = killed / ARMS[0] / "metrics.jsonl"
    limit = time.monotonic() + 300
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 30:
        assert time.monotonic() < limit and runner.poll() is None
        time.sleep(0.01)
    runner.kill()
    runner.wait(timeout=60)
    if orphan == "dies":
        os.kill(record(killed / ARMS[0])["pid"], signal.SIGKILL)
    assert start(*command).wait(timeout=600) == 0

    for arm in ARMS:
        for name in ("metrics", "probes"):
            assert numbers(killed / arm, name) == numbers(calm / arm, name)
        assert [row["step"] for row in numbers(killed / arm, "metrics")] == list(range(1, STEPS + 1))
        ends = [json.loads((folder / arm / "summary.json").read_text()) for folder in (calm, killed)]
        assert len({json.dumps({k: v for k, v in end.items() if k not in CLOCKS}) for end in ends}) == 1
    assert record(killed / ARMS[1])["attempts"] == 1
    assert record(killed / ARMS[0])["attempts"] == (2 if orphan == "dies" else 1)
