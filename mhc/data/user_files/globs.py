"""List the files of a glob, on this machine or on ``gs://``."""

from __future__ import annotations

import dataclasses
import fnmatch
import glob
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from mhc import remote
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
        """Return ``sha256:…`` of the content; of a file in a store what that has, ``md5:…`` or ``crc32c:…``."""
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
    files = [path for path in paths if os.path.isfile(path)]
    if not files:
        if os.path.isdir(expanded):
            files_of = {"tokens": "*.npy"}.get(kind, "*.txt")
            raise UserError(
                f"{kind}:{pattern} is a directory; name its files, as in {kind}:{pattern.rstrip('/')}/**/{files_of}"
            )
        raise UserError(f"{kind}:{pattern} matches no file")
    base = _fixed_part(expanded) or "."
    found = []
    for path in files:
        try:
            state = os.stat(path)
        except OSError as error:  # it was there a moment ago
            raise UserError(f"{path} cannot be read: {error.strerror}") from None
        if not os.access(path, os.R_OK):
            raise UserError(f"{path} cannot be read: permission denied")
        found.append(CorpusFile(path, os.path.relpath(path, base), state.st_size, state.st_mtime_ns))
    return found


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
    """Return what follows the fixed part of a local glob: what the names of files are matched by."""
    expanded = os.path.expanduser(pattern)
    return os.path.relpath(expanded, _fixed_part(expanded) or ".")


def _match_in_store(kind: str, pattern: str) -> list[CorpusFile]:
    folder = remote.path(_fixed_part(pattern))
    remote.check(folder)
    with remote.reporting_refusals(folder):
        found = _store().glob(pattern, detail=True)
    base = os.fspath(folder).removeprefix("gs://").rstrip("/") + "/"
    stored_files = []
    for path, about in sorted(found.items()):
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
