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


def origin_of(file: CorpusFile) -> dict[str, Any]:
    """Return where a file of the corpus lies, and when it was last changed."""
    path = file.path if remote.is_remote(file.path) else os.path.abspath(file.path)
    return {"path": path, "version": file.version}


def known_checksums(folder: Path, begun: dict[str, Any] | None) -> dict[tuple[str, int, int], str]:
    """Return {(name, size, time of change): checksum} of the files, as they were when the folder was begun."""
    if begun is None or not (folder / ORIGIN).is_file():
        return {}
    origin = read(folder / ORIGIN)["files"]
    return {
        (file["name"], file["size"], origin[file["name"]]["version"]): file["checksum"]
        for file in begun["files"]
        if file["name"] in origin
    }


def describe(files: list[CorpusFile], known: dict[tuple[str, int, int], str], tell: Tell) -> list[dict[str, Any]]:
    """Return name, size and checksum of each file. Files that have not changed are not read again."""

    def checksum(file: CorpusFile) -> str:
        return known.get((file.name, file.size, file.version)) or file.checksum()

    unknown = [file.size for file in files if (file.name, file.size, file.version) not in known]
    if unknown:
        tell(f"hashing {len(unknown)} file(s), {sum(unknown) / 1e6:,.1f} MB")
    with futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # hashing lets go of the interpreter
        sums = list(pool.map(checksum, files))
    return [{"name": file.name, "size": file.size, "checksum": value} for file, value in zip(files, sums, strict=True)]


def check_same(
    plan: dict[str, Any], begun: dict[str, Any], files: list[CorpusFile], folder: Path, *, explicit: bool
) -> None:
    """Raise UserError where the folder was begun with other files or settings; the line names them."""
    remedy = f"name a new folder, or remove {folder}"
    for name in plan:
        if name == "shard_size" and not explicit:  # it follows from the files
            continue
        theirs, ours = (given["hash"] if name == "tokenizer" else given for given in (begun[name], plan[name]))
        if name == "whole" and theirs != ours:
            was, now = ("with" if given else "without" for given in (theirs, ours))
            raise UserError(f"--out {folder} was begun {was} --validation, now it is {now}: {remedy}")
        if name != "files" and theirs != ours:
            raise UserError(f"--out {folder} was begun with --{name} {theirs}, now it is {ours}: {remedy}")
    before = {file["name"]: file for file in begun["files"]}
    paths = {file.name: file.path for file in files}
    for file in plan["files"]:
        if file["name"] not in before:
            raise UserError(f"{paths[file['name']]} is new since {folder} was begun: {remedy}")
        if before.pop(file["name"]) != file:
            raise UserError(f"{paths[file['name']]} has changed since {folder} was begun: {remedy}")
    for name in before:
        raise UserError(f"{name} of the corpus is gone since {folder} was begun: {remedy}")
