"""Read ``tokens:<glob>``: files of token ids."""

from __future__ import annotations

import bisect
import functools
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mhc.data.corpus.indexed import Found, IndexedFiles, block_size
from mhc.data.tokenizers.protocol import Tokenizer
from mhc.data.tokenizers.spelling import first_line
from mhc.data.user_files.formats import stem
from mhc.data.warning import warn_once
from mhc.errors import UserError

_MEASURED = 1 << 20  # ids whose width is looked at
_MAGIC = b"\x93NUMPY"
_HEADERS = {  # how other formats of the name .bin begin: (format, bytes before the ids; None: no such ids)
    b"LITPKDS": ("a PackedDataset of lit-gpt", 24),
    (20240520).to_bytes(4, "little"): ("a data file of llm.c", 1024),
    (20240801).to_bytes(4, "little"): ("a data file of llm.c", 1024),
    b"PK\x03\x04": ("a zip archive", None),
    b"\x1f\x8b\x08\x00": ("a gzip file, whose name must end in .gz", None),
    b"\x1f\x8b\x08\x08": ("a gzip file, whose name must end in .gz", None),
    b"\x28\xb5\x2f\xfd": ("a zst file, whose name must end in .zst", None),
}
_AT_ONCE = 1 << 22  # ids
_DOCUMENTS = 256  # whose first id is looked at


class Layout(NamedTuple):
    """Says how the ids of a file are stored."""

    dtype: np.dtype
    first: int  # byte where they begin
    length: int


class TokenFiles(IndexedFiles):
    """Reads ``tokens:<glob>``: ``.npy`` files (one axis of any integers), or ``.bin`` files of ``data.token_dtype``.

    Each may be compressed as ``.gz`` or ``.zst``. ``source[i]`` is document i: int64[n] ids, without the
    ``data.end_token`` that ends it and the ``data.start_token`` that begins it.

    Raises:
      UserError: at opening, for a pattern that matches nothing, a file that is no such array, a ``.bin`` file whose
        size is no multiple of the item, and a corpus without tokens; later, for a file that changed.
    """

    kind = "tokens"
    unit = "token"

    def __getitem__(self, index: int) -> np.ndarray:
        dtype = self._layout(int(self.index.owner[index])).dtype
        return np.frombuffer(self._content(index), dtype).astype(np.int64)

    def name(self, index: int) -> str:
        """Return a document's file and tokens."""
        return f"{self.files[int(self.index.owner[index])]}, tokens {self.index.start[index]}–{self.index.stop[index]}"

    def check_ids(self, tokenizer: Tokenizer) -> None:
        """Check that the ids of all files are a tokeniser's, and warn if documents seem to be cut at the wrong ids.

        Raises:
          UserError: for the first id that is not in 0 ≤ id < vocab_size, whatever its split.
        """
        ends = sum(self._check_file(file, tokenizer) for file, size in enumerate(self._sizes) if size)
        if ends and self._data.end_token != tokenizer.eos_id:
            warn_once(
                f"{self.label} has the id {tokenizer.eos_id} (eos) {ends:,} times, which ends no document here, since "
                f"data.end_token is {self._data.end_token}; set data.end_token={tokenizer.eos_id} if it should"
            )
        some = np.linspace(0, len(self) - 1, min(len(self), _DOCUMENTS)).astype(int).tolist()
        begins = [self[index][0] == tokenizer.bos_id for index in some if self.begins(index)]
        if sum(begins) > len(begins) / 2:
            warn_once(
                f"{self.label}: documents begin with the id {tokenizer.bos_id} (bos), and every document is given one, "
                f"so that it is there twice; data.start_token={tokenizer.bos_id} leaves out that of the file"
            )

    def _check_file(self, file: int, tokenizer: Tokenizer) -> int:
        """Check the ids of a file, and return how often eos is among them."""
        path, size = self.files[file], tokenizer.vocab_size
        hint, start, ends = "", 0, 0
        for chunk in self._chunks(file):
            if not start and stem(path.name).lower().endswith(".bin"):
                hint = check_width(chunk, str(path), self._data.token_dtype)
            if len(chunk) and (int(chunk.max()) >= size or int(chunk.min()) < 0):
                first = int(np.flatnonzero((chunk >= size) | (chunk < 0))[0])
                raise UserError(
                    f"{path}, token {start + first}: id {int(chunk[first])} is not of 0 to {size - 1}, the ids "
                    f"(data.tokenizer={self._data.tokenizer}){hint}"
                )
            start += len(chunk)
            ends += int((chunk == tokenizer.eos_id).sum())
        return ends

    def _in_blocks(self, file: int) -> bool:
        return self._data.end_token is None

    def _bytes_of(self, file: int, start: int, stop: int) -> tuple[int, int]:
        first, item = self._layout(file).first, self._layout(file).dtype.itemsize
        return first + start * item, first + stop * item

    def _layout(self, file: int) -> Layout:
        if file not in self._layouts:
            with self._opened(file):
                path = self._paths[file]
                self._layouts[file] = layout_of(path, self._sizes[file], self._data.token_dtype, str(self.files[file]))
        return self._layouts[file]

    @functools.cached_property
    def _layouts(self) -> dict[int, Layout]:
        """Return the cache of layouts, by the number of the file."""
        return {}

    def _chunks(self, file: int) -> Iterator[np.ndarray]:
        """Read the ids of a file in order, some million at once."""
        dtype, first, length = self._layout(file)
        with self._opened(file) as content:
            content.seek(first)
            for start in range(0, length, _AT_ONCE):
                size = min(_AT_ONCE, length - start) * dtype.itemsize
                chunk = content.read(size)
                if len(chunk) < size:
                    raise self._changed(file)
                yield np.frombuffer(chunk, dtype)

    def _settings(self) -> list[Any]:
        first = [] if self._data.start_token is None else [self._data.start_token]
        return [self._data.end_token, self._data.token_dtype, self._block(), *first]

    def _block(self) -> int:
        tokens = sum(self._sizes) // 2  # near enough, whatever the type
        return block_size(self._data, self._sizes, tokens, 32 << 10)

    def _scan(self, file: int, block: int) -> Iterator[Found]:
        """Cut a file into documents: after each end token, or else into blocks of about one length."""
        end, count = self._data.end_token, self._layout(file).length
        blocks = max(1, count // block)
        bounds = [count * number // blocks for number in range(1, blocks + 1)]
        start = number = checksum = seen = 0
        opens = self._data.start_token is not None  # whether the next id opens a document, and may be left out
        for chunk in self._chunks(file):
            if end is None:
                stops = bounds[bisect.bisect(bounds, seen) : bisect.bisect(bounds, seen + len(chunk))]
            else:
                stops = (seen + np.flatnonzero(chunk == end)).tolist()
            place = 0  # in the chunk
            for stop in [*stops, None]:
                if opens and place < len(chunk):
                    opens = False
                    if chunk[place] == self._data.start_token:
                        start, place = start + 1, place + 1
                if stop is None:
                    break
                checksum = zlib.crc32(chunk[place : stop - seen].data, checksum)
                if stop > start:
                    yield start, stop, number, checksum
                    number += 1
                start, checksum = stop + (end is not None), 0
                opens = self._data.start_token is not None and end is not None
                place = start - seen
            checksum = zlib.crc32(chunk[place:].data, checksum)
            seen += len(chunk)
        if start < count:
            yield start, count, number, checksum


def layout_of(path: Path, size: int, token_dtype: str, shown: str) -> Layout:
    """Return where the ids of a .npy or raw .bin file are.

    Args:
      path: the file, of ``size`` bytes.
      shown: its name for messages.
    Raises:
      UserError: it is no array of integers with one axis.
    """
    kind = path.suffix.lower()
    with path.open("rb") as file:
        opening = file.read(8)
    has_header = opening.startswith(_MAGIC)
    if kind == ".npy":
        if not has_header:
            raise UserError(
                f"{shown} is not a readable .npy file: it has no numpy header; raw ids are read from files whose names "
                f"end in .bin, of data.token_dtype={token_dtype}"
            )
        try:
            # The map is for its offset: no id is read by it. Headers in the spelling of Python 2 make numpy warn.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                ids = np.load(path, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # numpy parses the header as Python, which fails in as many ways as Python does
            objects = "allow_pickle" in str(error) or "Python objects" in str(error)
            reason = "it holds Python objects, not integers" if objects else first_line(error)
            raise UserError(f"{shown} is not a readable .npy file: {reason}") from None
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise UserError(f"{shown}: wanted one axis of integers, found shape {ids.shape} of {ids.dtype}")
        return Layout(ids.dtype, getattr(ids, "offset", 0), len(ids))
    if kind != ".bin":
        raise UserError(f"{shown}: tokens: reads .npy and .bin files, not {path.suffix or 'files without an ending'}")
    if has_header:
        raise UserError(f"{shown} has a numpy header, which raw ids have not; its name must end in .npy")
    for magic, (what, header) in _HEADERS.items():
        if opening.startswith(magic):
            remedy = f", with a header before its ids; cut that off: tail -c +{header + 1} FILE" if header else ""
            raise UserError(f"{shown} is {what}{remedy}")
    dtype = np.dtype(token_dtype)
    if size % dtype.itemsize:
        raise UserError(
            f"{shown}: {size} bytes are no multiple of the {dtype.itemsize} of data.token_dtype={token_dtype}"
        )
    return Layout(dtype, 0, size // dtype.itemsize)


def check_width(tokens: np.ndarray, shown: str, token_dtype: str) -> str:
    """Return a hint for the message that an id is too large: that two narrow ids may be read as one, or "".

    Raises: UserError if ids were written in more bytes than ``token_dtype`` has. Every second value is then the upper
      half of an id: at most 15 for ids up to a million, while the values between them are larger.
    """
    some, item = np.asarray(tokens[:_MEASURED]), tokens.dtype.itemsize
    pairs = some[: len(some) // 2 * 2].reshape(-1, 2)
    if len(pairs) < 64:
        return ""
    low, high = pairs.T
    if item in (2, 4) and high.min() >= 0 and high.max() <= 15 and (low > 15).mean() > 0.25:
        zeros = "" if high.any() else " (every second id is 0)"
        raise UserError(
            f"{shown} holds ids of {16 * item} bits or more, read as data.token_dtype={token_dtype}{zeros}; "
            f"set data.token_dtype={'uint32' if item == 2 else 'int64'}"
        )
    if item > 2 and (some.view(np.uint16).reshape(len(some), -1)[:, 1] > 15).mean() > 0.25:
        return f"; several ids of 16 bits seem to be read as one of data.token_dtype={token_dtype}"
    return ""
