"""Sources over the user's own files: ``text:<glob>`` and ``tokens:<glob>``.

Documents. In a ``.jsonl`` file a line is a document, in a ``.parquet`` file a row is. Any other text file is one
document, and so is a token file unless ``data.end_token`` cuts it; but what is longer than a block is cut into blocks,
since a corpus of one or of few files could otherwise not be held out in part. Blocks are treated as documents, save
that only a file's last one ends with eos. A block is 64 KiB (32 Ki tokens), with few files 1/1024 of the corpus if that
is less, but not below 8 sequences; text is cut at the end of a paragraph, or else of a line. (For training, documents
are cut further, see `mhc.data.packing.Pieces`.)

Held out. With ``2 / data.holdout`` files or more, whole files are held out, by a hash of their path below the glob's
fixed part; with fewer, documents are, by a hash of that path and their number. Moving the corpus keeps the split.

Files are read once from end to end before training, to find the documents and what is wrong with them. Beyond 64 MiB
the result is kept in the cache directory. What cannot be read at random where it lies is copied there, see
`mhc.data.places`.
"""

from __future__ import annotations

import array
import codecs
import copy
import dataclasses
import functools
import hashlib
import json
import logging
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np

from mhc.config import DataConfig
from mhc.data.holdout import holds_out_files, of_split
from mhc.data.ids import check_width, open_tokens
from mhc.data.places import Place, cache_directory, is_lines, is_new_lines, is_parquet, match, plain, replacing, stem
from mhc.errors import UserError

_NOT_TEXT = (
    *(".json", ".parquet", ".pq", ".arrow", ".feather", ".npy", ".npz", ".bin"),
    *(".zip", ".xz", ".bz2", ".lz4", ".br", ".7z", ".tar", ".tgz"),
)
_COMPRESSED = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst"}  # by how such files begin
_LOOKED_AT = 1 << 16  # bytes of a text file that are looked at for lines of JSON
_CACHED_FROM = 64 << 20  # bytes
_INDEX_FORMAT = 1
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Index:
    """Where the documents of a corpus are."""

    owner: np.ndarray  # int32[n]: number of the file, in the order of the names
    start: np.ndarray  # int64[n]: first byte (text) or token (tokens)
    stop: np.ndarray  # int64[n]
    number: np.ndarray  # int64[n]: line of a jsonl file, or row of a parquet one, from 1; else number, from 0
    ends: np.ndarray  # bool[n]: False for a block that another follows

    def __getitem__(self, wanted: np.ndarray | slice) -> Index:
        return Index(*(getattr(self, field.name)[wanted] for field in dataclasses.fields(self)))


class _Files:
    """What both kinds share: the list of files, the index, the split."""

    kind = ""
    unit = ""

    def __init__(self, data: DataConfig, pattern: str, split: str, whole: bool):
        """Args: the pattern behind the colon; ``whole``: ignore the split and take every document."""
        self._data = data
        self.label = f"{self.kind}:{pattern}"
        self.places = match(self.kind, pattern)
        self.names = [place.name for place in self.places]
        self._plain = [self._local(place) for place in self.places]
        sizes = [path.stat().st_size for path in self._plain]
        self.file_sizes = dict(zip(self.names, sizes, strict=True))
        index = self._load_index(sizes)
        if not len(index.start):
            raise UserError(f"{self.label} is empty: {len(self.places)} file(s) without any {self.unit}")
        self.holdout = None if whole else data.holdout
        if not whole:
            index = index[of_split(index.owner, index.number, self.names, data.holdout, split, self.label)]
        self.index = index
        described = [self.label.partition(":")[0], split, whole, self.names, sizes, *self._settings(sizes)]
        self.fingerprint = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.index.start)

    @property
    def sizes(self) -> np.ndarray:
        """int64[n]: bytes or tokens of each document (of a jsonl line: of the line)."""
        return self.index.stop - self.index.start

    def part(self, start: int, stop: int) -> Self:
        """Documents start to stop of these: small to send to another process."""
        made = copy.copy(self)
        made.index = self.index[slice(start, stop)]
        return made

    def ends(self, index: int) -> bool:
        """Whether document i is more than a block of one that goes on."""
        return bool(self.index.ends[index])

    def begins(self, index: int) -> bool:
        """Whether document i is no later block of one."""
        return not self._in_blocks(int(self.index.owner[index])) or not self.index.number[index]

    def _index_of(self, table: np.ndarray) -> Index:
        """Args: table: int64[n, 4]: file, start, stop, number."""
        file = table[:, 0].astype(np.int32)
        follows = np.append(file[1:] == file[:-1], False) if len(file) else np.zeros(0, bool)
        blocks = np.array([self._in_blocks(number) for number in range(len(self.names))], bool)
        return Index(file, table[:, 1], table[:, 2], table[:, 3], ~(follows & blocks[file]))

    def _in_blocks(self, file: int) -> bool:
        """Whether the documents of a file are blocks of one."""
        raise NotImplementedError

    def _settings(self, sizes: list[int]) -> list[Any]:
        """What besides the files decides the index."""
        raise NotImplementedError

    def _local(self, place: Place) -> Path:
        return plain(place, self._data)

    def _scan(self, file: int, block: int) -> Iterator[tuple[int, int, int]]:
        """(start, stop, number) of each document of a file; raises UserError for what is wrong with it."""
        raise NotImplementedError

    def _block(self, sizes: list[int]) -> int:
        raise NotImplementedError

    def _load_index(self, sizes: list[int]) -> Index:
        total = sum(sizes)
        described = [
            _INDEX_FORMAT,
            self.kind,
            [(str(path), size, path.stat().st_mtime_ns) for path, size in zip(self._plain, sizes, strict=True)],
            self._settings(sizes),
        ]
        key = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:24]
        kept = cache_directory(self._data) / "index" / f"{key}.npz"
        if total >= _CACHED_FROM and kept.exists():
            with np.load(kept) as arrays:
                return Index(**{field.name: arrays[field.name] for field in dataclasses.fields(Index)})
        block = self._block(sizes)
        flat = array.array("q")  # 32 bytes a document, where a list of tuples takes ten times that
        for file in range(len(self._plain)):
            for document in self._scan(file, block) if sizes[file] else ():
                flat.extend((file, *document))
        table = np.array(flat, np.int64).reshape(-1, 4)
        index = self._index_of(table)
        if total >= _CACHED_FROM:
            with replacing(kept) as temporary, open(temporary, "wb") as output:
                np.savez(output, **dataclasses.asdict(index))
        return index


class TextFiles(_Files):
    """``text:<glob>``: plain text or ``.jsonl``, each also as ``.gz`` or ``.zst``, or ``.parquet``.

    ``source[i]`` is the UTF-8 bytes of document i.

    Raises UserError (at opening) for a pattern that matches nothing, an unreadable or broken file, bytes that are not
    UTF-8, a line or row that is not an object with the field, and a corpus without text.
    """

    kind = "text"
    unit = "text"

    def __getitem__(self, index: int) -> bytes:
        file, start, stop = (int(column[index]) for column in (self.index.owner, self.index.start, self.index.stop))
        with open(self._plain[file], "rb") as handle:
            handle.seek(start)
            content = handle.read(stop - start)
        if not self._is_lines(file):
            return content
        return self._text_of_line(file, int(self.index.number[index]), content).encode()

    def name(self, index: int) -> str:
        """File and line (jsonl), row (parquet; from 0) or bytes."""
        file = int(self.index.owner[index])
        if self._is_lines(file):
            return self._line(file, int(self.index.number[index]))
        return f"{self.places[file]}, bytes {self.index.start[index]}–{self.index.stop[index]}"

    def _in_blocks(self, file: int) -> bool:
        return not self._is_lines(file)

    def _is_lines(self, file: int) -> bool:
        return is_lines(self.names[file])

    def _line(self, file: int, number: int) -> str:
        place = self.places[file]
        return f"{place}, row {number - 1}" if is_parquet(place.name) else f"{place}, line {number}"

    def _settings(self, sizes: list[int]) -> list[Any]:
        # A position among documents that were read otherwise is refused, and so is an index of them.
        new = [name for name in self.names if is_new_lines(name)]
        return [self._data.field, self._block(sizes), *([new] if new else [])]

    def _block(self, sizes: list[int]) -> int:
        return _block_size(self._data, sizes, sum(sizes), 64 << 10)

    def _local(self, place: Place) -> Path:
        if stem(place.name).lower().endswith(_NOT_TEXT) and not is_parquet(place.name):
            raise UserError(
                f"{place} is not a text file; text: reads plain text and .jsonl, each also as .gz or .zst, and .parquet"
            )
        return plain(place, self._data)

    def _scan(self, file: int, block: int) -> Iterator[tuple[int, int, int]]:
        with (
            open(self._plain[file], "rb") as handle,
            mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            if self._is_lines(file):
                yield from self._scan_lines(file, content)
            else:
                yield from self._scan_blocks(file, content, block)

    def _scan_lines(self, file: int, content: mmap.mmap) -> Iterator[tuple[int, int, int]]:
        start = number = 0
        while start < len(content):
            stop = content.find(b"\n", start)
            stop = len(content) if stop < 0 else stop
            number += 1
            line = content[start:stop]
            if _without_mark(line, number).strip():
                text = self._text_of_line(file, number, line, start)
                if text and not text.isspace():
                    yield start, stop, number
            start = stop + 1

    def _text_of_line(self, file: int, number: int, line: bytes, start: int = 0) -> str:
        place = self._line(file, number)
        text_of = _without_mark(line, number)
        start += len(line) - len(text_of)
        try:
            value = json.loads(text_of.decode())
        except UnicodeDecodeError as error:
            raise UserError(f"{place}: not UTF-8 at byte {start + error.start} of the file") from None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{place}: not JSON: {error}") from None
        if not isinstance(value, dict):
            raise UserError(f"{place}: not a JSON object but {type(value).__name__}")
        if self._data.field not in value:
            has = ", ".join(repr(key) for key in list(value)[:8]) or "none"
            raise UserError(f"{place}: no field {self._data.field!r} (data.field); the line's fields: {has}")
        text = value[self._data.field]
        if not isinstance(text, str):
            raise UserError(f"{place}: field {self._data.field!r} is not a string but {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"{place}: field {self._data.field!r} has an unpaired surrogate: not UTF-8") from None
        return text

    def _looks_like_lines(self, content: bytes) -> bool:
        """Whether the first lines of a file, as far as they are there, are JSON objects with the field."""
        lines = [line for line in content.removeprefix(codecs.BOM_UTF8).splitlines() if line.strip()]
        lines = lines if len(content) < _LOOKED_AT or len(lines) < 2 else lines[:-1]
        if not lines or not all(line.lstrip().startswith(b"{") for line in lines[:3]):
            return False
        try:
            return all(self._data.field in json.loads(line) for line in lines[:3])
        except (ValueError, RecursionError):
            return False

    def _scan_blocks(self, file: int, content: mmap.mmap, block: int) -> Iterator[tuple[int, int, int]]:
        start = number = 0
        for begins, ending in _COMPRESSED.items():
            if content[: len(begins)] == begins:
                raise UserError(f"{self.places[file]}: not UTF-8: it is compressed, and its name must end in {ending}")
        if self._looks_like_lines(content[:_LOOKED_AT]):
            _warn_once(
                f"{self.places[file]}: its lines are JSON objects with the field {self._data.field!r} (data.field), "
                "but a file of this name is read as plain text, JSON and all; name it .jsonl to read the field"
            )
        while start < len(content):
            stop = _cut(content, start, block)
            piece = content[start:stop]
            try:
                text = piece.decode()
            except UnicodeDecodeError as error:
                place = f"{self.places[file]}, byte {start + error.start}"
                raise UserError(f"{place}: not UTF-8 ({piece[error.start]:#04x}: {error.reason})") from None
            if not text.isspace():
                yield start, stop, number
                number += 1
            start = stop


class TokenFiles(_Files):
    """``tokens:<glob>``: ``.npy`` files (one axis, any integer type), or raw ``.bin`` files of ``data.token_dtype``;
    each also as ``.gz`` or ``.zst``.

    ``source[i]`` is document i: int64[n] ids, without the ``data.end_token`` that ends it. Files are memory-mapped.

    Raises UserError (at opening) for a pattern that matches nothing, a file that is no such array, a ``.bin`` file
    whose size is no multiple of the item, and a corpus without tokens.
    """

    kind = "tokens"
    unit = "token"

    def __getitem__(self, index: int) -> np.ndarray:
        file, start, stop = (int(column[index]) for column in (self.index.owner, self.index.start, self.index.stop))
        return np.asarray(self._array(file)[start:stop], np.int64)

    def name(self, index: int) -> str:
        """File and tokens."""
        return f"{self.places[int(self.index.owner[index])]}, tokens {self.index.start[index]}–{self.index.stop[index]}"

    def check_vocabulary(self, size: int) -> None:
        """Raises UserError for the first id that is not in 0 ≤ id < size, whatever its split."""
        for file, place in enumerate(self.places):
            if not self._plain[file].stat().st_size:
                continue
            tokens = self._array(file)
            hint = ""
            if stem(place.name).lower().endswith(".bin"):
                hint = check_width(tokens, str(place), self._data.token_dtype)
            for start in range(0, len(tokens), 1 << 24):
                chunk = tokens[start : start + (1 << 24)]
                if len(chunk) and (int(chunk.max()) >= size or int(chunk.min()) < 0):
                    first = int(np.flatnonzero((chunk >= size) | (chunk < 0))[0])
                    raise UserError(
                        f"{place}, token {start + first}: id {int(chunk[first])} is not of 0 to {size - 1}, the ids "
                        f"(data.tokenizer={self._data.tokenizer}){hint}"
                    )

    def _in_blocks(self, file: int) -> bool:
        return self._data.end_token is None

    def _array(self, file: int) -> np.ndarray:
        return open_tokens(self._plain[file], self._data.token_dtype, str(self.places[file]))

    def _settings(self, sizes: list[int]) -> list[Any]:
        return [self._data.end_token, self._data.token_dtype, self._block(sizes)]

    def _block(self, sizes: list[int]) -> int:
        tokens = sum(sizes) // 2  # near enough, whatever the type
        return _block_size(self._data, sizes, tokens, 32 << 10)

    def _scan(self, file: int, block: int) -> Iterator[tuple[int, int, int]]:
        tokens, end = self._array(file), self._data.end_token
        if end is None:
            pieces = max(1, len(tokens) // block)
            bounds = [len(tokens) * piece // pieces for piece in range(pieces + 1)]
            yield from ((bounds[piece], bounds[piece + 1], piece) for piece in range(pieces) if len(tokens))
            return
        start = number = 0
        for base in range(0, len(tokens), 1 << 24):
            for stop in (base + np.flatnonzero(tokens[base : base + (1 << 24)] == end)).tolist():
                if stop > start:
                    yield start, stop, number
                    number += 1
                start = stop + 1
        if start < len(tokens):
            yield start, len(tokens), number


@functools.cache  # a corpus is opened for training, for validation and for the probes
def _warn_once(line: str) -> None:
    _log.warning("%s", line)


def _without_mark(line: bytes, number: int) -> bytes:
    """A line without the byte order mark that some programs begin a file with."""
    return line.removeprefix(codecs.BOM_UTF8) if number == 1 else line


def _block_size(data: DataConfig, sizes: list[int], total: int, most: int) -> int:
    """Bytes or tokens of a block, see the module's docstring."""
    whole = holds_out_files(sum(size > 0 for size in sizes), data.holdout)
    return max(piece_size(data), most if whole else min(total // 1024, most))


def piece_size(data: DataConfig) -> int:
    """Bytes (ids, for tokens:) of 8 sequences: what a document is cut into for training.

    Short enough for a batch to change its documents every few steps, long enough for few sequences to be broken.
    """
    bytes_per_token = 1 if data.tokenizer == "bytes" or data.source.startswith("tokens:") else 4
    return 8 * data.sequence_length * bytes_per_token


def _cut(content: mmap.mmap, start: int, block: int) -> int:
    """Where the block that opens at ``start`` ends: after a paragraph, a line, or at worst a character."""
    if len(content) - start <= block + block // 2:
        return len(content)
    stop = start + block
    for mark in (b"\n\n", b"\n"):
        found = content.rfind(mark, start + block // 2, stop)
        if found >= 0:
            return found + len(mark)
    for place in range(stop, stop - 4, -1):
        if content[place] & 0xC0 != 0x80:
            return place
    return stop
