"""Read the JSON files of a prepared folder: what was prepared, how, and from which files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from mhc import remote
from mhc.config import DataConfig
from mhc.data.user_files.formats import pointer
from mhc.errors import UserError

FORMAT = 1  # of the folder
MANIFEST, ORIGIN, PLAN = "manifest.json", "origin.json", "plan.json"  # the last: a manifest before there are shards
_PLANNED = {
    "source": str,
    "field": str,
    "tokenizer": {"name": str, "hash": str, "vocabulary": int},
    "sequence_length": int,
    "holdout": float,
    "whole": bool,
    "shard_size": int,
    "files": [{"name": str, "size": int, "checksum": str}],
}
_STORED = {"size": int, "sha256": str}
_COUNTS = {"documents": int, "tokens": int, "bytes": int}
_SHARD = {"name": str, **_COUNTS, "files": {"array_record": _STORED, "npy": _STORED}}
_FORMS: dict[str, Any] = {
    PLAN: _PLANNED,
    MANIFEST: {**_PLANNED, **_COUNTS, "shards": [_SHARD]},
    ORIGIN: {"pattern": str, "files": {str: {"path": str, "version": int}}},
}


def parse(path: remote.Folder, content: bytes) -> dict[str, Any]:
    """Return the content of one of the folder's JSON files. Raises UserError for missing keys and wrong types."""
    form = _FORMS[path.name]
    remedy = f"remove the folder {path.parent}, and prepare it again"
    if path.name == ORIGIN:
        remedy = "remove it: nothing is compared without it"
    if what := pointer(content):
        raise UserError(f"{path} is a {what}")
    try:
        parsed: dict[str, Any] = json.loads(content)
        fault = _fault(parsed, {"format": int} if path.name != ORIGIN else {}, "")
    except (ValueError, RecursionError) as error:
        fault = f"it is not JSON: {str(error).splitlines()[0]}"
    if not fault and path.name != ORIGIN and parsed["format"] != FORMAT:
        raise UserError(
            f"{path} has the format {parsed['format']}, this version reads {FORMAT}; prepare it again in a new folder"
        )
    fault = fault or _fault(parsed, form, "")
    if not fault and path.name == MANIFEST:
        fault = _fault_of_totals(parsed)
    if not fault and path.name != ORIGIN and not parsed["shard_size"]:
        fault = "shard_size is 0"
    if fault:
        raise UserError(f"{path} is damaged ({fault}): {remedy}")
    return parsed


def read_manifest(folder: str) -> tuple[bytes, dict[str, Any]]:
    """Return a folder's manifest, as bytes and as JSON. Raises UserError where it is missing or damaged."""
    place = remote.path(os.path.expanduser(folder))
    try:
        content = remote.read(place / MANIFEST)
    except PermissionError as error:
        raise UserError(f"{place / MANIFEST} cannot be read: {error.strerror}") from None
    if content is None:
        if remote.read(place / PLAN) is not None:
            raise UserError(
                f"prepared:{folder} is not prepared to the end (no {MANIFEST}); start python -m mhc.data.prepare again"
            )
        made_there = isinstance(place, Path) and (not place.exists() or (place.is_dir() and not any(place.iterdir())))
        out = folder if made_there else "DIR (a new folder), and name that"
        raise UserError(
            f"prepared:{folder} has no {MANIFEST}; prepare it: python -m mhc.data.prepare --source … --out {out}"
        )
    return content, parse(place / MANIFEST, content)


def manifest_hash(data: DataConfig, source: str | None = None) -> str | None:
    """Return the SHA-256 of the manifest of ``source`` (None: ``data.source``), in hex; None if it is not prepared.

    It is equal for equal shards made of equal text: the manifest has the hashes of both, and no path or time.

    Raises:
      UserError: the manifest is missing or damaged.
    """
    kind, _, folder = (source or data.source).partition(":")
    return hashlib.sha256(read_manifest(folder)[0]).hexdigest() if kind == "prepared" else None


def check_table(shard: dict[str, Any], table: np.ndarray, files: int, folder: Path) -> None:
    """Raise UserError where what a folder's manifest says of a shard is not what the shard's table has.

    Args:
      files: the number of files in the manifest.
    """
    fault = ""
    for name, counted in counts(table).items():
        if shard[name] != counted:
            fault = f"{shard[name]} {name} in {shard['name']}, its table has {counted}"
            break
    if not fault and table["file"].max(initial=-1) >= files:
        fault = f"{files} files, the table of {shard['name']} has more"
    if fault:
        raise UserError(f"{folder / MANIFEST} is damaged ({fault}): remove the folder, and prepare it again")


def counts(table: np.ndarray) -> dict[str, int]:
    """Return the documents, tokens (without bos and eos) and bytes of text of a shard, from its table."""
    return {
        "documents": len(table),
        "tokens": int(table["ids"].sum(dtype=np.int64)),
        "bytes": int(table["bytes"].sum(dtype=np.int64)),
    }


def _fault_of_totals(manifest: dict[str, Any]) -> str:
    """Return which total of a manifest is not the sum over its shards, or ""."""
    if not manifest["shards"]:
        return "it has no shard"
    for name in _COUNTS:
        total = sum(shard[name] for shard in manifest["shards"])
        if manifest[name] != total:
            return f"{manifest[name]} {name}, its shards have {total}"
    return ""


def _fault(value: Any, form: Any, where: str) -> str:
    """Return what is wrong with a value, or "".

    A form is a type, [the form of each item], {key: the form of its value}, or {str: the form of every value}.
    """
    kind: Any = form if isinstance(form, type) else type(form)
    items: Iterable[tuple[str, Any, Any]]
    if type(value) is not kind and not (kind is float and type(value) is int):
        return f"{where or 'it'} is not {_KINDS[kind]}"
    if kind is list:
        items = ((f"{where}[{index}]", item, form[0]) for index, item in enumerate(value))
    elif kind is dict and str in form:
        items = ((f"{where}[{key!r}]", item, form[str]) for key, item in value.items())
    elif kind is dict:
        missing = next((key for key in form if key not in value), None)
        if missing is not None:
            return f"{where or 'it'} has no {missing!r}"
        items = ((f"{where}.{key}".lstrip("."), value[key], of) for key, of in form.items())
    else:
        return f"{where} is out of range" if kind is int and not 0 <= value < 1 << 63 else ""
    return next(filter(None, (_fault(item, of, name) for name, item, of in items)), "")


_KINDS = {
    str: "a string",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}
