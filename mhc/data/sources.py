"""Sources of documents, by the name that ``data.source`` gives.

stdlib, tfds:<name>, text:<glob>, tokens:<glob>, prepared:<folder>. A source is one split of a corpus with random
access. Its documents are UTF-8 text (bytes) or, for ``tokens:`` and ``prepared:``, ids.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from mhc.config import DataConfig, Share, shares
from mhc.data import stdlib, tokenizers
from mhc.data.files import TextFiles, TokenFiles
from mhc.data.holdout import hold_out
from mhc.data.packing import Tokenised
from mhc.data.places import cache_directory
from mhc.data.prepared import Prepared
from mhc.errors import UserError

Split = Literal["train", "validation"]
_READ_TO_MEASURE = 10_000  # TFDS examples: no more are read just to learn their sizes


class Source(Protocol):
    """Documents of one split, at least one."""

    label: str  # how the user named the corpus
    fingerprint: str  # hex: equal when the corpus and its order are (names and sizes stand for contents)
    holdout: float | None  # the share of the corpus that is held out; None: it is read whole, or has its own splits

    @property
    def sizes(self) -> np.ndarray | None:
        """int64[n]: about the bytes (ids) of each document; None: too many to find out."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> bytes | np.ndarray | Tokenised:
        """UTF-8 text, int64[n] ids, or ids with the bytes that they stand for."""
        ...

    def ends(self, index: int) -> bool:
        """Whether the document ends with this one (False: a block, see `mhc.data.files`)."""
        ...

    def begins(self, index: int) -> bool:
        """Whether the document begins with this one (False: a later block)."""
        ...

    def name(self, index: int) -> str:
        """File and place, for messages."""
        ...


def open_source(data: DataConfig, split: Split) -> Source:
    """A split of the corpus that ``data`` describes; of several sources, all one after the other.

    ``train`` is that split of ``data.source``. ``validation`` is ``data.validation`` when that names another corpus:
    all of it for text:, tokens: and prepared:, its validation split for stdlib and tfds:. Otherwise it is what
    ``data.source`` holds out: its own validation split (TFDS: ``validation``, else ``test``), or a share of
    ``data.holdout`` of it.

    Raises UserError for everything that is wrong with the corpus.
    """
    several = parts(data, split)
    if len(several) == 1:
        return _open_one(several[0][1], split)
    return Joined([_open_one(own, split) for _, own in several], data.validation or data.source)


def parts(data: DataConfig, split: Split) -> tuple[tuple[Share, DataConfig], ...]:
    """The sources of a split, each with a config of its own; of most splits one, whose name is "".

    A mixture without ``data.validation`` holds out a part of each of its sources, under the source's name.
    """
    training = shares(data.source)
    sets = () if data.validation is None else shares(data.validation, "data.validation")
    held_out = {one.source for one in training}
    if sets:
        held_out &= {one.source for one in sets}

    def own(one: Share, other: Share | None) -> DataConfig:
        """Of one source: a part of it is held out, unless the ``other`` corpus serves for validation."""
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
        return _Tfds(stdlib.prepare(cache_directory(data)), "text", split, "stdlib", data.holdout, whole=False)
    if kind == "tfds":
        return _open_tfds(data, rest, split, whole=apart)
    if kind == "text":
        return TextFiles(data, rest, split, whole=apart)
    if kind == "prepared":
        return Prepared(data, rest, split, whole=apart)
    return TokenFiles(data, rest, split, whole=apart)


def documents(data: DataConfig, split: Split) -> Iterator[bytes]:
    """The raw text of a split's documents (or blocks of them), in order: the bytes that bits per byte are counted over.

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


class _Tfds:
    """A split of a prepared TFDS dataset; raises UserError where its files or its features do not serve."""

    def __init__(self, folder: Path, field: str, split: Split, label: str, holdout: float, whole: bool):
        import tensorflow_datasets as tfds

        builder = tfds.builder_from_directory(folder)
        self.label = label
        self._field = field
        features = list(builder.info.features)
        if field not in features:
            near = difflib.get_close_matches(field, features, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UserError(f"{label}: no feature {field!r} (data.field) among {', '.join(features)}{hint}")
        self._split, selected = _tfds_split(list(builder.info.splits), split, label)
        try:
            self._examples = builder.as_data_source(split=self._split)
        except NotImplementedError:
            raise UserError(
                f"{label}: prepared at {folder} in a format without random access; "
                f"prepare it with: tfds build {label.removeprefix('tfds:')} --file_format=array_record"
            ) from None
        count = len(self._examples)
        self._indices = np.arange(count)
        self.holdout = None if selected or whole else holdout
        if not selected and not (whole and split == "validation"):
            held = hold_out(count, holdout, label) if not whole else np.zeros(count, bool)
            self._indices = np.flatnonzero(held if split == "validation" else ~held)
        if not len(self._indices):
            raise UserError(
                f"{label}: nothing is left for {split} of {count} document(s) at data.holdout={holdout}; "
                "change data.holdout or name another corpus in data.validation"
            )
        self.sizes: np.ndarray | None = None
        if len(self._indices) <= _READ_TO_MEASURE:
            self.sizes = np.array([len(self[index]) for index in range(len(self))], np.int64)
        described = [label, folder.name, self._split, field, count, len(self._indices), folder.parts[-3:]]
        self.fingerprint = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> bytes:
        text = self._examples[int(self._indices[index])][self._field]
        if isinstance(text, str):
            return text.encode()
        if not isinstance(text, bytes):
            raise UserError(f"{self.name(index)}: feature {self._field!r} (data.field) is not text")
        try:
            text.decode()
        except UnicodeDecodeError as error:
            raise UserError(f"{self.name(index)}: not UTF-8 at byte {error.start}") from None
        return text

    def ends(self, index: int) -> bool:
        return True

    def begins(self, index: int) -> bool:
        return True

    def name(self, index: int) -> str:
        return f"{self.label}, split {self._split}, example {self._indices[index]}"


def _tfds_split(splits: list[str], wanted: Split, label: str) -> tuple[str, bool]:
    """The dataset's split to read, and whether it is the wanted one (otherwise documents are held out by hash)."""
    held = next((name for name in ("validation", "test") if name in splits), None)
    if wanted == "validation" and held:
        return held, True
    if "train" in splits:
        return "train", held is not None
    if wanted == "validation" and splits:
        return splits[0], False
    raise UserError(f"{label}: no split 'train' among {', '.join(splits) or 'none'}")


def _open_tfds(data: DataConfig, name: str, split: Split, whole: bool) -> Source:
    from tensorflow_datasets.core import read_only_builder

    where = Path(data.cache_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()
    try:  # from its files alone: the code that prepared a dataset may need TensorFlow, or lie elsewhere
        builder = read_only_builder.builder_from_files(name, data_dir=str(where))
    except Exception as error:  # TFDS has a dozen kinds for "no such dataset, configuration or version"
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise
        found = [*where.glob("*/*/dataset_info.json"), *where.glob("*/*/*/dataset_info.json")]
        prepared = sorted(
            {path.relative_to(where).parts[0] for path in found} - {p.name for p in where.glob("stdlib-*")}
        )
        base = name.split("/")[0].split(":")[0]
        near = [] if base in prepared else difflib.get_close_matches(base, prepared, 1)
        hint = f"did you mean 'tfds:{near[0]}'? To prepare it" if near else "to prepare it"
        raise UserError(
            f"tfds:{name} is not prepared in {where} (has: {', '.join(prepared) or 'nothing'}); {hint}: "
            f"tfds build {name} --data_dir={where} --file_format=array_record"
        ) from None
    return _Tfds(Path(builder.data_path), data.field, split, f"tfds:{name}", data.holdout, whole)


class Joined:
    """Several sources as one, each after the other."""

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
        source, own = self._place(index)
        return source[own]

    def ends(self, index: int) -> bool:
        source, own = self._place(index)
        return source.ends(own)

    def begins(self, index: int) -> bool:
        source, own = self._place(index)
        return source.begins(own)

    def name(self, index: int) -> str:
        source, own = self._place(index)
        return source.name(own)


def joint_fingerprint(sources: Sequence[Source]) -> str:
    """Of several sources in their order."""
    return hashlib.sha256("\n".join(one.fingerprint for one in sources).encode()).hexdigest()[:16]
