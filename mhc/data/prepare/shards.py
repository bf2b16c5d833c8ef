"""Make the shards of a prepared folder, in several processes."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from pathlib import Path
from typing import Any

import numpy as np

from mhc.config import DataConfig
from mhc.data import tokenizers
from mhc.data.corpus.pieces import count_pieces, cut_text, piece_size
from mhc.data.corpus.text import TextFiles
from mhc.data.prepare.check import check_unchanged
from mhc.data.prepare.folder import PART, writing_to
from mhc.data.prepare.progress import SpeedMeter, Tell
from mhc.data.shards.manifest import counts
from mhc.data.shards.records import ENDINGS, TABLE, Tokenised, pack, unpack
from mhc.data.user_files.globs import sha256
from mhc.errors import UserError

_WRITER = "group_size:1,zstd:1"  # of array_record: each record by itself
_READ_AT_ONCE = 256  # records
_ENDING = (signal.SIGINT, signal.SIGTERM)


@dataclasses.dataclass(frozen=True)
class Job:
    """Describes a shard to make."""

    name: str
    folder: Path
    documents: TextFiles  # of this shard alone
    held: np.ndarray  # bool[n]: held out, and so tokenised whole


def shard_jobs(documents: TextFiles, held: np.ndarray, folder: Path, size: int) -> Iterator[Job]:
    """Yield a job for each shard: the documents that begin within the same ``size`` bytes of the corpus."""
    sizes = documents.sizes
    place = (np.cumsum(sizes) - sizes) // size
    bounds = [0, *(np.flatnonzero(np.diff(place)) + 1).tolist(), len(sizes)]
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        yield Job(f"shard-{number:05d}", folder, documents.part(start, stop), held[start:stop])


class _Stopped(Exception):
    """Ends a process because another one failed."""


class _Worker:
    """Holds what a process keeps between shards; a single worker is a thread of this process."""

    data: DataConfig
    tokenizer: tokenizers.Tokenizer
    counts: Any  # shared int64[4]: documents, tokens, bytes of the corpus; whether to stop

    @classmethod
    def start(cls, data: DataConfig, counts: Any) -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            for number in _ENDING:
                signal.signal(number, signal.SIG_IGN)  # the parent is told, and tells
            threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
        cls.data, cls.counts = data, counts
        cls.tokenizer = tokenizers.load(data.tokenizer)

    @classmethod
    def count(cls, documents: int, ids: int, size: int) -> None:
        with cls.counts.get_lock():
            if cls.counts[3]:
                raise _Stopped
            for place, more in enumerate((documents, ids, size)):
                cls.counts[place] += more


@contextlib.contextmanager
def _held_back() -> Iterator[None]:
    """Hold back the signals that end a program; a process that starts meanwhile does so until it handles them.

    The mask alone does not suffice: it is this thread's, and another may take the signal. Python's handler then runs
    in the main thread all the same, perhaps between the start of a worker and its entry among those to wait for.
    """
    came: list[int] = []
    handlers = {}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in _ENDING if callable(signal.getsignal(number))}
            for number in handlers:
                signal.signal(number, lambda number, frame: came.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if came:
            signal.raise_signal(came[0])


def _end_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)  # a killed parent leaves no process behind


def make_shards(jobs: list[Job], data: DataConfig, workers: int, tell: Tell) -> list[dict[str, Any]]:
    """Make the shards that are not there, and return what the manifest says of each."""
    context = multiprocessing.get_context("spawn")
    counts = context.Array("q", 4)
    total = sum(int(job.documents.sizes.sum()) for job in jobs)
    shards: dict[int, dict[str, Any]] = {}
    waiting = list(enumerate(jobs))[::-1]
    running: dict[futures.Future[dict[str, Any]], int] = {}
    clock = SpeedMeter(total, tell)
    workers = min(workers, len(jobs))
    start: dict[str, Any] = {"initializer": _Worker.start, "initargs": (data, counts)}
    pool: futures.Executor = futures.ThreadPoolExecutor(1, **start)
    if workers > 1:
        pool = futures.ProcessPoolExecutor(workers, context, **start)
    with pool:
        try:
            while waiting or running:
                while waiting and len(running) < 2 * workers:
                    number, job = waiting.pop()
                    with _held_back():
                        running[pool.submit(make_shard, job)] = number
                done, _ = futures.wait(running, timeout=1.0, return_when=futures.FIRST_COMPLETED)
                for future in done:
                    number = running.pop(future)
                    shards[number] = future.result()
                    if shards[number].pop("kept"):
                        clock.keep(int(jobs[number].documents.sizes.sum()))
                clock.tell(counts[:3])
        except BrokenProcessPool:
            raise UserError(
                "a process was killed, perhaps for its memory; start again to go on, perhaps with fewer --workers"
            ) from None
        finally:
            counts[3] = bool(waiting or running)
            pool.shutdown(cancel_futures=True)
    clock.tell(counts[:3], last=True)
    return [shards[number] for number in range(len(jobs))]


def make_shard(job: Job) -> dict[str, Any]:
    """Make a shard unless it is there and whole, and return what the manifest says of it."""
    paths = {ending: job.folder / f"{job.name}.{ending}" for ending in ENDINGS}
    table = _read_whole(job, paths)
    kept = table is not None
    if table is None:
        table = _make_files(job, paths)
    return {
        "name": job.name,
        **counts(table),
        "files": {ending: {"size": path.stat().st_size, "sha256": sha256(path)} for ending, path in paths.items()},
        "kept": kept,
    }


_KEYS = {"file": "owner", "start": "start", "stop": "stop", "number": "number", "ends": "ends"}  # of the index


def _read_whole(job: Job, paths: dict[str, Path]) -> np.ndarray | None:
    """Return the table of a shard; None if the shard is missing or not what its documents give.

    Reading costs little beside tokenising, so every record is read, and its ids and bytes are counted.
    """
    from array_record.python.array_record_module import ArrayRecordReader

    if not all(path.is_file() for path in paths.values()):
        return None
    empty, stored = io.BytesIO(), b""
    np.save(empty, np.zeros(len(job.documents), TABLE))
    with contextlib.suppress(OSError):
        stored = paths["npy"].read_bytes()
    header = len(empty.getvalue()) - len(job.documents) * TABLE.itemsize
    if len(stored) != len(empty.getvalue()) or stored[:header] != empty.getvalue()[:header]:
        return None
    table = np.frombuffer(stored, TABLE, offset=header)
    if any(not np.array_equal(table[ours], getattr(job.documents.index, theirs)) for ours, theirs in _KEYS.items()):
        return None
    reader = ArrayRecordReader(str(paths["array_record"]))
    try:
        if reader.num_records() != len(table):
            return None
        for start in range(0, len(table), _READ_AT_ONCE):
            rows = table[start : start + _READ_AT_ONCE]
            for row, record in zip(rows, reader.read(start, start + len(rows)), strict=True):
                document = unpack(record)
                lengths = _Worker.tokenizer.byte_lengths[document.ids] if document.lengths is None else document.lengths
                size = int(lengths.sum(dtype=np.int64)) + int(document.rests.sum(dtype=np.int64))
                if (len(document.ids), size) != (row["ids"], row["bytes"]):
                    return None
    except (RuntimeError, ValueError, IndexError):
        return None
    finally:
        with contextlib.suppress(RuntimeError):
            reader.close()
    return table


def _make_files(job: Job, paths: dict[str, Path]) -> np.ndarray:
    """Write both files of a shard, and return its table. Raises UserError where a file cannot be written or changed."""
    from array_record.python.array_record_module import ArrayRecordWriter

    parts = {ending: path.with_name(f"{PART}{path.name}") for ending, path in paths.items()}
    documents, size = job.documents, piece_size(_Worker.data)
    pieces = np.where(job.held, 1, count_pieces(documents.sizes, size))
    table = np.zeros(len(documents), TABLE)
    for ours, theirs in _KEYS.items():
        table[ours] = getattr(documents.index, theirs)
    with writing_to(paths["array_record"]):
        writer = ArrayRecordWriter(str(parts["array_record"]), _WRITER)
    try:
        for number in range(len(documents)):
            text = _text(documents, number)
            try:
                document = _tokenise(cut_text(text, int(pieces[number]), size))
            except UserError as error:
                raise UserError(f"{documents.name(number)}: {error}") from None
            with writing_to(paths["array_record"]):
                writer.write(pack(document))
            table[number]["ids"], table[number]["bytes"] = len(document.ids), len(text)
            _Worker.count(1, len(document.ids), int(documents.sizes[number]))
    except BaseException:
        with contextlib.suppress(RuntimeError):
            writer.close()
        raise
    with writing_to(paths["array_record"]):
        writer.close()
    check_unchanged(documents)
    with writing_to(paths["npy"]), parts["npy"].open("wb") as file:
        np.save(file, table)
    for ending in reversed(ENDINGS):  # a shard is there when both are
        with writing_to(paths[ending]):
            with parts[ending].open("rb") as file:
                os.fsync(file.fileno())
            parts[ending].replace(paths[ending])
    return table


def _text(documents: TextFiles, number: int) -> bytes:
    try:
        return documents[number]
    except UserError:
        check_unchanged(documents)
        raise


def _tokenise(texts: Sequence[bytes]) -> Tokenised:
    encoded = [_Worker.tokenizer.encode_with_bytes(text) for text in texts]
    ids = np.concatenate([ids for ids, _ in encoded])
    lengths = np.concatenate([lengths for _, lengths in encoded])
    ends = np.cumsum([len(ids) for ids, _ in encoded])
    rests = np.array([len(text) - int(each.sum()) for text, (_, each) in zip(texts, encoded, strict=True)])
    usual = np.array_equal(lengths, _Worker.tokenizer.byte_lengths[ids])
    return Tokenised(ids, None if usual else lengths, ends, rests)
