"""Read, write and append JSON and JSON lines, repair them after a crash, and replace files at once.

A *record* is a flat mapping of names to values. Values are numbers, strings, None, arrays, lists of numbers, or
mappings of names to numbers. JSON has no NaN, so a non-finite number is written as the string ``"NaN"``, ``"Infinity"``
or ``"-Infinity"``: every line parses under a strict parser, and the readers turn the strings back into floats. Arrays
(numpy, jax) become lists, zero-dimensional ones numbers.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mhc import full_disk
from mhc.errors import UserError

log = logging.getLogger(__name__)

Record = Mapping[str, Any]

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonlWriter:
    """Appends records to a file, one JSON object a line, each line written and flushed whole.

    A line that the disk has no room for is kept and written with a later one, so that training goes on meanwhile;
    ``flush`` insists.

    Args:
        path: the file; it and its folder are made when missing. A torn last line, left by a crash, is cut first.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        repair(self.path)
        self._file = self.path.open("ab", buffering=0)
        self._kept = b""  # lines that there was no room for

    def write(self, record: Record) -> None:
        """Append one record. Raises TypeError for a value that has no JSON form."""
        before, self._kept = self._kept, self._kept + _line(record)
        try:
            self.flush()
        except full_disk.DiskFull as full:
            if not before:
                log.warning("%s; its lines are kept until there is room", full)

    def flush(self, then: str = "") -> None:
        """Write every line that was kept. Raises DiskFull for a full disk, with ``then`` at the end of its message."""
        if self._kept:
            with full_disk.reporting(self.path, then=then):
                _append(self._file, self._kept)
            self._kept = b""

    def close(self) -> None:
        """Close the file. Lines that there is still no room for are lost."""
        with contextlib.suppress(full_disk.DiskFull):
            self.flush()
        self._file.close()


def append_jsonl(path: str | os.PathLike[str], record: Record) -> None:
    """Append one record to a file that a :class:`JsonlWriter`, of this process or another, may have open."""
    with Path(path).open("ab", buffering=0) as file:
        _append(file, _line(record))


def _append(file: io.FileIO, data: bytes) -> None:
    """Append all of the bytes, or none of them if the disk has no room for all."""
    written = 0
    try:
        while written < len(data):
            written += file.write(data[written:]) or 0
    except OSError:
        if written:
            file.truncate(os.fstat(file.fileno()).st_size - written)
        raise


def _encoded(text: str) -> bytes:
    """Return a line of JSON; a byte of a file's name that is not UTF-8 becomes an escape, as JSON spells it."""
    return text.encode(errors="backslashreplace") + b"\n"


def _line(record: Record) -> bytes:
    return _encoded(json.dumps(jsonable(record), allow_nan=False, separators=(",", ":"), ensure_ascii=False))


def repair(path: str | os.PathLike[str], last_step: int | None = None) -> int:
    """Make a file of JSON lines whole again after a crash, and rewind it to a step.

    The tail behind the last whole line is cut (a last object that lacks nothing but its newline is whole and gets one).
    With ``last_step`` every object whose ``step`` is greater goes too: the run will write those steps again. Everything
    else stays byte for byte, objects without a step included. The file is replaced in one rename, or not touched when
    there is nothing to change; a missing file is left missing.

    Returns:
        The number of lines dropped, a torn one included.

    Raises:
        UserError: a line that is not a JSON object stands before whole lines, so it is no crash's torn tail.
    """
    path = Path(path)
    if not path.exists():
        return 0
    content = path.read_bytes()
    lines = _split(content)
    parsed = [_parse(line) for line in lines]
    whole = len(lines)
    while whole and parsed[whole - 1] is None:
        whole -= 1
    kept = []
    for number, (line, record) in enumerate(zip(lines[:whole], parsed, strict=False), 1):
        if record is None:
            raise UserError(f"{path}: line {number} is not a JSON object, yet whole lines follow it")
        step = record.get("step")
        if last_step is None or step is None or step <= last_step:
            kept.append(line if line.endswith(b"\n") else line + b"\n")
    repaired = b"".join(kept)
    if repaired != content:
        _replace(path, repaired)
    return len(lines) - len(kept)


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return all whole records of a file written by :class:`JsonlWriter`, non-finite numbers as floats again.

    A torn last line is left out, so that the file of a running or crashed run can be read.

    Raises:
        UserError: the file is missing or unreadable, or a line before the last is not a JSON object.
    """
    path = Path(path)
    try:
        lines = _split(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    parsed = [_parse(line) for line in lines]
    while parsed and parsed[-1] is None:
        parsed.pop()
    records = []
    for number, record in enumerate(parsed, 1):
        if record is None:
            raise UserError(f"{path}: line {number} is not a JSON object")
        records.append(_revived(record, f"{path}, line {number}"))
    return records


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write one JSON document (indented, non-finite numbers as strings), replacing the file in one rename.

    Raises DiskFull where the disk is full; the file is then as it was.
    """
    path = Path(path)
    _replace(path, _encoded(json.dumps(jsonable(value), indent=2, allow_nan=False, ensure_ascii=False)))


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the object in a JSON file, with the strings of non-finite numbers as floats again.

    Raises:
        UserError: the file is missing, unreadable, or holds no JSON object.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    record = _parse(content)
    if record is None:
        raise UserError(f"{path}: holds no JSON object")
    return _revived(record, str(path))


def jsonable(value: Any) -> Any:
    """Return ``value`` in the types that JSON has: arrays as lists, non-finite numbers as strings.

    Raises:
        TypeError: for a value that has no JSON form.
    """
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, str | bool | int) or value is None:
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if hasattr(value, "__array__"):
        array = np.asarray(value)
        if array.dtype.kind not in "biufSU":
            array = array.astype(np.float32)  # bfloat16 and its kin
        return jsonable(array.tolist())
    raise TypeError(f"no JSON form for a {type(value).__name__}")


def _replace(path: Path, content: bytes) -> None:
    """Put ``content`` in place of a file (which need not exist) at once, keeping its mode."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with full_disk.reporting(path), temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except full_disk.DiskFull:
        temporary.unlink(missing_ok=True)
        raise
    if path.exists():
        temporary.chmod(path.stat().st_mode & 0o7777)
    temporary.replace(path)


def _revive(value: Any) -> Any:
    """Undo what ``jsonable`` does to non-finite numbers."""
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, list):
        return [_revive(item) for item in value]
    if isinstance(value, dict):
        return {key: _revive(item) for key, item in value.items()}
    return value


def _revived(record: dict[str, Any], place: str) -> dict[str, Any]:
    """Return a record with the strings of non-finite numbers as floats. Raises UserError for too deep a nesting."""
    try:
        return {key: _revive(value) for key, value in record.items()}
    except RecursionError:
        raise UserError(f"{place}: nested too deep") from None


def _split(content: bytes) -> list[bytes]:
    """Return the lines with their newline, the last perhaps without; only b"\\n" ends a line."""
    lines = [line + b"\n" for line in content.split(b"\n")]
    lines[-1] = lines[-1][:-1]
    return lines if lines[-1] else lines[:-1]


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line, None where there is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
