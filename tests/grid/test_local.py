"""Test running a grid on one machine, with arms that train nothing: each runs once, whatever happens around it."""

from __future__ import annotations

import collections
import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mhc import full_disk
from mhc.grid import folder as folders
from mhc.grid import local
from mhc.grid.__main__ import main
from mhc.grid.devices import Slot
from mhc.grid.local import Runner
from tests.small_runs import BACKGROUND, small_disk

FAKE = Path(__file__).with_name("fake_arm.py")
RUNNER = Path(__file__).with_name("fake_runner.py")
ROOT = Path(__file__).parents[2]
STEPS = 10


def command(workdir: Path, arm: str) -> list[str]:
    """Return the command of a fake arm."""
    return [sys.executable, "-S", str(FAKE), str(workdir), arm]


def run(
    workdir: Path, *arms: str, slots: list[Slot] | None = None, retry: tuple[str, ...] = ()
) -> tuple[int, list[str]]:
    """Return (exit code, lines) of a runner in this process."""
    lines: list[str] = []
    steps = dict.fromkeys(arms, STEPS)
    runner = Runner(workdir, steps, slots or [Slot()], retry=retry, command=command, say=lines.append)
    return runner.run(), lines


def behave(workdir: Path, **arms: str) -> None:
    """Tell arms how to behave."""
    (workdir / "behaviour.json").write_text(json.dumps(arms))


def starts(workdir: Path) -> list[dict[str, Any]]:
    """Return what each start of an arm saw, in order."""
    file = workdir / "starts"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def names(workdir: Path) -> list[str]:
    """Return the arms in the order of their starts."""
    return [start["arm"] for start in starts(workdir)]


def states(workdir: Path, *arms: str) -> list[str]:
    """Return the states of the arms."""
    return [folders.state(workdir / arm, STEPS) for arm in arms]


def wait_until(what: Callable[[], Any]) -> None:
    """Wait until something holds; a minute is for the slowest of machines."""
    limit = time.monotonic() + 60
    while not what():
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_that_nobody_hears_the_lines_any_more_stops_no_arm(tmp_path: Path) -> None:
    def gone(line: str) -> None:
        raise BrokenPipeError

    runner = Runner(tmp_path, dict.fromkeys("abc", STEPS), [Slot()] * 2, command=command, say=gone)
    assert runner.run() == 0
    assert states(tmp_path, *"abc") == ["finished"] * 3


def test_a_full_disk_starts_no_further_arm_and_the_same_command_goes_on(tmp_path: Path) -> None:
    behave(tmp_path, b="full")
    code, lines = run(tmp_path, "a", "b", "c")
    assert code == full_disk.EXIT_CODE
    assert lines[-1] == (
        f"{tmp_path}: there is no room for b: checkpoint 4: cannot be written: No space left on device; "
        "the same command continues"
    )
    assert states(tmp_path, "a", "b", "c") == ["finished", "interrupted", "pending"]
    behave(tmp_path)
    assert run(tmp_path, "a", "b", "c")[0] == 0
    assert names(tmp_path) == ["a", "b", "b", "c"]


def test_a_runner_without_room_for_its_own_files_ends_in_a_line(tmp_path: Path) -> None:
    with small_disk(10):
        code, lines = run(tmp_path, "a", "b")
    assert code == full_disk.EXIT_CODE and not starts(tmp_path)
    assert re.fullmatch(r".*/a/arm\.json: cannot be written: File too large; .*; the same command continues", lines[-1])
    assert not folders.claimed(tmp_path / "a")
    assert run(tmp_path, "a", "b")[0] == 0


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start runners in processes of their own; end them, and let hanging arms go."""
    processes = []

    def start(jobs: int, *arms: str, through: Sequence[str] = ()) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*through, sys.executable, str(RUNNER), str(tmp_path), str(jobs), *arms],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        processes.append(process)
        return process

    yield start
    (tmp_path / "go").touch()
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_every_arm_runs_once_and_a_finished_one_never_again(tmp_path: Path) -> None:
    arms = ("a", "b", "c", "d")
    code, _ = run(tmp_path, *arms, slots=[Slot()] * 3)
    assert code == 0
    assert sorted(names(tmp_path)) == list(arms)
    assert states(tmp_path, *arms) == ["finished"] * 4
    code, _ = run(tmp_path, *arms, "e")
    assert code == 0
    assert names(tmp_path)[4:] == ["e"]


def test_a_failed_arm_is_recorded_and_stops_nothing(tmp_path: Path) -> None:
    behave(tmp_path, b="fail", c="halt")
    code, lines = run(tmp_path, "a", "b", "c", "d")
    assert code == 1
    assert states(tmp_path, "a", "b", "c", "d") == ["finished", "failed", "halted", "finished"]
    note = folders.record(tmp_path / "b")
    assert note["exit_code"] == 1
    assert note["last_lines"] == [*(f"line {n}" for n in range(31, 50)), "Traceback: out of luck"]
    assert any("b: failed" in line and "out of luck" in line for line in lines)


def branching(workdir: Path, *arms: str, **sources: str) -> tuple[int, list[str]]:
    """Run arms in two slots, some of which start when another one has finished."""
    lines: list[str] = []
    runner = Runner(
        workdir,
        dict.fromkeys(arms, STEPS),
        [Slot()] * 2,
        sources={arm: (source, STEPS) for arm, source in sources.items()},
        command=command,
        say=lines.append,
    )
    return runner.run(), lines


def test_a_branch_starts_when_its_trunk_has_finished(tmp_path: Path) -> None:
    """It does so in whatever order they are listed; a free slot takes an arm that need not wait."""
    code, lines = branching(tmp_path, "c", "b", "a", "d", b="a", c="b")
    assert code == 0
    order = names(tmp_path)
    assert sorted(order) == ["a", "b", "c", "d"]
    assert order.index("a") < order.index("b") < order.index("c") and set(order[:2]) == {"a", "d"}
    told = [line.partition(" ")[0].strip(":") + line.partition(":")[2][:6] for line in lines]
    for trunk, branch in (("a", "b"), ("b", "c")):
        assert told.index(f"{trunk} finis") < told.index(f"{branch} start")
    assert branching(tmp_path, "c", "b", "a", "d", b="a", c="b") == (0, [])


def test_branches_of_a_trunk_that_failed_are_left_and_told(tmp_path: Path) -> None:
    behave(tmp_path, a="fail")
    code, lines = branching(tmp_path, "a", "b", "c", "d", b="a", c="b")
    assert code == 1 and sorted(names(tmp_path)) == ["a", "d"]
    assert states(tmp_path, "b", "c") == ["pending", "pending"]
    assert "b: not started: it branches from a, which is failed" in lines
    assert "c: not started: it branches from b, which is pending" in lines
    behave(tmp_path)
    run(tmp_path, "a", retry=("a",))
    assert branching(tmp_path, "a", "b", "c", "d", b="a", c="b")[0] == 0
    assert names(tmp_path)[2:] == ["a", "b", "c"]


def test_what_failed_runs_again_only_when_asked(tmp_path: Path) -> None:
    behave(tmp_path, b="fail", c="halt")
    run(tmp_path, "a", "b", "c")
    behave(tmp_path)
    assert run(tmp_path, "a", "b", "c")[0] == 1
    assert len(starts(tmp_path)) == 3
    assert run(tmp_path, "b", retry=("b",))[0] == 0
    assert run(tmp_path, "a", "b", "c")[0] == 0  # a halt is an end that the arm came to by itself
    assert names(tmp_path)[3:] == ["b"]
    assert folders.record(tmp_path / "b")["attempts"] == 2
    assert states(tmp_path, "a", "b", "c") == ["finished", "finished", "halted"]


def test_the_last_lines_are_of_the_latest_attempt(tmp_path: Path) -> None:
    behave(tmp_path, a="fail")
    run(tmp_path, "a")
    behave(tmp_path, a="halt")
    run(tmp_path, "a", retry=("a",))
    assert folders.record(tmp_path / "a")["last_lines"] == []
    assert (tmp_path / "a" / "arm.log").read_text().count("out of luck") == 1


def test_an_arm_whose_steps_were_raised_is_not_finished(tmp_path: Path) -> None:
    run(tmp_path, "a")
    assert folders.state(tmp_path / "a", STEPS + 1) == "interrupted"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no process to cores")
def test_slots_pin_devices_and_cores(tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    slots = [Slot({"CUDA_VISIBLE_DEVICES": "7"}, ("cuda:7",)), Slot(cores=(core,))]
    behave(tmp_path, a="hang", b="hang")
    lines: list[str] = []
    arms = dict.fromkeys("ab", STEPS)
    runner = Runner(tmp_path, arms, slots, command=command, say=lines.append)
    reap = runner._reap

    def let_go() -> None:  # once both run, so that each has a slot of its own
        if len(starts(tmp_path)) == 2:
            (tmp_path / "go").touch()
        reap()

    runner._reap = let_go  # type: ignore[method-assign]
    assert runner.run() == 0
    by_arm = {start["arm"]: start for start in starts(tmp_path)}
    assert by_arm["a"]["cuda"] == "7"
    assert (by_arm["b"]["cuda"], by_arm["b"]["cores"]) == (os.environ.get("CUDA_VISIBLE_DEVICES"), [core])
    assert folders.record(tmp_path / "a")["devices"] == ["cuda:7"]


def test_arms_share_what_they_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    assert Path(local.environment(tmp_path)["JAX_COMPILATION_CACHE_DIR"]).parent == tmp_path.resolve()
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/elsewhere")
    assert "JAX_COMPILATION_CACHE_DIR" not in local.environment(tmp_path)


# Several runners, and dead ones ---------------------------------------------------------------------------------------


def test_two_runners_never_run_the_same_arm(tmp_path: Path, runner: Callable[..., subprocess.Popen[str]]) -> None:
    arms = [f"arm{number}" for number in range(12)]
    both = [runner(2, *arms), runner(2, *reversed(arms))]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    assert sorted(names(tmp_path)) == sorted(arms)


def test_a_second_runner_waits_for_what_the_first_one_runs(
    tmp_path: Path, runner: Callable[..., subprocess.Popen[str]]
) -> None:
    behave(tmp_path, a="hang")
    first = runner(1, "a")
    wait_until(lambda: starts(tmp_path))
    second = runner(1, "a", "b")
    wait_until(lambda: states(tmp_path, "b") == ["finished"])
    assert second.poll() is None
    (tmp_path / "go").touch()
    assert [first.wait(timeout=60), second.wait(timeout=60)] == [0, 0]
    assert names(tmp_path) == ["a", "b"]
    assert "a: another process runs it" in second.communicate()[0]


def test_an_arm_outlives_its_killed_runner_and_is_not_started_twice(
    tmp_path: Path, runner: Callable[..., subprocess.Popen[str]]
) -> None:
    behave(tmp_path, a="hang")
    first = runner(1, "a", "b")
    wait_until(lambda: starts(tmp_path))
    first.kill()
    first.wait(timeout=60)
    assert states(tmp_path, "a", "b") == ["running", "pending"]
    second = runner(1, "a", "b")
    wait_until(lambda: states(tmp_path, "b") == ["finished"])
    (tmp_path / "go").touch()
    assert second.wait(timeout=60) == 0
    assert names(tmp_path) == ["a", "b"]
    assert states(tmp_path, "a") == ["finished"]


def test_an_arm_that_died_with_its_runner_is_continued(
    tmp_path: Path, runner: Callable[..., subprocess.Popen[str]]
) -> None:
    behave(tmp_path, a="hang")
    first = runner(1, "a", "b")
    wait_until(lambda: starts(tmp_path))
    first.kill()
    first.wait(timeout=60)
    second = runner(1, "a", "b")  # waits for the orphan
    wait_until(lambda: states(tmp_path, "b") == ["finished"])
    os.kill(starts(tmp_path)[0]["pid"], signal.SIGKILL)
    wait_until(lambda: len(starts(tmp_path)) == 3)
    (tmp_path / "go").touch()
    assert second.wait(timeout=60) == 0
    assert names(tmp_path) == ["a", "b", "a"]


def test_an_orphan_keeps_its_accelerator(tmp_path: Path, runner: Callable[..., subprocess.Popen[str]]) -> None:
    """The arm of a killed runner still fills the memory of its device: nothing else starts there until it ends."""
    behave(tmp_path, a="hang")
    first = runner(1, "a")
    wait_until(lambda: starts(tmp_path))
    first.kill()
    first.wait(timeout=60)
    record = tmp_path / "a" / folders.RECORD
    record.write_text(json.dumps({**json.loads(record.read_text()), "devices": ["cuda:0"]}))
    slots = [Slot({"CUDA_VISIBLE_DEVICES": number}, (f"cuda:{number}",)) for number in "01"]
    assert run(tmp_path, "b", "c", slots=slots)[0] == 0
    assert {start["arm"]: start["cuda"] for start in starts(tmp_path)[1:]} == {"b": "1", "c": "1"}


def test_an_orphan_that_its_guard_halted_is_not_continued(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / folders.RECORD).write_text('{"state": "running"}')
    assert states(tmp_path, "a") == ["interrupted"]
    (tmp_path / "a" / "summary.json").write_text('{"exit_reason": "halted", "steps": 10}')
    assert states(tmp_path, "a") == ["halted"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_runner_lets_its_arms_save(
    number: signal.Signals, tmp_path: Path, runner: Callable[..., subprocess.Popen[str]]
) -> None:
    behave(tmp_path, a="hang", b="hang")
    first = runner(2, "a", "b", "c")
    wait_until(lambda: len(starts(tmp_path)) == 2)
    first.send_signal(number)
    assert first.wait(timeout=60) == 128 + number
    assert states(tmp_path, "a", "b", "c") == ["interrupted", "interrupted", "pending"]
    for arm in ("a", "b"):
        assert folders.record(tmp_path / arm)["last_lines"] == ["saved"]
    behave(tmp_path)
    assert run(tmp_path, "a", "b", "c")[0] == 0
    assert sorted(names(tmp_path)[2:]) == ["a", "b", "c"]


def test_a_runner_in_the_background_ignores_interrupts_and_passes_sigterm_on(
    tmp_path: Path, runner: Callable[..., subprocess.Popen[str]]
) -> None:
    """A script starts it so by ``nohup … &``."""
    behave(tmp_path, a="hang", b="hang")
    first = runner(2, "a", "b", "c", through=BACKGROUND)
    wait_until(lambda: len(starts(tmp_path)) == 2)
    for number in (signal.SIGINT, signal.SIGHUP):
        first.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            first.wait(timeout=0.5)
    assert states(tmp_path, "a", "b") == ["running", "running"]
    first.send_signal(signal.SIGTERM)
    assert first.wait(timeout=60) == 128 + signal.SIGTERM
    assert states(tmp_path, "a", "b", "c") == ["interrupted", "interrupted", "pending"]
    assert [folders.record(tmp_path / arm)["last_lines"] for arm in "ab"] == [["saved"]] * 2


def test_an_arm_killed_from_outside_is_left_for_the_next_run(
    tmp_path: Path, runner: Callable[..., subprocess.Popen[str]]
) -> None:
    behave(tmp_path, a="hang")
    first = runner(1, "a", "b")
    wait_until(lambda: starts(tmp_path))
    os.kill(starts(tmp_path)[0]["pid"], signal.SIGKILL)
    assert first.wait(timeout=60) == 1
    assert states(tmp_path, "a", "b") == ["interrupted", "finished"]


def test_a_folder_in_which_a_run_trains_by_itself_is_left_alone(tmp_path: Path) -> None:
    from mhc.run_folder import lock

    (tmp_path / "a").mkdir()
    with lock(tmp_path / "a"):
        assert folders.Claim.take(tmp_path / "a") is None
    claim = folders.Claim.take(tmp_path / "a")
    assert claim is not None
    claim.release()


# The programs ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a grid file of three fake arms, of which x fails."""
    (tmp_path / "base.py").write_text(
        "from ml_collections import ConfigDict\ndef get_config():\n"
        "    return ConfigDict({'train': {'steps': 10}, 'residual': {'kind': 'plain'}})\n"
    )
    (tmp_path / "g.py").write_text(
        "from mhc.grid import *\ndef get_grid():\n    return Grid('base.py', axis('optimizer.lr', 0.1, 0.2, 0.3))\n"
    )
    monkeypatch.setattr(Runner.__init__, "__kwdefaults__", {"retry": (), "command": command})
    monkeypatch.setattr("mhc.grid.devices.accelerators", lambda environment: [])
    (tmp_path / "w").mkdir()
    behave(tmp_path / "w", **{"lr=0.2": "fail"})
    return str(tmp_path / "g.py")


def test_run_status_retry_collect(grid: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workdir = str(tmp_path / "w")
    assert main(["run", grid, "--workdir", workdir, "--jobs", "2"]) == 1
    assert main(["status", "--workdir", workdir]) == 0
    out = capsys.readouterr().out
    assert "2 finished, 1 failed" in out
    line = next(line for line in out.splitlines() if line.startswith("lr=0.2 "))
    assert "failed" in line and line.endswith("Traceback: out of luck")

    assert main(["collect", "--workdir", workdir]) == 0
    with (tmp_path / "w" / "results.csv").open() as file:
        rows = {row["arm"]: row for row in csv.DictReader(file)}
    assert {arm: (row["state"], row["optimizer.lr"], row["final_loss"], row["error"]) for arm, row in rows.items()} == {
        "lr=0.1": ("finished", "0.1", "2.5", ""),
        "lr=0.2": ("failed", "0.2", "", "Traceback: out of luck"),
        "lr=0.3": ("finished", "0.3", "2.5", ""),
    }

    behave(tmp_path / "w")
    assert main(["retry", "--workdir", workdir]) == 0
    assert main(["retry", "--workdir", workdir]) == 0
    assert "no arm has failed" in capsys.readouterr().out
    assert collections.Counter(names(tmp_path / "w")) == {"lr=0.1": 1, "lr=0.2": 2, "lr=0.3": 1}


def test_retry_refuses_an_arm_that_did_not_fail(grid: str, tmp_path: Path) -> None:
    from mhc.errors import UserError

    workdir = str(tmp_path / "w")
    main(["run", grid, "--workdir", workdir])
    with pytest.raises(UserError, match=r"arm lr=0\.1 is finished, allowed: arms that failed or were halted"):
        main(["retry", "lr=0.1", "--workdir", workdir])
    with pytest.raises(UserError, match=r"no arm lr=0\.21 in .* \(did you mean lr=0\.2\?\)"):
        main(["retry", "lr=0.21", "--workdir", workdir])
