"""Tokenisers: bytes, or a ``tokenizer.json`` file read by the ``tokenizers`` library.

Begin and end. A document enters a batch as ``bos + tokens + eos``; of a long one that is cut for training (see
`mhc.data.packing.Pieces`) every piece opens with bos, and the last one alone closes with eos. ``bos`` is an input only,
never a target; ``eos`` is a target only and stands for 0 bytes of text. Both come from the tokeniser, never from the
text: a text that spells a special token is tokenised as the letters that it is made of.
"""

from __future__ import annotations

import codecs
import difflib
import functools
import hashlib
import itertools
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
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_STRAY = "\N{REPLACEMENT CHARACTER}"
_EACH = "mhc-each-stray-byte"


def _each_stray_byte(error: UnicodeError) -> tuple[str, int]:
    """Gives U+FFFD for every stray byte, as byte fallback does; Python has one for the beginning of a character."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return _STRAY * (error.end - error.start), error.end


codecs.register_error(_EACH, _each_stray_byte)


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

    def starts(self, id_: int) -> bool:
        """Whether a sequence may be cut before this id and decoded in two: no character goes across."""
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

    def starts(self, id_: int) -> bool:
        """Whether an id is a byte that a character may begin with."""
        return id_ < 256 and id_ & 0xC0 != 0x80

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

        self._path = str(path)
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
        self._byte_of = np.full(size, -1, np.int16)  # of byte fallback's pieces, by id: decode spells them
        if '"ByteFallback"' in json.dumps(described.get("decoder")):
            for piece, id_ in vocabulary.items():
                if spelled := _BYTE_TOKEN.fullmatch(piece):
                    self._byte_of[id_] = int(spelled[1], 16)
        self.bos_id: int = bos if bos is not None else eos  # type: ignore[assignment]
        self.eos_id: int = eos if eos is not None else bos  # type: ignore[assignment]
        self._byte_level = _is_byte_level(described)
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
        known = (values >= 0) & (values < self.vocab_size)
        keep = values[known & (values != self.bos_id) & (values != self.eos_id)]
        try:
            if (self._byte_of[keep] >= 0x80).any():
                return str(self._tokenizer.decoder.decode(self._pieces(keep)))
            return self._tokenizer.decode(keep.tolist(), skip_special_tokens=True)
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"data.tokenizer: {self._path} cannot decode: {_first_line(error)}") from None

    def _pieces(self, ids: np.ndarray) -> list[str]:
        """The spelling of ids, bytes as the characters that they are.

        The library's own decoder makes every byte of a run U+FFFD where one of them is stray, and so unsays characters
        that were told before; and it leaves a space that is spelled in bytes (E2 96 81) as it is.
        """
        pieces: list[str] = []
        for is_byte, run in itertools.groupby(ids.tolist(), lambda id_: self._byte_of[id_] >= 0):
            if is_byte:
                pieces += bytes(self._byte_of[list(run)].astype(np.uint8)).decode("utf-8", _EACH)
            else:
                pieces += [piece for id_ in run if (piece := self._spellings[id_]) is not None]
        return pieces

    @functools.cached_property
    def _spellings(self) -> list[str | None]:
        """Of each id its piece; None: special, or none."""
        special = {id_ for id_, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        return [None if id_ in special else self._tokenizer.id_to_token(id_) for id_ in range(self.vocab_size)]

    def starts(self, id_: int) -> bool:
        """Whether an id begins with a whole character or with the first byte of one."""
        if self._byte_of[id_] >= 0:
            return bool(self._byte_of[id_] & 0xC0 != 0x80)
        piece = self._spellings[id_]
        if not piece or id_ in (self.bos_id, self.eos_id):
            return False
        inside = _later_bytes() if self._byte_level else _STRAY
        return piece[0] not in inside and self.decode([id_]) != ""


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


def _is_byte_level(described: dict[str, Any]) -> bool:
    """Whether pieces spell bytes by one printable character each."""
    return '"ByteLevel"' in json.dumps([described.get(part) for part in ("pre_tokenizer", "decoder", "normalizer")])


@functools.cache
def _later_bytes() -> frozenset[str]:
    """The characters by which byte-level pieces spell 80 to BF, the bytes that no UTF-8 character begins with."""
    from tokenizers.pre_tokenizers import ByteLevel

    spell = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    return frozenset(spell(chr(0x80 + byte))[0][0][1] for byte in range(0x40))


def _piece_lengths(described: dict[str, Any], vocabulary: dict[str, int], size: int) -> np.ndarray:
    lengths = np.zeros(size, np.int32)
    added = {token["id"]: bool(token["special"]) for token in described.get("added_tokens") or []}
    byte_level = _is_byte_level(described)
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
