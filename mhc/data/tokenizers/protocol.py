"""Declare what the pipeline needs of a tokeniser."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np


class Tokenizer(Protocol):
    """Turns text into ids and back."""

    vocab_size: int  # ids are 0 <= id < vocab_size, bos and eos included
    bos_id: int
    eos_id: int
    byte_lengths: np.ndarray  # int32[vocab_size]: bytes of text that an id stands for, 0 for special ids
    content_hash: str  # hex: equal for tokenisers that give the same ids
    unknown_id: int  # the id of text that the vocabulary does not know; -1: there is none
    total: bool  # whether every text can be encoded
    spelled: tuple[str, ...]  # spellings of bos and eos that a text turns into them

    def encode(self, text: bytes | str) -> np.ndarray:
        """Return int32[n]: the ids of a UTF-8 text, without bos and eos. Raises UserError for a text that has none."""
        ...

    def encode_with_bytes(self, text: bytes | str) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids int32[n], bytes int32[n]): also the bytes of this text that each id covers; they add up to it."""
        ...

    def bytes_of(self, ids: np.ndarray, begins: bool) -> np.ndarray:
        """Return int32[n]: the bytes of text that each of ids [n] stands for; with ``begins`` they begin a text."""
        ...

    def lost(self, text: str) -> int:
        """Return how many bytes of a text are not in its ids: dropped, changed by a normaliser, or unknown."""
        ...

    def decode(self, ids: Any) -> str:
        """Return the text of a sequence of ids; special ids give nothing, and broken UTF-8 gives U+FFFD."""
        ...

    def special_tokens(self) -> dict[str, str]:
        """Return {bos_token, eos_token, unk_token: its spelling}, of those that have one in a tokenizer.json."""
        ...

    def starts(self, id_: int) -> bool:
        """Return whether a sequence may be cut before this id and decoded in two: no character goes across."""
        ...
