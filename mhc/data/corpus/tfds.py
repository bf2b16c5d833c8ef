"""Read ``tfds:<name>``: TensorFlow datasets that are prepared on this machine, without TensorFlow."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mhc.config import DataConfig
from mhc.data.corpus.holdout import hold_out
from mhc.data.tokenizers.spelling import first_line
from mhc.data.user_files.local_copies import expand_home
from mhc.errors import UserError

if TYPE_CHECKING:
    from mhc.data.corpus.sources import Split

_READ_TO_MEASURE = 10_000  # examples of a split, at most, that are read just to learn their sizes


class TensorFlowDataset:
    """Reads a split of a prepared TFDS dataset. Raises UserError if its files or features cannot be used."""

    def __init__(self, folder: Path, field: str, split: Split, label: str, holdout: float, whole: bool):
        import tensorflow_datasets as tfds

        builder = tfds.builder_from_directory(folder)
        self.label = label
        self._folder = folder
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
        try:
            text = self._examples[int(self._indices[index])][self._field]
        except Exception as error:  # of array_record, protobuf or TFDS, which have a dozen kinds
            raise UserError(
                f"{self.name(index)} cannot be read: {first_line(error)}; prepare the dataset again, and remove "
                f"{self._folder} for that"
            ) from None
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
    """Return the split to read, and whether it is the wanted one; if not, documents are held out by hash."""
    held = next((name for name in ("validation", "test") if name in splits), None)
    if wanted == "validation" and held:
        return held, True
    if "train" in splits:
        return "train", held is not None
    if wanted == "validation" and splits:
        return splits[0], False
    raise UserError(f"{label}: no split 'train' among {', '.join(splits) or 'none'}")


def open_tfds(data: DataConfig, name: str, split: Split, whole: bool) -> TensorFlowDataset:
    """Open ``tfds:<name>``. Raises UserError where it is not prepared on this machine."""
    from tensorflow_datasets.core import read_only_builder

    where = expand_home(data.cache_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets")
    try:  # from its files alone: the code that prepared a dataset may need TensorFlow, or lie elsewhere
        builder = read_only_builder.builder_from_files(name, data_dir=str(where))
    except Exception as error:  # TFDS has a dozen kinds for "no such dataset, configuration or version"
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise
        described = [*where.glob("*/*/dataset_info.json"), *where.glob("*/*/*/dataset_info.json")]
        prepared = sorted(
            {path.relative_to(where).parts[0] for path in described} - {p.name for p in where.glob("stdlib-*")}
        )
        base = name.split("/")[0].split(":")[0]
        near = [] if base in prepared else difflib.get_close_matches(base, prepared, 1)
        hint = f"did you mean 'tfds:{near[0]}'? To prepare it" if near else "to prepare it"
        raise UserError(
            f"tfds:{name} is not prepared in {where} (has: {', '.join(prepared) or 'nothing'}); {hint}: "
            f"tfds build {name} --data_dir={where} --file_format=array_record"
        ) from None
    return TensorFlowDataset(Path(builder.data_path), data.field, split, f"tfds:{name}", data.holdout, whole)
