"""Make a corpus and a config for runs that take a second, and compare two runs."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import random
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from mhc.config import Config, from_config_dict, from_json, resolve, to_json
from mhc.files import read_jsonl
from mhc.model.decoder import Params
from mhc.remote import Folder
from mhc.sharding import make_mesh
from mhc.train import run as runs
from mhc.train.checkpoint import Checkpoints, save_weights
from mhc.train.record import CLOCK
from mhc.train.step import Trainer
from tests.small import assert_identical

BACKGROUND = ("sh", "-c", "trap '' INT HUP; exec \"$@\"", "sh")
"""What starts a command as ``nohup … &`` of a script does: interrupts and hangups are ignored."""


def write_corpus(folder: Path) -> str:
    """Write forty short texts, and return the source that reads them."""
    rng = random.Random(0)
    folder.mkdir()
    for number in range(40):
        words = (rng.choice(["stream", "width", "of", "the", "norm", "is", "—"]) for _ in range(rng.randint(5, 60)))
        (folder / f"{number:02d}.txt").write_text(" ".join(words), encoding="utf-8")
    return f"text:{folder}/*.txt"


def tiny(corpus: str, kind: str = "mhc", **groups: dict[str, Any]) -> dict[str, Any]:
    """Return fields of a run of 12 steps, as a nested dict: checkpoints every 4, validation every 6, probes every 3."""
    base: dict[str, dict[str, Any]] = {
        "model": {"layers": 2, "width": 8},
        "attention": {"heads": 2, "impl": "xla"},
        "mlp": {"width": 16},
        "residual": {"kind": kind},
        "data": {
            "source": corpus,
            "sequence_length": 16,
            "cache_dir": str(Path(corpus.removeprefix("text:")).parent.parent / "cache"),
            "holdout": 0.2,
        },
        "optimizer": {"lr": 1e-2},
        "schedule": {"kind": "constant"},
        "train": {"steps": 12, "batch_size": 8},
        "validation": {"every": 6, "batches": 2},
        "checkpoint": {"every": 4},
        "monitor": {"probe_every": 3, "probe_sequences": 2, "tensorboard": False, "progress_every": 0},
    }
    for group, fields in groups.items():
        base[group] = {**base.get(group, {}), **fields}
    return base


def config(corpus: str, kind: str = "mhc", **groups: dict[str, Any]) -> Config:
    """Return the config of ``tiny``."""
    return from_config_dict(tiny(corpus, kind, **groups))


def run(made: Config, folder: str | Path, devices: int = 1) -> int:
    """Run ``mhc.train.run.run`` on the first devices, since eight take long on few cores."""
    return runs.Run(made, folder, devices=jax.devices()[:devices]).execute()


def untrained(settings: Config, params: Params, folder: Path) -> Path:
    """Write a run folder that holds a resolved config and parameters of step 0 and return it; no step is compiled."""
    save_weights(folder, params, settings)
    (folder / "config.json").write_text(to_json(settings))
    return folder


@contextlib.contextmanager
def small_disk(size: int) -> Iterator[None]:
    """Limit the size of files meanwhile, which is to a program what a full disk is, with another reason."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def on_demand(make: Callable[..., Path]) -> Callable[..., Path]:
    """Return a function that makes a folder when first asked, once, and writes nothing to the test's streams."""

    @functools.cache
    def made(*of: str) -> Path:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            return make(*of)

    return made


def lines(run: Path, name: str, leave_out: tuple[str, ...] = CLOCK) -> list[dict[str, Any]]:
    """Return the records of metrics, probes or events without what differs from run to run."""
    return [
        {key: value for key, value in record.items() if key not in leave_out}
        for record in read_jsonl(run / f"{name}.jsonl")
    ]


def final_state(run: Folder, devices: int = 1) -> tuple[int, Any, dict[str, Any]]:
    """Return (step, train state, where the run stood, without times) of the last committed checkpoint."""
    stored = from_json((run / "config.json").read_text())
    trainer = Trainer(stored, make_mesh(stored.mesh, jax.devices()[:devices]))
    checkpoints = Checkpoints(run, stored.checkpoint)
    try:
        step = checkpoints.latest()
        assert step is not None
        state, standing = checkpoints.restore(step, trainer.abstract, trainer.layout)
    finally:
        checkpoints.close()
    return step, state, {name: value for name, value in standing.to_json().items() if name != "seconds"}


def assert_equal_runs(run: Path, reference: Path, devices: int = 1) -> None:
    """Check that metrics but for times, probes, the last state and the data's position are equal, bit for bit."""
    metrics = lines(run, "metrics")
    assert [record["step"] for record in metrics] == list(range(1, len(metrics) + 1))
    assert metrics == lines(reference, "metrics")
    assert lines(run, "probes") == lines(reference, "probes")
    step, state, host = final_state(run, devices)
    expected_step, expected_state, expected_host = final_state(reference, devices)
    assert (step, host) == (expected_step, expected_host)
    assert_identical(state, expected_state)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (run, reference)]
    for summary in summaries:
        for name in ("seconds", "tokens_per_second", "goodput"):
            assert summary.pop(name) > 0
    assert summaries[0] == summaries[1]


def snapshot(run: Path) -> dict[str, tuple[int, bytes]]:
    """Return {file: (time of its last change, content)} of a folder."""
    return {
        str(path.relative_to(run)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(run.rglob("*"))
        if path.is_file()
    }


def resolved(made: Config) -> Config:
    """Return the config with what the byte tokeniser decides filled in."""
    from mhc.data.tokenizers import load

    return resolve(made, load("bytes").vocab_size)
