"""Read a folder of Hugging Face: config.json and safetensors, in one file or in shards with an index."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mhc import full_disk
from mhc.errors import UserError
from mhc.interop.safetensors import LFS, POINTER, SafetensorsFile, listed

log = logging.getLogger(__name__)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"


@contextlib.contextmanager
def written_whole(target: Path) -> Iterator[Path]:
    """Give the block a hidden folder beside ``target``, which takes that name when the block ends well.

    Otherwise the folder is removed, and so is what a killed process has left of an earlier attempt.

    Raises:
      UserError: the folder cannot be made; DiskFull where the disk is full.
    """
    for left in target.parent.glob(f".{target.name}.*") if target.parent.is_dir() else ():
        number = left.name.rpartition(".")[2]
        if number.isdigit() and not _runs(int(number)):
            shutil.rmtree(left, ignore_errors=True)
    hidden = target.parent / f".{target.name}.{os.getpid()}"
    try:
        hidden.mkdir(parents=True)
    except OSError as error:
        raise full_disk.error_class(error)(f"{target}: the folder cannot be made: {error.strerror}") from None
    try:
        with full_disk.reporting(target):
            yield hidden
        if target.exists():
            target.rmdir()
        hidden.rename(target)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class HfFolder(Mapping[str, np.ndarray]):
    """Maps the names of a folder's tensors to the tensors, float32; ``config`` is its config.json.

    The headers of all files are read and checked when the folder is opened, a tensor when it is asked for. Its dtype is
    checked by ``check_dtype`` and when it is read, so that a folder may hold other tensors of any dtype. A subclass may
    want some of the tensors only (``wants``); then the files that hold none of them are not opened.

    Raises:
      UserError: no such folder, config or shard, or a damaged file.
    """

    def __init__(self, folder: str | Path):
        self.path = Path(folder)
        if not self.path.is_dir():
            raise UserError(f"{folder}: no such folder" if not self.path.exists() else f"{folder}: not a folder")
        self.config = read_object(self.path / "config.json")
        self._files: dict[str, SafetensorsFile] = {}
        self._where: dict[str, str] = {}  # by the index
        for file in self._shards():
            for name in filter(self.wants, file.entries):
                if self._where.get(name, file.path.name) != file.path.name:
                    continue  # the index has it in another file
                if name in self._files:
                    raise UserError(f"{file.path}: {name} is also in {self._files[name].path.name}")
                self._files[name] = file

    def wants(self, name: str) -> bool:
        """Return whether the tensor of this name is one of the mapping; ``config`` has been read before."""
        return True

    def _shards(self) -> list[SafetensorsFile]:
        single, index = self.path / SINGLE, self.path / INDEX
        if single.is_file():
            named = read_object(index).get("weight_map") if index.is_file() else None
            if isinstance(named, dict) and set(map(str, named.values())) - {SINGLE}:
                log.warning("%s: %s is read, not the files that %s names", self.path, SINGLE, INDEX)
            return [SafetensorsFile(single)]
        if not index.is_file():
            others = sorted(entry.name for entry in self.path.glob("*.safetensors"))
            others = others or sorted(entry.name for entry in self.path.glob("*.bin"))
            hint = f"; there is {listed(others, 3)}" if others else ""
            raise UserError(f"{self.path}: neither {SINGLE} nor {INDEX}{hint}")
        where = read_object(index).get("weight_map")
        if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
            raise UserError(f"{index}: weight_map is missing or no mapping of tensors to files")
        every = set(where.values())
        where = {name: file for name, file in where.items() if self.wants(name)}
        names = sorted(set(where.values()))
        unread = sorted(name for name in every.difference(names) if not os.path.isfile(self.path / name))
        if unread:
            log.warning("%s: missing shards, without a tensor that is wanted here: %s", self.path, listed(unread))
        if any(Path(name).name != name for name in names):
            raise UserError(f"{index}: weight_map names files outside of the folder")
        missing = [name for name in names if not os.path.isfile(self.path / name)]
        if missing:
            raise UserError(f"{self.path}: missing shards: {listed(missing)}, which {INDEX} names")
        files = {name: SafetensorsFile(self.path / name) for name in names}
        lost = [name for name, file in where.items() if name not in files[file].entries]
        if lost:
            raise UserError(f"{index}: tensors that are not in the shard it names for them: {listed(lost)}")
        self._where = where
        return list(files.values())

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, without reading it."""
        return self._files[name].entries[name].shape

    def check_dtype(self, name: str) -> None:
        """Raise UserError where a tensor is not of floats of 16 or 32 bits."""
        self._files[name].check_dtype(name)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._files[name].read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises UserError where it cannot be read, or holds something else."""
    try:
        content = path.read_bytes()
        if content.startswith(LFS):
            raise UserError(f"{path}: {POINTER}")
        value = json.loads(content.decode("utf-8-sig"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    except RecursionError:
        raise UserError(f"{path}: not JSON that can be read: it is nested too deeply") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a JSON object")
    return value
