"""``tokens:<glob>``: files of token ids, mapped into memory."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mhc.data.corpus.indexed import IndexedFiles, block_size
from mhc.data.tokenizers.spelling import first_line
from mhc.data.user_files.formats import stem
from mhc.errors import UserError

_MEASURED = 1 << 20  # ids whose width is looked at
_MAGIC = b"\x93NUMPY"


class TokenFiles(IndexedFiles):
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
        return block_size(self._data, sizes, tokens, 32 << 10)

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


@functools.lru_cache(maxsize=64)  # a map holds a file descriptor, of which a process has about a thousand
def open_tokens(path: Path, token_dtype: str, shown: str) -> np.ndarray:
    """Return the ids of a .npy or raw .bin file, mapped into memory: integers [n].

    Args: ``shown``: its name for messages. Raises: UserError for a file that is no such array.
    """
    kind = path.suffix.lower()
    with path.open("rb") as file:
        has_header = file.read(len(_MAGIC)) == _MAGIC
    if kind == ".npy":
        if not has_header:
            raise UserError(
                f"{shown} is not a readable .npy file: it has no numpy header; raw ids are read from files whose names "
                f"end in .bin, of data.token_dtype={token_dtype}"
            )
        try:
            with warnings.catch_warnings():  # a header in the spelling of Python 2 is read, and numpy says so
                warnings.simplefilter("ignore", UserWarning)
                tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError, SyntaxError, MemoryError, OverflowError) as error:
            objects = "allow_pickle" in str(error) or "Python objects" in str(error)
            said = "it holds Python objects, not integers" if objects else first_line(error)
            raise UserError(f"{shown} is not a readable .npy file: {said}") from None
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise UserError(f"{shown}: wanted one axis of integers, found shape {tokens.shape} of {tokens.dtype}")
        return tokens
    if kind != ".bin":
        raise UserError(f"{shown}: tokens: reads .npy and .bin files, not {path.suffix or 'files without an ending'}")
    if has_header:
        raise UserError(f"{shown} has a numpy header, which raw ids have not; its name must end in .npy")
    item, size = np.dtype(token_dtype).itemsize, path.stat().st_size
    if size % item:
        raise UserError(f"{shown}: {size} bytes are no multiple of the {item} of data.token_dtype={token_dtype}")
    return np.memmap(path, token_dtype, mode="r")


def check_width(tokens: np.ndarray, shown: str, token_dtype: str) -> str:
    """Return a hint for the message that an id is too large: that two narrow ids may be read as one, or "".

    Raises: UserError where ids were written in more bytes than ``token_dtype`` has, so that every second one is 0. Of
      ids up to a million the upper half is at most 15: at every second place, where the lower half is not.
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
