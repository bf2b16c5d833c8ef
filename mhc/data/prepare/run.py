"""Prepare a corpus, or go on where a preparation ended."""

from __future__ import annotations

import contextlib
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
from mhc.data.prepare.shards import make_shards, shard_jobs
from mhc.data.shards.manifest import FORMAT, MANIFEST, ORIGIN, PLAN
from mhc.data.shards.records import ENDINGS
from mhc.data.user_files.globs import match
from mhc.errors import UserError

LARGEST_SHARD = 10**18  # bytes a shard


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
            return _prepare(data, folder, whole, workers or os.cpu_count() or 1, shard_size, tell)
    finally:
        if new:
            with contextlib.suppress(OSError):  # not empty: the rule
                folder.rmdir()


def _prepare(
    data: DataConfig, folder: Path, whole: bool, workers: int, shard_size: int | None, tell: Tell
) -> dict[str, Any]:
    with writing_to(folder):
        for left in folder.glob(f"{PART}*"):
            left.unlink()
        if (folder / PLAN).is_file():
            clear(folder)
    began = next((read(folder / name) for name in (MANIFEST, PLAN) if (folder / name).is_file()), None)
    if began is None and {path.name for path in folder.iterdir()} - {ORIGIN}:  # which is the first to be written
        raise UserError(f"--out {folder}: holds other files; name a new folder")
    try:
        return _go_on(data, folder, whole, workers, shard_size, began, tell)
    except BaseException as error:
        with contextlib.suppress(OSError):
            for left in folder.glob(f"{PART}*"):  # perhaps what filled the disk
                left.unlink()
            clear(folder)
        if isinstance(error, ChangedFile):
            remedy = f"remove {folder}, and start again" if has_begun(folder) else "start again"
            raise UserError(f"{error} has changed while it was prepared: {remedy}") from None
        raise


def _go_on(
    data: DataConfig,
    folder: Path,
    whole: bool,
    workers: int,
    shard_size: int | None,
    began: dict[str, Any] | None,
    tell: Tell,
) -> dict[str, Any]:
    """Prepare what is missing; ``began`` is the plan or manifest in the folder."""
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
        "files": describe(places, known_checksums(folder, began), tell),
    }
    if began is not None:
        check_same(plan, began, places, folder, explicit=shard_size is not None)
        plan = {name: began[name] for name in plan}
    if began is None or not (folder / ORIGIN).is_file():
        origin = {"pattern": pattern, "files": {place.name: origin_of(place) for place in places}}
        write(folder / ORIGIN, origin)
    if began is None:
        write(folder / PLAN, plan)
    finished = began is not None and "shards" in began
    damaged: list[str] = []
    if began is not None and finished:
        with writing_to(folder):
            (folder / PLAN).unlink(missing_ok=True)
        damaged = damaged_shards(began, folder, tell)
        if not damaged:
            tell(f"{folder} is prepared already")
            return began
        tell(f"{len(damaged)} shard(s) are damaged or missing and are made anew: {', '.join(damaged)}")
    tell(f"finding the documents of {len(places)} file(s)")
    documents = TextFiles(data, pattern, "train", whole=True)
    fidelity.check(documents, chosen)
    index = documents.index
    held = np.ones(len(documents), bool)
    if not whole:
        held = held_out(index.owner, index.number, documents.names, data.holdout)
    jobs = list(shard_jobs(documents, held, folder, plan["shard_size"]))
    if began is not None and finished:
        planned = [(job.name, len(job.documents)) for job in jobs]
        if planned != [(shard["name"], shard["documents"]) for shard in began["shards"]]:
            raise UserError(
                f"{folder / MANIFEST} is damaged (its shards are not those of the corpus): remove the folder, and "
                "start again"
            )
        jobs = [job for job in jobs if job.name in damaged]
        with writing_to(folder):
            for name in damaged:  # a run that starts meanwhile says that they are missing
                for ending in ENDINGS:
                    (folder / f"{name}.{ending}").unlink(missing_ok=True)
    shards = make_shards(jobs, data, workers, tell)
    for before, now in itertools.zip_longest(places, match("text", pattern)):
        if before != now:
            raise ChangedFile(str(before or now))
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
    write(folder / MANIFEST, manifest)
    with writing_to(folder):
        (folder / PLAN).unlink()
    return manifest
