"""Read and write a folder as Hugging Face has it: config.json and safetensors, one file or shards with an index."""

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
    """Yield a hidden folder beside ``target`` that takes its name when the block ends well, and is removed otherwise.

    What a killed process left of an earlier attempt is removed.

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
    """Reads the tensors of a folder by name, float32, each when it is asked for; ``config`` is its config.json.

    Every file's header is read and checked when the folder is opened, no tensor is. What a tensor is stored as is asked
    of those alone that are wanted (``check_dtype``, and reading one): a folder may hold others.

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
            for name in file.entries:
                if self._where.get(name, file.path.name) != file.path.name:
                    continue  # the index has it in another file
                if name in self._files:
                    raise UserError(f"{file.path}: {name} is also in {self._files[name].path.name}")
                self._files[name] = file

    def _shards(self) -> list[SafetensorsFile]:
        single, index = self.path / SINGLE, self.path / INDEX
        if single.is_file():
            named = read_object(index).get("weight_map") if index.is_file() else None
            if isinstance(named, dict) and set(map(str, named.values())) - {SINGLE}:
                log.warning("%s: %s is read, not the files that %s names", self.path, SINGLE, INDEX)
            return [SafetensorsFile(single)]
        if not index.is_file():
            tensors = sorted(entry.name for entry in self.path.glob("*.safetensors"))
            other = sorted(entry.name for entry in self.path.glob("*.bin"))
            hint = f"; there is {listed(tensors or other, 3)}" if tensors or other else ""
            raise UserError(f"{self.path}: neither {SINGLE} nor {INDEX}{hint}")
        where = read_object(index).get("weight_map")
        if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
            raise UserError(f"{index}: weight_map is missing or no mapping of tensors to files")
        names = sorted(set(where.values()))
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
        """Return the shape of a tensor without reading it."""
        return self._files[name].entries[name].shape

    def check_dtype(self, name: str) -> None:
        """Raises UserError where a tensor is no float of 16 or 32 bits."""
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
        parsed = json.loads(content.decode("utf-8-sig"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    except RecursionError:
        raise UserError(f"{path}: not JSON that can be read: it is nested too deeply") from None
    if not isinstance(parsed, dict):
        raise UserError(f"{path}: not a JSON object")
    return parsed
