"""Read ``text:<glob>``: plain text, lines of JSON, and columns of parquet files."""

from __future__ import annotations

import codecs
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from mhc.data.corpus.indexed import Found, IndexedFiles, block_size
from mhc.data.user_files.formats import is_lines, is_new_lines, is_parquet, stem
from mhc.data.user_files.globs import CorpusFile
from mhc.data.warning import warn_once
from mhc.errors import UserError

_NOT_TEXT = (
    *(".json", ".parquet", ".pq", ".arrow", ".feather", ".npy", ".npz", ".bin"),
    *(".zip", ".xz", ".bz2", ".lz4", ".br", ".7z", ".tar", ".tgz"),
)
_COMPRESSED = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst"}  # by how such files begin
_LOOKED_AT = 1 << 16  # bytes of a text file that are looked at for lines of JSON


class TextFiles(IndexedFiles):
    """Reads ``text:<glob>``: plain text or ``.jsonl``, each also as ``.gz`` or ``.zst``, or ``.parquet``.

    ``source[i]`` is the UTF-8 bytes of document i.

    Raises:
      UserError: at opening, for a pattern that matches nothing, an unreadable or broken file, bytes that are not UTF-8,
        a line or row that is not an object with the field, and a corpus without text; later, for a file that changed.
    """

    kind = "text"
    unit = "text"

    def __getitem__(self, index: int) -> bytes:
        content = self._content(index)
        file = int(self.index.owner[index])
        if not self._is_lines(file):
            return content
        return self._text_of_line(file, int(self.index.number[index]), content).encode()

    def name(self, index: int) -> str:
        """Return a document's file, and its line (jsonl), row (parquet; from 0) or bytes."""
        file = int(self.index.owner[index])
        if self._is_lines(file):
            return self._line(file, int(self.index.number[index]))
        return f"{self.files[file]}, bytes {self.index.start[index]}–{self.index.stop[index]}"

    def _in_blocks(self, file: int) -> bool:
        return not self._is_lines(file)

    def _is_lines(self, file: int) -> bool:
        return is_lines(self.names[file])

    def _line(self, file: int, number: int) -> str:
        path = self.files[file]
        return f"{path}, row {number - 1}" if is_parquet(path.name) else f"{path}, line {number}"

    def _settings(self) -> list[Any]:
        # A position among documents that were read otherwise is refused, and so is an index of them.
        new = [name for name in self.names if is_new_lines(name)]
        return [self._data.field, self._block(), *([new] if new else [])]

    def _block(self) -> int:
        return block_size(self._data, self._sizes, sum(self._sizes), 64 << 10)

    def _local(self, file: CorpusFile) -> Path:
        if stem(file.name).lower().endswith(_NOT_TEXT) and not is_parquet(file.name):
            raise UserError(
                f"{file} is not a text file; text: reads plain text and .jsonl, each also as .gz or .zst, and .parquet"
            )
        return super()._local(file)

    def _scan(self, file: int, block: int) -> Iterator[Found]:
        with self._opened(file) as content:
            if self._is_lines(file):
                yield from self._scan_lines(file, content)
            else:
                yield from self._scan_blocks(file, content, block)

    def _scan_lines(self, file: int, content: IO[bytes]) -> Iterator[Found]:
        start = number = 0
        while start < self._sizes[file]:
            read = content.readline(self._sizes[file] - start)
            if not read:
                raise self._changed(file)
            number += 1
            line = read.removesuffix(b"\n")
            if _without_mark(line, number).strip():
                text = self._text_of_line(file, number, line, start)
                if text and not text.isspace():
                    yield start, start + len(line), number, zlib.crc32(line)
            start += len(read)

    def _text_of_line(self, file: int, number: int, line: bytes, start: int = 0) -> str:
        """Return the text in a line of JSON that begins at byte ``start``. Raises UserError where there is none."""
        where = self._line(file, number)
        json_text = _without_mark(line, number)
        start += len(line) - len(json_text)
        try:
            value = _parsed(json_text.decode())
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: not UTF-8 at byte {start + error.start} of the file") from None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not JSON: {error}{_hint(json_text)}") from None
        if not isinstance(value, dict):
            raise UserError(f"{where}: not a JSON object but {type(value).__name__}{_hint(json_text)}")
        if self._data.field not in value:
            has = ", ".join(repr(key) for key in list(value)[:8]) or "none"
            raise UserError(f"{where}: no field {self._data.field!r} (data.field); the line's fields: {has}")
        text = value[self._data.field]
        if not isinstance(text, str):
            raise UserError(f"{where}: field {self._data.field!r} is not a string but {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"{where}: field {self._data.field!r} has an unpaired surrogate: not UTF-8") from None
        return text

    def _looks_like_lines(self, content: bytes) -> bool:
        """Return whether the first lines of a file, as far as they are there, are JSON objects with the field."""
        lines = [line for line in content.removeprefix(codecs.BOM_UTF8).splitlines() if line.strip()]
        lines = lines if len(content) < _LOOKED_AT or len(lines) < 2 else lines[:-1]
        if not lines or not all(line.lstrip().startswith(b"{") for line in lines[:3]):
            return False
        try:
            return all(self._data.field in _parsed(line.decode()) for line in lines[:3])
        except (ValueError, RecursionError):
            return False

    def _scan_blocks(self, file: int, content: IO[bytes], block: int) -> Iterator[Found]:
        path, size = self.files[file], self._sizes[file]
        opening = content.read(min(_LOOKED_AT, size))
        for begins, ending in _COMPRESSED.items():
            if opening.startswith(begins):
                raise UserError(f"{path}: not UTF-8: it is compressed, and its name must end in {ending}")
        if self._looks_like_lines(opening):
            warn_once(
                f"{path}: its lines are JSON objects with the field {self._data.field!r} (data.field), "
                "but a file of this name is read as plain text, JSON and all; name it .jsonl to read the field"
            )
        start = number = 0
        while start < size:
            wanted = min(block + block // 2 + 1, size - start)  # one more than the last block may have
            content.seek(start)
            ahead = content.read(wanted)
            if len(ahead) < wanted:
                raise self._changed(file)
            piece = ahead[: _cut(ahead, block)]
            try:
                text = piece.decode()
            except UnicodeDecodeError as error:
                reason = f"{piece[error.start]:#04x}: {error.reason}"
                raise UserError(f"{path}, byte {start + error.start}: not UTF-8 ({reason})") from None
            if not text.isspace():
                yield start, start + len(piece), number, zlib.crc32(piece)
                number += 1
            start += len(piece)


def _parsed(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError, RecursionError."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except ValueError:  # an integer of more digits than Python turns into a number; none is a text
        return json.loads(text, parse_int=lambda digits: 0)


def _hint(line: bytes) -> str:
    """Return a clause for a line that opens a JSON array: the file may be one JSON value; "" for any other line."""
    is_array = line.lstrip().startswith(b"[")
    return "; each line must be a JSON object, as jq -c '.[]' makes them of an array" if is_array else ""


def _without_mark(line: bytes, number: int) -> bytes:
    """Return a line without the byte order mark that some programs begin a file with."""
    return line.removeprefix(codecs.BOM_UTF8) if number == 1 else line


def _cut(ahead: bytes, block: int) -> int:
    """Return where the block that opens ``ahead`` ends: after a paragraph, a line, or at worst a character."""
    if len(ahead) <= block + block // 2:
        return len(ahead)
    for mark in (b"\n\n", b"\n"):
        place = ahead.rfind(mark, block // 2, block)
        if place >= 0:
            return place + len(mark)
    return next((place for place in range(block, block - 4, -1) if ahead[place] & 0xC0 != 0x80), block)
