"""Lock, write and clear the folder that a corpus is prepared in."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mhc import full_disk, remote
from mhc.data.prepare.progress import Tell
from mhc.data.shards.manifest import MANIFEST, ORIGIN, PLAN, parse
from mhc.data.user_files.globs import may_match
from mhc.errors import UserError

PART = ".part-"


def check_apart(pattern: str, folder: Path) -> None:
    """Raise UserError where the glob matches what is written into the folder."""
    names = (MANIFEST, ORIGIN, PLAN, "shard-00000.array_record", "shard-00000.npy")
    if not remote.is_remote(pattern) and any(may_match(pattern, os.path.join(folder, name)) for name in names):
        raise UserError(f"--out {folder}: --source text:{pattern} matches what is written there; name another folder")


@contextlib.contextmanager
def lock(folder: Path, tell: Tell) -> Iterator[None]:
    """Hold the folder against other processes of this machine, until the process ends.

    Raises:
      UserError: another process holds it. If the file system has no locks, this warns and goes on.
    """
    with writing_to(folder):
        handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--out {folder}: another process is preparing this folder") from None
        except OSError as error:  # of some network file systems
            tell(f"{folder} cannot be locked ({error.strerror}): start no second preparation of it meanwhile")
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Turn an error while writing (no space left, no permission), the system's or array_record's, into a UserError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or re.sub(r"^\w+\(\) failed: ", "", str(error).partition("; ")[0])
        raise full_disk.error_class(error)(
            f"--out: cannot write {path}: {reason}; once it can, the same command goes on"
        ) from None


def read(path: Path) -> dict[str, Any]:
    """Return one of the folder's JSON files. Raises UserError where it cannot be read or is damaged."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    return parse(path, content)


def write(path: Path, content: dict[str, Any]) -> None:
    """Write one of the folder's JSON files, as a whole or not at all."""
    part = path.with_name(f"{PART}{path.name}")
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    with writing_to(path):
        with part.open("wb") as file:
            file.write(text.encode(errors="backslashreplace"))  # as JSON spells a byte of a name that is not UTF-8
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)


def has_begun(folder: Path) -> bool:
    """Return whether the folder holds more than `clear` removes."""
    return (folder / MANIFEST).exists() or any(folder.glob("shard-*.array_record"))


def clear(folder: Path) -> None:
    """Remove what a preparation wrote that made no shard: it would only be in the way of the next one."""
    if has_begun(folder):
        return
    for path in (folder / ORIGIN, folder / PLAN, *folder.glob(f"{PART}*"), *folder.glob("shard-*.npy")):
        path.unlink(missing_ok=True)
