"""Hold an opened run: its programs, files and state, with the operations that a step needs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from mhc import chips, distributed, provenance
from mhc import config as configs
from mhc.config import shares
from mhc.data import pipeline
from mhc.data.corpus import fidelity
from mhc.data.shards.manifest import manifest_hash
from mhc.errors import UserError
from mhc.files import write_json
from mhc.model.decoder import Params
from mhc.model.flops import count_parameters, flops_per_token
from mhc.monitor import probes
from mhc.monitor.phases import Phases, device_memory
from mhc.monitor.progress import Progress
from mhc.sharding import put_whole
from mhc.train import corpus, start
from mhc.train.checkpoint import Checkpoints
from mhc.train.record import Alarm, Record, wall_seconds
from mhc.train.setup import Setup
from mhc.train.standing import Standing
from mhc.train.step import Faults, Trainer, TrainState
from mhc.train.validate import validate


class Pending(NamedTuple):
    """Holds a step that the devices were given and whose metrics were not read yet."""

    step: int
    metrics: dict[str, Any]  # on the devices
    batch: dict[str, np.ndarray]  # this process' rows
    position: dict[str, Any]  # of the data before the batch


@dataclasses.dataclass
class Opened:
    """Holds a run whose folder is open.

    Attributes:
      setup: config, devices and data.
      trainer: the compiled functions.
      checkpoints, record, progress: what the run writes.
      phases: where its time goes.
      probe: measures parameters on the run's probe batch; None: there are no probes.
      data_start: position of the data before the first step.
      state: the train state, on the devices.
      standing: how far the run is; its ``seconds`` are those before this process opened it.
      fresh: whether the run begins here, with no checkpoint before.
      wall_before: seconds that earlier processes of the run took in all.
      began: when training began here, by time.perf_counter.
      last_time: when the last step ended, by time.perf_counter.
      halted: why the guard ended the run, in a line; None: it did not.
      left_out: {step: batches left out after a rewind to it}.
    """

    setup: Setup
    trainer: Trainer
    checkpoints: Checkpoints
    record: Record
    progress: Progress
    phases: Phases
    probe: Callable[[Params], dict[str, jax.Array]] | None
    data_start: dict[str, Any]
    state: TrainState
    standing: Standing
    fresh: bool
    wall_before: float
    began: float = dataclasses.field(default_factory=time.perf_counter)
    last_time: float = dataclasses.field(default_factory=time.perf_counter)
    halted: str | None = None
    left_out: dict[int, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self._flops_per_token = flops_per_token(self.setup.config)

    @property
    def seconds(self) -> float:
        """Return the seconds of training so far, in all processes that have continued the run."""
        return self.standing.seconds + time.perf_counter() - self.began

    # ---------------------------------------------------------------------------------------------------------- a step

    def log(self, pending: Pending, *, with_validation: bool = False, with_probe: bool = False) -> Alarm | None:
        """Wait for a step to end, probe and validate if asked, and write its line.

        The probe comes before the line: a flagged step is judged by what the stream looks like after it.

        Returns:
          An alarm where the step is flagged.
        """
        config = self.setup.config
        with self.phases("step"):
            values = jax.device_get(pending.metrics)
        now = time.perf_counter()
        seconds, self.last_time = now - self.last_time, now
        self.standing.tokens += int(values["target_tokens"])
        if with_probe:
            self.measure(values)
        validation = self.validate() if with_validation else None
        if with_probe or with_validation:
            self.last_time = time.perf_counter()  # neither is part of the next step's time
        tokens_per_second = config.train.batch_size * config.data.sequence_length / seconds
        spent = {
            **self.phases.take(),
            "wall_seconds": self.wall_before + time.perf_counter() - self.setup.began,
            **device_memory(self.setup.mesh.local_devices),
        }
        return self.record.step(
            pending.step,
            values,
            tokens=self.standing.tokens,
            seconds=seconds,
            mfu=self._mfu(tokens_per_second),
            spent=spent,
            sources=self._by_source(values),
            validation=validation,
        )

    def _by_source(self, values: Mapping[str, Any]) -> dict[str, float | int | None]:
        """Return the loss of each source of a mixture in a step, and add up and return its tokens so far."""
        columns: dict[str, float | int | None] = {}
        for number, name in enumerate(self.standing.source_tokens):
            tokens = int(values["source_tokens"][number])
            self.standing.source_tokens[name] += tokens
            columns[f"loss/{name}"] = float(values["source_nll"][number]) / tokens if tokens else None
            columns[f"tokens/{name}"] = self.standing.source_tokens[name]
        return columns

    def _mfu(self, tokens_per_second: float) -> float | None:
        """Return the model FLOP utilisation: FLOPs of the model over the peak; None where the chip is not known."""
        mesh = self.setup.mesh
        peak = chips.peak_flops(mesh.devices.flat[0].device_kind)
        return None if peak is None else tokens_per_second * self._flops_per_token / (peak * mesh.size)

    def validate(self) -> dict[str, float | None]:
        """Return the losses of the validation sets."""
        with self.phases("validation"):
            return validate(self.trainer, self.state.params, self.setup.validation, self.setup.lost, self.phases)

    def measure(self, metrics: dict[str, Any] | None) -> None:
        """Probe the state, if there are probes, and write the probe's line.

        Args:
          metrics: of the step that led to the state, on the host; None: no step did.
        """
        if self.probe is not None:
            with self.phases("probe"):
                values = jax.device_get(self.probe(self.state.params))
            self.record.probe(self.standing.step, values, metrics)

    # ------------------------------------------------------------------------------------------------- there and back

    def save(self) -> None:
        """Begin a checkpoint of the state, unless its step has one."""
        if self.checkpoints.latest() == self.standing.step:
            return
        with self.phases("checkpoint"), jax.transfer_guard("allow"):  # orbax fetches the state as it likes
            position = pipeline.merge_states(distributed.gather(self.setup.data.get_state()))
            standing = dataclasses.replace(self.standing, data=position, seconds=self.seconds)
            with distributed.together():
                if self.setup.primary:  # a checkpoint is never ahead of the lines up to its step
                    self.record.flush(self.checkpoints.left())
                    self.setup.home.push()
            self.checkpoints.save(self.state, standing, self.setup.config)
        self.last_time = time.perf_counter()

    def go_back(self, step: int | None) -> None:
        """Put state, data and record back to where they stood at a checkpoint; None: at the start.

        Events stay: what led to the rewind is part of the record. The rewind itself is counted.
        """
        with distributed.together():
            self.record.flush(self.checkpoints.left())
        self.checkpoints.drop_after(step or 0)
        self.record.close()
        before = self.standing
        with self.phases("rewind"), jax.transfer_guard("allow"):
            self.state, self.standing = restored(self.setup, self.trainer, self.checkpoints, self.data_start, step)
        self.standing.rewinds = before.rewinds + 1
        self.standing.seconds = before.seconds  # the clock of this process goes on
        self.record = open_record(self.setup, self.progress, self.standing.step, keep_events=True)


def restored(
    setup: Setup, trainer: Trainer, checkpoints: Checkpoints, data_start: dict[str, Any], step: int | None
) -> tuple[TrainState, Standing]:
    """Return state and standing of a checkpoint, and set the data to its position then; None stands for the start.

    Raises:
      UserError: the checkpoint is damaged, or the data is another.
    """
    several = shares(setup.config.data.source)
    no_tokens = {share.name: 0 for share in several} if len(several) > 1 else {}
    if step is None or checkpoints.standing(step).weights_only:  # imported: no step was taken yet
        state = start.initial_state(trainer) if step is None else start.state_of_weights(trainer, setup.place, step)
        setup.data.set_state(data_start)
        return state, Standing(step=step or 0, source_tokens=no_tokens)
    state, standing = checkpoints.restore(step, trainer.abstract, trainer.layout)
    standing.source_tokens = no_tokens | standing.source_tokens
    assert standing.data is not None
    try:
        setup.data.set_state(standing.data)
    except UserError as error:
        changed = corpus.changes(corpus.stored(setup.place), setup.data.files())
        if not changed or standing.data["corpus"] == data_start["corpus"]:
            raise
        raise UserError(f"{error}; since the run was here last: {changed}") from None
    return state, standing


def open_record(setup: Setup, progress: Progress, last_step: int, *, keep_events: bool = False) -> Record:
    """Return the record cut to a step. Process 0 cuts and writes it; the others read it first, to judge alike."""
    record: Record | None = None
    with distributed.together():
        if setup.primary:
            record = Record(setup.home.files, setup.config, last_step, progress, keep_events=keep_events)
            setup.home.push()
    if record is None:
        setup.home.pull()
        record = Record(setup.home.files, setup.config, last_step, progress, writes=False)
    distributed.wait("the record is read")
    return record


# Opening --------------------------------------------------------------------------------------------------------------


def open_run(
    setup: Setup, progress: Progress, phases: Phases, closing: contextlib.ExitStack, faults: Faults | None
) -> Opened:
    """Make or restore the state, cut the record to it, and open what the run writes.

    Args:
      closing: closes what is opened.
      faults: test hook.

    Raises:
      UserError: the last checkpoint is damaged, or the data is another than its own.
    """
    config, place = setup.config, setup.place
    trainer = Trainer(config, setup.mesh, faults)
    progress.note(f"{place}: {_headline(setup, trainer)}")
    residual = config.residual
    if residual.module is None and not residual.spec.builder:
        progress.note(
            f"warning: residual.kind={residual.kind} is registered by this program alone, so that no other can read "
            "the run; put it into a module and name that as residual.module"
        )
    for name, (before, after) in setup.changes.items():
        progress.note(f"{place}: {name} changed from {before!r} to {after!r}")
    if setup.primary:
        write_json(setup.home.files / "config.json", configs.to_dict(config))
    checkpoints = Checkpoints(place, config.checkpoint)
    closing.callback(checkpoints.close)
    probe = None
    if setup.probe_batch is not None:
        compiled = probes.compile_probe(trainer.definition, setup.mesh)
        probe = functools.partial(compiled, batch=put_whole(setup.probe_batch, setup.mesh))
    wall_before = wall_seconds(setup.home.files / "metrics.jsonl") if setup.primary else 0.0
    latest = checkpoints.latest()
    # A run that started within the data knows from its checkpoint of step 0 where that was.
    started = checkpoints.standing(0).data if latest is not None and config.train.init_data else None
    data_start = setup.data.get_state() if started is None else started
    _note_start(setup, progress, data_start, latest or 0)
    state, standing = restored(setup, trainer, checkpoints, data_start, latest)
    if setup.primary:
        corpus.keep(setup.home, setup.data.files())
    record = open_record(setup, progress, -1 if latest is None else latest)
    opened = Opened(
        setup=setup,
        trainer=trainer,
        checkpoints=checkpoints,
        record=record,
        progress=progress,
        phases=phases,
        probe=probe,
        data_start=data_start,
        state=state,
        standing=standing,
        fresh=latest is None,
        wall_before=wall_before,
    )
    closing.callback(lambda: opened.record.close())  # a rewind opens another
    if latest is not None and standing.step < config.train.steps:
        record.event("resume", standing.step, changes={name: list(pair) for name, pair in setup.changes.items()})
        progress.note(f"{place}: resuming after step {standing.step}")
    return opened


def _headline(setup: Setup, trainer: Trainer) -> str:
    """Return the first line of a run: parameters, corpus, tokens a step, devices, precision."""
    config, device = setup.config, setup.mesh.devices.flat[0]
    parameters = count_parameters(trainer.definition)["total"]
    return (
        f"{parameters:,} parameters, corpus {config.data.source}, tokeniser {config.data.tokenizer}, "
        f"{config.train.batch_size * config.data.sequence_length:,} tokens a step, {setup.mesh.size} × "
        f"{device.device_kind}, {config.model.dtype}"
    )


def _note_start(setup: Setup, progress: Progress, data_start: Mapping[str, Any], step: int) -> None:
    """Add this start to run.json, and print what changed since the last start, or since the run it was copied from."""
    if not setup.primary:
        return
    config, file = setup.config, setup.home.files / provenance.FILE
    manifests = [manifest_hash(config.data, share.source) for share in shares(config.data.source)]
    data = {
        "corpus": data_start["corpus"],
        "manifest": " ".join(filter(None, manifests)) or None,
        "tokenizer": setup.tokenizer.content_hash,
    }
    notes = [*setup.notes, *(batches.coverage(name) for name, batches in setup.validation.items())]
    if lost := fidelity.worst(setup.lost.values()):
        name = config.data.tokenizer
        notes.append(fidelity.why_withheld(lost, name) or fidelity.describe(lost, name))
        data["bytes lost"] = lost
    now = provenance.start(config, setup.mesh, step=step, data=data)
    earlier = provenance.read(file).starts if file.is_file() else ()
    for note in [*notes, *provenance.notes(now, earlier, setup.origin)]:
        progress.note(f"{setup.place}: {note}")
    provenance.append(file, config, now)
