"""One run: from a config and a folder to checkpoints, curves and a summary, resumed where it was left."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mhc import config as configs
from mhc.config import Config
from mhc.data import pipeline, tokenizers
from mhc.data.tokenizers import Tokenizer
from mhc.errors import UserError
from mhc.model.decoder import DecoderDefinition
from mhc.model.flops import count_parameters, flops_per_token, leaf_sizes
from mhc.monitor import probes
from mhc.monitor.detectors import RollingZScore, spike_score
from mhc.monitor.writers import JsonlWriter, Progress, TensorBoardWriter, Writer, read_jsonl, repair, write_json
from mhc.sharding import check_batch, make_mesh, put_batch
from mhc.train.checkpoint import Checkpoints
from mhc.train.optimizer import GROUPS, group_of
from mhc.train.step import Trainer, TrainState

log = logging.getLogger(__name__)

# Peak dense bfloat16 FLOP/s of one chip, by the start of jax's device_kind: the denominator of mfu.
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
}


def dry_run(config: Config) -> dict[str, Any]:
    """What a run would be, with nothing allocated: params, flops_per_token, tokens_per_step, residual, mesh.

    Raises:
      UserError: the mesh does not fit the devices, the batch not the mesh, or the tokeniser cannot be read.
    """
    config = configs.resolve(config, tokenizers.load(config.data.tokenizer).vocab_size)
    mesh = make_mesh(config.mesh)
    check_batch(config.train.batch_size // config.train.accumulation, mesh, "train.batch_size / train.accumulation")
    definition = DecoderDefinition(config)
    by_group = dict.fromkeys(GROUPS, 0)
    for path, size in leaf_sizes(definition).items():
        by_group[group_of(path).name] += size
    return {
        "params": {**count_parameters(definition), "by_group": {name: size for name, size in by_group.items() if size}},
        "flops_per_token": flops_per_token(config),
        "tokens_per_step": config.train.batch_size * config.data.sequence_length,
        "residual": configs.to_dict(config)["residual"],
        "mesh": dict(mesh.shape),
    }


def run(config: Config, workdir: str | Path) -> int:
    """Train to ``train.steps``, from the last committed checkpoint of ``workdir`` if there is one.

    Returns:
      The exit code: 0 when the run ended or was asked to stop (SIGTERM, SIGINT) and saved.

    Raises:
      UserError: the folder holds a run of another config, or the data, mesh or batch cannot be used. Nothing is
      written.
    """
    return Run(config, Path(workdir)).execute()


@contextlib.contextmanager
def lock(workdir: Path) -> Iterator[None]:
    """Holds a run folder against other processes of this machine; the lock ends with the process, however it ends.

    Raises:
      UserError: another process holds it.
    """
    with (workdir / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{workdir}: another process is training in this folder") from None
        except OSError:
            log.info("%s: this file system has no locks", workdir)
        yield


class Run:
    """A run in its folder. ``execute`` reads from top to bottom: open, loop, close."""

    def __init__(self, config: Config, workdir: Path):
        self.workdir = workdir
        self.tokenizer: Tokenizer = tokenizers.load(config.data.tokenizer)
        self.config = configs.resolve(config, self.tokenizer.vocab_size)
        self.mesh: Mesh = make_mesh(self.config.mesh)
        train = self.config.train
        check_batch(train.batch_size // train.accumulation, self.mesh, "train.batch_size / train.accumulation")
        self.changes = self._check_stored()
        # Everything that the user's data can make fail comes before the first file is written.
        self.data = pipeline.train_iterator(
            self.config.data,
            self.tokenizer,
            batch_size=train.batch_size,
            seed=self.config.seed.data,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        )
        try:
            self.validation = pipeline.validation_batches(
                self.config.data,
                self.tokenizer,
                batch_size=train.batch_size,
                batches=self.config.validation.batches,
                process_index=jax.process_index(),
                process_count=jax.process_count(),
            )
            probing = self.config.monitor.probe_every > 0
            self.probe_batch = probes.probe_batch(self.config) if probing else None
        except BaseException:
            self.data.close()
            raise
        self.stop = False

    def _check_stored(self) -> dict[str, tuple[Any, Any]]:
        stored = self.workdir / "config.json"
        if not stored.is_file():
            return {}
        return configs.check_resume(configs.from_json(stored.read_text()), self.config)

    # ------------------------------------------------------------------------------------------------------------ run

    def execute(self) -> int:
        with contextlib.ExitStack() as closing:
            closing.callback(self.data.close)
            closing.enter_context(self._signals())
            self.workdir.mkdir(parents=True, exist_ok=True)
            closing.enter_context(lock(self.workdir))
            self._open(closing)
            begun_at = self.step
            if self.step < self.config.train.steps:
                self._loop()
            return self._finish(idle=self.step == begun_at)

    def _open(self, closing: contextlib.ExitStack) -> None:
        """Make or restore the state, repair the record to it, and open the writers."""
        config, workdir = self.config, self.workdir
        self.progress = Progress(config.train.steps, every=config.monitor.progress_every, label=workdir.name)
        closing.callback(self.progress.close)
        for name, (before, after) in self.changes.items():
            self.progress.note(f"{workdir}: {name} changed from {before!r} to {after!r}")
        write_json(workdir / "config.json", configs.to_dict(config))
        self.trainer = Trainer(config, self.mesh)
        self.checkpoints = Checkpoints(workdir, config.checkpoint)
        closing.callback(self.checkpoints.close)

        latest = self.checkpoints.latest()
        self.step, self.tokens, self.seconds_before = 0, 0, 0.0
        self.val: dict[str, float] = {}
        if latest is None:
            self.state: TrainState = self.trainer.init(config.seed.init)
        else:
            self.state, host = self.checkpoints.restore(latest, self.trainer.abstract, self.trainer.layout)
            self.step, self.tokens, self.seconds_before = latest, host["tokens"], host["seconds"]
            self.data.set_state(host["data"])
        for name in ("metrics", "probes", "events"):
            repair(workdir / f"{name}.jsonl", self.step if latest is not None else -1)

        self.metrics, self.probes, self.events = (
            JsonlWriter(workdir / f"{name}.jsonl") for name in ("metrics", "probes", "events")
        )
        self.writers: list[Writer] = [self.metrics, self.progress]
        if config.monitor.tensorboard:
            self.writers.append(TensorBoardWriter(workdir / "tensorboard", purge_step=self.step + 1))
        for writer in (*self.writers, self.probes, self.events):
            closing.callback(writer.close)
        self._restore_history(read_jsonl(workdir / "metrics.jsonl"))
        self.flops_per_token = flops_per_token(config)
        self.probe = probes.compile_probe(self.trainer.definition) if self.probe_batch is not None else None
        self.began = self.last_time = time.perf_counter()
        if latest is not None and self.step < config.train.steps:
            self._event("resume", changes={name: list(pair) for name, pair in self.changes.items()})
            self.progress.note(f"{workdir}: resuming after step {self.step}")

    def _restore_history(self, records: list[dict[str, Any]]) -> None:
        """The detectors' windows and the last validation, as an uninterrupted run would hold them."""
        monitor = self.config.monitor
        self.z_loss, self.z_grad = (
            RollingZScore(
                (record[name] for record in records),
                window=monitor.zscore_window,
                min_history=monitor.zscore_min_history,
                threshold=monitor.zscore_threshold,
            )
            for name in ("loss", "grad_norm")
        )
        for record in records:
            if "val_loss" in record:
                self.val = {name: record[name] for name in ("val_loss", "val_bits_per_byte")}

    # ----------------------------------------------------------------------------------------------------------- loop

    def _loop(self) -> None:
        """Take a step; write the metrics of the step before; then what is due: probe, validation, checkpoint.

        The device always has the next step queued while the last one's metrics are fetched, and never more than that.
        """
        config = self.config
        if self.step == 0:
            self._probe(None)
        pending: tuple[int, dict[str, Any]] | None = None
        while self.step < config.train.steps and not self.stop:
            batch = put_batch(next(self.data), self.mesh)
            self.state, metrics = self.trainer.step(self.state, batch)
            self.step += 1
            if pending is not None:
                self._log(*pending)
            pending = (self.step, metrics)

            last = self.step == config.train.steps
            validate, probe, save = (
                self._due(config.validation.every, last),
                self.probe is not None and self._due(config.monitor.probe_every, last),
                self._due(config.checkpoint.every, last),
            )
            if validate or probe or save:
                # The line of this step is written before its checkpoint: a crash after the save loses no line.
                self._log(*pending, self._validate if validate else None)
                pending = None
                if probe:
                    self._probe(metrics)
                if save:
                    self._save()
        if self.stop and self.checkpoints.latest() != self.step:
            if pending is not None:
                self._log(*pending)
            self._save()

    def _due(self, every: int, last: bool) -> bool:
        return last if every == 0 else last or self.step % every == 0

    def _log(self, step: int, metrics: dict[str, Any], validate: Any = None) -> None:
        """Fetch a step's metrics (this waits for it to end) and hand the record to the writers."""
        values = {name: value for name, value in jax.device_get(metrics).items() if name != "grad/norm"}
        now = time.perf_counter()
        seconds, self.last_time = now - self.last_time, now
        new_tokens = int(values.pop("target_tokens"))
        self.tokens += new_tokens
        rate = self.config.train.batch_size * self.config.data.sequence_length / seconds
        loss, grad_norm = float(values["loss"]), float(values["grad_norm"])
        z_loss, loss_flag = self.z_loss.update(loss)
        z_grad, grad_flag = self.z_grad.update(grad_norm)
        record: dict[str, Any] = {
            "step": step,
            "loss": loss,
            "tokens": self.tokens,
            **{name: float(values[name]) for name in ("grad_norm", "update_norm", "param_norm")},
            "update_ratio": float(values["update_norm"]) / max(float(values["param_norm"]), 1e-30),
            **{name: float(values[name]) for name in ("lr", "logit_max", "log_z")},
            "skipped": int(values["skipped"]),
            "nonfinite": int(values["nonfinite"]),
            "seconds": seconds,
            "tokens_per_second": rate,
            "mfu": self._mfu(rate),
            "z_loss": None if math.isnan(z_loss) else z_loss,
            "z_grad_norm": None if math.isnan(z_grad) else z_grad,
            "spike": loss_flag or grad_flag,
        }
        if record["spike"]:
            flagged = [name for name, flag in (("loss", loss_flag), ("grad_norm", grad_flag)) if flag]
            self._event("spike", step=step, flagged=flagged, loss=loss, grad_norm=grad_norm)
        if validate is not None:
            self.val = validate()
            record |= self.val
            self.last_time = time.perf_counter()  # validation is not part of the next step's time
        for writer in self.writers:
            writer.write(record)

    def _mfu(self, tokens_per_second: float) -> float | None:
        """Model FLOP utilisation: ``flops_per_token`` (it says what counts) over the chips' bfloat16 peak."""
        kind = self.mesh.devices.flat[0].device_kind
        peak = next((peak for name, peak in PEAK_FLOPS.items() if kind.startswith(name)), None)
        return None if peak is None else tokens_per_second * self.flops_per_token / (peak * self.mesh.size)

    def _validate(self) -> dict[str, float]:
        """Loss over the fixed validation set, weighted by tokens; at most two batches are in flight."""
        sums = dict.fromkeys(("nll", "weight", "bytes"), 0.0)
        waiting: dict[str, jax.Array] | None = None

        def add(part: dict[str, jax.Array] | None) -> None:
            for name, value in (jax.device_get(part) if part is not None else {}).items():
                sums[name] += float(value)

        for batch in self.validation:
            part = self.trainer.validate(self.state.params, put_batch(batch, self.mesh))
            add(waiting)
            waiting = part
        add(waiting)
        bits = sums["nll"] / math.log(2)
        return {
            "val_loss": sums["nll"] / max(sums["weight"], 1.0),
            "val_bits_per_byte": bits / sums["bytes"] if sums["bytes"] else math.nan,
        }

    def _probe(self, metrics: dict[str, Any] | None) -> None:
        if self.probe is None:
            return
        values: dict[str, Any] = jax.device_get(self.probe(self.state.params, self.probe_batch))
        record: dict[str, Any] = {"step": self.step, **{name: np.asarray(value) for name, value in values.items()}}
        if metrics is not None:
            record["grad/norm"] = {name: float(value) for name, value in metrics["grad/norm"].items()}
        self.probes.write(record)
        for writer in self.writers:
            if isinstance(writer, TensorBoardWriter):
                writer.write(record)
        self.last_time = time.perf_counter()

    def _save(self) -> None:
        host = {"data": self.data.get_state(), "tokens": self.tokens, "seconds": self._seconds()}
        self.checkpoints.save(self.step, self.state, host, self.config)
        self.last_time = time.perf_counter()

    def _seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.began

    def _event(self, event: str, step: int | None = None, **details: Any) -> None:
        self.events.write({"step": self.step if step is None else step, "event": event, "time": time.time(), **details})

    # ------------------------------------------------------------------------------------------------------------- end

    def _finish(self, idle: bool) -> int:
        """Write the summary, once every checkpoint is committed; ``idle``: no step was taken."""
        self.checkpoints.wait()
        reason = "finished" if self.step >= self.config.train.steps else "stopped"
        summary = self.workdir / "summary.json"
        if reason == "finished" and idle and summary.is_file():
            self.progress.note(f"{self.workdir}: finished at step {self.step} already")
            return 0
        if reason == "stopped":
            self._event("stopped", reason="signal")
        write_json(summary, self._summary(reason))
        if reason == "stopped":
            self.progress.note(f"{self.workdir}: stopped and saved after step {self.step}; the same command resumes it")
        return 0

    def _summary(self, reason: str) -> dict[str, Any]:
        records = read_jsonl(self.workdir / "metrics.jsonl")
        probed = read_jsonl(self.workdir / "probes.jsonl")
        losses, norms = ([r[name] for r in records] for name in ("loss", "grad_norm"))
        validated = [r["val_loss"] for r in records if "val_loss" in r]

        def peak(direction: str) -> float | None:
            return max((max(r[f"gain/{direction}_composite_mean"]) for r in probed), default=None)

        return {
            "kind": self.config.residual.kind,
            "steps": self.step,
            "tokens": self.tokens,
            "final_loss": losses[-1] if losses else None,
            "best_loss": min((x for x in losses if math.isfinite(x)), default=None),
            "val_loss": self.val.get("val_loss"),
            "best_val_loss": min((x for x in validated if math.isfinite(x)), default=None),
            "bits_per_byte": self.val.get("val_bits_per_byte"),
            "spike_score_loss": spike_score(np.asarray(losses))[0] if losses else None,
            "spike_score_grad_norm": spike_score(np.asarray(norms))[0] if norms else None,
            "peak_forward_gain": peak("forward"),
            "peak_backward_gain": peak("backward"),
            "max_grad_norm": max((x for x in norms if math.isfinite(x)), default=None),
            "tokens_per_second": float(np.median([r["tokens_per_second"] for r in records])) if records else None,
            "seconds": self._seconds(),
            "params": count_parameters(self.trainer.definition)["total"],
            "exit_reason": reason,
        }

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT ask the loop to stop after the step in hand and to save; a second one interrupts."""

        def ask(number: int, frame: FrameType | None) -> None:
            if self.stop:
                raise KeyboardInterrupt
            self.stop = True

        before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
