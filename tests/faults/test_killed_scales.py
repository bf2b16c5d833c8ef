"""Test kill -9 of a run with scheduled and trained scales and noisy positions: it ends with the same bits."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mhc.config import from_config_dict
from mhc.files import read_jsonl
from tests.faults.test_many_kills import LIMIT, start, write_config
from tests.small_runs import assert_equal_runs, run, tiny, write_corpus

SCALES: dict[str, Any] = {
    "norm": {"gamma_init": 0.8, "gamma_schedule": 0.4, "gamma_shape": "cosine", "gamma_layers": [1], "bias": True},
    "update": {"scale": 0.5, "trained": True, "layers": [0]},
    "positions": {"noise": 0.3},
}


def fields(folder: Path, update: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a run of 12 steps with every scale and with noise, whose checkpoints all stay."""
    monitor = {"probe_every": 3, "probe_sequences": 2, "tensorboard": False, "progress_every": 0, "gamma": True}
    groups = SCALES | {"update": update, "monitor": monitor, "checkpoint": {"every": 4, "keep": 3}}
    return tiny(write_corpus(folder / "texts"), "mhc", **groups)


@pytest.mark.long
def test_a_run_that_goes_on_from_an_earlier_checkpoint_has_the_same_bits(tmp_path: Path) -> None:
    """A finished run loses all that came after its first checkpoint, as by a kill, and goes on."""
    made = from_config_dict(fields(tmp_path, SCALES["update"]))
    assert run(made, tmp_path / "calm") == 0
    torn = Path(shutil.copytree(tmp_path / "calm", tmp_path / "torn"))
    for step in (8, 12):
        shutil.rmtree(torn / "checkpoints" / str(step))
    (torn / "summary.json").unlink()
    assert run(made, torn) == 0
    assert_equal_runs(torn, tmp_path / "calm")


@pytest.mark.process
@pytest.mark.parametrize("update", [SCALES["update"], {"schedule": 0.2}], ids=["trained", "scheduled"])
def test_kills_leave_the_bits_of_an_undisturbed_run(tmp_path: Path, update: dict[str, Any]) -> None:
    """One kill falls between checkpoints, one into a checkpoint; the probes hold each layer's share of gamma."""
    made = fields(tmp_path, update)
    assert run(from_config_dict(made), tmp_path / "calm") == 0
    config, folder = write_config(tmp_path / "config.py", made), tmp_path / "run"
    for phase, after in (("step", 6), ("checkpoint", 2)):
        life = start(config, folder, "--phase", phase, "--after", str(after))
        _, told = life.communicate(timeout=LIMIT)
        assert life.returncode == -signal.SIGKILL, told
    last = start(config, folder)
    _, told = last.communicate(timeout=LIMIT)
    assert last.returncode == 0, told
    assert_equal_runs(folder, tmp_path / "calm")
    for record in read_jsonl(folder / "probes.jsonl")[1:]:
        norms, shares = np.array(record["grad/gamma_norm"]), np.array(record["grad/gamma_share"])
        assert norms.shape == (4,) and shares.sum() == pytest.approx(1.0)
        np.testing.assert_allclose(shares, norms**2 / np.sum(norms**2), rtol=1e-6)
