"""Define what the pipeline needs of a tokeniser."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np


class Tokenizer(Protocol):
    """Defines what the pipeline needs of a tokeniser."""

    vocab_size: int  # ids are 0 <= id < vocab_size, bos and eos included
    bos_id: int
    eos_id: int
    byte_lengths: np.ndarray  # int32[vocab_size]: bytes of text that an id stands for, 0 for special ids
    content_hash: str  # hex: equal for tokenisers that give the same ids
    unknown_id: int  # what text becomes that the vocabulary has no ids for; -1: none
    total: bool  # whether every text can be encoded
    spelled: tuple[str, ...]  # spellings of bos and eos that a text turns into them

    def encode(self, text: bytes | str) -> np.ndarray:
        """Return int32[n]: the ids of a UTF-8 text, without bos and eos."""
        ...

    def encode_with_bytes(self, text: bytes | str) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids int32[n], bytes int32[n]): the bytes of this text that each id covers sum to its length."""
        ...

    def bytes_of(self, ids: np.ndarray, begins: bool) -> np.ndarray:
        """Return int32[n]: bytes of the text that ids [n] stand for in a row; ``begins``: at a text's beginning."""
        ...

    def lost(self, text: str) -> int:
        """Return the bytes of a text that its ids do not tell: dropped, changed by a normaliser, or unknown."""
        ...

    def decode(self, ids: Any) -> str:
        """Return the text of a sequence of ids; special ids give nothing, broken UTF-8 gives U+FFFD."""
        ...

    def special_tokens(self) -> dict[str, str]:
        """Return {bos_token, eos_token, unk_token}: their spellings, of those that have one in a tokenizer.json."""
        ...

    def starts(self, id_: int) -> bool:
        """Return whether a sequence may be cut before this id and decoded in two: no character goes across."""
        ...
