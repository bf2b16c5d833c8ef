"""Read runs: the belief at every kept checkpoint, and the step at which the loss was flagged."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mhc import config as configs
from mhc.config import Config
from mhc.data.windtunnel import is_windtunnel
from mhc.errors import UserError
from mhc.eval.common.events import flags_loss, lead_window
from mhc.eval.windtunnel.leads.bands import Measure, Trace
from mhc.files import append_jsonl, read_jsonl, repair
from mhc.monitor.detectors import median_excess

MEASURES = (
    Measure("log_posterior_r2", "R² of the log posterior, collapsed state", -1, 0.05),
    Measure("log_posterior_r2_worst_stream", "R² of the log posterior, worst stream", -1, 0.05),
    Measure("key_cosine", "|cosine| of the symbols' keys", 1, 0.05, by_change=True),
    Measure("alignment", "alignment of queries with keys", -1, 0.05, by_change=True),
    Measure("kl_bits", "KL(Bayes ‖ model), bits", 1, 0.05),
)
KL = MEASURES[-1]
DETECTORS = {
    "spike": "the run flagged the loss, or something not finite (events.jsonl)",
    "excess": "the training loss lies 0.1 nats above the median of up to 201 steps before",
    "held_out": "the held-out loss leaves its band: KL(Bayes ‖ model), which is that loss less what no model can learn",
}
HELD_OUT = "held_out"  # not read from a run: it follows from a measure
READINGS = "readings.jsonl"
_EVIDENCE = ("key_cosine_values", "key_cosine_observations")


@dataclasses.dataclass(frozen=True)
class Run:
    """Describes a run on a wind tunnel.

    Attributes:
        name: its folder, relative to the folder that all runs have in common.
        start: the step of the checkpoint RUN@STEP that it began from, 0 without one. Its own steps count from there.
        steps: its own, of the checkpoints that it keeps, ascending.
    """

    name: str
    folder: Path
    config: Config
    start: int
    steps: tuple[int, ...]


def runs(folders: Sequence[str]) -> list[Run]:
    """Return the runs in or under some folders that keep a checkpoint and have logged a step.

    Raises:
        UserError: there is none, a folder does not exist, or a run is on no wind tunnel.
    """
    from mhc.train.checkpoint import committed_steps

    for given in folders:
        if not Path(given).is_dir():
            raise UserError(f"--leads: {given}: no such folder")
    found = sorted({folder for given in folders for folder in _folders(Path(given).resolve())})
    root = Path(os.path.commonpath([folder.parent for folder in found])) if found else Path()
    out = []
    for folder in found:
        config = configs.from_json((folder / "config.json").read_text("utf-8"), folder / "config.json")
        if not is_windtunnel(config.data.source):
            raise UserError(
                f"--leads: {folder}: data.source={config.data.source} is no wind tunnel, allowed: runs on windtunnel:…"
            )
        steps = tuple(committed_steps(folder))
        if steps and (folder / "metrics.jsonl").exists():
            out.append(Run(folder.relative_to(root).as_posix(), folder, config, _start(config), steps))
        else:
            print(f"{folder} is left out: it keeps no checkpoint or has logged no step", file=sys.stderr)
    if not out:
        raise UserError(f"--leads: {', '.join(folders)}: no run with a checkpoint here")
    return out


def _folders(folder: Path) -> Iterator[Path]:
    """Yield the run folders in or under a folder; what lies inside a run is not searched."""
    for current, below, files in os.walk(folder):
        if "config.json" in files:
            below.clear()
            yield Path(current)
        below[:] = [name for name in below if not name.startswith(".")]


def _start(config: Config) -> int:
    _, at, step = (config.train.init_from or "").rpartition("@")
    return int(step) if at and step.isdigit() else 0


def traces(found: Sequence[Run], sequences: int, out: Path) -> list[Trace]:
    """Return the trace of each run, from the last step on at which one of them branches.

    Each checkpoint is measured once: what it gives is kept in ``readings.jsonl`` of the folder ``out``, from which an
    interrupted program goes on.

    Args:
        found: the runs.
        sequences: held-out sequences, as `mhc.eval.windtunnel.depth.probe` takes them.
    """
    begin = max(run.start for run in found)
    readings = _Readings(out / READINGS, sequences)
    total = sum(run.start + step >= begin for run in found for step in run.steps)
    done, result = 0, []
    for run in found:
        steps = [step for step in run.steps if run.start + step >= begin]
        values = []
        for step in steps:
            done += 1
            values.append(readings.of(run, step, f"{done} of {total}"))
        last, loss = _loss(run, begin)
        result.append(
            Trace(
                arm=run.name,
                kind=run.config.residual.kind,
                rate=run.config.optimizer.lr,
                seed=(run.config.seed.init, run.config.seed.data),
                steps=np.array([run.start + step for step in steps], np.float64),
                values={
                    measure.name: np.array([one.get(measure.name, np.nan) for one in values], np.float64)
                    for measure in MEASURES
                },
                loss=loss,
                last=last,
                window=lead_window(run.config.monitor.probe_every),
            )
        )
    return result


def _loss(run: Run, begin: int) -> tuple[int, dict[str, int | None]]:
    """Return (the last step that was logged, {detector: the first step after ``begin`` that it flags, or None})."""
    metrics = [row for row in read_jsonl(run.folder / "metrics.jsonl") if "loss" in row]
    path = run.folder / "events.jsonl"
    events = read_jsonl(path) if path.exists() else []
    steps = [run.start + int(row["step"]) for row in metrics]
    flags = median_excess([float(row["loss"]) for row in metrics])
    flagged = {
        "spike": [run.start + int(event["step"]) for event in events if flags_loss(event)],
        "excess": [step for step, flag in zip(steps, flags, strict=True) if flag],
    }
    first = {name: min((step for step in found if step > begin), default=None) for name, found in flagged.items()}
    return max(steps, default=run.start), first


class _Readings:
    """Keeps the measures of each checkpoint in a file of JSON lines."""

    def __init__(self, path: Path, sequences: int) -> None:
        self._path, self._sequences = path, sequences
        path.parent.mkdir(parents=True, exist_ok=True)
        repair(path)
        known = read_jsonl(path) if path.exists() else []
        self._known = {_key(record): record["values"] for record in known}

    def of(self, run: Run, step: int, place: str) -> Mapping[str, float]:
        """Return {measure: value} of a checkpoint, for the measures that exist."""
        folder = run.folder / "checkpoints" / str(step)
        record: dict[str, Any] = {
            "run": str(run.folder),
            "step": step,
            "sequences": self._sequences,
            "written": folder.stat().st_mtime_ns,  # a run that was made anew has other weights under the same name
        }
        values = self._known.get(_key(record))
        if values is None:
            print(f"{run.name}, step {step}: measuring, {place}", file=sys.stderr, flush=True)
            values = measure(run.folder, step, self._sequences)
            append_jsonl(self._path, record | {"values": values})
        return values


def _key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(record.get(name) for name in ("run", "step", "sequences", "written"))


def measure(folder: Path, step: int, sequences: int) -> dict[str, float]:
    """Return the measures of one checkpoint; what does not exist for its model is left out."""
    from mhc.eval.common import checkpoints
    from mhc.eval.windtunnel import belief, depth, geometry

    checkpoint = checkpoints.load(str(folder), step)
    task = belief.fitting(checkpoint)
    kl = float(belief.measure(checkpoint, sequences).distances.kl.mean())
    found = depth.measure(checkpoint, task, sequences).scalars | geometry.measure(checkpoint, task, sequences).scalars
    # Of the symbols that the posterior is computed from, which attention must tell apart.
    cosine = next((found[name] for name in _EVIDENCE if name in found), None)
    every = found | {"kl_bits": kl} | ({} if cosine is None else {"key_cosine": cosine})
    return {one.name: every[one.name] for one in MEASURES if one.name in every}
