"""Tokenisers: bytes, or a ``tokenizer.json`` file read by the ``tokenizers`` library.

Begin and end. A document enters a batch as ``bos + tokens + eos``; of a long one that is cut for training (see
`mhc.data.packing.Pieces`) every piece opens with bos, and the last one alone closes with eos. ``bos`` is an input only,
never a target; ``eos`` is a target only and stands for 0 bytes of text. Both come from the tokeniser, never from the
text: a text that spells a special token is tokenised as the letters that it is made of.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mhc.errors import UserError

# In the order of preference; a file that has none of a list is covered by the policy in `JsonTokenizer`.
_BOS_NAMES = (
    "<s>",
    "<bos>",
    "<|begin_of_text|>",
    "<|startoftext|>",
    "<|bos|>",
    "<｜begin▁of▁sentence｜>",
    "[BOS]",
    "[CLS]",
)
_EOS_NAMES = (
    "</s>",
    "<eos>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|eos|>",
    "<｜end▁of▁sentence｜>",
    "[EOS]",
    "[SEP]",
)
SPECIAL = "tokenizer_config.json"  # beside a tokenizer.json: names its bos_token and eos_token
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer(Protocol):
    """What the pipeline needs of a tokeniser."""

    vocab_size: int  # ids are 0 <= id < vocab_size, bos and eos included
    bos_id: int
    eos_id: int
    byte_lengths: np.ndarray  # int32[vocab_size]: bytes of text that an id stands for, 0 for special ids
    content_hash: str  # hex: equal for tokenisers that give the same ids

    def encode(self, text: bytes | str) -> np.ndarray:
        """int32[n]: the ids of a UTF-8 text, without bos and eos."""
        ...

    def encode_with_bytes(self, text: bytes | str) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32[n], bytes int32[n]): also the bytes of this text that each id covers, summing to its length."""
        ...

    def decode(self, ids: Any) -> str:
        """The text of a sequence of ids; special ids give nothing, broken UTF-8 gives U+FFFD."""
        ...


class ByteTokenizer:
    """Ids 0–255 are the bytes of UTF-8, 256 is bos, 257 is eos: ``vocab_size`` is 258."""

    vocab_size = 258
    bos_id = 256
    eos_id = 257
    content_hash = "bytes-258"

    def __init__(self) -> None:
        self.byte_lengths = np.ones(self.vocab_size, np.int32)
        self.byte_lengths[256:] = 0

    def encode(self, text: bytes | str) -> np.ndarray:
        """int32[bytes of text]."""
        data = text.encode() if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def encode_with_bytes(self, text: bytes | str) -> tuple[np.ndarray, np.ndarray]:
        """(ids, ones), both int32[bytes of text]."""
        ids = self.encode(text)
        return ids, np.ones_like(ids)

    def decode(self, ids: Any) -> str:
        """The ids under 256 as UTF-8."""
        values = np.asarray(ids, np.int64)
        return values[values < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class JsonTokenizer:
    """A ``tokenizer.json`` file.

    bos and eos are those that a ``tokenizer_config.json`` beside it names, else the first of the usual names that the
    file has (``<s>``, ``<|begin_of_text|>``, … and ``</s>``, ``<|endoftext|>``, …). When only one of the two is found
    it serves as both; when none is, one id is added behind the file's vocabulary and serves as both. Truncation,
    padding and the post-processor's special tokens are switched off.

    ``encode_with_bytes`` is exact for a document: it follows the offsets into the text, so that text which the
    normaliser drops belongs to the next id (at the end: to the last one), and a character that is split over several
    ids belongs to the first. ``byte_lengths`` is the same without a document at hand: exact for byte-level BPE and for
    byte fallback, the length of the piece's spelling otherwise.
    """

    def __init__(self, path: str | Path, special: Mapping[str, str] | None = None):
        """Reads the file; ``special``: {bos_token, eos_token}, None: those that lie beside it.

        Raises UserError when it is missing or no tokeniser, or when a named token is not in it.
        """
        import tokenizers

        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise UserError(f"data.tokenizer: cannot read {path}: {error.strerror}") from None
        try:
            described = json.loads(content)
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"data.tokenizer: {path} is not a tokenizer.json file: {_first_line(error)}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a text is text
        special = declared_special(Path(path)) if special is None else special
        named = json.dumps(dict(special), sort_keys=True).encode() if special else b""
        self.content_hash = hashlib.sha256(content + named).hexdigest()[:16]

        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UserError(f"data.tokenizer: {path} has an empty vocabulary")
        size = max(vocabulary.values()) + 1
        for role, token in special.items():
            if token not in vocabulary:
                raise UserError(f"{Path(path).with_name(SPECIAL)}: {role} {token!r} is not in {Path(path).name}")
        names = {"bos_token": _BOS_NAMES, "eos_token": _EOS_NAMES}
        chosen = {role: (special[role],) if role in special else usual for role, usual in names.items()}
        bos, eos = (next((vocabulary[name] for name in chosen[role] if name in vocabulary), None) for role in names)
        if bos is None and eos is None:
            bos = eos = size
            size += 1
        self.vocab_size = size
        self.bos_id: int = bos if bos is not None else eos  # type: ignore[assignment]
        self.eos_id: int = eos if eos is not None else bos  # type: ignore[assignment]
        self.byte_lengths = _piece_lengths(described, vocabulary, size)
        self.byte_lengths[[self.bos_id, self.eos_id]] = 0

    def encode(self, text: bytes | str) -> np.ndarray:
        """int32[n]; raises UnicodeDecodeError for bytes that are not UTF-8 (sources check that before)."""
        string = text.decode() if isinstance(text, bytes) else text
        return np.asarray(self._tokenizer.encode(string, add_special_tokens=False).ids, np.int32)

    def encode_with_bytes(self, text: bytes | str) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32[n], bytes int32[n]); the bytes sum to the text's length unless n is 0."""
        string = text.decode() if isinstance(text, bytes) else text
        encoding = self._tokenizer.encode(string, add_special_tokens=False)
        ids = np.asarray(encoding.ids, np.int32)
        if not len(ids):
            return ids, np.zeros(0, np.int32)
        byte_at = _byte_offsets(string)
        ends = np.asarray(encoding.offsets, np.int64).reshape(-1, 2)[:, 1]
        covered = np.maximum.accumulate(byte_at[ends])
        covered[-1] = byte_at[-1]
        return ids, np.diff(covered, prepend=0).astype(np.int32)

    def decode(self, ids: Any) -> str:
        """The text of the ids, special ones left out."""
        values = np.asarray(ids, np.int64)
        keep = values[(values != self.bos_id) & (values != self.eos_id)]
        return self._tokenizer.decode(keep.tolist(), skip_special_tokens=True)


def declared_special(path: Path) -> dict[str, str]:
    """{bos_token, eos_token} that the ``tokenizer_config.json`` beside a tokenizer.json names, as far as it does.

    Raises UserError where that file is not JSON.
    """
    beside = path.with_name(SPECIAL)
    if not beside.is_file():
        return {}
    try:
        described = json.loads(beside.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"data.tokenizer: cannot read {beside}: {_first_line(error)}") from None
    found: dict[str, str] = {}
    for role in ("bos_token", "eos_token"):
        token = described.get(role) if isinstance(described, dict) else None
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[role] = token
    return found


def load(spec: str) -> Tokenizer:
    """The tokeniser of ``data.tokenizer``: ``bytes``, or the path of a ``tokenizer.json`` file. Raises UserError."""
    if spec == "bytes":
        return ByteTokenizer()
    path = Path(spec).expanduser()
    if not path.exists():
        hint = "; did you mean 'bytes'?" if difflib.get_close_matches(spec, ["bytes"]) else ""
        raise UserError(f"data.tokenizer: {spec!r} is neither 'bytes' nor an existing tokenizer.json file{hint}")
    return JsonTokenizer(path)


def _byte_offsets(string: str) -> np.ndarray:
    """int64[len(string) + 1]: where each character starts in UTF-8, and the length in bytes."""
    if string.isascii():
        return np.arange(len(string) + 1, dtype=np.int64)
    points = np.frombuffer(string.encode("utf-32-le"), np.uint32)
    widths = 1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000)
    return np.concatenate([[0], np.cumsum(widths, dtype=np.int64)])


def _piece_lengths(described: dict[str, Any], vocabulary: dict[str, int], size: int) -> np.ndarray:
    lengths = np.zeros(size, np.int32)
    added = {token["id"]: bool(token["special"]) for token in described.get("added_tokens") or []}
    pipeline = json.dumps([described.get("pre_tokenizer"), described.get("decoder"), described.get("normalizer")])
    byte_level = '"ByteLevel"' in pipeline
    byte_fallback = bool(described["model"].get("byte_fallback"))
    prefix = described["model"].get("continuing_subword_prefix") or ""
    for piece, id_ in vocabulary.items():
        if id_ in added:
            lengths[id_] = 0 if added[id_] else len(piece.encode())
        elif byte_level:
            lengths[id_] = len(piece)  # one printable character for each byte
        elif byte_fallback and _BYTE_TOKEN.fullmatch(piece):
            lengths[id_] = 1
        else:
            lengths[id_] = len(piece.removeprefix(prefix).replace("▁", " ").encode())
    return lengths


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
