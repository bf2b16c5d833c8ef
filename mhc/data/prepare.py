"""Tokenises a corpus once: the folder that ``data.source='prepared:DIR'`` reads (see `mhc.data.prepared`).

    python -m mhc.data.prepare --source 'text:corpus/*.jsonl' --tokenizer tok.json --out DIR

Shards are made in parallel, each from the same slice of the documents whatever the number of processes, under a
temporary name that is replaced when the shard is whole. Started again after it was killed, it keeps the shards that are
there, and ends with the same bytes. A file of the corpus that has changed meanwhile is refused by name.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import fcntl
import io
import itertools
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from pathlib import Path
from typing import Any

import numpy as np

from mhc import cli, full_disk, remote
from mhc.config import DataConfig
from mhc.data import fidelity, tokenizers
from mhc.data.files import TextFiles, piece_size
from mhc.data.holdout import held_out
from mhc.data.packing import Tokenised, count_pieces, cut_text
from mhc.data.places import Place, match, may_match, sha256
from mhc.data.prepared import FORMAT, MANIFEST, ORIGIN, PLAN, TABLE, check_table, counts, pack, parse, unpack
from mhc.errors import UserError

_WRITER = "group_size:1,zstd:1"  # of array_record: each record by itself
_PART = ".part-"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_LARGEST = 10**18  # bytes a shard
_TELL_EVERY = 5.0  # seconds
_RECENT = 60.0  # seconds that speed and time left are taken over
_ENDINGS = ("array_record", "npy")
_READ_AT_ONCE = 256  # records
_ENDING = (signal.SIGINT, signal.SIGTERM)

Tell = Callable[[str], None]


def prepare(
    source: str,
    out: str,
    *,
    tokenizer: str = "bytes",
    field: str = "text",
    sequence_length: int | None = None,
    holdout: float | None = None,
    whole: bool = False,
    workers: int | None = None,
    shard_size: int | None = None,
    cache_dir: str | None = None,
    tell: Tell = lambda line: None,
) -> dict[str, Any]:
    """Prepares a corpus, or goes on with it, and gives its manifest.

    Args:
      source: ``text:<glob>``, the glob local or in a store.
      out: a local folder.
      tokenizer, field, sequence_length, holdout, cache_dir: as the fields of `data`, None: their defaults.
      whole: tokenise no document in pieces: for a corpus that is only validated on.
      workers: processes; None: one a core.
      shard_size: bytes of the corpus a shard; None: 1/64 of it, from 1 MB to 256 MB.
      tell: is given lines about the progress.
    Raises: UserError for what is wrong with the arguments or the corpus, for a folder that holds another one, and for a
      file that has changed since the folder was begun.
    """
    if not source.startswith("text:"):
        raise UserError(f"--source: given {source!r}, allowed: text:<glob>")
    given: dict[str, Any] = {"sequence_length": sequence_length, "holdout": holdout, "cache_dir": cache_dir}
    if shard_size is not None and not 1 <= shard_size <= _LARGEST:
        raise UserError(f"--shard_size: given {shard_size}, allowed: from 1 byte to {_LARGEST:,}")
    chosen = {name: value for name, value in given.items() if value is not None}
    data = DataConfig(source=source, tokenizer=tokenizer, field=field, **chosen)
    folder = cli.check_writable(os.path.expanduser(out), "--out")
    _check_apart(data.source.removeprefix("text:"), folder)
    new = not folder.exists()
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with _alone(folder):
            return _prepare(data, folder, whole, workers or os.cpu_count() or 1, shard_size, tell)
    finally:
        if new:
            with contextlib.suppress(OSError):  # not empty: the rule
                folder.rmdir()


def _check_apart(pattern: str, folder: Path) -> None:
    """Raises UserError where the pattern matches what is written into the folder."""
    names = (MANIFEST, ORIGIN, PLAN, "shard-00000.array_record", "shard-00000.npy")
    if not remote.is_remote(pattern) and any(may_match(pattern, os.path.join(folder, name)) for name in names):
        raise UserError(f"--out {folder}: --source text:{pattern} matches what is written there; name another folder")


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """What the system says to writing, or array_record for it, is a line: no space left, a quota, no permission."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        said = getattr(error, "strerror", None) or re.sub(r"^\w+\(\) failed: ", "", str(error).partition("; ")[0])
        raise full_disk.error_class(error)(
            f"--out: cannot write {path}: {said}; once it can, the same command goes on"
        ) from None


def _prepare(
    data: DataConfig, folder: Path, whole: bool, workers: int, shard_size: int | None, tell: Tell
) -> dict[str, Any]:
    with _writing(folder):
        for left in folder.glob(f"{_PART}*"):
            left.unlink()
        if (folder / PLAN).is_file():
            _clear(folder)
    began = next((_read(folder / name) for name in (MANIFEST, PLAN) if (folder / name).is_file()), None)
    if began is None and {path.name for path in folder.iterdir()} - {ORIGIN}:  # which is the first to be written
        raise UserError(f"--out {folder}: holds other files; name a new folder")
    try:
        return _go_on(data, folder, whole, workers, shard_size, began, tell)
    except BaseException as error:
        with contextlib.suppress(OSError):
            for left in folder.glob(f"{_PART}*"):  # perhaps what filled the disk
                left.unlink()
            _clear(folder)
        if isinstance(error, _Changed):
            remedy = f"remove {folder}, and start again" if _has_begun(folder) else "start again"
            raise UserError(f"{error} has changed while it was prepared: {remedy}") from None
        raise


def _has_begun(folder: Path) -> bool:
    """Whether there is more than files that `_clear` removes."""
    return (folder / MANIFEST).exists() or any(folder.glob("shard-*.array_record"))


def _clear(folder: Path) -> None:
    """Removes what was written of a preparation that has made no shard: it would only stand in the next one's way."""
    if _has_begun(folder):
        return
    for path in (folder / ORIGIN, folder / PLAN, *folder.glob(f"{_PART}*"), *folder.glob("shard-*.npy")):
        path.unlink(missing_ok=True)


def _go_on(
    data: DataConfig,
    folder: Path,
    whole: bool,
    workers: int,
    shard_size: int | None,
    began: dict[str, Any] | None,
    tell: Tell,
) -> dict[str, Any]:
    """Args: began: the plan or manifest in the folder."""
    chosen = tokenizers.load(data.tokenizer)
    pattern = data.source.removeprefix("text:")
    places = match("text", pattern)
    size = sum(place.size for place in places)
    plan: dict[str, Any] = {
        "format": FORMAT,
        "source": "text",
        "field": data.field,
        "tokenizer": {"name": Path(data.tokenizer).name, "hash": chosen.content_hash, "vocabulary": chosen.vocab_size},
        "sequence_length": data.sequence_length,
        "holdout": data.holdout,
        "whole": whole,
        "shard_size": shard_size or min(max(size // 64, 10**6), 256 * 10**6),
        "files": _describe(places, _known(folder, began), tell),
    }
    if began is not None:
        _check_same(plan, began, places, folder, explicit=shard_size is not None)
        plan = {name: began[name] for name in plan}
    if began is None or not (folder / ORIGIN).is_file():
        origin = {"pattern": pattern, "files": {place.name: _origin(place) for place in places}}
        _write(folder / ORIGIN, origin)
    if began is None:
        _write(folder / PLAN, plan)
    finished = began is not None and "shards" in began
    damaged: list[str] = []
    if began is not None and finished:
        with _writing(folder):
            (folder / PLAN).unlink(missing_ok=True)
        damaged = _damaged(began, folder, tell)
        if not damaged:
            tell(f"{folder} is prepared already")
            return began
        tell(f"{len(damaged)} shard(s) are damaged or missing and are made anew: {', '.join(damaged)}")
    tell(f"finding the documents of {len(places)} file(s)")
    documents = TextFiles(data, pattern, "train", whole=True)
    fidelity.check(documents, chosen)
    found = documents.index
    held = np.ones(len(documents), bool)
    if not whole:
        held = held_out(found.owner, found.number, documents.names, data.holdout)
    jobs = list(_jobs(documents, held, folder, plan["shard_size"]))
    if began is not None and finished:
        planned = [(job.name, len(job.documents)) for job in jobs]
        if planned != [(shard["name"], shard["documents"]) for shard in began["shards"]]:
            raise UserError(
                f"{folder / MANIFEST} is damaged (its shards are not those of the corpus): remove the folder, and "
                "start again"
            )
        jobs = [job for job in jobs if job.name in damaged]
        with _writing(folder):
            for name in damaged:  # a run that starts meanwhile says that they are missing
                for ending in _ENDINGS:
                    (folder / f"{name}.{ending}").unlink(missing_ok=True)
    shards = _run(jobs, data, workers, tell)
    for before, now in itertools.zip_longest(places, match("text", pattern)):
        if before != now:
            raise _Changed(str(before or now))
    if began is not None and finished:
        for shard in shards:
            if shard not in began["shards"]:
                raise UserError(
                    f"--out {folder}: {shard['name']} made anew is not what {MANIFEST} says, perhaps for another "
                    "version of array_record or numpy: name a new folder"
                )
        tell(f"{folder} is whole again")
        return began
    totals = {name: sum(shard[name] for shard in shards) for name in ("documents", "tokens", "bytes")}
    lost = fidelity.share_lost(documents, chosen)
    if lost:
        tell(fidelity.said(lost, data.tokenizer))
    manifest = {**plan, **totals, **({"lost": lost} if lost else {}), "shards": shards}
    _write(folder / MANIFEST, manifest)
    with _writing(folder):
        (folder / PLAN).unlink()
    return manifest


def _damaged(manifest: dict[str, Any], folder: Path, tell: Tell) -> list[str]:
    """Names of the shards whose files are missing or have another size or SHA-256 than in the manifest.

    Raises UserError where the manifest does not go with the table of one that has those.
    """
    shards = manifest["shards"]
    total = sum(shard["files"][ending]["size"] for shard in shards for ending in _ENDINGS)
    tell(f"checking {len(shards)} shard(s), {total / 1e6:,.1f} MB")

    def is_whole(shard: dict[str, Any]) -> bool:
        for ending in _ENDINGS:
            about = shard["files"][ending]
            path = folder / f"{shard['name']}.{ending}"
            try:
                if path.stat().st_size != about["size"] or sha256(path) != about["sha256"]:
                    return False
            except OSError:  # missing, or a sector that cannot be read
                return False
        table = np.load(folder / f"{shard['name']}.npy", allow_pickle=False)
        check_table(shard, table, len(manifest["files"]), folder)
        return True

    found, told = [], time.monotonic()
    with futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # hashing lets go of the interpreter
        for number, (shard, whole) in enumerate(zip(shards, pool.map(is_whole, shards), strict=True)):
            if not whole:
                found.append(shard["name"])
            if time.monotonic() - told > _TELL_EVERY:
                told = time.monotonic()
                tell(f"checked {number + 1} of {len(shards)} shard(s)")
    return found


class _Changed(UserError):
    """A file of the corpus, by its path, is another than at the start."""


# What is prepared -----------------------------------------------------------------------------------------------------


def _origin(place: Place) -> dict[str, Any]:
    path = place.path if remote.is_remote(place.path) else os.path.abspath(place.path)
    return {"path": path, "version": place.version}


def _known(folder: Path, began: dict[str, Any] | None) -> dict[tuple[str, int, int], str]:
    """Checksums by name, size and time of change, as of the folder's beginning."""
    if began is None or not (folder / ORIGIN).is_file():
        return {}
    origin = _read(folder / ORIGIN)["files"]
    return {
        (file["name"], file["size"], origin[file["name"]]["version"]): file["checksum"]
        for file in began["files"]
        if file["name"] in origin
    }


def _describe(places: list[Place], known: dict[tuple[str, int, int], str], tell: Tell) -> list[dict[str, Any]]:
    """Name, size and checksum of each file; those that did not change are not read again."""

    def checksum(place: Place) -> str:
        return known.get((place.name, place.size, place.version)) or place.checksum()

    unknown = [place.size for place in places if (place.name, place.size, place.version) not in known]
    if unknown:
        tell(f"hashing {len(unknown)} file(s), {sum(unknown) / 1e6:,.1f} MB")
    with futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # hashing lets go of the interpreter
        sums = list(pool.map(checksum, places))
    return [
        {"name": place.name, "size": place.size, "checksum": value} for place, value in zip(places, sums, strict=True)
    ]


def _check_same(
    plan: dict[str, Any], began: dict[str, Any], places: list[Place], folder: Path, *, explicit: bool
) -> None:
    """Raises UserError where the folder was begun with something else, by name."""
    remedy = f"name a new folder, or remove {folder}"
    for name in plan:
        if name == "shard_size" and not explicit:  # it follows from the files
            continue
        theirs, ours = (given["hash"] if name == "tokenizer" else given for given in (began[name], plan[name]))
        if name == "whole" and theirs != ours:
            was, now = ("with" if given else "without" for given in (theirs, ours))
            raise UserError(f"--out {folder} was begun {was} --validation, now it is {now}: {remedy}")
        if name != "files" and theirs != ours:
            raise UserError(f"--out {folder} was begun with --{name} {theirs}, now it is {ours}: {remedy}")
    before = {file["name"]: file for file in began["files"]}
    paths = {place.name: place.path for place in places}
    for file in plan["files"]:
        if file["name"] not in before:
            raise UserError(f"{paths[file['name']]} is new since {folder} was begun: {remedy}")
        if before.pop(file["name"]) != file:
            raise UserError(f"{paths[file['name']]} has changed since {folder} was begun: {remedy}")
    for name in before:
        raise UserError(f"{name} of the corpus is gone since {folder} was begun: {remedy}")


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Holds the folder against other processes of this machine, until the process ends."""
    with _writing(folder):
        handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--out {folder}: another process is preparing this folder") from None
        yield
    finally:
        os.close(handle)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    return parse(path, content)


def _write(path: Path, content: dict[str, Any]) -> None:
    """As a whole or not at all."""
    part = path.with_name(f"{_PART}{path.name}")
    with _writing(path):
        with part.open("w", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)


# Shards ---------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Job:
    """A shard to make."""

    name: str
    folder: Path
    documents: TextFiles  # of this shard alone
    held: np.ndarray  # bool[n]


def _jobs(documents: TextFiles, held: np.ndarray, folder: Path, size: int) -> Iterator[_Job]:
    """Shards of about ``size`` bytes of the corpus: the documents that begin within the same ``size`` bytes."""
    sizes = documents.sizes
    place = (np.cumsum(sizes) - sizes) // size
    bounds = [0, *(np.flatnonzero(np.diff(place)) + 1).tolist(), len(sizes)]
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        yield _Job(f"shard-{number:05d}", folder, documents.part(start, stop), held[start:stop])


class _Stopped(Exception):
    """Another process failed."""


class _Worker:
    """What a process keeps between shards; a single worker is a thread of ours."""

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
    """The signals that end a program wait; in a process that starts meanwhile, until it says how it takes them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)  # a killed parent leaves no process behind


def _run(jobs: list[_Job], data: DataConfig, workers: int, tell: Tell) -> list[dict[str, Any]]:
    """What the manifest says of each shard; makes those that are not there."""
    context = multiprocessing.get_context("spawn")
    counts = context.Array("q", 4)
    total = sum(int(job.documents.sizes.sum()) for job in jobs)
    found: dict[int, dict[str, Any]] = {}
    waiting = list(enumerate(jobs))[::-1]
    running: dict[futures.Future[dict[str, Any]], int] = {}
    clock = _Clock(total, tell)
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
                        running[pool.submit(_make, job)] = number
                done, _ = futures.wait(running, timeout=1.0, return_when=futures.FIRST_COMPLETED)
                for future in done:
                    number = running.pop(future)
                    found[number] = future.result()
                    if found[number].pop("kept"):
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
    return [found[number] for number in range(len(jobs))]


class _Clock:
    """Tells how far it is, every few seconds, with the speed of the last minute, and at the end with that of all."""

    def __init__(self, total: int, tell: Tell):
        self._total = total
        self._tell = tell
        self._kept = 0
        self._told = time.monotonic()
        self._began = self._told
        self._seen = collections.deque([(self._told, 0)])  # (time, bytes) of each line, the first of a minute ago

    def keep(self, size: int) -> None:
        """Counts bytes of the corpus that were prepared before."""
        self._kept += size

    def tell(self, counts: list[int], last: bool = False) -> None:
        """Args: documents, tokens, bytes of the corpus that were prepared since the start."""
        documents, ids, size = counts
        now = time.monotonic()
        if now - self._told < _TELL_EVERY and not last:
            return
        self._told = now
        while len(self._seen) > 1 and self._seen[1][0] <= now - _RECENT:
            self._seen.popleft()
        then, before = (self._began, 0) if last else self._seen[0]
        self._seen.append((now, size))
        rate = (size - before) / max(now - then, 1e-9)
        left = (self._total - self._kept - size) / rate if rate else float("inf")
        time_left = f"{left // 60:.0f} min {left % 60:02.0f} s left" if np.isfinite(left) else "time left unknown"
        kept = f" (and {self._kept / 1e6:,.1f} MB from before)" if self._kept else ""
        self._tell(
            f"{documents:,} documents, {ids:,} tokens, {size / 1e6:,.1f} of {self._total / 1e6:,.1f} MB{kept}, "
            f"{rate / 1e6:.2f} MB/s, {time_left}"
        )


def _make(job: _Job) -> dict[str, Any]:
    """Makes a shard unless it is there as a whole, and describes it."""
    paths = {ending: job.folder / f"{job.name}.{ending}" for ending in _ENDINGS}
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


def _read_whole(job: _Job, paths: dict[str, Path]) -> np.ndarray | None:
    """The table of a shard that is there; None where it is not, or not what its documents give.

    Reading costs little beside tokenising: so every record is read, and its ids and bytes are counted.
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


def _make_files(job: _Job, paths: dict[str, Path]) -> np.ndarray:
    """Writes both files of a shard; the table. Raises UserError where a file cannot be written or has changed."""
    from array_record.python.array_record_module import ArrayRecordWriter

    parts = {ending: path.with_name(f"{_PART}{path.name}") for ending, path in paths.items()}
    documents, size = job.documents, piece_size(_Worker.data)
    pieces = np.where(job.held, 1, count_pieces(documents.sizes, size))
    table = np.zeros(len(documents), TABLE)
    for ours, theirs in _KEYS.items():
        table[ours] = getattr(documents.index, theirs)
    with _writing(paths["array_record"]):
        writer = ArrayRecordWriter(str(parts["array_record"]), _WRITER)
    try:
        for number in range(len(documents)):
            text = _text(documents, number)
            try:
                document = _tokenise(cut_text(text, int(pieces[number]), size))
            except UserError as error:
                raise UserError(f"{documents.name(number)}: {error}") from None
            with _writing(paths["array_record"]):
                writer.write(pack(document))
            table[number]["ids"], table[number]["bytes"] = len(document.ids), len(text)
            _Worker.count(1, len(document.ids), int(documents.sizes[number]))
    except BaseException:
        with contextlib.suppress(RuntimeError):
            writer.close()
        raise
    with _writing(paths["array_record"]):
        writer.close()
    _check_unchanged(documents)
    with _writing(paths["npy"]), parts["npy"].open("wb") as file:
        np.save(file, table)
    for ending in reversed(_ENDINGS):  # a shard is there when both are
        with _writing(paths[ending]):
            with parts[ending].open("rb") as file:
                os.fsync(file.fileno())
            parts[ending].replace(paths[ending])
    return table


def _text(documents: TextFiles, number: int) -> bytes:
    try:
        return documents[number]
    except UserError:
        _check_unchanged(documents)
        raise
    except OSError as error:
        _check_unchanged(documents)
        raise UserError(f"{documents.name(number)} cannot be read: {error.strerror}") from None


def _check_unchanged(documents: TextFiles) -> None:
    """Raises UserError for a local file of these documents of another size or time of change than at the start."""
    for number in np.unique(documents.index.owner).tolist():
        place = documents.places[number]
        if remote.is_remote(place.path):
            continue
        try:
            state = os.stat(place.path)
        except OSError:
            raise _Changed(place.path) from None
        if (state.st_size, state.st_mtime_ns) != (place.size, place.version):
            raise _Changed(place.path)


def _tokenise(texts: Sequence[bytes]) -> Tokenised:
    encoded = [_Worker.tokenizer.encode_with_bytes(text) for text in texts]
    ids = np.concatenate([ids for ids, _ in encoded])
    lengths = np.concatenate([lengths for _, lengths in encoded])
    ends = np.cumsum([len(ids) for ids, _ in encoded])
    rests = np.array([len(text) - int(each.sum()) for text, (_, each) in zip(texts, encoded, strict=True)])
    usual = np.array_equal(lengths, _Worker.tokenizer.byte_lengths[ids])
    return Tokenised(ids, None if usual else lengths, ends, rests)


# The program ----------------------------------------------------------------------------------------------------------


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]B|)", text.strip())
    size = 0.0 if found is None else float(found[1]) * _UNITS[found[2]]
    if not 1 <= size <= _LARGEST:
        raise UserError(
            f"--shard_size: given {text!r}, allowed: bytes, or as in 64MB (KB, MB, GB, TB), up to "
            f"{_LARGEST // 10**12:,}TB"
        )
    return int(size)


_OWN = ("source", "tokenizer", "field", "sequence_length", "holdout", "cache_dir")  # of data, options here


def main(arguments: Sequence[str]) -> int:
    """The program: arguments without its name; returns the exit code."""
    defaults = DataConfig()
    parser = cli.Parser(prog="python -m mhc.data.prepare", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--source", required=True, help="text:<glob>: .txt, .jsonl (also .gz, .zst) or .parquet; or gs://"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder: a new one, or one to go on with")
    parser.add_argument("--tokenizer", default="bytes", help="`bytes`, or the path of a tokenizer.json")
    parser.add_argument("--field", default=defaults.field, help="field of a line, or column, that holds the text")
    parser.add_argument(
        "--sequence_length", type=int, default=defaults.sequence_length, help="data.sequence_length of the runs"
    )
    parser.add_argument("--holdout", type=float, default=defaults.holdout, help="data.holdout of the runs")
    parser.add_argument(
        "--validation", action="store_true", help="a validation set of its own (data.validation): no document is cut"
    )
    parser.add_argument("--workers", type=int, help="processes; default: one a core")
    parser.add_argument("--shard_size", type=_size, help="of the corpus, as in 64MB; default: 1/64 of it, 1 to 256 MB")
    parser.add_argument("--cache_dir", help="where packed and remote files are copied to; default: as data.cache_dir")
    options: argparse.Namespace = parser.parse_args(arguments)
    if options.workers is not None and options.workers < 1:
        raise UserError(f"--workers: given {options.workers}, allowed: 1 or more")
    with cli.interrupted_by_sigterm(), cli.own_names(_OWN):
        manifest = prepare(
            options.source,
            options.out,
            tokenizer=options.tokenizer,
            field=options.field,
            sequence_length=options.sequence_length,
            holdout=options.holdout,
            whole=options.validation,
            workers=options.workers,
            shard_size=options.shard_size,
            cache_dir=options.cache_dir,
            tell=lambda line: print(line, file=sys.stderr, flush=True),
        )
    print(
        f"{options.out}: {manifest['documents']:,} documents, {manifest['tokens']:,} tokens, "
        f"{manifest['bytes']:,} bytes of text in {len(manifest['shards'])} shard(s)"
    )
    return 0


if __name__ == "__main__":
    cli.run_main(main)
