"""Read run folders: find the runs among some folders, and load their logs."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mhc import kinds, provenance, remote
from mhc.config import MACHINE, ModuleError, load_kinds
from mhc.errors import UserError
from mhc.eval.common.sheet import Floats
from mhc.eval.compare import checks
from mhc.files import read_json, read_jsonl
from mhc.monitor.detectors import judged_score
from mhc.remote import Folder

DIRECTIONS = ("forward", "backward")
RATE = "optimizer.lr"
SEEDS = ("seed.init", "seed.data")
# Fields (ending in a dot: groups) that change neither what is trained nor on what.
IMMATERIAL = ("checkpoint.", "validation.", "monitor.", *MACHINE)


@dataclasses.dataclass(frozen=True)
class Arm:
    """Holds one run: its configuration and its logs.

    Attributes:
        name: the run's folder relative to the common root.
        path: the run's folder, or a local copy of what it holds beside its checkpoints.
        config: nested mapping, as in config.json.
        metrics: one record a step.
        probes: one record a probe.
        summary: what the run wrote at its end; None when it has not ended.
        events: spikes, crossings of monitors, rewinds, resumes and the like, as they happened.
        source: the run's folder where ``path`` is a copy: one in a store.
        starts: how it was started, each time, from run.json; a run of an older version has none.
    """

    name: str
    path: Path
    config: dict[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    probes: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any] | None
    events: Sequence[Mapping[str, Any]] = ()
    source: Folder | None = None
    starts: Sequence[Mapping[str, Any]] = ()

    @property
    def kind(self) -> str:
        """Return the residual topology: plain, hc, mhc, …"""
        return str(self.config["residual"]["kind"])

    @property
    def mixes(self) -> bool:
        """Return whether maps may mix streams: all kinds but the plain residual, also those that are not known here."""
        kind = kinds.known().get(self.kind)
        return kind is None or not kind.is_plain

    @property
    def preset(self) -> str | None:
        """Return the convention by which the maps are projected, such as Sinkhorn's preset; None without any."""
        kind = kinds.known().get(self.kind)
        return str(self.flat[f"residual.{kind.convention}"]) if kind is not None and kind.convention else None

    @property
    def presets(self) -> tuple[str, ...]:
        """Return every convention that the kind has."""
        kind = kinds.known().get(self.kind)
        return kind.options[kind.convention].allowed() if kind is not None and kind.convention else ()

    @property
    def seeds(self) -> tuple[int, int]:
        """Return the seeds (init, data)."""
        return int(self.config["seed"]["init"]), int(self.config["seed"]["data"])

    @property
    def steps(self) -> int:
        """Return the number of completed updates that are logged."""
        return int(self.metrics[-1]["step"])

    @property
    def planned_steps(self) -> int:
        """Return the number of updates that the configuration asks for."""
        return int(self.config["train"]["steps"])

    @property
    def finished(self) -> bool:
        """Return whether the run wrote its summary after its last planned step."""
        return self.summary is not None and self.steps >= self.planned_steps

    @property
    def lost(self) -> float:
        """Return the share of the validation text's bytes that the tokeniser loses; 0 where the run does not tell."""
        return float(self.starts[-1]["data"].get("bytes lost", 0.0)) if self.starts else 0.0

    @functools.cached_property
    def flat(self) -> dict[str, Any]:
        """Return the configuration as {"section.field": value}, options that the kind lacks with their default."""
        flat = dict(_flatten(self.config))
        return flat | {
            f"residual.{name}": option.default
            for name, option in kinds.options().items()
            if f"residual.{name}" not in flat
        }

    @property
    def judged_after(self) -> int:
        """Return the number of steps before one that the run's z-scores needed."""
        return int(self.flat.get("monitor.zscore_min_history") or 64)

    @functools.cached_property
    def judged(self) -> Sequence[int]:
        """Return the steps that the run's z-scores judged: all but those with too little history before them."""
        scores = ("z_loss", "z_grad_norm")
        told = [any(name in row for name in scores) for row in self.metrics]
        return [
            int(row["step"])
            for number, row in enumerate(self.metrics)
            if (any(row.get(name) is not None for name in scores) if told[number] else number >= self.judged_after)
        ]

    def column(self, key: str) -> tuple[Floats, Floats]:
        """Return (steps, values) of the metrics records that hold ``key``; both float64[n].

        Raises:
            UserError: a value is no number.
        """
        rows = [(row["step"], row[key]) for row in self.metrics if key in row and row[key] is not None]
        checks.check_numbers(rows, key, self.path / "metrics.jsonl")
        array = np.array(rows, np.float64).reshape(-1, 2)
        return array[:, 0], array[:, 1]

    def gains(self, direction: str) -> tuple[Floats, Floats]:
        """Return (probe steps [P], token-mean composite gain [P, S]); P = 0 when the run has no probes."""
        return self.probe(f"gain/{direction}_composite_mean")

    def probe(self, key: str) -> tuple[Floats, Floats]:
        """Return (probe steps [P], values of ``key`` [P, …]) of the probes that hold arrays of one shape under it.

        P = 0, and values [0, 0], when the run has none.
        """
        rows = [
            (row["step"], np.asarray(row[key], np.float64)) for row in self.probes if isinstance(row.get(key), list)
        ]
        rows = [(step, values) for step, values in rows if values.shape == rows[-1][1].shape and values.size]
        if not rows:
            return np.zeros(0), np.zeros((0, 0))
        return np.array([step for step, _ in rows], np.float64), np.stack([values for _, values in rows])

    def peak_gain(self, direction: str) -> float | None:
        """Return the largest token-mean composite gain over steps and sublayers; 1 for plain, None without probes."""
        if not self.mixes:
            return 1.0
        _, gains = self.gains(direction)
        return largest(gains)


def load(paths: Sequence[str | os.PathLike[str]]) -> tuple[Path | None, list[Arm], list[str]]:
    """Return all runs in or under ``paths``, local or in a store, plain ones first, then by kind and name.

    Returns:
        (root, arms, warnings): the local folder that all arms are named relative to, None where a run is in a store;
        and a line for every run left out.

    Raises:
        UserError: a path does not exist, there is no run, or a file of a run cannot be read.
    """
    given = [_resolved(path) for path in paths]
    for path in given:
        remote.check(path)
        if not path.is_dir():
            raise UserError(f"{path}: no such folder" if not path.exists() else f"{path}: not a folder")
    folders = sorted({folder for path in given for folder in _runs_under(path)}, key=lambda folder: folder.parts)
    if not folders:
        raise UserError(f"{', '.join(map(str, given))}: no run here (a run is a folder that holds config.json)")
    root = Path(os.path.commonpath([_named(path.parent if _is_run(path) else path) for path in given]))
    arms, warnings = [], []
    for folder in folders:
        name = _named(folder).relative_to(root).as_posix()
        arm = _load_run(name, remote.local_copy(folder), None if isinstance(folder, Path) else folder)
        if arm is None:
            warnings.append(f"{name} is left out: it has not logged a step")
        else:
            arms.append(arm)
    if not arms:
        raise UserError(f"{', '.join(map(str, given))}: no run here has logged a step")
    local = all(isinstance(path, Path) for path in given)
    return root if local else None, sorted(arms, key=_order), warnings


def measures(arm: Arm) -> dict[str, Any]:
    """Return one arm's entries for summary.json; None for what the run does not tell or was too short to be judged on.

    Everything that the logs hold is computed from them; ``seconds``, ``params`` and ``exit_reason`` come from the
    run's own summary.
    """
    _, loss = arm.column("loss")
    _, grad_norm = arm.column("grad_norm")
    _, speed = arm.column("tokens_per_second")
    _, validation = arm.column("val_loss")
    _, bits = arm.column("val_bits_per_byte")
    spikes = int(sum(bool(row["spike"]) for row in arm.metrics if "spike" in row))
    out: dict[str, Any] = {
        "kind": arm.kind,
        "finished": arm.finished,
        "steps": arm.steps,
        "final_loss": float(loss[-1]) if len(loss) else None,
        "val_loss": float(validation[-1]) if len(validation) else None,
        "bits_per_byte": float(bits[-1]) if len(bits) else None,
        "best_bits_per_byte": float(np.min(bits)) if len(bits) else None,
        **({"bytes_lost": arm.lost} if arm.lost else {}),
        "peak_forward_gain": arm.peak_gain("forward"),
        "peak_backward_gain": arm.peak_gain("backward"),
        "max_grad_norm": largest(grad_norm),
        "spike_score_loss": judged_score(loss),
        "spike_score_grad_norm": judged_score(grad_norm),
        "judged_steps": len(arm.judged),
        "spikes": spikes if arm.judged or spikes else None,
        "nonfinite": int(np.max(arm.column("nonfinite")[1], initial=0)),
        "skipped": int(np.max(arm.column("skipped")[1], initial=0)),
        "tokens_per_second": float(np.median(speed)) if len(speed) else None,
        "seconds": None,
        "params": None,
        "exit_reason": None,
        "sinkhorn": arm.preset,
        "seed": {"init": arm.seeds[0], "data": arm.seeds[1]},
    }
    if arm.summary is not None:
        out |= {key: arm.summary[key] for key in ("seconds", "params", "exit_reason") if key in arm.summary}
    return out


def largest(values: Floats) -> float | None:
    """Return the largest value; infinity when one is not finite, None when there is none."""
    if not values.size:
        return None
    return float(values.max()) if np.isfinite(values).all() else math.inf


def differing_fields(arms: Sequence[Arm]) -> list[str]:
    """Return the fields whose value is not the same in all arms, in the order of the configuration."""
    fields = dict.fromkeys(field for arm in arms for field in arm.flat)
    return [field for field in fields if any(arm.flat.get(field) != arms[0].flat.get(field) for arm in arms)]


def reference_arms(arm: Arm, arms: Sequence[Arm]) -> list[Arm]:
    """Return the plain arms that ``arm`` is measured against.

    They are those that differ from it in the residual alone; where there are none, those that also differ in the
    learning rate; else those with the same seeds; else all.
    """
    plain = [other for other in arms if is_plain(other) and other is not arm]
    alike = [other for other in plain if other.seeds == arm.seeds]
    near = [other for other in alike if outside(other) == outside(arm)]
    exact = [other for other in near if other.flat.get(RATE) == arm.flat.get(RATE)]
    return exact or near or alike or plain


def is_plain(arm: Arm) -> bool:
    """Return whether an arm computes x' = x + F(x), the residual that all others are measured against."""
    kind = kinds.known().get(arm.kind)
    if kind is None or not kind.is_plain or arm.flat.get("residual.value_residual"):
        return False
    return all(arm.flat.get(f"residual.{field}", value) == value for field, value in kind.preserving.items())


def material(field: str) -> bool:
    """Return whether a field of the configuration can change a run's numbers."""
    return not any(field.startswith(entry) if entry.endswith(".") else field == entry for entry in IMMATERIAL)


def outside(arm: Arm) -> dict[str, Any]:
    """Return the fields that an arm's numbers may depend on besides the residual, the learning rate and the seeds."""
    return {
        field: value
        for field, value in arm.flat.items()
        if not field.startswith("residual.") and field not in (RATE, *SEEDS) and material(field)
    }


def gap_to_plain(arm: Arm, arms: Sequence[Arm], key: str) -> tuple[Floats, Floats]:
    """Return (steps, value of ``key`` minus the mean over the reference arms) at the steps that all of them have."""
    references = reference_arms(arm, arms)
    steps, values = arm.column(key)
    if not references:
        return steps[:0], values[:0]
    tables = [dict(zip(*(axis.tolist() for axis in other.column(key)), strict=True)) for other in references]
    shared = np.array([all(step in table for table in tables) for step in steps], bool)
    steps, values = steps[shared], values[shared]
    plain = np.array([[table[step] for step in steps] for table in tables], np.float64).reshape(len(tables), -1)
    return steps, values - plain.mean(axis=0)


def _resolved(path: str | os.PathLike[str]) -> Folder:
    folder = remote.path(path)
    return folder.resolve() if isinstance(folder, Path) else folder


def _named(folder: Folder) -> Path:
    """Return a folder as a local path, from which names are made; a folder in a store is put under /gs."""
    return folder if isinstance(folder, Path) else Path(*folder.parts)


def _is_run(folder: Folder) -> bool:
    return (folder / "config.json").is_file()


def _runs_under(folder: Folder) -> Iterator[Folder]:
    """Yield the run folders in or under a folder; what lies inside a run is not searched."""
    if not isinstance(folder, Path):
        children = sorted(folder.iterdir(), key=str)
        if any(child.name == "config.json" for child in children):
            yield folder
            return
        for child in children:
            if not child.name.startswith(".") and child.is_dir():
                yield from _runs_under(child)
        return
    for current, below, files in os.walk(folder):
        if "config.json" in files:
            below.clear()
            yield Path(current)
        below[:] = [name for name in below if not name.startswith(".")]


def _load_run(name: str, folder: Path, source: Folder | None) -> Arm | None:
    config = read_json(folder / "config.json")
    checks.check_config(config, folder / "config.json")
    try:
        load_kinds(config)
    except ModuleError as error:
        raise ModuleError(f"{folder / 'config.json'}: {error}") from None
    metrics = read_jsonl(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
    if not metrics:
        return None
    checks.check_records(metrics, folder / "metrics.jsonl")
    probes = read_jsonl(folder / "probes.jsonl") if (folder / "probes.jsonl").exists() else []
    checks.check_probes(probes, folder / "probes.jsonl")
    summary = read_json(folder / "summary.json") if (folder / "summary.json").exists() else None
    checks.check_summary(summary or {}, folder / "summary.json")
    events = read_jsonl(folder / "events.jsonl") if (folder / "events.jsonl").exists() else []
    checks.check_events(events, folder / "events.jsonl")
    starts = provenance.read(folder).starts if (folder / provenance.FILE).exists() else ()
    return Arm(name, folder, config, metrics, probes, summary, events, source, starts)


def _order(arm: Arm) -> tuple[int, str, list[tuple[int, str]]]:
    """Return the key by which arms are sorted: kinds as they were declared, unknown ones by name, then names."""
    names = kinds.names()
    rank = names.index(arm.kind) if arm.kind in names else len(names)
    natural = [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", arm.name)]
    return rank, arm.kind, natural


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
