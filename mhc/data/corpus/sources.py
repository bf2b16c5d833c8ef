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
    """Gives the documents of one split at random; it has at least one."""

    label: str  # how the user named the corpus
    fingerprint: str  # hex: equal when the corpus and its order are (names and sizes stand for contents)
    holdout: float | None  # the share of the corpus that is held out; None: it is read whole, or has its own splits

    @property
    def sizes(self) -> np.ndarray | None:
        """Return int64[n]: about how many bytes or ids each document has; None if there are too many to find out."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> bytes | np.ndarray | Tokenised:
        """Return a document: UTF-8 text, int64[n] ids, or ids with the bytes that they stand for."""
        ...

    def ends(self, index: int) -> bool:
        """Return whether a document ends here: False for a block that another follows (`mhc.data.corpus.indexed`)."""
        ...

    def begins(self, index: int) -> bool:
        """Return whether a document begins here: False for any block of one but the first."""
        ...

    def name(self, index: int) -> str:
        """Return a document's file and place, for messages."""
        ...


def open_source(data: DataConfig, split: Split) -> Source:
    """Open a split of the corpus that ``data`` describes. Several sources become one, each after the other.

    The split ``train`` is read from ``data.source``. The split ``validation`` is ``data.validation`` if that names
    another corpus: all of it for text:, tokens: and prepared:, its validation split for stdlib and tfds:. Otherwise it
    is what ``data.source`` holds out: its own validation split (TFDS: ``validation``, else ``test``), or a share of
    ``data.holdout`` of it.

    Raises:
      UserError: anything is wrong with the corpus.
    """
    refuse_documents(data)
    several = parts(data, split)
    if len(several) == 1:
        return _open_one(several[0][1], split)
    return Joined([_open_one(config, split) for _, config in several], data.validation or data.source)


def parts(data: DataConfig, split: Split) -> tuple[tuple[Share, DataConfig], ...]:
    """Return the sources of a split, each with a config of its own. Most splits have one, whose name is "".

    A mixture without ``data.validation`` holds out a part of each of its sources, under the source's name.
    """
    training = shares(data.source)
    sets = () if data.validation is None else shares(data.validation, "data.validation")
    held_out = {share.source for share in training}
    if sets:
        held_out &= {share.source for share in sets}

    def config(share: Share, validation: Share | None) -> DataConfig:
        """Return the config of one source; without a corpus for ``validation`` a part of the source is held out."""
        other = None if validation is None else validation.source
        return dataclasses.replace(data, source=share.source, validation=other)

    if split == "train":
        return tuple((share, config(share, None if share.source in held_out else sets[0])) for share in training)
    if not sets:
        return tuple((share, config(share, None)) for share in training)
    return tuple(
        (share, config(share, None) if share.source in held_out else config(training[0], share)) for share in sets
    )


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
    """Yield the text of a split's documents or blocks, in order: the bytes that bits per byte are counted over.

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
    """Joins several sources, each after the other."""

    def __init__(self, sources: Sequence[Source], label: str):
        self.sources, self.label = list(sources), label
        self.fingerprint = joint_fingerprint(sources)
        self.holdout = next((source.holdout for source in sources if source.holdout is not None), None)
        self._first = np.concatenate([[0], np.cumsum([len(source) for source in sources])])

    @property
    def sizes(self) -> np.ndarray | None:
        sizes = [source.sizes for source in self.sources]
        known = [array for array in sizes if array is not None]
        return np.concatenate(known) if len(known) == len(sizes) else None

    def __len__(self) -> int:
        return int(self._first[-1])

    def _place(self, index: int) -> tuple[Source, int]:
        number = int(np.searchsorted(self._first, index, side="right")) - 1
        return self.sources[number], index - int(self._first[number])

    def __getitem__(self, index: int) -> bytes | np.ndarray | Tokenised:
        source, inner = self._place(index)
        return source[inner]

    def ends(self, index: int) -> bool:
        source, inner = self._place(index)
        return source.ends(inner)

    def begins(self, index: int) -> bool:
        source, inner = self._place(index)
        return source.begins(inner)

    def name(self, index: int) -> str:
        source, inner = self._place(index)
        return source.name(inner)


def each_source(source: Source) -> Sequence[Source]:
    """Return the sources that are joined in one, or the source itself."""
    return source.sources if isinstance(source, Joined) else [source]


def joint_fingerprint(sources: Sequence[Source]) -> str:
    """Return a hash of several sources in their order, in hex."""
    return hashlib.sha256("\n".join(source.fingerprint for source in sources).encode()).hexdigest()[:16]
