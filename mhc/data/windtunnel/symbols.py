"""Present the ids of a wind tunnel as a tokeniser: they have names, and stand for no text."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from mhc.data.windtunnel.tasks import task
from mhc.errors import UserError


class SymbolTokenizer:
    """Names the ids of a task. It encodes nothing: the task makes ids by itself."""

    unknown_id = -1
    total = False
    spelled: tuple[str, ...] = ()

    def __init__(self, source: str):
        """Name the ids of ``windtunnel:…``. Raises UserError where that is no task."""
        self._source, self._task = source, task(source)
        self.vocab_size = self._task.vocabulary
        self.bos_id = self.eos_id = 0  # no sequence is framed; nothing asks for them
        self.byte_lengths = np.zeros(self.vocab_size, np.int32)
        self.content_hash = f"symbols-{self.vocab_size}-{self._task.name}"

    def encode(self, text: bytes | str) -> NoReturn:
        """Raise UserError: a text has no ids."""
        raise UserError(f"data.tokenizer={self._source} has no ids for text: it names the symbols of a task")

    encode_with_bytes = encode

    def bytes_of(self, ids: np.ndarray, begins: bool) -> np.ndarray:
        """Return int32[n] zeros: no id stands for text."""
        return np.zeros(len(ids), np.int32)

    def lost(self, text: str) -> int:
        """Return 0: there is no text to lose."""
        return 0

    def special_tokens(self) -> dict[str, str]:
        """Return no names: there are no special tokens."""
        return {}

    def starts(self, id_: int) -> bool:
        """Return True: every id has a name of its own."""
        return True

    def decode(self, ids: Any) -> str:
        """Return the names of ids, with a space between two."""
        return " ".join(self._task.symbol(int(id_)) for id_ in np.asarray(ids).reshape(-1))
