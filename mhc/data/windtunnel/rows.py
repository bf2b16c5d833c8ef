"""Make the rows of a wind tunnel: one sequence each, supervised at the places where the posterior is known.

Training row r of batch b is the sequence b · batch_size + r, so a row's position in the data is its sequence's number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mhc.config import DataConfig, shares
from mhc.data.rows.packing import Batch, empty_batch
from mhc.data.windtunnel.tasks import PREFIX, Split, Task, is_windtunnel, task
from mhc.errors import UserError
from mhc.rules import refuse


class EndlessSource(NamedTuple):
    """Takes the place of a corpus: it has a name and a fingerprint, and no documents."""

    label: str
    fingerprint: str
    holdout: None = None


class TaskOrder:
    """Orders the sequences of a task by their numbers, without end."""

    def __init__(self, made: Task, source: str, seed: int):
        """Order the sequences of a seed; ``source`` is the task's name for messages."""
        self._task, self._seed = made, seed
        self.source = EndlessSource(source, hashlib.sha256(repr(made).encode()).hexdigest()[:16])

    def stream(self, position: int, stride: int, offset: int) -> TaskStream:
        """Return the sequences ``position, position + stride, …``; each fills a row, so there is no ``offset``."""
        return TaskStream(self._task, self._seed, position, stride)

    def empty(self, rows: int, length: int) -> Batch:
        """Return a batch of padding; ``length`` is the task's."""
        return empty(self._task, rows)

    def name(self, position: int) -> str:
        """Return the name of the sequence at a position."""
        return f"{self.source.label}, sequence {position} of seed {self._seed}"


def open_task(data: DataConfig) -> Task | None:
    """Return the task that ``data.source`` names; None where it names a corpus.

    Raises:
        UserError: a wind tunnel in a mixture or in ``data.validation``, another length or tokeniser than the task's.
    """
    sources = [one.source for one in shares(data.source)]
    sets = [] if data.validation is None else [one.source for one in shares(data.validation, "data.validation")]
    if not any(map(is_windtunnel, [*sources, *sets])):
        return None
    if len(sources) > 1:
        refuse("data.source", data.source, f"{PREFIX}<task> by itself, not in a mixture")
    if data.validation is not None:
        refuse("data.validation", data.validation, f"None with {PREFIX}<task>, which holds out sequences of its own")
    chosen = task(data.source)
    if data.tokenizer != data.source:
        refuse("data.tokenizer", data.tokenizer, f"{data.source}, as data.source: the task makes ids by itself")
    if data.sequence_length != chosen.length:
        refuse("data.sequence_length", data.sequence_length, f"{chosen.length} with data.source={data.source}")
    return chosen


class TaskStream:
    """Reads the sequences ``position, position + stride, …``, one a row."""

    def __init__(self, made: Task, seed: int, position: int, stride: int):
        self._task, self._seed, self._stride = made, seed, stride
        self.position, self.offset = position, 0

    def fill(self, batch: Batch, row: int) -> bool:
        """Fill one row of a batch of `empty`; returns True: there is always another sequence."""
        _fill(self._task, self._seed, "train", [self.position], batch, slice(row, row + 1))
        self.position += self._stride
        return True


def empty(made: Task, rows: int) -> Batch:
    """Return an empty batch of a task.

    It has the arrays of a batch of text, and ``posterior`` [rows, T, C] if the task has its own classes.
    """
    batch = empty_batch(rows, made.length)
    if made.classes is not None:
        batch["posterior"] = np.zeros((rows, made.length, made.classes), np.float32)
    return batch


def _fill(made: Task, seed: int, split: Split, numbers: Sequence[int], batch: Batch, rows: slice) -> None:
    sequences = made.make(seed, split, numbers)
    batch["tokens"][rows] = sequences.tokens
    batch["targets"][rows, made.places] = sequences.targets + made.first_class
    batch["weights"][rows, made.places] = 1.0
    batch["segment_ids"][rows] = 1
    batch["positions"][rows] = made.positions(seed, split, numbers)
    if made.classes is not None:
        batch["posterior"][rows, made.places] = sequences.posterior


class TaskValidation:
    """Yields the first held-out sequences of a task in batches, the last one padded with rows of weight 0.

    They are those of seed 0, whatever seed a run trains on: every arm of a comparison is validated on the same.
    """

    lost = 0.0  # no text, so none is lost
    _ALL = 512  # sequences where a config asks for the whole of an endless set

    def __init__(self, made: Task, batch_size: int, count: int, rows: Sequence[int]):
        """Take ``count`` sequences (0: 512), and of each batch the ``rows`` of this process."""
        self._task, self._batch_size = made, batch_size
        self._count, self._rows = count or self._ALL, np.asarray(rows)

    def coverage(self, name: str = "") -> str:
        """Return a line that says which sequences the set has."""
        return f"validation: {self._count:,} held-out sequence(s) of {self._task.length} tokens"

    def __iter__(self) -> Iterator[Batch]:
        """Yield tokens, targets, weights and the like, as training does."""
        for first in range(0, self._count, self._batch_size):
            numbers = range(first, min(first + self._batch_size, self._count))
            batch = empty(self._task, self._batch_size)
            _fill(self._task, 0, "validation", numbers, batch, slice(0, len(numbers)))
            yield {name: array[self._rows] for name, array in batch.items()}


def refuse_documents(data: DataConfig) -> None:
    """Raise UserError where what reads documents is given a wind tunnel."""
    for source in filter(None, (data.source, data.validation)):
        if is_windtunnel(source):
            raise UserError(f"{source} has no documents; python -m eval.windtunnel measures what was trained on it")
