"""List the files of a glob, on this machine or on ``gs://``."""

from __future__ import annotations

import dataclasses
import errno
import fnmatch
import glob
import hashlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from mhc import remote
from mhc.data.warning import warn_once
from mhc.errors import UserError


@dataclasses.dataclass(frozen=True)
class CorpusFile:
    """Describes a file that a glob names."""

    path: str  # local, or gs://…
    name: str  # below the fixed part of the glob, with /
    size: int  # bytes
    version: int  # st_mtime_ns; in a store: the generation
    stored: str | None = None  # in a store: its checksum there

    def __str__(self) -> str:
        return self.path

    def open(self) -> IO[bytes]:
        """Open the file for reading; its handle can seek."""
        return _store().open(self.path, "rb") if remote.is_remote(self.path) else open(self.path, "rb")

    def is_unchanged(self) -> bool:
        """Return whether the file has the size and the time of change (in a store: the generation) that it had."""
        try:
            if remote.is_remote(self.path):
                return int(_store().info(self.path)["generation"]) == self.version
            state = os.stat(self.path)
        except OSError:
            return False
        return (state.st_size, state.st_mtime_ns) == (self.size, self.version)

    def checksum(self) -> str:
        """Return ``sha256:…`` of the content; for a file in a store, the store's own ``md5:…`` or ``crc32c:…``."""
        return self.stored or f"sha256:{sha256(self.path)}"


def sha256(path: str | Path) -> str:
    """Return the SHA-256 of a local file, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def match(kind: str, pattern: str) -> list[CorpusFile]:
    """Return the files that a glob matches, sorted by path.

    Args:
      kind: of the source, for messages: text or tokens.
    Raises:
      UserError: no file matches, one cannot be read, or a store cannot be asked.
    """
    if remote.is_remote(pattern):
        return _match_in_store(kind, pattern)
    expanded = os.path.expanduser(pattern)
    paths = [expanded] if os.path.exists(expanded) else sorted(glob.glob(expanded, recursive=True))
    base = _fixed_part(expanded) or "."
    files: list[CorpusFile] = []
    same: dict[tuple[int, int], list[str]] = {}  # names of each file
    rest: list[str] = []  # folders, pipes
    for path in paths:
        try:
            state = os.stat(path)
        except OSError as error:
            if error.errno == errno.ELOOP:  # below a folder that holds a link to itself, some forty levels down
                continue
            if os.path.islink(path):
                raise UserError(
                    f"{path} is a link to {os.readlink(path)}, which is not there: fetch that file, or remove the link"
                ) from None
            raise UserError(f"{path} cannot be read: {error.strerror}") from None
        if not stat.S_ISREG(state.st_mode):
            rest.append(path)
            continue
        if not os.access(path, os.R_OK):
            raise UserError(f"{path} cannot be read: permission denied")
        files.append(CorpusFile(path, os.path.relpath(path, base), state.st_size, state.st_mtime_ns))
        same.setdefault((state.st_dev, state.st_ino), []).append(path)
    if not files:
        raise _no_file(kind, pattern, expanded, rest)
    _warn_of_folders(pattern, [path for path in rest if os.path.isdir(path)])
    _warn_of_names([names for names in same.values() if len(names) > 1])
    return files


def _no_file(kind: str, pattern: str, expanded: str, rest: Sequence[str]) -> UserError:
    """Return the error of a glob that matches no file, but perhaps other things."""
    inside = {"tokens": "*.npy"}.get(kind, "*.txt")
    if os.path.isdir(expanded):
        return UserError(
            f"{kind}:{pattern} is a directory; name its files, as in {kind}:{pattern.rstrip('/')}/**/{inside}"
        )
    if not rest:
        return UserError(f"{kind}:{pattern} matches no file")
    if os.path.isdir(rest[0]):
        return UserError(
            f"{kind}:{pattern} matches folders alone, as {rest[0]}; name the files in them, as in "
            f"{kind}:{pattern.rstrip('/')}/{inside}"
        )
    return UserError(f"{kind}:{pattern} matches {rest[0]}, which is a pipe or a device: write it to a file first")


def _warn_of_folders(pattern: str, folders: Sequence[str]) -> None:
    """Warn of folders where the glob ends like the name of a file: other programs write such folders in parts."""
    if folders and "." in os.path.basename(pattern):
        warn_once(
            f"{folders[0]}{_more(len(folders) - 1)} matches {pattern} but is a folder: what is in it is not read; "
            "to read it, name the files in it"
        )


def _warn_of_names(files: Sequence[Sequence[str]]) -> None:
    """Warn of files that the glob matches under several names, by links or a folder that holds a link to itself."""
    if files:
        warn_once(
            f"{files[0][1]} is the same file as {files[0][0]}: its documents are read {len(files[0])} times, and may "
            f"be both trained on and held out{_more(len(files) - 1, '; so it is with {} more file(s)')}"
        )


def _more(count: int, words: str = " and {} more") -> str:
    return words.format(count) if count else ""


def may_match(pattern: str, path: str) -> bool:
    """Return whether a local glob matches a path that need not exist; links are followed in the fixed part alone."""
    base = _fixed_part(os.path.expanduser(pattern)) or "."
    rest = Path(below_fixed(pattern)).parts
    try:
        parts = Path(os.path.realpath(path)).relative_to(os.path.realpath(base)).parts
    except ValueError:
        return False
    return _parts_match(parts, rest)


def _parts_match(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether the parts of a path match those of a glob, by the rules of `glob`."""
    if not pattern or not parts:
        return not parts and all(part == "**" for part in pattern)
    rest, hidden = parts[1:], parts[0].startswith(".") and not pattern[0].startswith(".")
    if pattern[0] == "**":
        return _parts_match(parts, pattern[1:]) or (not hidden and _parts_match(rest, pattern))
    return not hidden and fnmatch.fnmatchcase(parts[0], pattern[0]) and _parts_match(rest, pattern[1:])


def _fixed_part(pattern: str) -> str:
    """Return the folder above the first part of a glob that has a wildcard, or above the file."""
    fixed = pattern
    while glob.has_magic(fixed):
        fixed = os.path.dirname(fixed)
    return fixed if fixed != pattern else os.path.dirname(fixed)


def below_fixed(pattern: str) -> str:
    """Return what follows the fixed part of a local glob, which is matched against the names of files."""
    expanded = os.path.expanduser(pattern)
    return os.path.relpath(expanded, _fixed_part(expanded) or ".")


def _match_in_store(kind: str, pattern: str) -> list[CorpusFile]:
    folder = remote.path(_fixed_part(pattern))
    remote.check(folder)
    with remote.reporting_refusals(folder):
        matches = _store().glob(pattern, detail=True)
    base = os.fspath(folder).removeprefix("gs://").rstrip("/") + "/"
    stored_files = []
    for path, about in sorted(matches.items()):
        if about["type"] == "file":
            stored = f"md5:{about['md5Hash']}" if about.get("md5Hash") else f"crc32c:{about.get('crc32c')}"
            name = path.removeprefix(base)
            stored_files.append(CorpusFile(f"gs://{path}", name, int(about["size"]), int(about["generation"]), stored))
    if not stored_files:
        raise UserError(f"{kind}:{pattern} matches no file (the name of a folder matches none; name its files)")
    return stored_files


def _store() -> Any:
    """Return the file system of ``gs://``."""
    import fsspec

    remote.path("gs://bucket")  # its packages and settings
    return fsspec.filesystem("gcs")
