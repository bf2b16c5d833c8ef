"""Tell the format of a user's file from its name, and a pointer to a file from the file."""

from __future__ import annotations

from pathlib import Path

from mhc.data.user_files.globs import Place
from mhc.errors import UserError

PACKED = {".gz": "gz", ".gzip": "gz", ".zst": "zst", ".zstd": "zst"}  # endings, in any case
_LINES = (".jsonl", ".ndjson", ".jsonlines", ".ldjson")
_POINTERS = {
    b"version https://git-lfs.github.com/spec/": "git-lfs pointer, not the file itself: git lfs pull",
    b"version https://hawser.github.com/spec/": "git-lfs pointer, not the file itself: git lfs pull",
    b"/annex/objects/": "git-annex pointer, not the file itself: git annex get",
}
_POINTER = 1024  # bytes, at most


def packing(name: str) -> str | None:
    """How a file of this name is compressed: gz, zst, or None."""
    return PACKED.get(Path(name).suffix.lower())


def stem(name: str) -> str:
    """A file's name without the ending of its compression."""
    return name if packing(name) is None else name[: -len(Path(name).suffix)]


def is_parquet(name: str) -> bool:
    """Return whether a file of this name is a parquet file."""
    return name.lower().endswith((".parquet", ".pq"))


def is_lines(name: str) -> bool:
    """Whether a file of this name holds a document on each line (of a parquet file: in each row)."""
    return stem(name).lower().endswith(_LINES) or is_parquet(name)


def is_new_lines(name: str) -> bool:
    """Return whether `is_lines` knows a name that older versions took for plain text."""
    inner = name.removesuffix(".gz") if name.endswith(".gz") else name.removesuffix(".zst")
    return is_lines(name) and not (inner.endswith(".jsonl") or name.endswith(".parquet"))


def pointer(content: bytes) -> str | None:
    """Return what a file is that stands for another one, and how that is fetched; None: it is itself."""
    return next((what for start, what in _POINTERS.items() if content.startswith(start)), None)


def check_pointer(place: Place | Path) -> None:
    """Raises UserError for a file that git-lfs or git-annex left in the place of the one that was meant."""
    if (place.size if isinstance(place, Place) else place.stat().st_size) > _POINTER:
        return
    with place.open() if isinstance(place, Place) else place.open("rb") as file:
        what = pointer(file.read(64))
    if what:
        raise UserError(f"{place} is a {what}")
