"""Test that the comparison of two codes sees a difference of one bit, and finds the code at hand equal to its own."""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tools import against
from tools.against import COMMIT, Children, Failed, costlier, cut, differing, numbers, without_added

ROOT = Path(__file__).parents[1]


def tree() -> dict[str, Any]:
    """Return a tree such as a run might have left."""
    return {
        "checkpoint": {
            "params/a": np.arange(6, dtype=np.float32).reshape(2, 3),
            "params/nan": np.array([np.nan, 0.0], np.float32),
            "step": np.array(20, np.int32),
        },
        "metrics": [{"step": 1, "loss": 5.5, "seconds": 0.25}, {"step": 2, "loss": 5.25, "seconds": 0.125}],
        "summary": {"best_loss": 5.25, "best_z": None, "exit_reason": "finished", "goodput": 0.5},
    }


def test_equal_trees_do_not_differ_and_times_are_left_out() -> None:
    other = tree()
    other["metrics"][0]["seconds"] = 7.0
    del other["summary"]["goodput"]
    assert differing(tree(), other) == []
    assert numbers(tree()) == 3 + 4 + 3


@pytest.mark.parametrize("name", ["params/a", "params/nan", "step"])
def test_each_bit_of_an_array_counts(name: str) -> None:
    size = tree()["checkpoint"][name].nbytes
    for bit in range(8 * size):
        other = tree()
        other["checkpoint"][name].reshape(-1).view(np.uint8)[bit // 8] ^= 1 << bit % 8
        found = differing(tree(), other)
        assert len(found) == 1 and found[0].startswith(f"checkpoint.{name}: 1 of ")


def test_a_measure_that_probes_add_is_no_difference_and_one_that_they_lack_is() -> None:
    """So is a field that anything but a probe adds."""
    fewer, more = {"step": 10, "gain": 1.0}, {"step": 10, "gain": 1.0, "norm": 2.0}
    assert without_added(differing({"probes": [fewer]}, {"probes": [more]})) == ([], {"norm"})
    for one, other in (({"probes": [more]}, {"probes": [fewer]}), ({"metrics": [fewer]}, {"metrics": [more]})):
        lines, added = without_added(differing(one, other))
        assert len(lines) == 1 and not added


def test_the_sign_of_zero_and_the_type_of_a_number_count() -> None:
    assert differing({"x": 0.0}, {"x": -0.0}) == ["x: 0.0 and -0.0"]
    assert differing({"x": 1}, {"x": 1.0}) and differing({"x": 1}, {"x": True}) and differing({"x": None}, {"x": 0})
    assert differing({"x": float("nan")}, {"x": float("nan")}) == []
    same = np.zeros(2, np.float32)
    assert differing({"x": same}, {"x": same.view(np.int32)}) and differing({"x": same}, {"x": same.reshape(1, 2)})


def test_the_last_digit_of_a_logged_number_a_missing_key_and_a_missing_record_count() -> None:
    other = tree()
    other["metrics"][1]["loss"] = float(np.nextafter(5.25, 6))
    assert [line.partition(":")[0] for line in differing(tree(), other)] == ["metrics[1].loss"]
    other = tree()
    del other["checkpoint"]["params/a"]
    other["summary"]["more"] = 1
    assert differing(tree(), other) == ["checkpoint.params/a: only in the first", "summary.more: only in the second"]
    other = tree()
    del other["metrics"][1]
    assert differing(tree(), other) == ["metrics: 2 and 1 entries"]


def test_costs_may_differ_by_a_hundredth_either_way() -> None:
    assert costlier({"flops": 1000.0}, {"flops": 1009.0}) == costlier({"flops": 1000.0}, {"flops": 991.0}) == []
    for other in ({"flops": 1011.0}, {"flops": 989.0}, {}, {"flops": float("nan")}):
        assert len(costlier({"flops": 1000.0}, other)) == 1
    assert len(costlier({"flops": 1.0}, {"flops": 1.0, "bytes": 1.0})) == 1


def test_a_run_is_cut_to_its_half(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20):
        (tmp_path / "run" / "checkpoints" / str(step)).mkdir(parents=True)
    (tmp_path / "run" / "summary.json").write_text("{}")
    cut(tmp_path / "run", tmp_path / "half", 10)
    assert sorted(path.name for path in (tmp_path / "half" / "checkpoints").iterdir()) == ["10", "5"]
    assert not (tmp_path / "half" / "summary.json").exists() and (tmp_path / "run" / "summary.json").exists()
    with pytest.raises(Failed, match="no checkpoint of step 12"):
        cut(tmp_path / "run", tmp_path / "none", 12)


def test_a_child_that_would_import_other_code_says_so(tmp_path: Path) -> None:
    """In a folder without mhc the installed one would be imported."""
    with pytest.raises(Failed, match=r"mhc was imported from .*, not from|No module named 'mhc'"):
        against.Side(tmp_path, tmp_path / "caches", Children()).child({"do": "cost", "configs": {}})


def test_no_child_goes_on_when_the_comparison_is_left(tmp_path: Path) -> None:
    """A child that runs is ended, as soon as it says that it runs; none begins afterwards."""
    children, began = Children(), tmp_path / "began"
    os.mkfifo(began)
    forever = [sys.executable, "-c", f"open({str(began)!r}, 'w').close(); import signal; signal.pause()"]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(children.run, forever, tmp_path, os.environ)
        began.read_bytes()  # until the child has opened it
        children.end()
        assert running.result(timeout=60)[0] == -signal.SIGKILL
    with pytest.raises(Failed, match="interrupted"):
        children.run(forever, tmp_path, os.environ)


def test_what_cannot_be_compared_is_said_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert against.main(["no-such-commit"]) == 2
    assert capsys.readouterr().err.startswith("error: git")
    with pytest.raises(SystemExit) as left:
        against.main(["--steps", "7"])
    assert left.value.code == 2 and "given 7, allowed: 2, 4" in capsys.readouterr().err


def commit_is_here() -> bool:
    """Return whether git and the commit are here."""
    if shutil.which("git") is None:
        return False
    command = ["git", "-C", str(ROOT), "cat-file", "-e", f"{COMMIT}^{{commit}}"]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.process
@pytest.mark.skipif(not commit_is_here(), reason=f"needs git and the commit {COMMIT}, which a shallow clone lacks")
def test_the_code_at_hand_computes_what_the_commit_did() -> None:
    command = [sys.executable, str(ROOT / "tools" / "against.py"), "--kinds", "plain", "mhc"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("equal (") == 6 and f"equal to {COMMIT}: plain, mhc" in done.stdout


@pytest.mark.process
@pytest.mark.skipif(not commit_is_here(), reason=f"needs git and the commit {COMMIT}, which a shallow clone lacks")
def test_a_change_of_the_last_bit_is_seen_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The code at hand is changed so that the loss is 1 + 2⁻²³ times what it was."""
    for name in against.CODE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name)
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    file = tmp_path / "mhc" / "train" / "step.py"
    before = "loss = parts.sums.nll / jnp.maximum(parts.weight, 1.0)"
    text = file.read_text("utf-8")
    assert before in text
    file.write_text(text.replace(before, f"{before} * (1 + 2**-23)"), "utf-8")
    assert against.run(COMMIT, ["plain"], 4, {"bits"}, {}, tmp_path) == 1
    said = capsys.readouterr().out
    assert "plain, bits: metrics[0].loss: " in said and "checkpoint" not in said
