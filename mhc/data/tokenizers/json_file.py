"""Tokenise text as a ``tokenizer.json`` file says, by the ``tokenizers`` library."""

from __future__ import annotations

import difflib
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mhc.data.tokenizers.spelling import (
    BYTE_TOKEN,
    EACH,
    STRAY,
    byte_offsets,
    first_line,
    is_byte_level,
    later_bytes,
    library_errors,
    piece_lengths,
    plain_decoder,
    stretches,
    utf8,
)
from mhc.data.user_files.formats import pointer
from mhc.errors import UserError

if TYPE_CHECKING:
    import tokenizers

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
_MOST = 1 << 24  # ids


class JsonTokenizer:
    """Tokenises text as a ``tokenizer.json`` file says.

    bos and eos are those that a ``tokenizer_config.json`` beside it names, or else the first of the usual names in the
    file (``<s>``, ``<|begin_of_text|>``, … and ``</s>``, ``<|endoftext|>``, …). When only one of the two is found
    it serves as both; when none is, one id is added behind the file's vocabulary and serves as both. Truncation,
    padding, the post-processor's special tokens and a BPE's dropout are switched off.

    ``encode_with_bytes`` is exact for a document: it follows the offsets into the text, so that text which the
    normaliser drops belongs to the next id (at the end: to the last one), and a character that is split over several
    ids belongs to the first. ``byte_lengths`` is the same without a document at hand: exact for byte-level BPE and for
    byte fallback, the length of the piece's spelling otherwise.
    """

    def __init__(self, path: str | Path, special: Mapping[str, str] | None = None):
        """Read the file; ``special`` has {bos_token, eos_token}, or None for those that a file beside it names.

        Raises UserError when it is missing or no tokeniser, or when a named token is not in it.
        """
        import tokenizers

        self._path = str(path)
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise UserError(f"data.tokenizer: cannot read {path}: {error.strerror}") from None
        if what := pointer(content):
            raise UserError(f"data.tokenizer: {path} is a {what}")
        with library_errors(f"data.tokenizer: {path} is not a tokenizer.json file"):
            described = json.loads(content)
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
            if described["model"].get("dropout"):  # ids drawn at random: no two runs, nor two readings, would agree
                described["model"]["dropout"] = None
                self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(described))
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
        if size > _MOST:
            raise UserError(f"data.tokenizer: {path} has the id {size - 1}, allowed: below {_MOST}")
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
                if spelled := BYTE_TOKEN.fullmatch(piece):
                    self._byte_of[id_] = int(spelled[1], 16)
        self.bos_id: int = bos if bos is not None else eos  # type: ignore[assignment]
        self.eos_id: int = eos if eos is not None else bos  # type: ignore[assignment]
        self._byte_level = is_byte_level(described)
        self.byte_lengths = piece_lengths(described, vocabulary, size)
        self.byte_lengths[[self.bos_id, self.eos_id]] = 0
        model = described["model"]
        unknown = model.get("unk_id")
        if unknown is None:
            unknown = vocabulary.get(model.get("unk_token"))
        self.unknown_id = -1 if unknown is None else int(unknown)
        self._plain_decoder = plain_decoder(self._tokenizer, described)
        self._added = np.full(size, -1, np.int32)  # bytes that an id adds behind others, as they are asked for
        self._neighbour = f"x{model.get('end_of_word_suffix') or ''}"  # a word that others stand behind
        with library_errors(f"data.tokenizer: {path} cannot decode"):
            self._space_in_bytes = self._plain_decoder.decode(["x", "▁"]) == "x " and bool((self._byte_of >= 0).any())
        # Characters for people's own use, which no vocabulary has.
        self.total = not self._fails("\ue000") and not self._fails("\U0010fffd \ue000")
        self.spelled = tuple(
            token for token, id_ in vocabulary.items() if id_ in (bos, eos) and self._spells(token, id_)
        )

    def encode(self, text: bytes | str) -> np.ndarray:
        """Return the ids of a text, int32[n].

        Raises:
          UserError: the tokeniser has no ids for the text.
          UnicodeDecodeError: the bytes are not UTF-8, which sources check before.
        """
        return np.asarray(self._encode(text.decode() if isinstance(text, bytes) else text).ids, np.int32)

    def _encode(self, text: str) -> tokenizers.Encoding:
        try:
            with library_errors(f"data.tokenizer: {self._path} cannot encode"):
                return self._tokenizer.encode(text, add_special_tokens=False)
        except UserError as error:
            utf8(text)
            fails = next((part for part in [*text.split(), *re.findall(r"\s", text)] if self._fails(part)), text)
            raise UserError(f"{error}: {fails if len(fails) <= 40 else fails[:40] + '…'!r}") from None

    def _spells(self, token: str, id_: int) -> bool:
        """Return whether the text of a special token becomes its id."""
        text = f"x {token} x"
        return not self._fails(text) and id_ in self._encode(text).ids

    def _fails(self, text: str) -> bool:
        try:
            with library_errors(""):
                self._tokenizer.encode(text, add_special_tokens=False)
        except UserError:
            return True
        return False

    def encode_with_bytes(self, text: bytes | str) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids int32[n], bytes int32[n]); the bytes add up to the length of the text unless n is 0."""
        string = text.decode() if isinstance(text, bytes) else text
        encoding = self._encode(string)
        ids = np.asarray(encoding.ids, np.int32)
        if not len(ids):
            return ids, np.zeros(0, np.int32)
        byte_at = byte_offsets(string)
        ends = np.asarray(encoding.offsets, np.int64).reshape(-1, 2)[:, 1]
        covered = np.maximum.accumulate(byte_at[ends])
        covered[-1] = byte_at[-1]
        return ids, np.diff(covered, prepend=0).astype(np.int32)

    def decode(self, ids: Any) -> str:
        """Return the text of ids, without special ones."""
        values = np.asarray(ids, np.int64)
        known = (values >= 0) & (values < self.vocab_size)
        keep = values[known & (values != self.bos_id) & (values != self.eos_id)]
        if not len(keep):  # a decoder that strips the end panics
            return ""
        with library_errors(f"data.tokenizer: {self._path} cannot decode"):
            if (self._byte_of[keep] >= 0x80).any():
                return str(self._tokenizer.decoder.decode(self._pieces(keep)))
            return self._tokenizer.decode(keep.tolist(), skip_special_tokens=True)

    def bytes_of(self, ids: np.ndarray, begins: bool) -> np.ndarray:
        """Return int32[n]: how many bytes each id adds to the decoded text; a stray byte counts as one.

        A decoder may leave out what opens a text, as the space that SentencePiece puts there. It may spell a space in
        three bytes (E2 96 81), of which the first counts.
        """
        if self._byte_level:
            return self.byte_lengths[ids]
        ids = np.asarray(ids)
        for id_ in np.unique(ids[self._added[ids] < 0]).tolist():
            self._added[id_] = self._bytes_behind([self._neighbour], id_)
        lengths = self._added[ids]
        if self._space_in_bytes:
            values = self._byte_of[ids]
            (places,) = np.nonzero((values[:-2] == 0xE2) & (values[1:-1] == 0x96) & (values[2:] == 0x81))
            lengths[places + 1] = lengths[places + 2] = 0
        (visible,) = np.nonzero(lengths)
        if begins and len(visible):
            first = int(visible[0])
            is_space = self._space_in_bytes and first + 2 < len(ids) and not lengths[first + 1 : first + 3].any()
            opening = ids[first : first + 3] if is_space and self._byte_of[ids[first]] == 0xE2 else ids[[first]]
            if len(opening) > 1 or self._byte_of[ids[first]] < 0x80:
                lengths[first] = len(self._plain_decoder.decode(self._pieces(opening)).encode())
        return lengths

    def _bytes_behind(self, before: list[str], id_: int) -> int:
        if self._byte_of[id_] >= 0:
            return 1
        piece = None if id_ in (self.bos_id, self.eos_id) else self._spellings[id_]
        if piece is None:
            return 0
        with library_errors(f"data.tokenizer: {self._path} cannot decode"):
            start = len(self._plain_decoder.decode(before))
            return len(self._plain_decoder.decode([*before, piece])[start:].encode())

    def lost(self, text: str) -> int:
        """Return how many bytes of a text are not in its ids: dropped, changed by a normaliser, or unknown.

        If the ids decode to the text, nothing is lost. Otherwise each stretch of text is compared with what its ids
        decode to, and what is missing there is lost. Spaces that a decoder puts between all ids do not count.
        """
        encoding = self._encode(text)
        ids = np.asarray(encoding.ids, np.int64)
        if not (ids == self.unknown_id).any() and self.decode(ids) == text:
            return 0
        lost, end, known = 0, 0, functools.lru_cache(maxsize=1 << 14)(self._lost_of)
        for start, stop, members in stretches(encoding.offsets):
            piece = tuple(ids[members].tolist())
            if self.unknown_id in piece:
                lost += len(text[start:stop].encode()) + known(text[end:start], piece, not end)
            else:
                lost += known(text[end:stop], piece, not end)
            end = stop
        return lost + len(text[end:].encode())

    def _lost_of(self, text: str, ids: tuple[int, ...], first: bool) -> int:
        """Return how many bytes of a stretch its ids do not add to the decoded text; ``first``: no text is before."""
        if not text:
            return 0
        pieces, before = self._pieces(np.asarray(ids)), [] if first else [self._neighbour]
        with library_errors(f"data.tokenizer: {self._path} cannot decode"):
            start = len(self._plain_decoder.decode(before)) if before else 0
            told = self._plain_decoder.decode([*before, *pieces])[start:]
        if text in told:
            return 0
        blocks = difflib.SequenceMatcher(None, text, told, autojunk=False).get_matching_blocks()
        return len(text.encode()) - sum(len(text[a : a + size].encode()) for a, _, size in blocks)

    def _pieces(self, ids: np.ndarray) -> list[str]:
        """Return the spellings of ids, with bytes put together into characters.

        The library's own decoder turns a whole run of bytes into U+FFFD if one of them is stray, and so takes back
        characters that were streamed before; and it leaves a space that is spelled in bytes (E2 96 81) as it is.
        """
        pieces: list[str] = []
        for is_byte, run in itertools.groupby(ids.tolist(), lambda id_: self._byte_of[id_] >= 0):
            if is_byte:
                pieces += bytes(self._byte_of[list(run)].astype(np.uint8)).decode("utf-8", EACH)
            else:
                pieces += [piece for id_ in run if (piece := self._spellings[id_]) is not None]
        return pieces

    @functools.cached_property
    def _spellings(self) -> list[str | None]:
        """Return the piece of each id; None for special ids and gaps."""
        special = {id_ for id_, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        return [None if id_ in special else self._tokenizer.id_to_token(id_) for id_ in range(self.vocab_size)]

    def special_tokens(self) -> dict[str, str]:
        """Return {bos_token, eos_token, unk_token: its spelling}, of those that the file has."""
        ids = {"bos_token": self.bos_id, "eos_token": self.eos_id, "unk_token": self.unknown_id}
        spelled = {role: self._tokenizer.id_to_token(id_) for role, id_ in ids.items() if id_ >= 0}
        return {role: token for role, token in spelled.items() if token is not None}

    def starts(self, id_: int) -> bool:
        """Return whether an id begins with a whole character or with the first byte of one."""
        if self._byte_of[id_] >= 0:
            return bool(self._byte_of[id_] & 0xC0 != 0x80)
        piece = self._spellings[id_]
        if not piece or id_ in (self.bos_id, self.eos_id):
            return False
        inside = later_bytes() if self._byte_level else STRAY
        return piece[0] not in inside and self.decode([id_]) != ""


def declared_special(path: Path) -> dict[str, str]:
    """Return those of {bos_token, eos_token} that the ``tokenizer_config.json`` beside a tokenizer.json names.

    Raises:
      UserError: that file is not JSON.
    """
    beside = path.with_name(SPECIAL)
    if not beside.is_file():
        return {}
    try:
        described = json.loads(beside.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"data.tokenizer: cannot read {beside}: {first_line(error)}") from None
    special: dict[str, str] = {}
    for role in ("bos_token", "eos_token"):
        token = described.get(role) if isinstance(described, dict) else None
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            special[role] = token
    return special
