"""Describe what a folder is prepared from: the files of the corpus with their checksums, and the settings."""

from __future__ import annotations

import os
from concurrent import futures
from pathlib import Path
from typing import Any

from mhc import remote
from mhc.data.prepare.folder import read
from mhc.data.prepare.progress import Tell
from mhc.data.shards.manifest import ORIGIN
from mhc.data.user_files.globs import CorpusFile
from mhc.errors import UserError


def origin_of(place: CorpusFile) -> dict[str, Any]:
    path = place.path if remote.is_remote(place.path) else os.path.abspath(place.path)
    return {"path": path, "version": place.version}


def known_checksums(folder: Path, began: dict[str, Any] | None) -> dict[tuple[str, int, int], str]:
    """Return checksums by name, size and time of change, as of the folder's beginning."""
    if began is None or not (folder / ORIGIN).is_file():
        return {}
    origin = read(folder / ORIGIN)["files"]
    return {
        (file["name"], file["size"], origin[file["name"]]["version"]): file["checksum"]
        for file in began["files"]
        if file["name"] in origin
    }


def describe(places: list[CorpusFile], known: dict[tuple[str, int, int], str], tell: Tell) -> list[dict[str, Any]]:
    """Return name, size and checksum of each file; those that did not change are not read again."""

    def checksum(place: CorpusFile) -> str:
        return known.get((place.name, place.size, place.version)) or place.checksum()

    unknown = [place.size for place in places if (place.name, place.size, place.version) not in known]
    if unknown:
        tell(f"hashing {len(unknown)} file(s), {sum(unknown) / 1e6:,.1f} MB")
    with futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # hashing lets go of the interpreter
        sums = list(pool.map(checksum, places))
    return [
        {"name": place.name, "size": place.size, "checksum": value} for place, value in zip(places, sums, strict=True)
    ]


def check_same(
    plan: dict[str, Any], began: dict[str, Any], places: list[CorpusFile], folder: Path, *, explicit: bool
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
