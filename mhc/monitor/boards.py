"""Write a run's curves to TensorBoard and to Weights & Biases, for viewing; metrics.jsonl holds all of them."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mhc.errors import UserError
from mhc.files import Record

log = logging.getLogger(__name__)


class TensorBoardWriter:
    """Writes records as TensorBoard scalars (through tensorboardX).

    Numbers become a scalar under their own name; of an array (one value per sublayer) its maximum is written, under the
    same name, and of a mapping one scalar per entry, ``name/entry``. Strings and None are left out: the JSON lines hold
    everything, this is for looking.

    Args:
        directory: where the event file goes.
        purge_step: on a resume, the first step that will be written again; TensorBoard drops what older event files
            hold from there on.
    """

    def __init__(self, directory: str | os.PathLike[str], *, purge_step: int | None = None) -> None:
        from tensorboardX import SummaryWriter  # heavy, and wanted only where monitor.tensorboard is on

        self._directory, self._failed = directory, False
        with self._trying():
            self._writer = SummaryWriter(str(directory), purge_step=purge_step)
            # A thread of the library's writes. If it died of an error, whoever gives it records would wait for ever.
            file = self._writer.file_writer.event_writer._ev_writer
            for name in ("write_event", "flush", "close"):
                setattr(file, name, self._tried(getattr(file, name)))

    @contextlib.contextmanager
    def _trying(self) -> Iterator[None]:
        """Warn once if a full disk stops the block, and write nothing to the board from then on."""
        try:
            yield
        except OSError as error:
            if not self._failed:
                log.warning("%s: cannot be written: %s; training goes on without it", self._directory, error.strerror)
            self._failed = True

    def _tried(self, do: Callable[..., Any]) -> Callable[..., Any]:
        def tried(*arguments: Any) -> Any:
            with self._trying():
                return None if self._failed else do(*arguments)

        return tried

    def write(self, record: Record) -> None:
        """Write every number of the record at its ``step``. Raises KeyError without one."""
        if self._failed:
            return
        from tensorboardX.proto.summary_pb2 import Summary

        # One event for all: with one for each, as add_scalar makes them, a fast step would wait for the writer.
        values = [Summary.Value(tag=name, simple_value=number) for name, number in scalars(record).items()]
        self._writer.file_writer.add_summary(Summary(value=values), int(record["step"]))

    def close(self) -> None:
        """Write out what is buffered and close the file."""
        if hasattr(self, "_writer"):
            self._writer.close()


class WandbWriter:
    """Writes records to a Weights & Biases run, by the rule of :class:`TensorBoardWriter`.

    The run's id stays in ``directory``/wandb/id, so that a resumed run goes on under the same one. The x axis is
    ``step``. Offline, every start leaves a folder of its own. After a resume or a rewind the steps taken again are
    there twice; metrics.jsonl has each once.

    Args:
        directory: the run folder; wandb keeps its files in ``directory``/wandb.
        mode: "offline" (``wandb sync`` sends them later) or "online".
        config: shown beside the curves.

    Raises:
        UserError: wandb is not installed.
    """

    @staticmethod
    def check(mode: str) -> Any:
        """Import wandb. Raises UserError where it is not installed: to be called before anything is written."""
        try:
            import wandb  # an extra of this project, and heavy
        except ImportError:
            raise UserError(
                f"monitor.wandb: given {mode!r}, allowed: 'off' until wandb is installed (pip install 'mhc-jax[wandb]')"
            ) from None
        return wandb

    def __init__(self, directory: str | os.PathLike[str], *, mode: str, config: Mapping[str, Any]) -> None:
        wandb = self.check(mode)
        folder = Path(directory) / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "id").is_file():
            (folder / "id").write_text(secrets.token_hex(8))
        self._run = wandb.init(
            project="mhc",
            dir=str(directory),
            name=Path(directory).name,
            id=(folder / "id").read_text().strip(),
            resume="allow" if mode == "online" else None,  # a question to the server
            mode="online" if mode == "online" else "offline",
            config=dict(config),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Record) -> None:
        """Send every number of the record with its ``step``. Raises KeyError without one."""
        self._run.log({"step": int(record["step"]), **scalars(record)})

    def close(self) -> None:
        """Finish the run; waits until everything is written."""
        self._run.finish()


def scalars(record: Record) -> dict[str, float]:
    """Return a record as single numbers: an array's largest value, and a mapping's entries as ``name/entry``.

    ``step``, None, strings and empty arrays are left out.
    """
    out: dict[str, float] = {}
    for name, value in record.items():
        if name == "step" or value is None or isinstance(value, str):
            continue
        if isinstance(value, Mapping):
            out |= {f"{name}/{entry}": float(number) for entry, number in value.items()}
        else:
            array = np.asarray(value, dtype=np.float64)
            if array.size:
                out[name] = float(array.max())
    return out
