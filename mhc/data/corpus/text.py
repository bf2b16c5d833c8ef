"""``text:<glob>``: plain text, lines of JSON, and columns of parquet files."""

from __future__ import annotations

import codecs
import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mhc.data.corpus.indexed import IndexedFiles, block_size
from mhc.data.corpus.warning import warn_once
from mhc.data.user_files.formats import is_lines, is_new_lines, is_parquet, stem
from mhc.data.user_files.globs import Place
from mhc.data.user_files.local_copies import plain
from mhc.errors import UserError

_NOT_TEXT = (
    *(".json", ".parquet", ".pq", ".arrow", ".feather", ".npy", ".npz", ".bin"),
    *(".zip", ".xz", ".bz2", ".lz4", ".br", ".7z", ".tar", ".tgz"),
)
_COMPRESSED = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst"}  # by how such files begin
_LOOKED_AT = 1 << 16  # bytes of a text file that are looked at for lines of JSON


class TextFiles(IndexedFiles):
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
        return block_size(self._data, sizes, sum(sizes), 64 << 10)

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
            warn_once(
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


def _without_mark(line: bytes, number: int) -> bytes:
    """A line without the byte order mark that some programs begin a file with."""
    return line.removeprefix(codecs.BOM_UTF8) if number == 1 else line


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
