"""Write the record of a run (metrics.jsonl, probes.jsonl, events.jsonl, TensorBoard), and raise alarms from it."""

from __future__ import annotations

import collections
import hashlib
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mhc import config as configs
from mhc.config import Config
from mhc.files import JsonlWriter, read_jsonl, repair
from mhc.monitor import guard
from mhc.monitor.boards import TensorBoardWriter, WandbWriter
from mhc.monitor.detectors import RollingZScore, judged_score
from mhc.monitor.progress import Progress
from mhc.monitor.writers import NoWriter, Writer

HISTORY = 32  # steps that an event carries
BEFORE = 8  # a gradient norm flagged so many steps before the loss counts as having come first
FILES = ("metrics", "probes", "events")
SPREAD = 128  # steps that seconds_p50 and seconds_p95 are taken over
# Keys of a metrics line that the clock and the machine decide: two runs of the same numbers differ in them.
CLOCK = (
    "seconds",
    "tokens_per_second",
    "mfu",
    "data_wait",
    "compile_seconds",
    "checkpoint_seconds",
    "validation_seconds",
    "probe_seconds",
    "seconds_p50",
    "seconds_p95",
    "wall_seconds",
    "goodput",
    "memory_bytes",
    "memory_peak_bytes",
)


class Alarm(NamedTuple):
    """Describes a step that was flagged, and the configured action."""

    step: int
    finite: bool
    action: str  # log, clip, skip, rewind or halt
    event: dict[str, Any]  # what events.jsonl is to say, but for the batch


class Record:
    """Writes the record of a run from ``last_step`` on: cuts later lines, and sets the detectors to their state then.

    With ``writes=False`` it only reads and judges: another process writes the same.
    """

    def __init__(
        self,
        workdir: Path,
        config: Config,
        last_step: int,
        progress: Progress,
        *,
        keep_events: bool = False,
        writes: bool = True,
    ):
        self.workdir, self.config, self.progress = workdir, config, progress
        self.validation: dict[str, float | None] = {}
        self._extra: list[Writer] = []
        self._metrics: Writer
        self._probes: Writer
        self._events: Writer
        if not writes:
            self._metrics = self._probes = self._events = NoWriter()
            self._restore_history()
            return
        for name in FILES[:2] if keep_events else FILES:
            repair(workdir / f"{name}.jsonl", last_step)
        self._metrics, self._probes, self._events = (JsonlWriter(workdir / f"{name}.jsonl") for name in FILES)
        if config.monitor.tensorboard:
            self._extra.append(TensorBoardWriter(workdir / "tensorboard", purge_step=max(last_step, 0) + 1))
        if config.monitor.wandb != "off":
            self._extra.append(WandbWriter(workdir, mode=config.monitor.wandb, config=configs.to_dict(config)))
        self._restore_history()

    def _restore_history(self) -> None:
        monitor, records = self.config.monitor, read_jsonl(self.workdir / "metrics.jsonl")
        self._z_loss, self._z_grad = (
            RollingZScore(
                (record[name] for record in records),
                window=monitor.zscore_window,
                min_history=self.config.zscore_min_history,
                threshold=monitor.zscore_threshold,
            )
            for name in ("loss", "grad_norm")
        )
        self._recent = collections.deque(records, HISTORY)
        self._durations = collections.deque(map(_alone, records[-SPREAD:]), SPREAD)
        # A step whose update was left out is no progress; those that a rewind or a crash undid have no line.
        applied = zip(records, [{"skipped": 0}, *records], strict=False)
        self._counted = sum(_alone(record) for record, before in applied if record["skipped"] == before["skipped"])
        self._skipped = records[-1]["skipped"] if records else 0
        for record in records:
            if "val_loss" in record:
                self.validation = {name: value for name, value in record.items() if name.startswith("val_")}
        self._watch = guard.ProbeWatch(self.config.guard)
        for record in read_jsonl(self.workdir / "probes.jsonl"):
            self._watch.update(record)

    def flush(self, then: str = "") -> None:
        """Write every line so far to its file. Raises DiskFull where the disk is full; ``then`` ends its message."""
        for writer in (self._metrics, self._probes, self._events):
            if isinstance(writer, JsonlWriter):
                writer.flush(then)

    def close(self) -> None:
        """Close the files; `flush` first where no line may be lost."""
        for writer in (self._metrics, self._probes, self._events, *self._extra):
            writer.close()

    # ---------------------------------------------------------------------------------------------------------- a step

    def step(
        self,
        step: int,
        values: Mapping[str, Any],
        *,
        tokens: int,
        seconds: float,
        mfu: float | None,
        spent: Mapping[str, float | int | None],
        sources: Mapping[str, float | int | None],
        validation: Mapping[str, float | None] | None,
    ) -> Alarm | None:
        """Write a step's line.

        Args:
          values: the train step's metrics, on the host. tokens: target tokens so far. seconds: that the step took, with
          what was compiled for it. spent: where else time and memory went: data_wait, compile_seconds,
          checkpoint_seconds, validation_seconds, probe_seconds, recompilations, wall_seconds, memory_bytes,
          memory_peak_bytes. sources: loss/NAME and tokens/NAME of a mixture's. validation: what was measured after it.

        Returns:
          An alarm where loss or gradient norm is flagged.
        """
        train, threshold = self.config.train, self.config.monitor.zscore_threshold
        loss, grad_norm = float(values["loss"]), float(values["grad_norm"])
        z_loss, z_grad = self._z_loss.update(loss)[0], self._z_grad.update(grad_norm)[0]
        if "z_loss" in values:  # the step decided by its own, in float32
            z_loss, z_grad = float(values["z_loss"]), float(values["z_grad_norm"])
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        flags = {
            "loss": z_loss > threshold or not math.isfinite(loss),
            "grad_norm": z_grad > threshold or not math.isfinite(grad_norm),
        }
        record: dict[str, Any] = {
            "step": step,
            "loss": loss,
            "tokens": tokens,
            **{name: float(values[name]) for name in ("grad_norm", "update_norm", "param_norm")},
            "update_ratio": float(values["update_norm"]) / max(float(values["param_norm"]), 1e-30),
            **{name: float(values[name]) for name in ("lr", "logit_max", "log_z")},
            **{name: int(values[name]) for name in ("skipped", "nonfinite")},
            "seconds": seconds,
            "tokens_per_second": train.batch_size * self.config.data.sequence_length / seconds,
            "mfu": mfu,
            **sources,
            **spent,
            "z_loss": None if math.isnan(z_loss) else z_loss,
            "z_grad_norm": None if math.isnan(z_grad) else z_grad,
            "spike": any(flags.values()),
            # Five digits are enough for a profile, and a deep model has many sublayers.
            "grad_norm_by_sublayer": [float(f"{x:.4e}") for x in np.asarray(values["grad"].sublayers, np.float64)],
        }
        self._durations.append(_alone(record))
        if record["skipped"] == self._skipped:
            self._counted += self._durations[-1]
        self._skipped = record["skipped"]
        ordered = sorted(self._durations)
        p50, p95 = (ordered[round(share * (len(ordered) - 1))] for share in (0.5, 0.95))
        wall = record["wall_seconds"]
        record |= {"seconds_p50": p50, "seconds_p95": p95, "goodput": self._counted / wall if wall else None}
        if "clip_scale" in values:
            record["clip_scale"] = float(values["clip_scale"])
        if "router" in values:
            record |= router_summary(values["router"])
        record |= validation or {}
        self.validation = dict(validation) if validation else self.validation
        self._recent.append(record)
        writers: tuple[Writer, ...] = (self._metrics, self.progress, *self._extra)
        for writer in writers:
            writer.write(record)
        return self._alarm(record, flags, finite) if record["spike"] else None

    def _alarm(self, record: Mapping[str, Any], flags: Mapping[str, bool], finite: bool) -> Alarm:
        before = [r for r in self._recent if record["step"] - BEFORE <= r["step"] < record["step"]]
        event = {
            "step": record["step"],
            "event": "spike" if finite else "nonfinite",
            "flagged": [name for name, flag in flags.items() if flag],
            "cause": guard.cause(
                finite=finite,
                loss_flag=flags["loss"],
                grad_flag=flags["grad_norm"],
                grad_flag_before=any(self._grad_flagged(r) for r in before),
                active=self._watch.active,
            ),
            "monitors": dict(self._watch.active),
            **{name: record[name] for name in ("loss", "grad_norm", "z_loss", "z_grad_norm")},
            "history": {
                name: [r[name] for r in self._recent] for name in ("step", "loss", "grad_norm", "grad_norm_by_sublayer")
            },
        }
        action = self.config.guard.on_spike if finite else self.config.guard.on_nonfinite
        return Alarm(record["step"], finite, action, event | {"action": action})

    def _grad_flagged(self, record: Mapping[str, Any]) -> bool:
        z = record["z_grad_norm"]
        return not math.isfinite(record["grad_norm"]) or (z is not None and z > self.config.monitor.zscore_threshold)

    # --------------------------------------------------------------------------------------------------------- a probe

    def probe(self, step: int, values: Mapping[str, Any], metrics: Mapping[str, Any] | None) -> None:
        """Write a probe's line, and an event for each monitor that crosses its threshold.

        The line has the norms of the step before the probe (``metrics``, on the host). Events let lead times and false
        alarms be counted.
        """
        record: dict[str, Any] = {"step": step, **{name: np.asarray(value) for name, value in values.items()}}
        if metrics is not None:
            grad, update, param = (metrics[name] for name in ("grad", "update", "param"))
            record["grad/norm"] = np.asarray(grad.sublayers)
            record["grad/group_norm"] = {name: float(value) for name, value in grad.groups.items()}
            if "gamma" in metrics:
                gamma = np.asarray(metrics["gamma"], np.float64)
                record["grad/gamma_norm"] = gamma
                record["grad/gamma_share"] = gamma**2 / max(float(np.sum(gamma**2)), 1e-30)
            if "router" in metrics:
                load = np.asarray(metrics["router"]["load"])
                record["router/load"] = load / np.maximum(load.sum(axis=-1, keepdims=True), 1.0)
            record["update/ratio"] = np.asarray(update.sublayers) / np.maximum(np.asarray(param.sublayers), 1e-30)
            record["update/group_ratio"] = {
                name: float(value) / max(float(param.groups[name]), 1e-30) for name, value in update.groups.items()
            }
        for writer in (self._probes, *self._extra):
            writer.write(record)
        for name, what in self._watch.update(record).items():
            self.event("monitor", step, monitor=name, **what)

    def event(self, event: str, step: int, **details: Any) -> None:
        """Write an event's line."""
        self._events.write({"step": step, "event": event, "time": time.time(), **details})

    # ------------------------------------------------------------------------------------------------------ the summary

    def summary(self) -> dict[str, Any]:
        """Return a summary of the whole run."""
        metrics, probes, events = (read_jsonl(self.workdir / f"{name}.jsonl") for name in FILES)
        losses, norms = ([r[name] for r in metrics] for name in ("loss", "grad_norm"))
        validated = [r["val_loss"] for r in metrics if "val_loss" in r]

        def peak(direction: str) -> float | None:
            key = f"gain/{direction}_composite_mean"  # not of topologies without maps of streams
            return max((max(r[key]) for r in probes if key in r), default=None)

        def scores(name: str, series: list[float]) -> dict[str, float | None]:
            return {
                f"spike_score_{name}": judged_score(series),
                f"spike_score_{name}_last_10k": judged_score(series[-10_000:]),
            }

        judged = sum(r["spike"] or r["z_loss"] is not None or r["z_grad_norm"] is not None for r in metrics)

        return {
            "kind": self.config.residual.kind,
            "final_loss": losses[-1] if losses else None,
            "best_loss": min((x for x in losses if math.isfinite(x)), default=None),
            "val_loss": self.validation.get("val_loss"),
            "best_val_loss": min((x for x in validated if math.isfinite(x)), default=None),
            "bits_per_byte": self.validation.get("val_bits_per_byte"),
            **{name: value for name, value in self.validation.items() if "/" in name},  # of each of several sets
            **scores("loss", losses),
            **scores("grad_norm", norms),
            "peak_forward_gain": peak("forward"),
            "peak_backward_gain": peak("backward"),
            "max_grad_norm": max((x for x in norms if math.isfinite(x)), default=None),
            "skipped": metrics[-1]["skipped"] if metrics else 0,
            "nonfinite": metrics[-1]["nonfinite"] if metrics else 0,
            "rewinds": sum(e["event"] == "rewind" for e in events),
            "judged_steps": judged,  # that had enough history, or were not finite
            "spikes": sum(e["event"] in ("spike", "nonfinite") for e in events) if judged else None,
            "stalls": sum(e["event"] == "stall" for e in events),
            "recompilations": sum(r.get("recompilations", 0) for r in metrics),
            "goodput": metrics[-1].get("goodput") if metrics else None,
            "tokens_per_second": float(np.median([r["tokens_per_second"] for r in metrics])) if metrics else None,
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,  # of this process
        }


def _alone(record: Mapping[str, Any]) -> float:
    """Return the seconds of a step minus those of compiling (0 where an older log does not say)."""
    return max(float(record["seconds"] - record.get("compile_seconds", 0.0)), 0.0)


def wall_seconds(metrics: Path) -> float:
    """Return the seconds that a run's processes had taken by the last line of its metrics.jsonl, cut lines included."""
    records = read_jsonl(metrics) if metrics.is_file() else []
    if not records:
        return 0.0
    return float(records[-1].get("wall_seconds", sum(record["seconds"] for record in records)))


def router_summary(router: Mapping[str, Any]) -> dict[str, float]:
    """Return the largest and smallest expert load over the mean, and the mean balance and z losses, over all layers."""
    load = np.asarray(router["load"], np.float64)
    ratio = load / np.maximum(load.mean(axis=-1, keepdims=True), 1e-30)
    return {
        "expert_load_max": float(ratio.max()),
        "expert_load_min": float(ratio.min()),
        "router_balance": float(np.mean(router["balance"])),
        "router_z": float(np.mean(router["z"])),
    }


def batch_hash(batch: Mapping[str, np.ndarray]) -> str:
    """Return the first 16 hex digits of the SHA-256 of a batch's tokens and targets, which identify the batch."""
    digest = hashlib.sha256()
    for name in ("tokens", "targets"):
        digest.update(np.ascontiguousarray(batch[name]).tobytes())
    return digest.hexdigest()[:16]
