"""Where the user's files lie: the files of a pattern, here or on ``gs://``, and plain local copies of them.

Readers need random access to plain local files. A local file that is plain already is read where it is; whatever else
is copied once into ``unpacked`` of the cache directory: what ``.gz`` and ``.zst`` unpack to, the column ``data.field``
of a ``.parquet`` as lines of JSON, and every file of a store. A copy's name is a hash of the file's path, size and time
of change (in a store: its generation), so that a changed file is copied again; copies are never removed.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import glob
import gzip
import hashlib
import importlib
import json
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from mhc import full_disk, remote
from mhc.config import DataConfig
from mhc.errors import UserError, did_you_mean

PACKED = {".gz": "gz", ".gzip": "gz", ".zst": "zst", ".zstd": "zst"}  # endings, in any case
_LINES = (".jsonl", ".ndjson", ".jsonlines", ".ldjson")
_POINTERS = {
    b"version https://git-lfs.github.com/spec/": "git-lfs pointer, not the file itself: git lfs pull",
    b"version https://hawser.github.com/spec/": "git-lfs pointer, not the file itself: git lfs pull",
    b"/annex/objects/": "git-annex pointer, not the file itself: git annex get",
}
_POINTER = 1024  # bytes, at most
_CHUNK = 1 << 18  # bytes read at once
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Place:
    """A file that a pattern names."""

    path: str  # local, or gs://…
    name: str  # below the pattern's fixed part, with /
    size: int  # bytes
    version: int  # st_mtime_ns; in a store: the generation
    stored: str | None = None  # in a store: its checksum there

    def __str__(self) -> str:
        return self.path

    def open(self) -> IO[bytes]:
        """The file's bytes, seekable."""
        return _store().open(self.path, "rb") if remote.is_remote(self.path) else open(self.path, "rb")

    def checksum(self) -> str:
        """``sha256:…`` of the content; in a store what it has: ``md5:…`` or ``crc32c:…``."""
        return self.stored or f"sha256:{sha256(self.path)}"


def sha256(path: str | Path) -> str:
    """The SHA-256 of a local file, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def packing(name: str) -> str | None:
    """How a file of this name is compressed: gz, zst, or None."""
    return PACKED.get(Path(name).suffix.lower())


def stem(name: str) -> str:
    """A file's name without the ending of its compression."""
    return name if packing(name) is None else name[: -len(Path(name).suffix)]


def is_parquet(name: str) -> bool:
    """Return whether a file of this name is a parquet file."""
    return name.lower().endswith((".parquet", ".pq"))


def is_lines(name: str) -> bool:
    """Whether a file of this name holds a document on each line (of a parquet file: in each row)."""
    return stem(name).lower().endswith(_LINES) or is_parquet(name)


def is_new_lines(name: str) -> bool:
    """Return whether `is_lines` knows a name that older versions took for plain text."""
    inner = name.removesuffix(".gz") if name.endswith(".gz") else name.removesuffix(".zst")
    return is_lines(name) and not (inner.endswith(".jsonl") or name.endswith(".parquet"))


def pointer(content: bytes) -> str | None:
    """Return what a file is that stands for another one, and how that is fetched; None: it is itself."""
    return next((what for start, what in _POINTERS.items() if content.startswith(start)), None)


def check_pointer(place: Place | Path) -> None:
    """Raises UserError for a file that git-lfs or git-annex left in the place of the one that was meant."""
    if (place.size if isinstance(place, Place) else place.stat().st_size) > _POINTER:
        return
    with place.open() if isinstance(place, Place) else place.open("rb") as file:
        what = pointer(file.read(64))
    if what:
        raise UserError(f"{place} is a {what}")


def cache_directory(data: DataConfig) -> Path:
    """``data.cache_dir``, else ``$MHC_CACHE``, else ``~/.cache/mhc``; not created."""
    return Path(data.cache_dir or os.environ.get("MHC_CACHE") or "~/.cache/mhc").expanduser()


class replacing:
    """A temporary file beside ``path`` that takes its place when the block ends well: readers never see half a file.

    Raises UserError, which names ``setting``, where the folder cannot be written, and for what the system says while
    the file is made: no space left, a quota, a broken disk.
    """

    def __init__(self, path: Path, setting: str = "data.cache_dir"):
        self._path = path
        self._setting = setting

    def __enter__(self) -> str:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle, self._temporary = tempfile.mkstemp(dir=self._path.parent, prefix=".part-")
        except OSError as error:
            raise full_disk.error_class(error)(
                f"{self._setting}: cannot write to {self._path.parent}: {error.strerror}"
            ) from None
        os.close(handle)
        return self._temporary

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if error is None:
            try:
                os.replace(self._temporary, self._path)
            except OSError as failed:
                error = failed
        if error is not None:
            os.unlink(self._temporary)
        if isinstance(error, OSError) and error.errno is not None:  # a store's errors have none
            raise full_disk.error_class(error)(f"{self._setting}: cannot make {self._path}: {error.strerror}") from None


# The files of a pattern -----------------------------------------------------------------------------------------------


def match(kind: str, pattern: str) -> list[Place]:
    """The files that a pattern matches, sorted by path.

    Raises UserError for none, for one that cannot be read, and for a store that cannot be asked.
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
        if not os.access(path, os.R_OK):
            raise UserError(f"{path} cannot be read: permission denied")
        state = os.stat(path)
        found.append(Place(path, os.path.relpath(path, base), state.st_size, state.st_mtime_ns))
    return found


def may_match(pattern: str, path: str) -> bool:
    """Whether a local pattern matches a path that need not be there; links are followed in its fixed part alone."""
    base = _fixed_part(os.path.expanduser(pattern)) or "."
    rest = Path(below_fixed(pattern)).parts
    try:
        parts = Path(os.path.realpath(path)).relative_to(os.path.realpath(base)).parts
    except ValueError:
        return False
    return _parts_match(parts, rest)


def _parts_match(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """As `glob` does, part by part."""
    if not pattern or not parts:
        return not parts and all(part == "**" for part in pattern)
    rest, hidden = parts[1:], parts[0].startswith(".") and not pattern[0].startswith(".")
    if pattern[0] == "**":
        return _parts_match(parts, pattern[1:]) or (not hidden and _parts_match(rest, pattern))
    return not hidden and fnmatch.fnmatchcase(parts[0], pattern[0]) and _parts_match(rest, pattern[1:])


def _fixed_part(pattern: str) -> str:
    """The folder above the first part of a pattern that has a wildcard, or above the file."""
    fixed = pattern
    while glob.has_magic(fixed):
        fixed = os.path.dirname(fixed)
    return fixed if fixed != pattern else os.path.dirname(fixed)


def below_fixed(pattern: str) -> str:
    """The rest of a local pattern below its fixed part: what files' names are matched by."""
    expanded = os.path.expanduser(pattern)
    return os.path.relpath(expanded, _fixed_part(expanded) or ".")


def _match_in_store(kind: str, pattern: str) -> list[Place]:
    folder = remote.path(_fixed_part(pattern))
    remote.check(folder)
    with remote.plainly(folder):
        found = _store().glob(pattern, detail=True)
    base = os.fspath(folder).removeprefix("gs://").rstrip("/") + "/"
    places = []
    for path, about in sorted(found.items()):
        if about["type"] == "file":
            stored = f"md5:{about['md5Hash']}" if about.get("md5Hash") else f"crc32c:{about.get('crc32c')}"
            name = path.removeprefix(base)
            places.append(Place(f"gs://{path}", name, int(about["size"]), int(about["generation"]), stored))
    if not places:
        raise UserError(f"{kind}:{pattern} matches no file (the name of a folder matches none; name its files)")
    return places


def _store() -> Any:
    """The file system of ``gs://``."""
    import fsspec

    remote.path("gs://bucket")  # its packages and settings
    return fsspec.filesystem("gcs")


# Plain local copies ---------------------------------------------------------------------------------------------------


def plain(place: Place, data: DataConfig) -> Path:
    """A local file with the plain content of a file, copied into the cache directory where it is not one itself.

    Raises UserError for a broken file, and for a parquet file whose column ``data.field`` is missing or no text.
    """
    with remote.plainly(place.path):
        check_pointer(place)
    parquet = is_parquet(place.name)
    local = not remote.is_remote(place.path)
    if local and not parquet and stem(place.name) == place.name:
        return Path(place.path)
    described = [str(Path(place.path).resolve()) if local else place.path, place.size, place.version]
    key = hashlib.sha256(json.dumps([*described, *([data.field] if parquet else [])]).encode()).hexdigest()[:24]
    copy = cache_directory(data) / "unpacked" / (key + Path(stem(place.name)).suffix)
    if not copy.exists():
        _log.info("copying %s to %s", place, copy)
        with (
            replacing(copy) as temporary,
            open(temporary, "wb") as target,
            remote.plainly(place.path),
            place.open() as source,
        ):
            _unpack(place, source, target, data.field)
    return copy


def _unpack(place: Place, source: IO[bytes], target: IO[bytes], field: str) -> None:
    if is_parquet(place.name):
        _unpack_parquet(place, source, target, field)
    elif packing(place.name) == "zst":
        _unpack_zst(place, source, target)
    elif packing(place.name) == "gz":
        try:
            with gzip.open(source) as packed:
                shutil.copyfileobj(packed, target, _CHUNK)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UserError(f"{place} is not a readable gzip file: {error}") from None
    else:
        shutil.copyfileobj(source, target, _CHUNK)


def _unpack_zst(place: Place, source: IO[bytes], target: IO[bytes]) -> None:
    zstandard = _needed("zstandard", place)
    # Frame by frame: the library's own readers take a file that breaks off for one that ends.
    frame = None
    try:
        while chunk := source.read(_CHUNK):
            while chunk:
                if frame is None:
                    frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
                target.write(frame.decompress(chunk))
                chunk = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    except zstandard.ZstdError as error:
        raise UserError(f"{place} is not a readable zst file: {error}") from None
    if frame is not None:
        raise UserError(f"{place} is not a readable zst file: it breaks off")


def _unpack_parquet(place: Place, source: IO[bytes], target: IO[bytes], field: str) -> None:
    """Writes ``{field: text}`` for each row; what is null becomes null, which the reader of lines refuses."""
    pyarrow = _needed("pyarrow", place)
    parquet = importlib.import_module("pyarrow.parquet")
    row = 0
    try:
        file = parquet.ParquetFile(source, buffer_size=1 << 20)
        names = file.schema_arrow.names
        if field not in names:
            raise UserError(
                f"{place}: no column {field!r} (data.field) among {', '.join(names[:8])}{did_you_mean(field, names)}"
            )
        kind = file.schema_arrow.field(field).type
        kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if not any(
            is_text(kind)
            for is_text in (pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_string_view)
        ):
            raise UserError(f"{place}: column {field!r} (data.field) is not text but {kind}")
        for batch in file.iter_batches(batch_size=256, columns=[field]):
            for text in batch.column(0):
                target.write(json.dumps({field: text.as_py()}, ensure_ascii=False).encode() + b"\n")
                row += 1
    except UnicodeDecodeError as error:
        raise UserError(f"{place}, row {row}: not UTF-8: {error.reason}") from None
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the system's, not the library's
            raise
        raise UserError(f"{place} is not a readable parquet file: {str(error).splitlines()[0]}") from None


def _needed(package: str, place: Place) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise UserError(f"{place} needs {package}: pip install 'mhc-jax[corpora]'") from None
