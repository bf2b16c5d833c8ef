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
from mhc.data.user_files.formats import check_pointer, is_parquet, packing, stem
from mhc.data.user_files.globs import Place
from mhc.errors import UserError, did_you_mean

_CHUNK = 1 << 18  # bytes read at once
_log = logging.getLogger(__name__)


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


def plain(place: Place, data: DataConfig) -> Path:
    """A local file with the plain content of a file, copied into the cache directory where it is not one itself.

    Raises UserError for a broken file, and for a parquet file whose column ``data.field`` is missing or no text.
    """
    with remote.reporting_refusals(place.path):
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
            remote.reporting_refusals(place.path),
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
