"""Measure how much of a corpus a tokeniser loses, and check that it can encode it.

A tokeniser loses letters and spaces that it drops, text that its normaliser changes, and text that becomes the unknown
id. Bits per byte divides by the bytes of the text, so a model is credited with every lost byte without predicting it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mhc.data.corpus.prepared import Prepared
from mhc.data.corpus.sources import Source, each_source
from mhc.data.shards.records import Tokenised
from mhc.data.tokenizers import ByteTokenizer, Tokenizer
from mhc.data.warning import warn_once
from mhc.errors import UserError

LIMIT = 0.001  # share of lost bytes above which bits per byte means nothing
_DOCUMENTS = 64  # documents that are measured
_SAMPLE = 1 << 18  # bytes of text that are measured
_CHECKED = 16 << 20  # bytes of text that are encoded at opening where a tokeniser cannot encode every text


def share_lost(source: Source, tokenizer: Tokenizer) -> float:
    """Return the share of the bytes that ``tokenizer`` loses, from 0 to 1, in documents spread evenly over the source.

    For ids without text it is the share of unknown ids. For a prepared corpus it is what was measured when the corpus
    was prepared; in a folder of an older version, text that a normaliser changed is not counted.

    Raises:
      UserError: a document cannot be read or encoded.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return 0.0
    stored = [_stored(part) for part in each_source(source)]
    if not any(share is None for share in stored):
        return max(share for share in stored if share is not None)
    count = min(len(source), _DOCUMENTS)
    lost = total = 0
    for index in np.linspace(0, len(source) - 1, count).astype(int).tolist():
        content = source[index]
        try:
            if isinstance(content, bytes):
                text = _beginning(content, _SAMPLE // count)
                lost, total = lost + tokenizer.lost(text), total + len(text.encode())
            elif isinstance(content, Tokenised):
                lost, total = lost + _lost_of_ids(content, tokenizer), total + _size(content, tokenizer)
            else:
                lost, total = lost + int((content == tokenizer.unknown_id).sum()), total + len(content)
        except UserError as error:
            raise UserError(f"{source.name(index)}: {error}") from None
    return max(lost / max(total, 1), *(share or 0.0 for share in stored))


def why_withheld(share: float, name: str) -> str | None:
    """Return why bits per byte is null, as a clause; None if it is not. ``name`` is the tokeniser's."""
    if share <= LIMIT:
        return None
    return f"{describe(share, name)}; bits per byte is null above {LIMIT:.1%}"


def describe(share: float, name: str) -> str:
    """Return the share of lost bytes as a clause. ``name`` is the tokeniser's."""
    shown = f"{share:.2%}" if share >= 5e-5 or not share else "less than 0.01%"
    return f"{name} loses {shown} of the text's bytes (dropped, normalised away or on the unknown id)"


def check(source: Source, tokenizer: Tokenizer) -> None:
    """Encode the beginning of each corpus if its tokeniser cannot encode every text, so that a run fails at its start.

    Raises:
      UserError: a document cannot be encoded; the line names its file and place.
    """
    if tokenizer.spelled and _has_text(source):
        warn_once(
            f"data.tokenizer reads the text {' and '.join(map(repr, tokenizer.spelled))} as the id that begins or ends "
            'a document; if its entry among added_tokens in tokenizer.json has "special": true, it is read as letters'
        )
    if tokenizer.total:
        return
    for part in each_source(source):
        left = _CHECKED
        for index in range(len(part)):
            content = part[index]
            if not isinstance(content, bytes) or left <= 0:
                break
            left -= len(content)
            try:
                tokenizer.encode(content)
            except UserError as error:
                raise UserError(f"{part.name(index)}: {error}") from None


def _has_text(source: Source) -> bool:
    """Return whether a source has text, which this process tokenises."""
    return any(isinstance(part[0], bytes) for part in each_source(source))


def worst(shares: Iterable[float]) -> float:
    """Return the largest of some shares; 0 of none."""
    return max(shares, default=0.0)


def _stored(source: Source) -> float | None:
    return source.manifest.get("lost") if isinstance(source, Prepared) else None


def _beginning(content: bytes, size: int) -> str:
    """Return a text's first ``size`` bytes at most, cut where a word ends."""
    if len(content) <= size:
        return content.decode()
    text = content[:size].decode(errors="ignore")
    return text[: max(text.rfind(" "), text.rfind("\n"), 0)] or text


def _size(content: Tokenised, tokenizer: Tokenizer) -> int:
    lengths = tokenizer.byte_lengths[content.ids] if content.lengths is None else content.lengths
    return int(lengths.sum(dtype=np.int64)) + content.rest


def _lost_of_ids(content: Tokenised, tokenizer: Tokenizer) -> int:
    """Return how many bytes of a document became the unknown id or are missing from what its ids decode to."""
    lengths = tokenizer.byte_lengths[content.ids] if content.lengths is None else content.lengths
    unknown = int(lengths[content.ids == tokenizer.unknown_id].sum(dtype=np.int64))
    known = content.ids[content.ids != tokenizer.unknown_id]
    return unknown + max(_size(content, tokenizer) - unknown - len(tokenizer.decode(known).encode()), 0)
