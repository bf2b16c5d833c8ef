"""Test worker processes: they change neither batches nor state, and their errors are one line."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mhc.config import DataConfig
from mhc.data import tokenizers
from mhc.data.pipeline import TrainIterator, train_iterator
from mhc.data.rows.packing import Batch
from mhc.errors import UserError
from tests.data.conftest import write_texts


@pytest.fixture
def mixed(tmp_path: Path, bpe: str) -> DataConfig:
    """Return two sources and a tokeniser that takes its time."""
    for seed, name in enumerate("ab"):
        write_texts(tmp_path / name, 20, seed=seed)
    return DataConfig(
        source=f"mix:a=0.6*text:{tmp_path}/a/*.txt;b=0.4*text:{tmp_path}/b/*.txt",
        tokenizer=bpe,
        sequence_length=32,
        cache_dir=str(tmp_path / "cache"),
    )


@contextmanager
def opened(data: DataConfig, workers: int, **arguments: Any) -> Iterator[TrainIterator]:
    data = dataclasses.replace(data, workers=workers)
    iterator = train_iterator(data, tokenizers.load(data.tokenizer), **{"batch_size": 5, "seed": 3, **arguments})
    try:
        yield iterator
    finally:
        iterator.close()


def read(iterator: TrainIterator, count: int) -> list[tuple[Batch, dict[str, Any]]]:
    """Return batches, each with the state after it."""
    return [(next(iterator), json.loads(json.dumps(iterator.get_state()))) for _ in range(count)]


def assert_same(one: list[tuple[Batch, Any]], other: list[tuple[Batch, Any]]) -> None:
    for (batch, state), (theirs, their_state) in zip(one, other, strict=True):
        assert state == their_state and batch.keys() == theirs.keys()
        for name, array in batch.items():
            assert array.dtype == theirs[name].dtype
            np.testing.assert_array_equal(array, theirs[name])


def test_their_number_changes_neither_batches_nor_state(mixed):
    """Five rows on two processes go on from the state of one process."""
    with opened(mixed, 0) as alone, opened(mixed, 2) as shared:
        assert alone.get_state() == shared.get_state()
        whole = read(alone, 12)
        shared.set_state(whole[3][1])
        assert shared.get_state() == whole[3][1]
        assert_same(read(shared, 8), whole[4:])
        assert len(multiprocessing.active_children()) == 2
    assert not multiprocessing.active_children()


@pytest.mark.process
@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("workers", [1, 3, 9])
def test_any_number_of_them_any_rows_and_read_ahead(mixed, workers, prefetch):
    """There may be more processes than rows, and a state goes from any number of them to any other."""
    data = dataclasses.replace(mixed, prefetch=prefetch)
    for rows in ([0, 1, 2, 3, 4], [1, 4], [2]):
        with opened(data, 0, rows=rows) as alone, opened(data, workers, rows=rows) as shared:
            whole = read(alone, 8)
            assert_same(read(shared, 4), whole[:4])
            shared.set_state(whole[5][1])
            assert_same(read(shared, 2), whole[6:])
            alone.set_state(shared.get_state())
            assert_same(read(alone, 3), read(shared, 3))


@pytest.mark.process
def test_one_that_is_killed_is_a_line(mixed):
    with opened(mixed, 2) as shared:
        read(shared, 2)
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)  # type: ignore[arg-type]
        with pytest.raises(UserError, match=r"data\.workers=2: a worker process was ended from outside"):
            read(shared, 100_000)
    assert not multiprocessing.active_children()


@pytest.mark.process
def test_a_mistake_in_one_is_the_line_that_it_is(mixed, tmp_path):
    with opened(mixed, 2) as shared:
        (tmp_path / "a" / "007.txt").write_text("another text than when the run began")
        with pytest.raises(UserError, match=r"text:.*/a/\*\.txt has changed since the run began: put back"):
            read(shared, 1)
    with opened(mixed, 2) as shared:
        (tmp_path / "b" / "007.txt").unlink()
        (tmp_path / "b").rename(tmp_path / "gone")
        with pytest.raises(UserError, match="no file"):
            read(shared, 1)
