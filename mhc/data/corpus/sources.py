"""Open sources of documents by the name that ``data.source`` gives.

stdlib, tfds:<name>, text:<glob>, tokens:<glob>, prepared:<folder>. A source is one split of a corpus with random
access. Its documents are UTF-8 text (bytes) or, for ``tokens:`` and ``prepared:``, ids.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

import numpy as np

from mhc.config import DataConfig, Share, shares
from mhc.data import tokenizers
from mhc.data.corpus import stdlib
from mhc.data.corpus.prepared import Prepared
from mhc.data.corpus.text import TextFiles
from mhc.data.corpus.tfds import TensorFlowDataset, open_tfds
from mhc.data.corpus.token_ids import TokenFiles
from mhc.data.shards.records import Tokenised
from mhc.data.user_files.local_copies import cache_directory
from mhc.data.windtunnel.rows import refuse_documents

Split = Literal["train", "validation"]


class Source(Protocol):
    """Reads the documents of one split, at least one."""

    label: str  # how the user named the corpus
    fingerprint: str  # hex: equal when the corpus and its order are (names and sizes stand for contents)
    holdout: float | None  # the share of the corpus that is held out; None: it is read whole, or has its own splits

    @property
    def sizes(self) -> np.ndarray | None:
        """Return int64[n]: about the bytes (ids) of each document; None: too many to find out."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> bytes | np.ndarray | Tokenised:
        """Return UTF-8 text, int64[n] ids, or ids with the bytes that they stand for."""
        ...

    def ends(self, index: int) -> bool:
        """Return whether the document ends with this one (False: a block, see `mhc.data.corpus.indexed`)."""
        ...

    def begins(self, index: int) -> bool:
        """Return whether the document begins with this one (False: a later block)."""
        ...

    def name(self, index: int) -> str:
        """Return file and place, for messages."""
        ...


def open_source(data: DataConfig, split: Split) -> Source:
    """Open a split of the corpus that ``data`` describes; of several sources, all one after the other.

    ``train`` is that split of ``data.source``. ``validation`` is ``data.validation`` when that names another corpus:
    all of it for text:, tokens: and prepared:, its validation split for stdlib and tfds:. Otherwise it is what
    ``data.source`` holds out: its own validation split (TFDS: ``validation``, else ``test``), or a share of
    ``data.holdout`` of it.

    Raises UserError for everything that is wrong with the corpus.
    """
    refuse_documents(data)
    several = parts(data, split)
    if len(several) == 1:
        return _open_one(several[0][1], split)
    return Joined([_open_one(own, split) for _, own in several], data.validation or data.source)


def parts(data: DataConfig, split: Split) -> tuple[tuple[Share, DataConfig], ...]:
    """Return the sources of a split, each with its own config; most splits have one, whose name is "".

    A mixture without ``data.validation`` holds out a part of each of its sources, under the source's name.
    """
    training = shares(data.source)
    sets = () if data.validation is None else shares(data.validation, "data.validation")
    held_out = {one.source for one in training}
    if sets:
        held_out &= {one.source for one in sets}

    def own(one: Share, other: Share | None) -> DataConfig:
        """Return the config of one source, which holds out a part of itself unless ``other`` serves for validation."""
        return dataclasses.replace(data, source=one.source, validation=None if other is None else other.source)

    if split == "train":
        return tuple((one, own(one, None if one.source in held_out else sets[0])) for one in training)
    if not sets:
        return tuple((one, own(one, None)) for one in training)
    return tuple((one, own(one, None) if one.source in held_out else own(training[0], one)) for one in sets)


def _open_one(data: DataConfig, split: Split) -> Source:
    apart = data.validation is not None and data.validation != data.source
    spec = data.validation if split == "validation" and data.validation is not None else data.source
    kind, _, rest = spec.partition(":")  # one of the five kinds, by DataConfig
    if spec == "stdlib":
        folder = stdlib.prepare(cache_directory(data))
        return TensorFlowDataset(folder, "text", split, "stdlib", data.holdout, whole=False)
    if kind == "tfds":
        return open_tfds(data, rest, split, whole=apart)
    if kind == "text":
        return TextFiles(data, rest, split, whole=apart)
    if kind == "prepared":
        return Prepared(data, rest, split, whole=apart)
    return TokenFiles(data, rest, split, whole=apart)


def documents(data: DataConfig, split: Split) -> Iterator[bytes]:
    """Yield the raw text of a split's documents (or blocks of them), in order: the bytes that bits per byte counts.

    Documents of ids are decoded with ``data.tokenizer``. Raises UserError as `open_source` does.
    """
    source = open_source(data, split)
    tokenizer: tokenizers.Tokenizer | None = None
    for index in range(len(source)):
        document = source[index]
        if not isinstance(document, bytes):
            tokenizer = tokenizer or tokenizers.load(data.tokenizer)
            ids = document.ids if isinstance(document, Tokenised) else document
            document = tokenizer.decode(ids).encode()
        yield document


class Joined:
    """Reads several sources as one, each after the other."""

    def __init__(self, sources: Sequence[Source], label: str):
        self.sources, self.label = list(sources), label
        self.fingerprint = joint_fingerprint(sources)
        self.holdout = next((one.holdout for one in sources if one.holdout is not None), None)
        self._first = np.concatenate([[0], np.cumsum([len(one) for one in sources])])

    @property
    def sizes(self) -> np.ndarray | None:
        sizes = [one.sizes for one in self.sources]
        return None if any(one is None for one in sizes) else np.concatenate([one for one in sizes if one is not None])

    def __len__(self) -> int:
        return int(self._first[-1])

    def _place(self, index: int) -> tuple[Source, int]:
        number = int(np.searchsorted(self._first, index, side="right")) - 1
        return self.sources[number], index - int(self._first[number])

    def __getitem__(self, index: int) -> bytes | np.ndarray | Tokenised:
        source, local = self._place(index)
        return source[local]

    def ends(self, index: int) -> bool:
        source, local = self._place(index)
        return source.ends(local)

    def begins(self, index: int) -> bool:
        source, local = self._place(index)
        return source.begins(local)

    def name(self, index: int) -> str:
        source, local = self._place(index)
        return source.name(local)


def joint_fingerprint(sources: Sequence[Source]) -> str:
    """Return the fingerprint of several sources in their order."""
    return hashlib.sha256("\n".join(one.fingerprint for one in sources).encode()).hexdigest()[:16]
