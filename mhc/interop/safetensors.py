"""Read and write safetensors: eight bytes that count a JSON header, the header, and the tensors one after the other.

Files are read tensor by tensor with ordinary reads and are not mapped, so that tensors that were read and dropped do
not count as memory in use. The format is small: saying in words why a damaged file is refused is most of the work.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mhc.errors import UserError

FLOATS = {"F32": 4, "F16": 2, "BF16": 2}  # dtypes that weights may have, and the bytes of one number
_SIZES = FLOATS | {"F64": 8, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_SIZES |= {"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
LFS = b"version https://git-lfs"  # how a pointer of git-lfs begins
POINTER = "a git-lfs pointer, not the file itself: fetch that with git lfs pull"
_LARGEST_HEADER = 100_000_000  # bytes; the format's own limit


class Entry(NamedTuple):
    """Describes a tensor of a file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int  # bytes from the end of the header
    end: int


class SafetensorsFile:
    """Reads the tensors of a file, whose header is read and checked against its size at opening.

    Raises:
      UserError: unreadable, truncated, or a header that does not describe the rest of the file.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                start = file.read(8)
                length = int.from_bytes(start, "little") if size >= 8 else -1
                if LFS.startswith(start) and size >= 8:
                    raise UserError(f"{path}: {POINTER}")
                if not 0 <= length <= min(size - 8, _LARGEST_HEADER):
                    raise UserError(f"{path}: not a safetensors file, or cut off within its header ({size} bytes)")
                header = json.loads(file.read(length))
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise UserError(f"{path}: not a safetensors file: its header is no JSON") from None
        self._start, held = 8 + length, size - 8 - length
        if not isinstance(header, dict):
            raise UserError(f"{path}: not a safetensors file: its header is no JSON object")
        self.metadata: Any = header.pop("__metadata__", {})
        self.entries: dict[str, Entry] = {name: self._entry(name, raw) for name, raw in header.items()}
        self._check(held)

    def _entry(self, name: str, raw: Any) -> Entry:
        try:
            dtype, shape, (begin, end) = raw["dtype"], tuple(raw["shape"]), raw["data_offsets"]
            counts = all(isinstance(number, int) and 0 <= number < 2**63 for number in (*shape, begin, end))
            wanted = math.prod(shape) * _SIZES[dtype] if dtype in _SIZES else end - begin
            if not counts or not 0 <= end - begin == wanted:
                raise ValueError
        except (TypeError, KeyError, ValueError):
            raise UserError(f"{self.path}: the header's entry of {name} is not valid: {raw!r:.100}") from None
        return Entry(dtype, shape, begin, end)

    def _check(self, held: int) -> None:
        at = 0
        for name, entry in sorted(self.entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.begin != at:
                raise UserError(f"{self.path}: the header is not valid: {name} does not begin where the last one ends")
            at = entry.end
        if at != held:
            what = "truncated" if held < at else "longer than its header says"
            raise UserError(f"{self.path}: {what}: the header names {at} bytes of tensors, the file holds {held}")

    def check_dtype(self, name: str) -> None:
        """Raise UserError where the dtype of a tensor is not one of FLOATS."""
        if self.entries[name].dtype not in FLOATS:
            raise UserError(f"{self.path}: {name} is {self.entries[name].dtype}, allowed: {', '.join(FLOATS)}")

    def read(self, name: str) -> np.ndarray:
        """Return a tensor as float32, C order.

        Raises:
          UserError: its dtype is not one of FLOATS.
        """
        self.check_dtype(name)
        entry = self.entries[name]
        with self.path.open("rb", buffering=0) as file:
            file.seek(self._start + entry.begin)
            raw, got = np.empty(entry.end - entry.begin, np.uint8), 0
            while got < len(raw):
                count = file.readinto(raw[got:].data)
                if not count:
                    raise UserError(f"{self.path}: cannot be read to the end of {name}")
                got += count
        return widen(raw, entry.dtype).reshape(entry.shape)


def widen(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Return the bytes of little-endian numbers of one of FLOATS as float32."""
    if dtype == "BF16":  # the upper half of a float32
        return (raw.view("<u2").astype("<u4") << 16).view("<f4")
    return raw.view({"F32": "<f4", "F16": "<f2"}[dtype]).astype(np.float32, copy=False)


def write(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensor: Callable[[str], np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a file of float32 tensors in the order of their names, fetched one after the other.

    The layout is that of the reference implementation, byte for byte: header padded with spaces to a multiple of 8.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    names = sorted(shapes)
    for name in names:
        end = at + 4 * math.prod(shapes[name])
        header[name] = {"dtype": "F32", "shape": list(shapes[name]), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            array = np.asarray(tensor(name), "<f4", order="C")
            if array.shape != shapes[name]:
                raise ValueError(f"{name} is {array.shape}, announced as {shapes[name]}")
            file.write(array.reshape(-1).view(np.uint8).data)


def listed(names: Iterable[str], most: int = 12) -> str:
    """Return names for a message of one line; those beyond ``most`` are counted."""
    every = list(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")
