"""Compute what must stay as it was of the runs in tests/witnesses: values that the code which made them gave.

`measured` takes them, by the programs and functions that users have; tests/witnesses/make.py stored what it gave. Both
stand in the folder of the witnesses, for the runs name their corpus relative to it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mhc import config as configs
from mhc.config import Config
from mhc.sharding import make_mesh, path_of
from mhc.train.checkpoint import load_run
from mhc.train.run import Run
from mhc.train.step import Trainer

FOLDER = Path(__file__).with_name("witnesses")
STEPS = 12
FURTHER = 2  # steps that a copy goes on for

# Of both; `train.py --config configs/default.py` with these makes the runs, in the folder of the witnesses.
FIELDS: dict[str, Any] = {
    "model.layers": 2,
    "model.width": 8,
    "attention.heads": 2,
    "mlp.width": 16,
    "init.kind": "fan_in",
    "data.source": "text:corpus/*.jsonl",
    "data.sequence_length": 48,
    "data.holdout": 0.2,
    "optimizer.lr": 1e-2,
    "schedule.kind": "constant",
    "train.steps": STEPS,
    "train.batch_size": 8,
    "validation.every": 4,
    "validation.batches": 2,
    "checkpoint.every": 0,
    "monitor.probe_every": 4,
    "monitor.probe_sequences": 2,
    "monitor.tensorboard": False,
    "monitor.progress_every": 4,
}
# Of one: maps that depend on the token, far from the identity and from symmetry, so that a fault in them shows.
RUNS: dict[str, dict[str, Any]] = {
    "plain": {"residual.kind": "plain"},
    "mhc": {"residual.kind": "mhc", "residual.init": "fanin", "residual.alpha": 2.0, "residual.iters": 4},
}


def overrides(name: str) -> list[str]:
    """Return the arguments of train.py by which a run was made."""
    return [f"--config.{field}={value}" for field, value in {**FIELDS, **RUNS[name]}.items()]


def flat(config: Config) -> dict[str, Any]:
    """Return {dotted name: value} of a config, as JSON has it; of an option that its residual lacks, the default."""
    return json.loads(json.dumps({name: configs.value_of(config, name) for name in configs.field_names()}))


def weights(run: Path) -> dict[str, str]:
    """Return {path: dtype, shape and SHA-256} of the parameters of the last checkpoint."""
    leaves = jax.tree_util.tree_leaves_with_path(load_run(run).params)
    arrays = {path_of(path): np.asarray(leaf) for path, leaf in leaves}
    return {
        name: f"{array.dtype}{list(array.shape)} {hashlib.sha256(array.tobytes()).hexdigest()}"
        for name, array in arrays.items()
    }


def batch(config: Config) -> dict[str, jax.Array]:
    """Return the fixed batch: two rows of [T] ids, in each a document of T / 3 tokens and one of the rest."""
    length = config.data.sequence_length
    tokens = (np.arange(2 * (length + 1)) ** 2 * 7 % 251).reshape(2, length + 1).astype(np.int32)
    place = np.arange(length, dtype=np.int32)
    second = place >= length // 3
    rows = (2, length)
    fields = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": np.broadcast_to(1 + second.astype(np.int32), rows),
        "positions": np.broadcast_to(np.where(second, place - length // 3, place), rows),
        "weights": np.broadcast_to((place != length // 3 - 1).astype(np.float32), rows),
        "target_bytes": np.ones(rows, np.int32),
    }
    return {name: jnp.asarray(values) for name, values in fields.items()}


def loss(run: Path) -> float:
    """Return the loss of the last checkpoint on the fixed batch, in nats per token."""
    loaded = load_run(run)
    trainer = Trainer(loaded.config, make_mesh(loaded.config.mesh, jax.devices()[:1]))
    sums = trainer.validate(loaded.params, batch(loaded.config))
    return float(sums["nll"]) / float(sums["weight"])


def continued(run: Path) -> list[float]:
    """Return the losses of the steps that a copy of the run goes on for: optimiser and place in the data count."""
    stored = configs.from_json((run / "config.json").read_text("utf-8"))
    longer = configs.change(stored, {"train.steps": STEPS + FURTHER})
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        copy = Path(shutil.copytree(run, Path(folder) / run.name))
        assert Run(longer, copy, devices=jax.devices()[:1]).execute() == 0
        lines = (copy / "metrics.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines[STEPS:]]


def compared(folder: Path) -> dict[str, Any]:
    """Return the summary.json that eval.compare writes for a folder with copies of both runs."""
    from mhc.eval.compare.write import compare

    with contextlib.redirect_stderr(io.StringIO()):
        report = compare([folder])
    summary: dict[str, Any] = json.loads((report.parent / "summary.json").read_text("utf-8"))
    return summary


def scored(run: Path) -> dict[str, Any]:
    """Return what eval.perplexity says of the last checkpoint on all of the corpus' validation split."""
    from mhc.eval.common import checkpoints
    from mhc.eval.common.rows import packed
    from mhc.eval.perplexity.score import score, summary

    checkpoint = checkpoints.load(str(run), devices=jax.devices()[:1])
    corpus = packed(checkpoint.config, "validation", rows=0, batch_size=4)
    found = summary(score(checkpoint, corpus), None)
    return {name: value for name, value in found.items() if name not in ("checkpoint", "seconds", "by_context")}


def measured(kind: str) -> dict[str, Any]:
    """Return all that is held of a run, in the folder of the witnesses."""
    run = Path(kind)
    return {
        "config": flat(configs.from_json((run / "config.json").read_text("utf-8"))),
        "weights": weights(run),
        "loss": loss(run),
        "continued": continued(run),
        "perplexity": scored(run),
    }


def apart(one: Any, other: Any, relative: float, where: str = "") -> list[str]:
    """Return the names at which two trees of JSON differ: numbers by more than ``relative``, all else at all."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        names = [name for name in dict.fromkeys([*one, *other]) if name not in one or name not in other]
        found = [f"{where}{name}: in one alone" for name in names]
        for name in one.keys() & other.keys():
            found += apart(one[name], other[name], relative, f"{where}{name}.")
        return found
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [line for number, (a, b) in pairs for line in apart(a, b, relative, f"{where}{number}.")]
    if isinstance(one, float) and isinstance(other, float):
        near = math.isclose(one, other, rel_tol=relative) or (math.isnan(one) and math.isnan(other))
        return [] if near else [f"{where.rstrip('.')}: {one!r} and {other!r}"]
    return [] if type(one) is type(other) and one == other else [f"{where.rstrip('.')}: {one!r} and {other!r}"]
