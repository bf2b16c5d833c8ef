"""Read ``prepared:<folder>``: a corpus that ``python -m mhc.data.prepare`` tokenised once.

The folder holds

    shard-00000.array_record, …   a record for each document: its ids, see `mhc.data.shards.records.pack`
    shard-00000.npy, …            a row of `TABLE` for each document: its place in the corpus, and counts
    manifest.json                 what was prepared and how; it is written last, when everything else is there
    origin.json                   where the files of the corpus lay and when they had changed, to notice changes

A document is held out by its place in the corpus and cut by its size there, so a run reads what it would read from the
text itself, in the same order. The ids of a text may depend on where it is cut. So a document is tokenised in the
pieces that training reads (`mhc.data.corpus.pieces.Pieces`), and a held-out one as a whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import hashlib
import io
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from mhc import remote
from mhc.config import DataConfig
from mhc.data.corpus.holdout import of_split
from mhc.data.shards.manifest import MANIFEST, ORIGIN, check_table, parse, read_manifest
from mhc.data.shards.records import Tokenised, unpack
from mhc.data.tokenizers import Tokenizer
from mhc.data.tokenizers.spelling import first_line
from mhc.data.user_files.formats import check_pointer, is_lines, is_parquet
from mhc.data.user_files.globs import below_fixed, match, sha256
from mhc.data.user_files.local_copies import cache_directory, replacing
from mhc.data.warning import warn_once
from mhc.errors import UserError

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Shard:
    """Describes a shard's file to grain, so that grain need not open it to count its records."""

    filename: str
    skip: int
    take: int
    examples_in_shard: int


class Prepared:
    """Reads a split of a prepared corpus: a `mhc.data.corpus.sources.Source` whose documents are `Tokenised`.

    Raises:
      UserError: at opening, for a folder that is not prepared to the end, whose files are not those of its manifest, or
        whose corpus has changed since; later, for a record that cannot be read.
    """

    def __init__(self, data: DataConfig, folder: str, split: str, whole: bool):
        """Open a folder. With ``whole`` the split is ignored and every document is taken."""
        import grain

        self.label = f"prepared:{folder}"
        self._data = data
        content, self.manifest = read_manifest(folder)
        self._where = _local(folder, content, self.manifest, data)
        _check_unchanged(self._where, self.manifest, self.label)
        shards = self.manifest["shards"]
        self._names: list[str] = [file["name"] for file in self.manifest["files"]]
        table = np.concatenate([self._table_of(shard) for shard in shards])
        self._first = np.cumsum([0, *(shard["documents"] for shard in shards)])
        self._records = np.arange(len(table))
        self.holdout = None if whole else data.holdout
        if not whole:
            wanted = of_split(table["file"], table["number"], self._names, data.holdout, split, self.label)
            self._records, table = self._records[wanted], table[wanted]
        self._table = table
        self._reader = grain.sources.ArrayRecordDataSource(
            [
                _Shard(str(self._where / f"{shard['name']}.array_record"), 0, count, count)
                for shard in shards
                for count in [shard["documents"]]
            ]
        )
        described = [hashlib.sha256(content).hexdigest(), split, whole, data.holdout]
        self.fingerprint = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]
        self._tell_differences(whole)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Tokenised:
        """Return document ``index``. Raises UserError where its record does not match array_record's hash of it."""
        record = int(self._records[index])
        try:
            document = unpack(self._reader[record])
            if len(document.ids) != self._table["ids"][index]:
                raise ValueError("the number of ids is another than in the table")
        except (RuntimeError, ValueError, IndexError) as error:
            shard = self.manifest["shards"][int(np.searchsorted(self._first, record, side="right")) - 1]["name"]
            reason = first_line(error)
            if "Too many open files" in reason:
                raise UserError(
                    f"{self.label}: {shard}.array_record cannot be opened: too many open files; raise ulimit -n above "
                    f"the number of shards, {len(self.manifest['shards'])}, or prepare it with a larger --shard_size"
                ) from None
            raise self._damaged(f"{shard}.array_record", reason) from None
        return document

    def _table_of(self, shard: dict[str, Any]) -> np.ndarray:
        name = f"{shard['name']}.npy"
        try:
            content = (self._where / name).read_bytes()
        except OSError as error:
            raise UserError(f"{self.label}: {name} cannot be read: {error.strerror}; prepare it again") from None
        if hashlib.sha256(content).hexdigest() != shard["files"]["npy"]["sha256"]:
            raise self._damaged(name, f"its SHA-256 is not that in {MANIFEST}")
        table: np.ndarray = np.load(io.BytesIO(content), allow_pickle=False)
        check_table(shard, table, len(self._names), self._where)
        return table

    def _damaged(self, name: str, why: str) -> UserError:
        return _damaged(self.label, self._where / name, why)

    @functools.cached_property
    def sizes(self) -> np.ndarray:
        """Return int64[n]: the bytes that each document has in its file, as the source of the text would."""
        return self._table["stop"] - self._table["start"]

    def ends(self, index: int) -> bool:
        """Return whether a document ends here: False for a block that another one follows."""
        return bool(self._table["ends"][index])

    def begins(self, index: int) -> bool:
        """Return whether a document begins here: False for any block of one but the first."""
        return is_lines(self._names[self._table[index]["file"]]) or not self._table[index]["number"]

    def name(self, index: int) -> str:
        """Return a document's file in the corpus, and its line, row or bytes."""
        row = self._table[index]
        name = self._names[row["file"]]
        if is_parquet(name):
            return f"{self.label}, {name}, row {row['number'] - 1}"
        place = f"line {row['number']}" if is_lines(name) else f"bytes {row['start']}–{row['stop']}"
        return f"{self.label}, {name}, {place}"

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raise UserError where the corpus was prepared with another tokeniser."""
        theirs = self.manifest["tokenizer"]
        if theirs["hash"] != tokenizer.content_hash:
            raise UserError(
                f"{self.label} was prepared with the tokeniser {theirs['name']} of hash {theirs['hash']}, "
                f"data.tokenizer={self._data.tokenizer} has the hash {tokenizer.content_hash}"
            )

    def _tell_differences(self, whole: bool) -> None:
        fields = ("sequence_length",) if whole else ("sequence_length", "holdout")
        other = [name for name in fields if self.manifest[name] != getattr(self._data, name)]
        if other:
            theirs = ", ".join(f"data.{name}={self.manifest[name]}" for name in other)
            ours = ", ".join(f"{getattr(self._data, name)}" for name in other)
            warn_once(
                f"{self.label} was prepared for {theirs}, this run has {ours}: "
                "long documents are cut elsewhere than in the text itself"
            )


def _local(folder: str, content: bytes, manifest: dict[str, Any], data: DataConfig) -> Path:
    """Return the folder, or its copy in the cache directory if it is in a store; its shards are there."""
    place = remote.path(os.path.expanduser(folder))
    where = place
    if not isinstance(place, Path):
        where = cache_directory(data) / "prepared" / hashlib.sha256(content).hexdigest()[:24]
    for shard in manifest["shards"]:
        for ending in ("array_record", "npy"):
            about = shard["files"][ending]
            name = f"{shard['name']}.{ending}"
            if not isinstance(place, Path) and not (where / name).exists():
                _fetch(place / name, where / name, about["sha256"])
            try:
                size = (where / name).stat().st_size
            except OSError:
                raise UserError(f"prepared:{folder}: {name} is missing; prepare it again") from None
            if size != about["size"]:
                check_pointer(where / name)
                raise _damaged(f"prepared:{folder}", where / name, f"not of the size in {MANIFEST}")
    return where


def _damaged(label: str, file: Path, why: str) -> UserError:
    """Return the error of a damaged file of a shard, with the path of its copy if the cache directory has one."""
    if remote.is_remote(label.removeprefix("prepared:")):
        return UserError(f"{label}: its copy {file} is damaged ({why}): remove it, so that it is copied again")
    return UserError(f"{label}: {file.name} is damaged ({why}); prepare it again, which makes it anew")


def _fetch(source: remote.Folder, target: Path, digest: str) -> None:
    _log.info("copying %s to %s", source, target)
    with replacing(target) as temporary:
        try:
            with remote.reporting_refusals(source), source.open("rb") as file, open(temporary, "wb") as copy:
                shutil.copyfileobj(file, copy, 1 << 20)
        except FileNotFoundError:
            raise UserError(f"{source} is missing; prepare it again") from None
        if sha256(temporary) != digest:
            raise UserError(f"{source} is not what {MANIFEST} says: its SHA-256 differs; copy the folder again")


def _check_unchanged(folder: Path, manifest: dict[str, Any], label: str) -> None:
    """Raise UserError for a file of the corpus that is where it was, but no longer has the content that was prepared.

    A file of the same size and time of change passes. A file whose time alone differs is read, for its hash. Files that
    are gone pass. Files in a store pass too, without a look at them. New files get a warning.
    """
    origin = folder / ORIGIN
    if not origin.is_file():
        return
    stored = parse(origin, origin.read_bytes())
    places = stored["files"]
    for file in manifest["files"]:
        place = places.get(file["name"])
        if place is None or remote.is_remote(place["path"]) or not os.path.isfile(place["path"]):
            continue
        state = os.stat(place["path"])
        if (state.st_size, state.st_mtime_ns) == (file["size"], place["version"]):
            continue
        if state.st_size != file["size"] or _hash_of(place["path"], state.st_mtime_ns) != file["checksum"]:
            raise UserError(
                f"{place['path']} has changed since {label} was prepared from it: prepare it again, "
                f"or remove {origin} to read what was prepared"
            )
    come = _new_files(stored["pattern"], places)
    if come:
        more = f" and {len(come) - 1} more file(s)" if len(come) > 1 else ""
        warn_once(
            f"{come[0]}{more} came to the corpus after {label} was prepared: not read here; "
            "to read all, prepare the corpus in a new folder"
        )


def _new_files(pattern: str, places: dict[str, dict[str, Any]]) -> list[str]:
    """Return the local files that the glob of the corpus matches now but did not when it was prepared."""
    name, place = next(iter(places.items()), ("", {"path": ""}))
    base = place["path"].removesuffix(name)
    if remote.is_remote(pattern) or not name or base == place["path"]:
        return []
    known = {place["path"] for place in places.values()}
    with contextlib.suppress(UserError):  # none is left, or one may not be read: nobody is to read it
        now = match("text", glob.escape(base) + below_fixed(pattern))  # of a relative pattern the folder may be another
        return [file.path for file in now if file.path not in known]
    return []


@functools.lru_cache(maxsize=1 << 16)
def _hash_of(path: str, version: int) -> str:
    return f"sha256:{sha256(path)}"
