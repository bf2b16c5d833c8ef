"""Prepare the config, devices and data of a run, and check them before the first file is written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from mhc import config as configs
from mhc import distributed, provenance, remote, run_folder
from mhc.config import Config, shares
from mhc.data import pipeline, tokenizers, windtunnel
from mhc.data.user_files.globs import may_match
from mhc.errors import UserError
from mhc.monitor import probes
from mhc.monitor.boards import WandbWriter
from mhc.sharding import check_batch, local_rows, make_mesh
from mhc.train import start
from mhc.train.checkpoint import committed_steps


class Setup:
    """Holds the config, devices and data of a run. Everything that a user may have got wrong is found while it is made.

    Attributes:
      config: resolved; what a resume keeps comes from the folder's stored config.
      home: the run's folder; ``place`` is the folder as the user named it.
      mesh: the devices.
      tokenizer: that of the data.
      data: the training batches, this process' rows of them. ``close`` it.
      validation: {name: batches} of the validation sets; the name of a single set is "".
      lost: {name: share of a validation set's bytes that the tokeniser loses}.
      probe_batch: the batch of the probes; None: there are none.
      changes: {field: (stored value, value now)} of the fields that a resume changes.
      notes: lines for the user about what the run starts from.
      origin: the run.json that the config is from, if any.
      primary: whether this process writes for all.
      began: when this began, by time.perf_counter.

    Raises:
      UserError: the folder holds a run of another config, or the data, mesh or batch cannot be used.
    """

    def __init__(
        self,
        config: Config,
        workdir: str | Path,
        devices: Sequence[jax.Device] | None = None,
        origin: provenance.StoredRun | None = None,
    ):
        self.began = time.perf_counter()
        self.primary = distributed.primary()
        self.origin = origin
        self.home = run_folder.open_folder(workdir, jax.process_index())
        self.place = self.home.place
        self.tokenizer = tokenizers.load(config.data.tokenizer)
        stored = _stored_config(self.place)
        config = config if stored is None else configs.keep_validation_rule(stored, config)
        config = configs.resolve(config, self.tokenizer.vocab_size)
        self.config = config if stored is None else configs.keep_history(stored, config)
        _check_apart(self.config, self.place)
        windtunnel.check_model(self.config)
        self.mesh: Mesh = make_mesh(self.config.mesh, None if devices is None else list(devices))
        train = self.config.train
        check_batch(train.batch_size // train.accumulation, self.mesh, "train.batch_size / train.accumulation")
        if self.config.monitor.wandb != "off":
            WandbWriter.check(self.config.monitor.wandb)
        self.changes = {} if stored is None else resumed_changes(stored, self.config)
        source = None if committed_steps(self.place) else start.source(self.config)
        self.notes = [] if source is None else list(start.notes(self.config, source, self.tokenizer.content_hash))
        rows = local_rows(self.mesh, train.batch_size)
        self.data = pipeline.train_iterator(
            self.config.data, self.tokenizer, batch_size=train.batch_size, seed=self.config.seed.data, rows=rows
        )
        try:
            if source is not None and train.init_data:
                start.set_data(self.data, self.config, source)
            self.validation = pipeline.validation_sets(
                self.config.data,
                self.tokenizer,
                batch_size=train.batch_size,
                count=self.config.validation_rows,
                spread=self.config.validation.rule != "first",
                rows=rows,
            )
            self.lost = {name: batches.lost for name, batches in self.validation.items()}
            self.probe_batch = probes.probe_batch(self.config) if self.config.monitor.probe_every > 0 else None
        except BaseException:
            self.data.close()
            raise

    def check_alike(self) -> None:
        """Raise UserError where the config or folder of this process is not that of process 0. All must call it."""
        first_config, first_place = distributed.gather([configs.to_json(self.config), str(self.place)])[0]
        check_same(self.config, str(self.place), configs.from_json(first_config), first_place)


def check_same(config: Config, place: str, first_config: Config, first_place: str) -> None:
    """Raise UserError where config or folder are not those of process 0, except for ``distributed.*``."""
    if place != first_place:
        raise UserError(f"--workdir: given {place}, allowed: what process 0 has, {first_place}")
    for name, (first, ours) in configs.diff(first_config, config).items():
        if not name.startswith("distributed."):
            raise UserError(f"{name}: given {ours!r}, allowed: what process 0 has, {first!r}")


def _stored_config(place: remote.Folder) -> Config | None:
    stored = remote.read(place / "config.json")
    return None if stored is None else configs.from_json(stored.decode(), place / "config.json")


def resumed_changes(stored: Config, config: Config) -> dict[str, tuple[Any, Any]]:
    """Return {field: (stored value, value now)} of what a resume changes, except ``distributed.*``.

    How the processes find each other does not affect the result.

    Raises:
      UserError: a field changed that a resume must keep.
    """
    changes = configs.check_resume(stored, config)
    return {name: pair for name, pair in changes.items() if not name.startswith("distributed.")}


def _check_apart(config: Config, place: remote.Folder) -> None:
    """Raise UserError where a corpus' pattern matches what the run would write: the next run would read it as text."""
    written = ("metrics.jsonl", "run.json", "train.log")
    for field in ("data.source", "data.validation"):
        spec = getattr(config.data, field.partition(".")[2])
        for share in [] if spec is None else shares(spec, field):
            kind, _, pattern = share.source.partition(":")
            if kind not in ("text", "tokens") or remote.is_remote(pattern) or not isinstance(place, Path):
                continue
            if any(may_match(pattern, str(place / name)) for name in written):
                raise UserError(f"--workdir {place}: {field}={spec} matches what is written there; name another folder")
