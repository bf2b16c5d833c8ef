"""Test that the loop makes no unintended transfers between host and devices, and names the parts that a trace shows."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhc.train.opened import Opened
from tests.small_runs import assert_equal_runs, config, run


@pytest.mark.parametrize("moment", ["log", "measure", "validate"])
def test_a_transfer_that_is_not_meant_stops_the_run(
    moment: str, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does so wherever the transfer hides in the loop; all other tests show that runs pass with all their parts."""
    original = getattr(Opened, moment)

    def careless(self: Opened, *arguments: Any, **named: Any) -> Any:
        jnp.sin(np.ones(3))
        return original(self, *arguments, **named)

    monkeypatch.setattr(Opened, moment, careless)
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        run(config(corpus, "plain"), tmp_path / "run")


def test_a_run_over_eight_devices_means_every_transfer(corpus: str, tmp_path: Path) -> None:
    """The run does all that a run does at a step: probes, validation, checkpoints, a mixture's sources, an alarm."""
    guard = {"on_spike": "clip", "zclip_warmup": 2}
    mixture = {"source": f"mix:a=1*{corpus};b=1*{corpus}"}
    mesh, train, model = {"data": 2, "fsdp": 4}, {"steps": 5}, {"layers": 1}
    fields: dict[str, Any] = {"train": train, "guard": guard, "mesh": mesh, "data": mixture, "model": model}
    assert run(config(corpus, "plain", **fields), tmp_path / "run", 8) == 0


def test_a_trace_names_steps_and_phases(corpus: str, compiled_once: None, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert run(config(corpus, "plain", train={"steps": 2}), tmp_path / "untraced") == 0
    with jax.profiler.trace(str(tmp_path / "trace"), create_perfetto_trace=False):
        assert run(config(corpus, "plain", train={"steps": 2}), folder) == 0
    (file,) = (tmp_path / "trace").rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    steps = {int(event["args"]["step_num"]) for event in events if event.get("name") == "train" and "args" in event}
    assert steps == {1, 2}
    names = {event.get("name", "") for event in events}
    assert {"data", "step", "validation", "probe", "checkpoint"} <= names
    assert_equal_runs(folder, tmp_path / "untraced")
