"""Make plain local copies of the user's files.

Readers need random access to plain local files. A local file that is plain already is read where it is; whatever else
is copied once into ``unpacked`` of the cache directory: what ``.gz`` and ``.zst`` unpack to, the column ``data.field``
of a ``.parquet`` as lines of JSON, and every file of a store. A copy's name is a hash of the file's path, size and time
of change (in a store: its generation), so that a changed file is copied again; copies are never removed.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib
import json
import logging
import os
import shutil
import tempfile
import zlib
from pathlib import Path
from typing import IO, Any

from mhc import full_disk, remote
from mhc.config import DataConfig
from mhc.data.user_files.formats import check_pointer, compression, is_parquet, stem
from mhc.data.user_files.globs import CorpusFile
from mhc.errors import UserError, did_you_mean

_CHUNK = 1 << 18  # bytes read at once
_log = logging.getLogger(__name__)


def cache_directory(data: DataConfig) -> Path:
    """Return ``data.cache_dir``, else ``$MHC_CACHE``, else ``~/.cache/mhc``; it need not exist."""
    return expand_home(data.cache_dir or os.environ.get("MHC_CACHE") or "~/.cache/mhc")


def expand_home(path: str) -> Path:
    """Return a path whose ``~`` is the home directory.

    Raises:
      UserError: there is none, as for a container's user who has no entry in /etc/passwd and no $HOME.
    """
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise UserError(f"{path}: no home directory is known; set data.cache_dir, or $MHC_CACHE or $HOME")
    return Path(expanded)


class replacing:
    """Give the block a temporary file beside ``path``, and put it in that place when the block ends well.

    So readers never see half a file.

    Raises:
      UserError: the folder cannot be written, or the file cannot be made (no space left, a quota, a broken disk); the
        line names ``setting``.
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


def local_copy(file: CorpusFile, data: DataConfig) -> Path:
    """Return a plain local file with the content of a file of the user's: itself, or a copy in the cache directory.

    Raises:
      UserError: a broken file, one that changes while it is copied, a parquet file whose column ``data.field`` is
        missing or no text, and a cache directory that cannot be written.
    """
    try:
        with remote.reporting_refusals(file.path):
            check_pointer(file)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}") from None
    parquet = is_parquet(file.name)
    local = not remote.is_remote(file.path)
    if local and not parquet and stem(file.name) == file.name:
        return Path(file.path)
    described = [str(Path(file.path).resolve()) if local else file.path, file.size, file.version]
    key = hashlib.sha256(json.dumps([*described, *([data.field] if parquet else [])]).encode()).hexdigest()[:24]
    copy = cache_directory(data) / "unpacked" / (key + Path(stem(file.name)).suffix)
    if not copy.exists():
        _log.info("copying %s to %s", file, copy)
        with replacing(copy) as temporary:
            try:
                with open(temporary, "wb") as target, remote.reporting_refusals(file.path), file.open() as source:
                    _unpack(file, source, target, data.field)
            except (UserError, OSError):
                _check_unchanged(file)  # the reason why it could not be read
                raise
            _check_unchanged(file)
    return copy


def _check_unchanged(file: CorpusFile) -> None:
    if not file.is_unchanged():
        raise UserError(f"{file} has changed while it was copied to the cache: start again when it is whole")


def _unpack(file: CorpusFile, source: IO[bytes], target: IO[bytes], field: str) -> None:
    if is_parquet(file.name):
        _unpack_parquet(file, source, target, field)
    elif compression(file.name) == "zst":
        _unpack_zst(file, source, target)
    elif compression(file.name) == "gz":
        try:
            with gzip.open(source) as packed:
                shutil.copyfileobj(packed, target, _CHUNK)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UserError(f"{file} is not a readable gzip file: {error}") from None
    else:
        shutil.copyfileobj(source, target, _CHUNK)


def _unpack_zst(file: CorpusFile, source: IO[bytes], target: IO[bytes]) -> None:
    zstandard = _needed("zstandard", file)
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
        raise UserError(f"{file} is not a readable zst file: {error}") from None
    if frame is not None:
        raise UserError(f"{file} is not a readable zst file: it breaks off")


def _unpack_parquet(file: CorpusFile, source: IO[bytes], target: IO[bytes], field: str) -> None:
    """Write ``{field: text}`` for each row. A null stays null, which the reader of lines refuses."""
    pyarrow = _needed("pyarrow", file)
    parquet = importlib.import_module("pyarrow.parquet")
    row = 0
    try:
        table = parquet.ParquetFile(source, buffer_size=1 << 20)
        names = table.schema_arrow.names
        if field not in names:
            raise UserError(
                f"{file}: no column {field!r} (data.field) among {', '.join(names[:8])}{did_you_mean(field, names)}"
            )
        if (count := names.count(field)) > 1:
            raise UserError(f"{file} has {count} columns {field!r} (data.field); give each a name of its own")
        kind = table.schema_arrow.field(field).type
        kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if not any(
            is_text(kind)
            for is_text in (pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_string_view)
        ):
            raise UserError(f"{file}: column {field!r} (data.field) is not text but {kind}")
        for batch in table.iter_batches(batch_size=256, columns=[field]):
            for text in batch.column(field):  # a name with dots selects what is nested under its parts too
                target.write(json.dumps({field: text.as_py()}, ensure_ascii=False).encode() + b"\n")
                row += 1
    except UnicodeDecodeError as error:
        raise UserError(f"{file}, row {row}: not UTF-8: {error.reason}") from None
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the system's, not the library's
            raise
        raise UserError(f"{file} is not a readable parquet file: {str(error).splitlines()[0]}") from None


def _needed(package: str, file: CorpusFile) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise UserError(f"{file} needs {package}: pip install 'mhc-jax[corpora]'") from None
