"""Files of token ids: opened, and whether their ids are as wide as they are read."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path

import numpy as np

from mhc.data.spelling import first_line
from mhc.errors import UserError

_MEASURED = 1 << 20  # ids whose width is looked at
_MAGIC = b"\x93NUMPY"


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
