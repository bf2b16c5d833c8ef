"""Tokenise text into the bytes of its UTF-8: the tokeniser ``bytes``."""

from __future__ import annotations

from typing import Any

import numpy as np

from mhc.data.tokenizers.spelling import utf8


class ByteTokenizer:
    """Gives each byte of UTF-8 its value as id; 256 is bos and 257 is eos, so that ``vocab_size`` is 258."""

    vocab_size = 258
    bos_id = 256
    eos_id = 257
    content_hash = "bytes-258"
    unknown_id = -1
    total = True
    spelled: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.byte_lengths = np.ones(self.vocab_size, np.int32)
        self.byte_lengths[256:] = 0

    def encode(self, text: bytes | str) -> np.ndarray:
        """Return the bytes of a text, int32[n]. Raises UserError for half a character."""
        data = utf8(text) if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def encode_with_bytes(self, text: bytes | str) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids, ones), both int32[n], of the n bytes of a text."""
        ids = self.encode(text)
        return ids, np.ones_like(ids)

    def bytes_of(self, ids: np.ndarray, begins: bool) -> np.ndarray:
        """Return int32[n]: 1 for each byte, 0 for bos and eos."""
        return self.byte_lengths[ids]

    def lost(self, text: str) -> int:
        """Return 0: every byte has an id."""
        return 0

    def special_tokens(self) -> dict[str, str]:
        """Return the spellings of bos and eos in the files that `mhc.interop.export` writes."""
        return {"bos_token": "<s>", "eos_token": "</s>"}

    def starts(self, id_: int) -> bool:
        """Return whether an id is a byte that a character may begin with."""
        return id_ < 256 and id_ & 0xC0 != 0x80

    def decode(self, ids: Any) -> str:
        """Return the ids below 256 as UTF-8 text; bytes that are none become U+FFFD."""
        values = np.asarray(ids, np.int64)
        return values[values < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")
