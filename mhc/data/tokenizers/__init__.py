"""Open tokenisers: bytes, or a ``tokenizer.json`` file read by the ``tokenizers`` library.

A document enters a batch as ``bos + tokens + eos``. A long one is cut into pieces for training (see
`mhc.data.corpus.pieces.Pieces`): every piece begins with bos, and only the last one ends with eos. ``bos`` is only ever
an input and ``eos`` only ever a target, which stands for 0 bytes of text. Both come from the tokeniser and not from the
text: a text that spells a special token is tokenised letter by letter, unless the tokeniser declares otherwise
(`Tokenizer.spelled`).
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from mhc.data.tokenizers.json_file import SPECIAL, JsonTokenizer, declared_special
from mhc.data.tokenizers.protocol import Tokenizer
from mhc.data.tokenizers.utf8_bytes import ByteTokenizer
from mhc.data.windtunnel.symbols import SymbolTokenizer
from mhc.data.windtunnel.tasks import is_windtunnel
from mhc.errors import UserError

__all__ = ["SPECIAL", "ByteTokenizer", "JsonTokenizer", "Tokenizer", "declared_special", "load"]


def load(spec: str) -> Tokenizer:
    """Return the tokeniser of ``data.tokenizer``: ``bytes``, ``windtunnel:…``, or the path of a ``tokenizer.json``.

    Raises UserError where it is none of them.
    """
    if spec == "bytes":
        return ByteTokenizer()
    if is_windtunnel(spec):
        return SymbolTokenizer(spec)
    path = Path(os.path.expanduser(spec))
    if not path.exists():
        hint = "; did you mean 'bytes'?" if difflib.get_close_matches(spec, ["bytes"]) else ""
        raise UserError(f"data.tokenizer: {spec!r} is neither 'bytes' nor an existing tokenizer.json file{hint}")
    return JsonTokenizer(path)
