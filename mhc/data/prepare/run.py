"""Prepare a corpus, or go on where a preparation ended."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np

from mhc import cli
from mhc.config import DataConfig
from mhc.data import tokenizers
from mhc.data.corpus import fidelity
from mhc.data.corpus.holdout import held_out
from mhc.data.corpus.text import TextFiles
from mhc.data.prepare.check import ChangedFile, damaged_shards
from mhc.data.prepare.folder import PART, check_apart, clear, has_begun, lock, read, write, writing_to
from mhc.data.prepare.plan import check_same, describe, known_checksums, origin_of
from mhc.data.prepare.progress import Tell
from mhc.data.prepare.shards import Job, make_shards, shard_jobs
from mhc.data.shards.manifest import FORMAT, MANIFEST, ORIGIN, PLAN
from mhc.data.shards.records import ENDINGS
from mhc.data.user_files.globs import CorpusFile, match
from mhc.errors import UserError

LARGEST_SHARD = 10**18  # bytes a shard


@dataclasses.dataclass(frozen=True)
class _Task:
    """Holds what is to be prepared, where and how."""

    data: DataConfig
    tokenizer: tokenizers.Tokenizer
    folder: Path
    whole: bool  # no document is tokenised in pieces
    workers: int
    shard_size: int | None  # bytes of the corpus; None: by the size of the corpus
    tell: Tell

    @property
    def pattern(self) -> str:
        """Return the glob that names the files of the corpus."""
        return self.data.source.removeprefix("text:")


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
    """Prepare a corpus, or go on with it, and return its manifest.

    Args:
      source: ``text:<glob>``, the glob local or in a store.
      out: a local folder.
      tokenizer, field, sequence_length, holdout, cache_dir: as the fields of `data`; None takes their defaults.
      whole: tokenise no document in pieces, for a corpus that is only validated on.
      workers: processes; None for one a core.
      shard_size: bytes of the corpus a shard; None for 1/64 of it, from 1 MB to 256 MB.
      tell: a function that is given lines about the progress.
    Raises:
      UserError: the arguments or the corpus are wrong, the folder holds another corpus, or a file has changed since the
        folder was begun.
    """
    if not source.startswith("text:"):
        raise UserError(f"--source: given {source!r}, allowed: text:<glob>")
    given: dict[str, Any] = {"sequence_length": sequence_length, "holdout": holdout, "cache_dir": cache_dir}
    if shard_size is not None and not 1 <= shard_size <= LARGEST_SHARD:
        raise UserError(f"--shard_size: given {shard_size}, allowed: from 1 byte to {LARGEST_SHARD:,}")
    chosen = {name: value for name, value in given.items() if value is not None}
    data = DataConfig(source=source, tokenizer=tokenizer, field=field, **chosen)
    folder = cli.check_writable(os.path.expanduser(out), "--out")
    check_apart(data.source.removeprefix("text:"), folder)
    new = not folder.exists()
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with lock(folder, tell):
            workers = workers or os.cpu_count() or 1
            return _prepare(_Task(data, tokenizers.load(tokenizer), folder, whole, workers, shard_size, tell))
    finally:
        if new:
            with contextlib.suppress(OSError):  # as a rule the folder is not empty
                folder.rmdir()


def _prepare(task: _Task) -> dict[str, Any]:
    """Go on with the folder, and leave no useless file in it, however the preparation ends."""
    folder = task.folder
    with writing_to(folder):
        for part in folder.glob(f"{PART}*"):
            part.unlink()
        if (folder / PLAN).is_file():
            clear(folder)
    begun = next((read(folder / name) for name in (MANIFEST, PLAN) if (folder / name).is_file()), None)
    if begun is None and {path.name for path in folder.iterdir()} - {ORIGIN}:  # which is the first to be written
        raise UserError(f"--out {folder}: holds other files; name a new folder")
    try:
        return _go_on(task, begun)
    except BaseException as error:
        with contextlib.suppress(OSError):
            for part in folder.glob(f"{PART}*"):  # perhaps what filled the disk
                part.unlink()
            clear(folder)
        if isinstance(error, ChangedFile):
            remedy = f"remove {folder}, and start again" if has_begun(folder) else "start again"
            raise UserError(f"{error} has changed while it was prepared: {remedy}") from None
        raise


def _go_on(task: _Task, begun: dict[str, Any] | None) -> dict[str, Any]:
    """Make the shards that are not there, or mend those of a finished folder, and return the manifest.

    Args:
      begun: the plan or the manifest in the folder, if there is one.
    """
    folder, data = task.folder, task.data
    files = match("text", task.pattern)
    size = sum(file.size for file in files)
    tokenizer = {"hash": task.tokenizer.content_hash, "vocabulary": task.tokenizer.vocab_size}
    plan: dict[str, Any] = {
        "format": FORMAT,
        "source": "text",
        "field": data.field,
        "tokenizer": {"name": Path(data.tokenizer).name, **tokenizer},
        "sequence_length": data.sequence_length,
        "holdout": data.holdout,
        "whole": task.whole,
        "shard_size": task.shard_size or min(max(size // 64, 10**6), 256 * 10**6),
        "files": describe(files, known_checksums(folder, begun), task.tell),
    }
    if begun is not None:
        check_same(plan, begun, files, folder, explicit=task.shard_size is not None)
        plan = {name: begun[name] for name in plan}
    if begun is None or not (folder / ORIGIN).is_file():
        origin = {"pattern": task.pattern, "files": {file.name: origin_of(file) for file in files}}
        write(folder / ORIGIN, origin)
    if begun is not None and "shards" in begun:
        _mend(task, begun, files)
        return begun
    if begun is None:
        write(folder / PLAN, plan)
    return _finish(task, plan, files)


def _finish(task: _Task, plan: dict[str, Any], files: list[CorpusFile]) -> dict[str, Any]:
    """Make the shards that are not there, and write the manifest."""
    documents, jobs = _jobs(task, plan, files)
    shards = make_shards(jobs, task.data, task.workers, task.tell)
    _check_files(task, files)
    totals = {name: sum(shard[name] for shard in shards) for name in ("documents", "tokens", "bytes")}
    lost = fidelity.share_lost(documents, task.tokenizer)
    if lost:
        task.tell(fidelity.describe(lost, task.data.tokenizer))
    manifest = {**plan, **totals, **({"lost": lost} if lost else {}), "shards": shards}
    write(task.folder / MANIFEST, manifest)
    with writing_to(task.folder):
        (task.folder / PLAN).unlink()
    return manifest


def _mend(task: _Task, manifest: dict[str, Any], files: list[CorpusFile]) -> None:
    """Make the damaged and missing shards of a finished folder anew."""
    folder = task.folder
    with writing_to(folder):
        (folder / PLAN).unlink(missing_ok=True)
    damaged = damaged_shards(manifest, folder, task.tell)
    if not damaged:
        task.tell(f"{folder} is prepared already")
        return
    task.tell(f"{len(damaged)} shard(s) are damaged or missing and are made anew: {', '.join(damaged)}")
    _, jobs = _jobs(task, manifest, files)
    if [(job.name, len(job.documents)) for job in jobs] != [
        (shard["name"], shard["documents"]) for shard in manifest["shards"]
    ]:
        raise UserError(
            f"{folder / MANIFEST} is damaged (its shards are not those of the corpus): remove the folder, and "
            "start again"
        )
    with writing_to(folder):
        for name in damaged:  # a run that starts meanwhile says that they are missing
            for ending in ENDINGS:
                (folder / f"{name}.{ending}").unlink(missing_ok=True)
    shards = make_shards([job for job in jobs if job.name in damaged], task.data, task.workers, task.tell)
    _check_files(task, files)
    for shard in shards:
        if shard not in manifest["shards"]:
            raise UserError(
                f"--out {folder}: {shard['name']} made anew is not what {MANIFEST} says, perhaps for another "
                "version of array_record or numpy: name a new folder"
            )
    task.tell(f"{folder} is whole again")


def _jobs(task: _Task, plan: dict[str, Any], files: list[CorpusFile]) -> tuple[TextFiles, list[Job]]:
    """Return the documents of the corpus, and a job for each shard of them."""
    task.tell(f"finding the documents of {len(files)} file(s)")
    documents = TextFiles(task.data, task.pattern, "train", whole=True)
    fidelity.check(documents, task.tokenizer)
    index = documents.index
    held = np.ones(len(documents), bool)
    if not task.whole:
        held = held_out(index.owner, index.number, documents.names, task.data.holdout)
    return documents, list(shard_jobs(documents, held, task.folder, plan["shard_size"]))


def _check_files(task: _Task, files: list[CorpusFile]) -> None:
    """Raise ChangedFile where the glob does not match the same files as at the start."""
    for before, now in itertools.zip_longest(files, match("text", task.pattern)):
        if before != now:
            raise ChangedFile(str(before or now))
