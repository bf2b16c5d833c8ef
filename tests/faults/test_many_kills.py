"""Test kill -9 at fifty moments of one run, and at ten of one grid: each ends with the bits of an undisturbed one."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mhc.config import from_config_dict
from mhc.train.record import CLOCK
from tests.faults.struck_run import unfinished
from tests.small_runs import assert_equal_runs, lines, run, tiny, write_corpus

ROOT = Path(__file__).parents[2]
STEPS = 800
LIMIT = 300.0  # seconds that a life may take on a busy machine
# Where the fifty lives end. "commit": a checkpoint's files lie in their temporary folder, which is not renamed yet.
KILLS = {"commit": 14, "checkpoint": 8, "step": 12, "validation": 6, "probe": 6, "data": 2, "start": 2}
GRID_STEPS = 200  # of each of three arms
# When the ten lives of the grid end: up to three seconds after an arm's process begins, or after so many steps.
GRID_KILLS = {"start": 3, "steps": 7}

ONE_DEVICE = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "XLA_FLAGS": re.sub(r"(device_count)=\d+", r"\1=1", os.environ.get("XLA_FLAGS", "")),
}


def fields(corpus: str) -> dict[str, Any]:
    """Return a run in which a save, a validation or a probe comes with almost every step."""
    return tiny(
        corpus,
        "mhc",
        train={"steps": STEPS},
        validation={"every": 5, "batches": 1},
        checkpoint={"every": 3},
        monitor={"probe_every": 4},
    )


def write_config(file: Path, made: dict[str, Any]) -> Path:
    """Write a config file of these fields; returns it."""
    file.write_text(
        "import json\nfrom ml_collections import ConfigDict\n\n\n"
        f"def get_config():\n    return ConfigDict(json.loads({json.dumps(made)!r}))\n"
    )
    return file


def start(config: Path, folder: Path, *fate: str) -> subprocess.Popen[str]:
    """Start a run on one device. `fate`: the arguments of `tests.faults.struck_run` that say where it is killed."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.faults.struck_run", "--config", str(config), "--workdir", str(folder), *fate],
        cwd=ROOT,
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=ONE_DEVICE,
    )


@pytest.mark.process
def test_fifty_kills_of_one_run_leave_the_bits_of_an_undisturbed_one(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Metrics, probes, events and the last state are the same; at least ten kills fall within a checkpoint's commit."""
    made = fields(write_corpus(tmp_path / "texts"))
    assert run(from_config_dict(made), tmp_path / "calm") == 0
    config, folder = write_config(tmp_path / "config.py", made), tmp_path / "run"
    draw = random.Random(time.time_ns())
    wheres = [where for where, count in KILLS.items() for _ in range(count)]
    draw.shuffle(wheres)
    struck: collections.Counter[str] = collections.Counter()
    while wheres:
        where = wheres[-1]
        delay = draw.uniform(0.0, {"start": 1.5, "commit": 0.01}.get(where, 0.003))
        after = 0 if where == "start" else draw.randint(7, 16)  # a checkpoint is committed before most
        life = start(config, folder, "--phase", where, "--after", str(after), "--delay", f"{delay:.5f}")
        _, told = life.communicate(timeout=LIMIT)
        assert "Traceback" not in told, told
        if life.returncode == 0:  # it came to the end before its turn
            break
        assert life.returncode == -signal.SIGKILL, told
        if where == "commit" and not unfinished(folder):
            continue  # the commit was over: once more
        wheres.pop()
        struck[where] += 1
    assert not wheres, f"the run ended with {len(wheres)} kills to go; struck: {struck}"
    last = start(config, folder)
    _, told = last.communicate(timeout=LIMIT)
    assert last.returncode == 0, told
    assert_equal_runs(folder, tmp_path / "calm")
    assert events(folder) == events(tmp_path / "calm")
    for where, count in struck.items():
        record_property(f"cases of kill -9 of a run ({where})", count)


def events(folder: Path) -> list[Any]:
    """Return a run's events but its resumptions, without times."""
    return [timeless(event) for event in lines(folder, "events") if event["event"] != "resume"]


def timeless(value: Any) -> Any:
    """Return a JSON value without what differs from run to run, also in the history that an event keeps."""
    if isinstance(value, dict):
        return {name: timeless(part) for name, part in value.items() if name not in (*CLOCK, "time")}
    return [timeless(part) for part in value] if isinstance(value, list) else value


@pytest.mark.process
def test_ten_kills_of_a_grid_leave_the_bits_of_an_undisturbed_one(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Every process of the grid is killed while an arm runs, and the same command is given again, ten times."""
    made = fields(write_corpus(tmp_path / "texts"))
    made["train"]["steps"] = GRID_STEPS
    write_config(tmp_path / "base.py", made)
    (tmp_path / "grid.py").write_text(
        "from mhc.grid import *\ndef get_grid():\n"
        "    return Grid('base.py', product(seeds(0), axis('residual.kind', 'plain', 'hc', 'mhc')))\n"
    )

    def grid(workdir: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "mhc.grid", "run", str(tmp_path / "grid.py"), "--workdir", str(workdir)],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env=ONE_DEVICE,
        )

    assert grid(tmp_path / "calm").wait(timeout=3 * LIMIT) == 0
    arms = sorted(path.parent for path in (tmp_path / "calm").glob("*/arm.json"))
    assert len(arms) == 3
    folder, draw = tmp_path / "killed", random.Random(time.time_ns())
    wheres = [where for where, count in GRID_KILLS.items() for _ in range(count)]
    draw.shuffle(wheres)
    struck: collections.Counter[str] = collections.Counter()
    share = len(arms) * GRID_STEPS / len(wheres)  # steps of the grid for each kill
    for number, where in enumerate(wheres):
        # No sooner than the share of the kill begins, and no later than in its middle: there is always more to do.
        target = (number + draw.uniform(0.0, 0.5)) * share
        while not killed(grid, folder, draw.uniform(0.0, 3.0) if where == "start" else None, target):
            pass  # it fell between two arms, where none runs
        struck[where] += 1
    assert struck == GRID_KILLS
    assert grid(folder).wait(timeout=3 * LIMIT) == 0
    for calm in arms:
        assert_equal_runs(folder / calm.name, calm)
        assert events(folder / calm.name) == events(calm)
    for where, count in struck.items():
        record_property(f"cases of kill -9 of a grid ({where})", count)


def killed(
    grid: Callable[[Path], subprocess.Popen[bytes]], folder: Path, seconds: float | None, steps: float
) -> list[int]:
    """Start a grid, and kill it while an arm runs.

    Args:
      grid: starts it. folder: of the grid.
      seconds: how long after the process of an arm begins it is killed; None: it is killed after ``steps``.
      steps: of all arms together, those of earlier lives too.

    Returns:
      The processes of arms that were killed.
    """
    earlier = set(arm_processes(folder))
    runner = grid(folder)
    wait_for(lambda: set(arm_processes(folder)) - earlier, runner)
    if seconds is None:
        wait_for(lambda: sum(logged(arm) for arm in folder.glob("*")) >= steps, runner)
    else:
        time.sleep(seconds)
    assert runner.poll() is None, "the grid was over before all kills"
    os.killpg(runner.pid, signal.SIGKILL)
    runner.wait(timeout=60)
    return [pid for pid in arm_processes(folder) if end_arm(pid)]


def wait_for(what: Callable[[], object], runner: subprocess.Popen[bytes]) -> None:
    """Wait until something holds, or the runner has ended."""
    limit = time.monotonic() + LIMIT
    while not what() and runner.poll() is None:
        assert time.monotonic() < limit
        time.sleep(0.002)


def arm_processes(grid: Path) -> list[int]:
    """Return the processes of a grid's arms that are said to run, whether they do or not."""
    pids = []
    for record in grid.glob("*/arm.json"):
        with contextlib.suppress(ValueError, OSError):  # it is being replaced
            told = json.loads(record.read_text())
            if told.get("state") == "running" and "pid" in told:
                pids.append(told["pid"])
    return pids


def end_arm(pid: int) -> bool:
    """Kill the process of an arm, which stands in a session of its own; return whether it was there."""
    with contextlib.suppress(OSError):
        if b"mhc.grid.child" in Path(f"/proc/{pid}/cmdline").read_bytes():  # no other that has its number by now
            os.kill(pid, signal.SIGKILL)
            return True
    return False


STEPS_LONG, EVERY = 20_000, 250


@pytest.mark.process
def test_twenty_thousand_steps_keep_memory_and_handles_flat(tmp_path: Path) -> None:
    """Resident memory stays within 5 %, and open files within two, of what they are after the first thousand steps."""
    made = tiny(
        write_corpus(tmp_path / "texts"),
        "mhc",
        train={"steps": STEPS_LONG},
        validation={"every": 500, "batches": 1},
        checkpoint={"every": 1000},
        monitor={"probe_every": 500, "tensorboard": True},
    )
    life = start(write_config(tmp_path / "config.py", made), tmp_path / "run")
    samples: list[tuple[int, int, int]] = []
    while life.poll() is None:
        steps = logged(tmp_path / "run")
        if steps >= (samples[-1][0] + EVERY if samples else EVERY):
            with contextlib.suppress(OSError):  # it may end meanwhile
                samples.append((steps, resident(life.pid), len(os.listdir(f"/proc/{life.pid}/fd"))))
        time.sleep(0.05)
    _, told = life.communicate(timeout=LIMIT)
    assert life.returncode == 0, told
    settled = [sample for sample in samples if sample[0] >= 1000]
    memory, handles = [sample[1] for sample in settled], [sample[2] for sample in settled]
    first = max(memory[:4])  # of the second thousand
    assert max(memory[4:]) <= 1.05 * first, samples
    assert max(handles[4:]) <= max(handles[:4]) + 2, samples


def logged(folder: Path) -> int:
    """Return the last step whose line is whole, from the end of the file alone."""
    file = folder / "metrics.jsonl"
    if not file.is_file():
        return 0
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - 8192))
        steps = re.findall(rb'\n{"step":(\d+),.*(?=\n)', opened.read())
    return int(steps[-1]) if steps else 0


def resident(pid: int) -> int:
    """Return the resident memory of a process in KiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1])  # type: ignore[index]
