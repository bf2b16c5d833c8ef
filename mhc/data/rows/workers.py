"""Share the rows of a batch out among worker processes, on grain's ``mp_prefetch``.

Rows share nothing: of W processes number w takes the rows w, w + W, …, and hands over with them where each is
afterwards; the batch and its state are put together from these. So the number of processes changes neither. Threads
would be of no use, since the tokenizers library holds the interpreter's lock.
"""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing
import os
import signal
import sys
import threading
from typing import Any

import grain
import numpy as np
from absl import flags

from mhc.config import DataConfig
from mhc.data.rows.iterator import PLACES, PackedIterator, Packing
from mhc.data.rows.order import digests, open_orders
from mhc.data.rows.packing import Batch
from mhc.data.tokenizers import load
from mhc.errors import UserError


@dataclasses.dataclass(frozen=True)
class Worker:
    """Tells a worker process what to read. It opens the corpus itself, since an index may be large."""

    data: DataConfig
    tokenizer: str  # its content_hash
    corpora: dict[str, str]  # `digests` of its sources
    seed: int
    packing: Packing

    def open(self) -> PackedIterator:
        """Open the corpus. Raises UserError where it is not what the run has opened."""
        tokenizer = load(self.data.tokenizer)
        orders = open_orders(self.data, tokenizer, self.seed)
        expected = {self.data.tokenizer: self.tokenizer, **self.corpora}
        for name, digest in {self.data.tokenizer: tokenizer.content_hash, **digests(orders)}.items():
            if digest != expected[name]:
                raise UserError(f"{name} has changed since the run began: put back what was there, and start again")
        return PackedIterator(self.packing, orders)

    @staticmethod
    def start(index: int, count: int) -> None:
        """Set a worker process up: it leaves signals and warnings to the run, and ends when the run does."""
        logging.disable(logging.WARNING)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        parent = multiprocessing.parent_process()
        if parent is not None:

            def end_with_it() -> None:
                parent.join()
                os._exit(1)

            threading.Thread(target=end_with_it, name="mhc-data-parent", daemon=True).start()


class _WorkerDataset(grain.IterDataset):
    """Yields the rows of a worker from a state on, with the state of each row afterwards."""

    def __init__(self, worker: Worker, state: dict[str, Any]):
        super().__init__()
        self._worker, self._state = worker, state

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Take the share of the rows that grain gives this process."""
        packing = self._worker.packing
        self._worker = dataclasses.replace(self._worker, packing=packing._replace(rows=packing.rows[sl]))
        self._state = {**self._state, **{name: self._state[name][sl] for name in PLACES}}

    def __iter__(self) -> _WorkerIterator:
        return _WorkerIterator(self._worker, self._state)


class _WorkerIterator(grain.DatasetIterator):
    def __init__(self, worker: Worker, state: dict[str, Any]):
        super().__init__()
        self._worker, self._state = worker, state
        self._packed: PackedIterator | None = None

    def __next__(self) -> Batch:
        if self._packed is None:
            self._packed = self._worker.open()
            self._packed.set_state(self._state)
        batch = next(self._packed)
        state = self._packed.get_state()
        return {**batch, **{name: state[name] for name in PLACES}}

    def get_state(self) -> dict[str, Any]:
        return {}  # the batches have it

    def set_state(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


class SharedDataset(grain.IterDataset):
    """Yields what `PackedDataset` does, made by worker processes, each ``prefetch`` batches ahead."""

    def __init__(self, worker: Worker, prefetch: int):
        super().__init__()
        self._worker, self._prefetch = worker, prefetch

    def __iter__(self) -> _SharedIterator:
        return _SharedIterator(self._worker, self._prefetch)


class _SharedIterator(grain.DatasetIterator):
    def __init__(self, worker: Worker, prefetch: int):
        super().__init__()
        self._worker = worker
        self._options = grain.MultiprocessingOptions(
            num_workers=min(worker.data.workers, len(worker.packing.rows)), per_worker_buffer_size=max(prefetch, 1)
        )
        self._state = worker.packing.start()
        self._processes: grain.DatasetIterator | None = None

    def __next__(self) -> Batch:
        count = self._options.num_workers
        shares = [self._next_share() for _ in range(count)]  # in turn, by grain
        batch = {}
        for name in shares[0]:
            arrays = [share[name] for share in shares]
            whole = batch[name] = np.empty((sum(map(len, arrays)), *arrays[0].shape[1:]), arrays[0].dtype)
            for index, array in enumerate(arrays):
                whole[index::count] = array
        self._state = {**{name: batch.pop(name) for name in PLACES}, "batches": self._state["batches"] + 1}
        return batch

    def _next_share(self) -> Batch:
        if self._processes is None:
            if not flags.FLAGS.is_parsed():  # by absl.app, which no program here is; grain reads them
                flags.FLAGS.mark_as_parsed()
            # no shared memory: pipes are fast enough, containers have little of it, and a kill leaves it behind
            options = grain.experimental.DatasetOptions(min_shm_size=sys.maxsize)
            dataset = grain.experimental.WithOptionsIterDataset(_WorkerDataset(self._worker, self._state), options)
            self._processes = iter(dataset.mp_prefetch(self._options, worker_init_fn=Worker.start))
        try:
            share: Batch = next(self._processes)
        except RuntimeError as error:
            if "exit code -" not in str(error):  # a signal; of anything else the traceback is above
                raise
            raise UserError(
                f"data.workers={self._options.num_workers}: a worker process was ended from outside, perhaps for its "
                "memory; start again to go on from the last checkpoint, perhaps with fewer"
            ) from None
        return share

    def get_state(self) -> dict[str, Any]:
        return self._state

    def set_state(self, state: dict[str, Any]) -> None:
        self._stop()
        self._state = state

    def _stop(self) -> None:
        if self._processes is not None:
            self._processes.close()
            self._processes = None

    def close(self) -> None:
        self._stop()
        super().close()
