"""Read the user's own files, ``text:<glob>`` and ``tokens:<glob>``, by an index of their documents.

Documents. In a ``.jsonl`` file a line is a document, in a ``.parquet`` file a row is. Any other text file is one
document, and so is a token file unless ``data.end_token`` cuts it; but what is longer than a block is cut into blocks,
since a corpus of one or of few files could otherwise not be held out in part. Blocks are treated as documents, save
that only a file's last one ends with eos. A block is 64 KiB (32 Ki tokens), with few files 1/1024 of the corpus if that
is less, but not below 8 sequences; text is cut at the end of a paragraph, or else of a line. (For training, documents
are cut further, see `mhc.data.corpus.pieces.Pieces`.)

Held out. With ``2 / data.holdout`` files or more, whole files are held out, by a hash of their path below the glob's
fixed part; with fewer, documents are, by a hash of that path and their number. Moving the corpus keeps the split.

Index. Files are read once from end to end before training, to find the documents and what is wrong with them. Beyond
64 MiB the index is kept in the cache directory. What cannot be read at random where it lies is copied there, see
`mhc.data.user_files.local_copies`.

Changes. The index has a checksum of each document's bytes, which is compared whenever a document is read: so a run
reads what was indexed, or ends with a line that names the file. Files are read and not mapped into memory, since a
process that reads a map of a file that was cut short is killed (SIGBUS).
"""

from __future__ import annotations

import array
import contextlib
import copy
import dataclasses
import hashlib
import json
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Self

import numpy as np

from mhc.config import DataConfig
from mhc.data.corpus.holdout import holds_out_files, of_split
from mhc.data.corpus.pieces import piece_size
from mhc.data.user_files.globs import CorpusFile, match
from mhc.data.user_files.local_copies import cache_directory, local_copy, replacing
from mhc.errors import UserError

_CACHED_FROM = 64 << 20  # bytes
_INDEX_FORMAT = 2  # 1 had no checksums

Found = tuple[int, int, int, int]  # (start, stop, number, checksum) of a document, as in `Index`


@dataclasses.dataclass(frozen=True)
class Index:
    """Holds where the documents of a corpus are, in the order of the files."""

    owner: np.ndarray  # int32[n]: number of the file, in the order of the names
    start: np.ndarray  # int64[n]: first byte (text) or token (tokens)
    stop: np.ndarray  # int64[n]
    number: np.ndarray  # int64[n]: line of a jsonl file, or row of a parquet one, from 1; else number, from 0
    ends: np.ndarray  # bool[n]: False for a block that another follows
    checksum: np.ndarray  # uint32[n]: CRC-32 of the document's bytes in its file

    def __getitem__(self, wanted: np.ndarray | slice) -> Index:
        return Index(*(getattr(self, field.name)[wanted] for field in dataclasses.fields(self)))


class IndexedFiles:
    """Reads documents at random from the files that a glob matches: what `text:` and `tokens:` share.

    Raises:
      UserError: at opening, for a file that changes while it is indexed; later, for one that has changed since.
    """

    kind = ""
    unit = ""

    def __init__(self, data: DataConfig, pattern: str, split: str, whole: bool):
        """Index the files, and choose the documents of a split.

        Args:
          pattern: the glob behind the colon of the source.
          whole: ignore the split, and take every document.
        """
        self._data = data
        self.label = f"{self.kind}:{pattern}"
        self.files = match(self.kind, pattern)
        self.names = [file.name for file in self.files]
        self._paths = [self._local(file) for file in self.files]
        self._states = [self._state(number) for number in range(len(self.files))]
        self._sizes = [size for size, _ in self._states]
        self.file_sizes = dict(zip(self.names, self._sizes, strict=True))
        index = self._load_index()
        if not len(index.start):
            raise UserError(f"{self.label} is empty: {len(self.files)} file(s) without any {self.unit}")
        self.holdout = None if whole else data.holdout
        if not whole:
            index = index[of_split(index.owner, index.number, self.names, data.holdout, split, self.label)]
        self.index = index
        described = [self.label.partition(":")[0], split, whole, self.names, self._sizes, *self._settings()]
        self.fingerprint = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.index.start)

    @property
    def sizes(self) -> np.ndarray:
        """Return int64[n]: the bytes or tokens of each document (of a jsonl line: of the line)."""
        return self.index.stop - self.index.start

    @property
    def digest(self) -> str:
        """Return a hash of the fingerprint and of what every document contains, in hex."""
        return hashlib.sha256(self.fingerprint.encode() + self.index.checksum.tobytes()).hexdigest()[:16]

    def part(self, start: int, stop: int) -> Self:
        """Return the documents from ``start`` to before ``stop`` as a source: small to send to another process."""
        part = copy.copy(self)
        part.index = self.index[slice(start, stop)]
        return part

    def ends(self, index: int) -> bool:
        """Return whether a document ends here: False for a block that another one follows."""
        return bool(self.index.ends[index])

    def begins(self, index: int) -> bool:
        """Return whether a document begins here: False for any block of one but the first."""
        return not self._in_blocks(int(self.index.owner[index])) or not self.index.number[index]

    def name(self, index: int) -> str:
        """Return a document's file and its place there, for messages."""
        raise NotImplementedError

    # Each kind of files has its own:

    def _in_blocks(self, file: int) -> bool:
        """Return whether a file is one document that is cut into blocks."""
        raise NotImplementedError

    def _settings(self) -> list[Any]:
        """Return what decides the index besides the files."""
        raise NotImplementedError

    def _local(self, file: CorpusFile) -> Path:
        """Return a plain local file with the content of a file of the user's: that file itself, or a copy."""
        return local_copy(file, self._data)

    def _bytes_of(self, file: int, start: int, stop: int) -> tuple[int, int]:
        """Return where a document lies in its file: its first byte, and the byte after its last."""
        return start, stop

    def _scan(self, file: int, block: int) -> Iterator[Found]:
        """Find the documents of a file, in the order of their bytes. Raises UserError for what is wrong there."""
        raise NotImplementedError

    def _block(self) -> int:
        """Return the bytes or tokens of a block."""
        raise NotImplementedError

    # The index

    def _load_index(self) -> Index:
        keeps = sum(self._sizes) >= _CACHED_FROM
        states = [(str(path), *state) for path, state in zip(self._paths, self._states, strict=True)]
        described = [_INDEX_FORMAT, self.kind, states]
        key = hashlib.sha256(json.dumps([*described, self._settings()]).encode()).hexdigest()[:24]
        kept = cache_directory(self._data) / "index" / f"{key}.npz" if keeps else None
        if kept is not None and (index := _read_index(kept)) is not None:
            return index
        block = self._block()
        flat = array.array("q")  # 40 bytes a document, where a list of tuples takes ten times that
        for file, size in enumerate(self._sizes):
            if size:
                for document in self._scan(file, block):
                    flat.extend((file, *document))
                if self._state(file) != self._states[file]:
                    raise self._changed(file)
        index = self._index_of(np.array(flat, np.int64).reshape(-1, 5))
        if kept is not None:
            with replacing(kept) as temporary, open(temporary, "wb") as output:
                np.savez(output, **dataclasses.asdict(index))
        return index

    def _index_of(self, table: np.ndarray) -> Index:
        """Return the index for a table int64[n, 5] of (file, start, stop, number, checksum)."""
        file = table[:, 0].astype(np.int32)
        follows = np.append(file[1:] == file[:-1], False) if len(file) else np.zeros(0, bool)
        blocks = np.array([self._in_blocks(number) for number in range(len(self.names))], bool)
        ends = ~(follows & blocks[file])
        return Index(file, table[:, 1], table[:, 2], table[:, 3], ends, table[:, 4].astype(np.uint32))

    # The files

    def _content(self, index: int) -> bytes:
        """Return a document's bytes. Raises UserError if their checksum is not that of the index."""
        file, start, stop = (int(column[index]) for column in (self.index.owner, self.index.start, self.index.stop))
        first, last = self._bytes_of(file, start, stop)
        with self._opened(file) as handle:
            handle.seek(first)
            content = handle.read(last - first)
        if len(content) != last - first or zlib.crc32(content) != self.index.checksum[index]:
            raise UserError(
                f"{self._shown(file)} has changed since it was indexed ({self.name(index)}): {self._remedy(file)}"
            )
        return content

    def _state(self, file: int) -> tuple[int, int]:
        """Return the size and the time of change of a local file."""
        try:
            state = self._paths[file].stat()
        except OSError as error:
            raise self._gone(file, error) from None
        return state.st_size, state.st_mtime_ns

    @contextlib.contextmanager
    def _opened(self, file: int) -> Iterator[IO[bytes]]:
        """Open a local file for the block; an OSError in it becomes a UserError."""
        try:
            with open(self._paths[file], "rb") as content:
                yield content
        except OSError as error:
            raise self._gone(file, error) from None

    def _gone(self, file: int, error: OSError) -> UserError:
        return UserError(f"{self._shown(file)} cannot be read: {error.strerror}; {self._remedy(file)}")

    def _changed(self, file: int) -> UserError:
        return UserError(f"{self._shown(file)} has changed while it was indexed: start again when it is whole")

    def _shown(self, file: int) -> str:
        """Return a file's name for messages, and that of its copy where that is read instead."""
        path, copy = self.files[file].path, str(self._paths[file])
        return path if path == copy else f"{path} (its copy {copy})"

    def _remedy(self, file: int) -> str:
        """Return advice on a file that has changed since it was indexed."""
        is_copy = self.files[file].path != str(self._paths[file])
        return "remove the copy, and start again" if is_copy else "put back what was there, and start again"


def _read_index(path: Path) -> Index | None:
    """Return an index that was kept; None where there is none, or a damaged one."""
    try:
        with open(path, "rb") as file, np.load(file) as arrays:
            return Index(**{field.name: arrays[field.name] for field in dataclasses.fields(Index)})
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None


def block_size(data: DataConfig, sizes: list[int], total: int, most: int) -> int:
    """Return the bytes or tokens of a block, by the rule in the module's docstring."""
    whole = holds_out_files(sum(size > 0 for size in sizes), data.holdout)
    return max(piece_size(data), most if whole else min(total // 1024, most))
