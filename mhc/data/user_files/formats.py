"""Tell the format of a file from its name, and recognise pointers of git-lfs and git-annex."""

from __future__ import annotations

from pathlib import Path

from mhc.data.user_files.globs import CorpusFile
from mhc.errors import UserError

PACKED = {".gz": "gz", ".gzip": "gz", ".zst": "zst", ".zstd": "zst"}  # endings, in any case
_LINES = (".jsonl", ".ndjson", ".jsonlines", ".ldjson")
_POINTERS = {
    b"version https://git-lfs.github.com/spec/": "git-lfs pointer, not the file itself: git lfs pull",
    b"version https://hawser.github.com/spec/": "git-lfs pointer, not the file itself: git lfs pull",
    b"/annex/objects/": "git-annex pointer, not the file itself: git annex get",
}
_POINTER = 1024  # bytes, at most


def compression(name: str) -> str | None:
    """Return how a file of this name is compressed: gz, zst, or None."""
    return PACKED.get(Path(name).suffix.lower())


def stem(name: str) -> str:
    """Return a file's name without the ending of its compression."""
    return name if compression(name) is None else name[: -len(Path(name).suffix)]


def is_parquet(name: str) -> bool:
    """Return whether a file of this name is a parquet file."""
    return name.lower().endswith((".parquet", ".pq"))


def is_lines(name: str) -> bool:
    """Return whether a file of this name holds a document on each line (of a parquet file: in each row)."""
    return stem(name).lower().endswith(_LINES) or is_parquet(name)


def is_new_lines(name: str) -> bool:
    """Return whether `is_lines` knows a name that older versions took for plain text."""
    inner = name.removesuffix(".gz") if name.endswith(".gz") else name.removesuffix(".zst")
    return is_lines(name) and not (inner.endswith(".jsonl") or name.endswith(".parquet"))


def pointer(content: bytes) -> str | None:
    """Describe a file that only points to another one, and how to fetch that one; return None for any other file."""
    return next((what for start, what in _POINTERS.items() if content.startswith(start)), None)


def check_pointer(file: CorpusFile | Path) -> None:
    """Raise UserError for a file that git-lfs or git-annex left in the place of the one that was meant."""
    if (file.size if isinstance(file, CorpusFile) else file.stat().st_size) > _POINTER:
        return
    with file.open() if isinstance(file, CorpusFile) else file.open("rb") as content:
        what = pointer(content.read(64))
    if what:
        raise UserError(f"{file} is a {what}")
