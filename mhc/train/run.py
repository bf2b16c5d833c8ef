"""One run: from a config and a folder to checkpoints, curves and a summary, resumed where it was left."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from mhc import chips, distributed, provenance, remote, run_folder, stdio
from mhc import config as configs
from mhc.config import Config, shares
from mhc.data import pipeline, tokenizers
from mhc.data.corpus import fidelity
from mhc.data.shards.manifest import manifest_hash
from mhc.data.tokenizers import Tokenizer
from mhc.data.user_files.globs import may_match
from mhc.errors import UserError
from mhc.files import append_jsonl, read_json, write_json
from mhc.model.decoder import DecoderDefinition
from mhc.model.flops import count_parameters, flops_per_token, leaf_sizes
from mhc.monitor import probes, train_log
from mhc.monitor.boards import WandbWriter
from mhc.monitor.phases import STALLED, Phases, Stall, Watchdog, device_memory, dump_stacks
from mhc.monitor.progress import Progress, duration
from mhc.sharding import check_batch, local_rows, make_mesh, path_of, put_batch, threads_of_one_cpu
from mhc.train import corpus, start
from mhc.train.checkpoint import Checkpoints, committed_steps
from mhc.train.optimizer import GROUPS, group_of
from mhc.train.record import Alarm, Record, batch_hash, wall_seconds
from mhc.train.step import Faults, Trainer, TrainState, sublayer_name

T = TypeVar("T")


def dry_run(config: Config, *, shardings: bool = False) -> dict[str, Any]:
    """What a run would be, with nothing allocated: params, flops_per_token, tokens_per_step, residual, mesh.

    ``shardings``: also how each leaf of the train state lies on the mesh, by path: its shape, over which of the mesh's
    axes each of its axes is split (null: whole), and the bytes that a device holds of it.

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
        **({"shardings": _shardings(config, mesh)} if shardings else {}),
    }


def _shardings(config: Config, mesh: Mesh) -> dict[str, dict[str, Any]]:
    trainer = Trainer(config, mesh)
    layout = {path_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(trainer.layout)}
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(trainer.abstract):
        one = layout[path_of(path)]
        held = math.prod(one.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        split = [*one.spec, *[None] * (leaf.ndim - len(one.spec))]
        found[path_of(path)] = {"shape": list(leaf.shape), "split": split, "bytes_per_device": held}
    return found


def run(config: Config, workdir: str | Path, origin: provenance.Origin | None = None) -> int:
    """Train to ``train.steps``, from the last committed checkpoint of ``workdir`` if there is one.

    Where several processes share the run (`mhc.distributed`), all of them call this. ``workdir`` may be ``gs://…``
    (`mhc.remote`).

    Args:
      origin: the run.json that the config is from: what is another here is said in a line each.

    Returns:
      The exit code: 0 when the run ended or was asked to stop (SIGTERM, SIGINT) and saved, 3 when the guard halted it.
      Where another process is lost, this one ends with `distributed.LOST`; where the watchdog is to end it, with
      `phases.STALLED`.

    Raises:
      UserError: the folder holds a run of another config, or the data, mesh or batch cannot be used. Nothing is
      written.
    """
    with distributed.leaving_when_lost(str(workdir)):
        with distributed.together():
            made = Run(config, workdir, origin=origin)
        return made.execute()


def _check_apart(config: Config, place: remote.Folder) -> None:
    """Raises UserError where a corpus' pattern matches what the run would write: the next run would read it as text."""
    written = ("metrics.jsonl", "run.json", "train.log")
    for field in ("data.source", "data.validation"):
        spec = getattr(config.data, field.partition(".")[2])
        for one in [] if spec is None else configs.shares(spec, field):
            kind, _, pattern = one.source.partition(":")
            if kind not in ("text", "tokens") or remote.is_remote(pattern) or not isinstance(place, Path):
                continue
            if any(may_match(pattern, str(place / name)) for name in written):
                raise UserError(f"--workdir {place}: {field}={spec} matches what is written there; name another folder")


class Pending(NamedTuple):
    """A step that the device was given and whose metrics were not read yet."""

    step: int
    metrics: dict[str, Any]  # on the device
    batch: dict[str, np.ndarray]  # this process' rows
    position: dict[str, Any]  # of the data before the batch


class Run:
    """A run in its folder. ``execute`` reads from top to bottom: open, loop, close."""

    def __init__(
        self,
        config: Config,
        workdir: str | Path,
        faults: Faults | None = None,
        devices: Sequence[jax.Device] | None = None,
        origin: provenance.Origin | None = None,
    ):
        """Open the data and check everything that a user may have got wrong; nothing is written yet.

        Args:
          faults: test hook. devices: those to use; None: all. origin: as `run`.
        """
        self.began = time.perf_counter()
        self.primary = distributed.primary()
        self.home = run_folder.open_folder(workdir, jax.process_index())
        self.place = self.home.place  # as the user named it
        self.faults, self.origin = faults, origin
        self.tokenizer: Tokenizer = tokenizers.load(config.data.tokenizer)
        stored = remote.read(self.place / "config.json")
        before = None if stored is None else configs.from_json(stored.decode(), self.place / "config.json")
        config = config if before is None else configs.keep_validation_rule(before, config)
        self.config = configs.resolve(config, self.tokenizer.vocab_size)
        if before is not None:
            self.config = configs.keep_history(before, self.config)
        _check_apart(self.config, self.place)
        self.mesh: Mesh = make_mesh(self.config.mesh, None if devices is None else list(devices))
        train = self.config.train
        check_batch(train.batch_size // train.accumulation, self.mesh, "train.batch_size / train.accumulation")
        self.synchronous = threads_of_one_cpu(self.mesh)
        if self.config.monitor.wandb != "off":
            WandbWriter.check(self.config.monitor.wandb)
        self.changes = self._check_stored()
        found = None if committed_steps(self.place) else start.source(self.config)
        self.notes = [] if found is None else list(start.notes(self.config, found, self.tokenizer.content_hash))
        # Everything that the user's data can make fail comes before the first file is written.
        self.data = pipeline.train_iterator(
            self.config.data,
            self.tokenizer,
            batch_size=train.batch_size,
            seed=self.config.seed.data,
            rows=local_rows(self.mesh, train.batch_size),
        )
        try:
            if found is not None and train.init_data:
                start.set_data(self.data, self.config, found)
            self.validation = pipeline.validation_sets(
                self.config.data,
                self.tokenizer,
                batch_size=train.batch_size,
                count=self.config.validation_rows,
                spread=self.config.validation.rule != "first",
                rows=local_rows(self.mesh, train.batch_size),
            )
            self.lost = {name: of.lost for name, of in self.validation.items()}
            probing = self.config.monitor.probe_every > 0
            self.probe_batch = probes.probe_batch(self.config) if probing else None
        except BaseException:
            self.data.close()
            raise
        self.stop = distributed.StopRequest()
        self.phases = Phases()
        self.step = 0
        self.log: train_log.TrainLog | None = None
        self.halted: str | None = None  # why, in a line
        self.left_out: dict[int, int] = {}  # batches left out after a rewind to a step

    def _check_stored(self) -> dict[str, tuple[Any, Any]]:
        """What of the stored config is another now, but how the processes find each other, which says nothing."""
        stored = remote.read(self.place / "config.json")
        changes = {}
        if stored is not None:
            changes = configs.check_resume(configs.from_json(stored.decode(), self.place / "config.json"), self.config)
        return {name: pair for name, pair in changes.items() if not name.startswith("distributed.")}

    # ------------------------------------------------------------------------------------------------------------ run

    def execute(self) -> int:
        with contextlib.ExitStack() as closing:
            closing.callback(self.data.close)
            closing.enter_context(self.stop.listening())
            closing.enter_context(self.phases.listening())
            with distributed.together():
                self._check_same(*distributed.gather([configs.to_json(self.config), str(self.place)])[0])
            with distributed.together():
                self.home.wait_until_free()
            with distributed.together():
                closing.enter_context(self.home.held(writes=self.primary))
            train, monitor = self.config.train, self.config.monitor
            self.stderr = stdio.lossy(sys.stderr)
            stream = None if self.primary else closing.enter_context(open(os.devnull, "w"))  # one process speaks
            self.progress = Progress(train.steps, every=monitor.progress_every, label=self.place.name, stream=stream)
            closing.callback(self.progress.close)
            if distributed.gather(self._finished())[0]:
                self.progress.note(f"{self.place}: finished already")
                return 0
            if self.primary:
                self.log = train_log.TrainLog(self.home.files / train_log.FILE)
                closing.callback(self.log.close)
                closing.enter_context(self.log.keeping_stderr())
                self.progress.log = self.log.line
            watchdog = Watchdog(self.phases, self.config.watchdog, self._stalled, self._resumed)
            closing.enter_context(watchdog.watching())
            with self.phases("start"):
                self._open(closing)
            if self.step < train.steps:
                self._loop()
            return self._finish()

    def _check_same(self, config: str, place: str) -> None:
        """Refuse a config or folder of this process that is not that of process 0, which these are."""
        if str(self.place) != place:
            raise UserError(f"--workdir: given {self.place}, allowed: what process 0 has, {place}")
        for name, (theirs, ours) in configs.diff(configs.from_json(config), self.config).items():
            if not name.startswith("distributed."):
                raise UserError(f"{name}: given {ours!r}, allowed: what process 0 has, {theirs!r}")

    def _finished(self) -> bool:
        """Whether the folder holds the whole run: a checkpoint of the last step, and the summary as of then."""
        steps, summary = committed_steps(self.place), self.home.files / "summary.json"
        if not steps or steps[-1] < self.config.train.steps or not summary.is_file():
            return False
        return read_json(summary)["steps"] == steps[-1]

    def _open(self, closing: contextlib.ExitStack) -> None:
        """Make or restore the state, cut the record to it, and open the writers."""
        config, place = self.config, self.place
        residual = config.residual
        if residual.module is None and not residual.spec.builder:
            self.progress.note(
                f"warning: residual.kind={residual.kind} is registered by this program alone, so that no other can "
                "read the run; put it into a module and name that as residual.module"
            )
        for name, (before, after) in self.changes.items():
            self.progress.note(f"{place}: {name} changed from {before!r} to {after!r}")
        if self.primary:
            write_json(self.home.files / "config.json", configs.to_dict(config))
        self.trainer = Trainer(config, self.mesh, self.faults)
        self.checkpoints = Checkpoints(place, config.checkpoint)
        closing.callback(self.checkpoints.close)
        self.flops_per_token = flops_per_token(config)
        self.probe = None
        if self.probe_batch is not None:
            self.probe = probes.compile_probe(self.trainer.definition, self.mesh)
        self.seconds_before = 0.0
        self.wall_before = wall_seconds(self.home.files / "metrics.jsonl") if self.primary else 0.0
        self.rewinds = 0
        latest = self.checkpoints.latest()
        # Once begun, a run that started within the data knows where from its checkpoint of step 0.
        begun = latest is not None and config.train.init_data
        self.data_start = self.checkpoints.host(0)["data"] if begun else self.data.get_state()
        self._note_start(latest or 0)
        self.fresh = latest is None
        self._restore(latest)
        if self.primary:
            corpus.keep(self.home, self.data.files())
        self.record = self._make_record(-1 if latest is None else latest)
        closing.callback(lambda: self.record.close())
        self.opened = self.last_time = time.perf_counter()
        if latest is not None and self.step < config.train.steps:
            self.record.event("resume", self.step, changes={name: list(pair) for name, pair in self.changes.items()})
            self.progress.note(f"{place}: resuming after step {self.step}")

    def _note_start(self, step: int) -> None:
        """Add this start to run.json, and say what is another than at the last one or in what it is from."""
        if not self.primary:
            return
        file = self.home.files / provenance.FILE
        manifests = [manifest_hash(self.config.data, one.source) for one in shares(self.config.data.source)]
        data = {
            "corpus": self.data_start["corpus"],
            "manifest": " ".join(filter(None, manifests)) or None,
            "tokenizer": self.tokenizer.content_hash,
        }
        self.notes += [of.said(name) for name, of in self.validation.items()]
        if lost := fidelity.worst(self.lost.values()):
            name = self.config.data.tokenizer
            self.notes.append(fidelity.reason(lost, name) or fidelity.said(lost, name))
            data["bytes lost"] = lost
        now = provenance.start(self.config, self.mesh, step=step, data=data)
        earlier = provenance.read(file).starts if file.is_file() else ()
        for note in [*self.notes, *provenance.notes(now, earlier, self.origin)]:
            self.progress.note(f"{self.place}: {note}")
        provenance.append(file, self.config, now)

    def _make_record(self, last_step: int, *, keep_events: bool = False) -> Record:
        """The record cut to a step. Process 0 cuts and writes it; the others read it first, to judge alike."""
        made: Record | None = None
        with distributed.together():
            if self.primary:
                made = Record(self.home.files, self.config, last_step, self.progress, keep_events=keep_events)
                self.home.push()
        if made is None:
            self.home.pull()
            made = Record(self.home.files, self.config, last_step, self.progress, writes=False)
        distributed.wait("the record is read")
        return made

    def _restore(self, step: int | None) -> None:
        """State, data and counts as of a checkpoint; None: as of the start."""
        if step is None:
            self.state: TrainState = start.initial_state(self.trainer)
            self.step, self.tokens, self.source_tokens = 0, 0, self._no_tokens()
            self.data.set_state(self.data_start)
            return
        host = self.checkpoints.host(step)
        if host.get("weights_only"):  # imported: no step was taken yet
            self.state = start.state_of_weights(self.trainer, self.place, step)
            self.step, self.tokens, self.source_tokens = step, 0, self._no_tokens()
            self.data.set_state(self.data_start)
            return
        self.state, host = self.checkpoints.restore(step, self.trainer.abstract, self.trainer.layout)
        self.step, self.tokens, self.seconds_before = step, host["tokens"], max(self.seconds_before, host["seconds"])
        self.rewinds = max(self.rewinds, host["rewinds"])
        self.source_tokens = self._no_tokens() | host.get("source_tokens", {})
        try:
            self.data.set_state(host["data"])
        except UserError as error:
            changed = corpus.changes(corpus.stored(self.place), self.data.files())
            if not changed or host["data"]["corpus"] == self.data_start["corpus"]:
                raise
            raise UserError(f"{error}; since the run was here last: {changed}") from None

    def _no_tokens(self) -> dict[str, int]:
        """By source of a mixture."""
        several = shares(self.config.data.source)
        return {one.name: 0 for one in several} if len(several) > 1 else {}

    def _by_source(self, values: Mapping[str, Any]) -> dict[str, float | int | None]:
        """What a step's line says of a mixture's sources: the loss of each in this step, and its tokens so far."""
        found: dict[str, float | int | None] = {}
        for number, name in enumerate(self.source_tokens):
            tokens = int(values["source_tokens"][number])
            self.source_tokens[name] += tokens
            found[f"loss/{name}"] = float(values["source_nll"][number]) / tokens if tokens else None
            found[f"tokens/{name}"] = self.source_tokens[name]
        return found

    # ----------------------------------------------------------------------------------------------------------- loop

    def _loop(self) -> None:
        """Take a step; read the metrics of the step before; then what is due: probe, validation, checkpoint.

        The device always has the next step queued while the last one's metrics are fetched, and never more than that.
        """
        config = self.config
        self.progress.note(f"{self.place}: compiling, then training from step {self.step + 1}{self._judged()}")
        if self.fresh:  # not: at step 0, where a run may have been stopped after its probe
            self._probe(None)
            if config.train.init_from is not None:  # from here on the run needs its source no more
                self._save()
        self.phases.take()  # what came before is no step's
        self.last_time = time.perf_counter()
        pending: Pending | None = None
        while self.step < config.train.steps and self.halted is None and not self.stop.poll():
            position = self.data.get_state()
            with self.phases("data"):
                batch = next(self.data)
            with self.phases("step"):
                self.state, metrics = self._in_order(self.trainer.step(self.state, put_batch(batch, self.mesh)))
            self.step += 1
            before, pending = pending, Pending(self.step, metrics, batch, position)
            if before is not None and (alarm := self._log(before)):
                pending = self._act(alarm, before, pending)

            last = self.step == config.train.steps
            validate, probe, save = (
                self._due(config.validation.every, last),
                self.probe is not None and self._due(config.monitor.probe_every, last),
                self._due(config.checkpoint.every, last),
            )
            if pending is not None and (validate or probe or save or self.synchronous):
                # The line of this step is written before its checkpoint: a crash after the save loses no line.
                now, pending = pending, None
                if alarm := self._log(now, validate=validate, probe=probe):
                    self._act(alarm, now, None)
                if save and self.step == now.step and self.halted is None:
                    self._save()
        if pending is not None and self.halted is None and (alarm := self._log(pending)):
            self._act(alarm, pending, None)
        if self.stop.asked and self.halted is None:
            self._save()

    def _judged(self) -> str:
        """Return what the start of a short run says of its z-scores, which need some history."""
        least, steps = self.config.zscore_min_history, self.config.train.steps
        if least >= steps:
            return (
                f"; {steps} steps are too few to judge loss and gradient norm by (monitor.zscore_min_history={least})"
            )
        if least >= configs.ZSCORE_HISTORY:
            return ""
        return f"; loss and gradient norm are judged from step {least + 1} on (monitor.zscore_min_history={least})"

    def _in_order(self, result: T) -> T:
        """The result of a program, waited for where the devices are threads of one CPU (``synchronous``).

        They wait for each other inside a program's collectives: two programs at once on too few cores can starve each
        other for ever, and there is nothing to overlap.
        """
        return jax.block_until_ready(result) if self.synchronous else result

    def _due(self, every: int, last: bool) -> bool:
        return last or (every > 0 and self.step % every == 0)

    def _log(self, of: Pending, validate: bool = False, probe: bool = False) -> Alarm | None:
        """Fetch a step's metrics (this waits for it to end), probe and validate if asked, and write its line.

        The probe comes before the line: a flagged step is judged by what the stream looks like after it.
        """
        with self.phases("step"):
            values = jax.device_get(of.metrics)
        now = time.perf_counter()
        seconds, self.last_time = now - self.last_time, now
        self.tokens += int(values["target_tokens"])
        if probe:
            self._probe(values)
        measured = self._validate() if validate else None
        if probe or validate:
            self.last_time = time.perf_counter()  # neither is part of the next step's time
        rate = self.config.train.batch_size * self.config.data.sequence_length / seconds
        spent = {
            **self.phases.take(),
            "wall_seconds": self.wall_before + time.perf_counter() - self.began,
            **device_memory(self.mesh.local_devices),
        }
        return self.record.step(
            of.step,
            values,
            tokens=self.tokens,
            seconds=seconds,
            mfu=self._mfu(rate),
            spent=spent,
            sources=self._by_source(values),
            validation=measured,
        )

    def _mfu(self, tokens_per_second: float) -> float | None:
        """Model FLOP utilisation: ``flops_per_token`` (it says what counts) over the chips' bfloat16 peak."""
        peak = chips.peak_flops(self.mesh.devices.flat[0].device_kind)
        return None if peak is None else tokens_per_second * self.flops_per_token / (peak * self.mesh.size)

    def _validate(self) -> dict[str, float | None]:
        """Loss over the fixed validation sets, weighted by tokens; at most two batches are in flight."""
        sums = {name: dict.fromkeys(("nll", "weight", "bytes"), 0.0) for name in self.validation}
        waiting: tuple[str, dict[str, jax.Array]] | None = None

        def add(part: tuple[str, dict[str, jax.Array]] | None) -> None:
            if part is not None:
                for name, value in jax.device_get(part[1]).items():
                    sums[part[0]][name] += float(value)

        def measures(of: Mapping[str, float], suffix: str, lost: float) -> dict[str, float | None]:
            bits = of["nll"] / math.log(2) / of["bytes"] if of["bytes"] else math.nan
            return {
                f"val_loss{suffix}": of["nll"] / max(of["weight"], 1.0),
                f"val_bits_per_byte{suffix}": bits if lost <= fidelity.LIMIT else None,
            }

        with self.phases("validation"):
            for name, batches in self.validation.items():
                for batch in batches:
                    part = self._in_order(self.trainer.validate(self.state.params, put_batch(batch, self.mesh)))
                    add(waiting)
                    waiting = (name, part)
                    self.phases.beat()
            add(waiting)
        total = {key: sum(of[key] for of in sums.values()) for key in ("nll", "weight", "bytes")}
        found = measures(total, "", fidelity.worst(self.lost.values()))
        for name, of in sums.items():
            if name:  # one of several
                found |= measures(of, f"/{name}", self.lost[name])
        return found

    def _probe(self, metrics: dict[str, Any] | None) -> None:
        """Measure the state in hand; ``metrics``: of the step that led to it, on the host."""
        if self.probe is not None:
            with self.phases("probe"):
                values = jax.device_get(self.probe(self.state.params, self.probe_batch))
            self.record.probe(self.step, values, metrics)

    def _save(self) -> None:
        """A checkpoint of the state in hand, unless this step has one."""
        if self.checkpoints.latest() == self.step:
            return
        with self.phases("checkpoint"):
            host = {
                "data": pipeline.merge_states(distributed.gather(self.data.get_state())),
                "tokens": self.tokens,
                "source_tokens": dict(self.source_tokens),
                "seconds": self._seconds(),
                "rewinds": self.rewinds,
            }
            with distributed.together():
                if self.primary:  # a checkpoint is never ahead of the lines up to its step
                    self.record.flush(self.checkpoints.left())
                    self.home.push()
            self.checkpoints.save(self.step, self.state, host, self.config)
        self.last_time = time.perf_counter()

    def _seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.opened

    # -------------------------------------------------------------------------------------------------------- watchdog

    def _stalled(self, stall: Stall) -> None:
        """Report that nothing gets on: a line, an event, and all threads' stacks. In the watchdog's thread.

        Every process of several says so; those that wait for a slower one are in a step.
        """
        number = f" (process {jax.process_index()})" if jax.process_count() > 1 else ""
        said = (
            f"{self.place}{number}: no progress for {stall.seconds:.3g} s: {stall.doing.words}, after step {self.step}"
        )
        self._say(f"{said}; the stacks of all threads follow")
        self._event_of(stall, "stall")
        dump_stacks(*(stream for stream in (self.stderr, self.log) if stream is not None))
        if self.config.watchdog.abort:
            self._say(f"{said}: given up (watchdog.abort); the same command goes on from the last checkpoint")
            # Nothing is waited for but, for a while, the copy of the record: what hangs would hang the end too.
            copying = threading.Thread(target=self.home.push, daemon=True)
            copying.start()
            copying.join(15.0)
            os._exit(STALLED)

    def _resumed(self, stall: Stall) -> None:
        self._say(f"{self.place}: going on after {stall.seconds:.3g} s {stall.doing.words}, after step {self.step}")
        self._event_of(stall, "stall_over")

    def _say(self, text: str) -> None:
        self.stderr.write(text + "\n")
        self.stderr.flush()
        if self.log is not None:
            self.log.line(text)

    def _event_of(self, stall: Stall, event: str) -> None:
        if self.primary:
            what = {"phase": stall.doing.phase, "compiling": stall.doing.compiling, "seconds": stall.seconds}
            line = {"step": self.step, "event": event, "time": time.time(), **what}
            with contextlib.suppress(OSError):  # no room; the lines on stderr say it too
                append_jsonl(self.home.files / "events.jsonl", line)

    # --------------------------------------------------------------------------------------------------------- actions

    def _act(self, alarm: Alarm, of: Pending, following: Pending | None) -> Pending | None:
        """Write the alarm's event and do what the guard's config says.

        Args:
          of: the flagged step. following: the step that the device was given after it, if any.

        Returns:
          The step whose metrics are still to be read.
        """
        event = dict(alarm.event)
        if not alarm.finite:
            event["tensor"] = self._first_nonfinite(of)
        event["batch"] = self._describe(of)
        self.record.event(**event)
        if alarm.action == "rewind":
            if self._rewind(alarm):
                return None
            why = f"{alarm.event['cause']} at step {alarm.step}, after {self.rewinds} rewinds"
        elif alarm.action == "halt":
            why = f"{alarm.event['cause']} at step {alarm.step}"
        else:
            return following
        if not alarm.finite:
            # The state was frozen by the flagged step: the one after it did not happen.
            self.step = alarm.step
            if following is not None:
                self.data.set_state(following.position)
            frozen = jax.device_put(np.zeros((), bool), self.trainer.layout.guard.frozen)
            self.state = self.state._replace(guard=self.state.guard._replace(frozen=frozen))
            why += f"; first non-finite: {event['tensor']}"
        elif following is not None:
            self._log(following)
        self.halted = why
        self._save()
        self.record.event("halt", self.step, reason=why)
        return None

    def _describe(self, of: Pending) -> dict[str, Any]:
        """The whole batch of a step: its hash, and where each of its rows begins."""
        ours = {name: of.batch[name].tolist() for name in ("tokens", "targets")} if jax.process_count() > 1 else {}
        parts = distributed.gather({"rows": of.position["rows"], "documents": self.data.describe(of.position), **ours})
        documents = {document["row"]: document for part in parts for document in part["documents"]}
        batch = of.batch
        if ours:
            batch = {}
            for name in ours:
                by_row = {row: ids for part in parts for row, ids in zip(part["rows"], part[name], strict=True)}
                batch[name] = np.asarray([by_row[row] for row in sorted(by_row)], np.int32)
        return {"hash": batch_hash(batch), "documents": [documents[row] for row in sorted(documents)]}

    def _rewind(self, alarm: Alarm) -> bool:
        """Back to the last checkpoint at least ``rewind_steps`` before the alarm, then over ``skip_batches`` batches.

        Where no checkpoint is old enough the run begins anew from its seed. A second rewind to the same step leaves out
        as many batches more: those after the first ones led to an alarm too. False when the rewinds are used up.
        """
        guard = self.config.guard
        if self.rewinds >= guard.max_rewinds:
            return False
        with self.phases("checkpoint"):
            self.checkpoints.wait()
        old = [step for step in self.checkpoints.steps() if step <= alarm.step - guard.rewind_steps]
        target = max(old, default=None)
        with distributed.together():
            self.record.flush(self.checkpoints.left())
        self.checkpoints.drop_after(target or 0)
        self.record.close()
        with self.phases("rewind"):
            self._restore(target)
        self.rewinds += 1
        # Events stay: what led to the rewind is part of the record.
        self.record = self._make_record(self.step, keep_events=True)
        self.left_out[self.step] = self.left_out.get(self.step, 0) + guard.skip_batches
        skipped = self.left_out[self.step]
        with self.phases("rewind"):
            for _ in range(skipped):
                next(self.data)
                self.phases.beat()
        self.record.event(
            "rewind",
            alarm.step,
            cause=alarm.event["cause"],
            to=self.step,
            skipped_batches=skipped,
            rewinds=self.rewinds,
        )
        self.progress.note(
            f"{self.place}: {alarm.event['cause']} at step {alarm.step}: back to step {self.step}, "
            f"{skipped} batches left out"
        )
        self.last_time = time.perf_counter()
        return True

    def _first_nonfinite(self, of: Pending) -> str:
        """The first non-finite tensor of a step: forward in depth order, then the loss, then gradients from the end.

        The step left the parameters as they were, so its forward pass can be run again.
        """
        fine = np.asarray(self.trainer.finite_outputs(self.state.params, put_batch(of.batch, self.mesh), of.step - 1))
        if not fine.all():
            return f"output of {sublayer_name(int(np.argmin(fine)))}, forward"
        values = jax.device_get(of.metrics)
        if not math.isfinite(values["loss"]):
            return "loss, forward"
        bad = np.flatnonzero(~np.isfinite(values["grad"].sublayers))
        groups = [name for name, norm in values["grad"].groups.items() if not math.isfinite(norm)]
        if "head" in groups:
            return "gradient of the head"
        if bad.size:
            return f"gradient of {sublayer_name(int(bad[-1]))}"
        return f"gradient of {', '.join(groups) or 'all parameters together'}"

    # ------------------------------------------------------------------------------------------------------------- end

    def _finish(self) -> int:
        """Write the summary, once every checkpoint is committed."""
        with self.phases("checkpoint"):
            self.checkpoints.wait()
        self.record.flush(self.checkpoints.left())
        finished = self.step >= self.config.train.steps
        reason = "halted" if self.halted else "finished" if finished else "stopped"
        if reason == "stopped":
            self.record.event("stopped", self.step, reason="signal")
        withheld = fidelity.reason(fidelity.worst(self.lost.values()), self.config.data.tokenizer)
        whole = {
            **(self.record.summary() if self.primary else {}),
            **({"bits_per_byte_reason": withheld} if withheld else {}),
            "steps": self.step,
            "tokens": self.tokens,
            "seconds": self._seconds(),
            "params": count_parameters(self.trainer.definition)["total"],
            "exit_reason": reason,
        }
        if self.primary:
            write_json(self.home.files / "summary.json", whole)
        if reason == "stopped":
            self.progress.note(f"{self.place}: stopped and saved after step {self.step}; the same command resumes it")
        if reason == "halted":
            self.progress.note(f"{self.place}: halted: {self.halted}; saved after step {self.step}, see events.jsonl")
        if self.log is not None:
            self.log.line(f"{reason} after step {self.step}, {duration(self._seconds())} of training")
        return 3 if reason == "halted" else 0
