"""Read the spelling of tokenisers: bytes, spaces and stretches of text; and turn the library's errors into lines."""

from __future__ import annotations

import codecs
import contextlib
import functools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mhc.errors import UserError

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a piece of byte fallback
STRAY = "\N{REPLACEMENT CHARACTER}"
EACH = "mhc-each-stray-byte"  # name of the error handler below


def _each_stray_byte(error: UnicodeError) -> tuple[str, int]:
    """Return one U+FFFD for each stray byte, as byte fallback does; Python's ``replace`` gives one for several."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return STRAY * (error.end - error.start), error.end


codecs.register_error(EACH, _each_stray_byte)


@contextlib.contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turn whatever the tokenizers library raises, bare exceptions and panics of its Rust code, into a UserError."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{what}: {first_line(error)}") from None


def utf8(text: str) -> bytes:
    """Return a text's UTF-8. Raises UserError for an unpaired surrogate, which is half a character."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"not UTF-8: character {error.start + 1} is an unpaired surrogate (U+{ord(text[error.start]):04X})"
        ) from None


def stretches(offsets: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, slice]]:
    """Yield (first character, end, ids) of the stretches of text that no id crosses."""
    first, start, end = 0, *(offsets[0] if offsets else (0, 0))
    for index, (begin, stop) in enumerate(offsets):
        if begin >= end and index:
            yield start, end, slice(first, index)
            first, start = index, begin
        end = max(end, stop)
    if offsets:
        yield start, end, slice(first, len(offsets))


def plain_decoder(tokenizer: Any, described: dict[str, Any]) -> Any:
    """Return the file's decoder; where it has none, one that adds no space which is not in the ids."""
    from tokenizers import decoders

    if tokenizer.decoder is not None:
        return tokenizer.decoder
    model = described["model"]
    if is_byte_level(described):
        return decoders.ByteLevel()
    if '"Metaspace"' in json.dumps(described.get("pre_tokenizer")):
        return decoders.Metaspace()
    if model.get("continuing_subword_prefix"):
        return decoders.WordPiece(prefix=model["continuing_subword_prefix"], cleanup=False)
    if model.get("end_of_word_suffix"):
        return decoders.BPEDecoder(suffix=model["end_of_word_suffix"])
    # Of whole words one is as good as the other: between any two of them there is a space.
    return decoders.WordPiece(prefix="\0", cleanup=False) if model.get("type") == "WordLevel" else decoders.Fuse()


def byte_offsets(string: str) -> np.ndarray:
    """Return int64[len(string) + 1]: where each character starts in UTF-8, and the length in bytes."""
    if string.isascii():
        return np.arange(len(string) + 1, dtype=np.int64)
    points = np.frombuffer(string.encode("utf-32-le"), np.uint32)
    widths = 1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000)
    return np.concatenate([[0], np.cumsum(widths, dtype=np.int64)])


def is_byte_level(described: dict[str, Any]) -> bool:
    """Return whether pieces spell bytes by one printable character each."""
    return '"ByteLevel"' in json.dumps([described.get(part) for part in ("pre_tokenizer", "decoder", "normalizer")])


@functools.cache
def later_bytes() -> frozenset[str]:
    """Return the characters by which byte-level pieces spell 80 to BF, with which no UTF-8 character begins."""
    from tokenizers.pre_tokenizers import ByteLevel

    spell = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    return frozenset(spell(chr(0x80 + byte))[0][0][1] for byte in range(0x40))


def piece_lengths(described: dict[str, Any], vocabulary: dict[str, int], size: int) -> np.ndarray:
    """Return int32[size]: the bytes that each id stands for by its spelling alone, 0 for special ids."""
    lengths = np.zeros(size, np.int32)
    added = {token["id"]: bool(token["special"]) for token in described.get("added_tokens") or []}
    byte_level = is_byte_level(described)
    byte_fallback = bool(described["model"].get("byte_fallback"))
    prefix = described["model"].get("continuing_subword_prefix") or ""
    for piece, id_ in vocabulary.items():
        if id_ in added:
            lengths[id_] = 0 if added[id_] else len(piece.encode())
        elif byte_level:
            lengths[id_] = len(piece)  # one printable character for each byte
        elif byte_fallback and BYTE_TOKEN.fullmatch(piece):
            lengths[id_] = 1
        else:
            lengths[id_] = len(piece.removeprefix(prefix).replace("▁", " ").encode())
    return lengths


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's type if the message is empty."""
    return (str(error).splitlines() or [type(error).__name__])[0]
