"""Sources over the user's own files: ``text:<glob>`` and ``tokens:<glob>``.

Documents. In a ``.jsonl`` file a line is a document, in a ``.parquet`` file a row is. Any other text file is one
document, and so is a token file unless ``data.end_token`` cuts it; but what is longer than a block is cut into blocks,
since a corpus of one or of few files could otherwise not be held out in part. Blocks are treated as documents, save
that only a file's last one ends with eos. A block is 64 KiB (32 Ki tokens), with few files 1/1024 of the corpus if that
is less, but not below 8 sequences; text is cut at the end of a paragraph, or else of a line. (For training, documents
are cut further, see `mhc.data.corpus.pieces.Pieces`.)

Held out. With ``2 / data.holdout`` files or more, whole files are held out, by a hash of their path below the glob's
fixed part; with fewer, documents are, by a hash of that path and their number. Moving the corpus keeps the split.

Files are read once from end to end before training, to find the documents and what is wrong with them. Beyond 64 MiB
the result is kept in the cache directory. What cannot be read at random where it lies is copied there, see
`mhc.data.user_files.local_copies`.
"""

from __future__ import annotations

import array
import copy
import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np

from mhc.config import DataConfig
from mhc.data.corpus.holdout import holds_out_files, of_split
from mhc.data.corpus.pieces import piece_size
from mhc.data.user_files.globs import Place, match
from mhc.data.user_files.local_copies import cache_directory, plain, replacing
from mhc.errors import UserError

_CACHED_FROM = 64 << 20  # bytes
_INDEX_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Index:
    """Where the documents of a corpus are."""

    owner: np.ndarray  # int32[n]: number of the file, in the order of the names
    start: np.ndarray  # int64[n]: first byte (text) or token (tokens)
    stop: np.ndarray  # int64[n]
    number: np.ndarray  # int64[n]: line of a jsonl file, or row of a parquet one, from 1; else number, from 0
    ends: np.ndarray  # bool[n]: False for a block that another follows

    def __getitem__(self, wanted: np.ndarray | slice) -> Index:
        return Index(*(getattr(self, field.name)[wanted] for field in dataclasses.fields(self)))


class IndexedFiles:
    """What both kinds share: the list of files, the index, the split."""

    kind = ""
    unit = ""

    def __init__(self, data: DataConfig, pattern: str, split: str, whole: bool):
        """Args: the pattern behind the colon; ``whole``: ignore the split and take every document."""
        self._data = data
        self.label = f"{self.kind}:{pattern}"
        self.places = match(self.kind, pattern)
        self.names = [place.name for place in self.places]
        self._plain = [self._local(place) for place in self.places]
        sizes = [path.stat().st_size for path in self._plain]
        self.file_sizes = dict(zip(self.names, sizes, strict=True))
        index = self._load_index(sizes)
        if not len(index.start):
            raise UserError(f"{self.label} is empty: {len(self.places)} file(s) without any {self.unit}")
        self.holdout = None if whole else data.holdout
        if not whole:
            index = index[of_split(index.owner, index.number, self.names, data.holdout, split, self.label)]
        self.index = index
        described = [self.label.partition(":")[0], split, whole, self.names, sizes, *self._settings(sizes)]
        self.fingerprint = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.index.start)

    @property
    def sizes(self) -> np.ndarray:
        """int64[n]: bytes or tokens of each document (of a jsonl line: of the line)."""
        return self.index.stop - self.index.start

    def part(self, start: int, stop: int) -> Self:
        """Documents start to stop of these: small to send to another process."""
        made = copy.copy(self)
        made.index = self.index[slice(start, stop)]
        return made

    def ends(self, index: int) -> bool:
        """Whether document i is more than a block of one that goes on."""
        return bool(self.index.ends[index])

    def begins(self, index: int) -> bool:
        """Whether document i is no later block of one."""
        return not self._in_blocks(int(self.index.owner[index])) or not self.index.number[index]

    def _index_of(self, table: np.ndarray) -> Index:
        """Args: table: int64[n, 4]: file, start, stop, number."""
        file = table[:, 0].astype(np.int32)
        follows = np.append(file[1:] == file[:-1], False) if len(file) else np.zeros(0, bool)
        blocks = np.array([self._in_blocks(number) for number in range(len(self.names))], bool)
        return Index(file, table[:, 1], table[:, 2], table[:, 3], ~(follows & blocks[file]))

    def _in_blocks(self, file: int) -> bool:
        """Whether the documents of a file are blocks of one."""
        raise NotImplementedError

    def _settings(self, sizes: list[int]) -> list[Any]:
        """What besides the files decides the index."""
        raise NotImplementedError

    def _local(self, place: Place) -> Path:
        return plain(place, self._data)

    def _scan(self, file: int, block: int) -> Iterator[tuple[int, int, int]]:
        """(start, stop, number) of each document of a file; raises UserError for what is wrong with it."""
        raise NotImplementedError

    def _block(self, sizes: list[int]) -> int:
        raise NotImplementedError

    def _load_index(self, sizes: list[int]) -> Index:
        total = sum(sizes)
        described = [
            _INDEX_FORMAT,
            self.kind,
            [(str(path), size, path.stat().st_mtime_ns) for path, size in zip(self._plain, sizes, strict=True)],
            self._settings(sizes),
        ]
        key = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:24]
        kept = cache_directory(self._data) / "index" / f"{key}.npz"
        if total >= _CACHED_FROM and kept.exists():
            with np.load(kept) as arrays:
                return Index(**{field.name: arrays[field.name] for field in dataclasses.fields(Index)})
        block = self._block(sizes)
        flat = array.array("q")  # 32 bytes a document, where a list of tuples takes ten times that
        for file in range(len(self._plain)):
            for document in self._scan(file, block) if sizes[file] else ():
                flat.extend((file, *document))
        table = np.array(flat, np.int64).reshape(-1, 4)
        index = self._index_of(table)
        if total >= _CACHED_FROM:
            with replacing(kept) as temporary, open(temporary, "wb") as output:
                np.savez(output, **dataclasses.asdict(index))
        return index


def block_size(data: DataConfig, sizes: list[int], total: int, most: int) -> int:
    """Bytes or tokens of a block, see the module's docstring."""
    whole = holds_out_files(sum(size > 0 for size in sizes), data.holdout)
    return max(piece_size(data), most if whole else min(total // 1024, most))
