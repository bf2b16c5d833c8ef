"""Keep the names and sizes of the files that a run reads (corpus.json): a resume names those that changed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from mhc import remote
from mhc.files import write_json
from mhc.remote import Folder
from mhc.run_folder import RunFolder

FILE = "corpus.json"
Files = Mapping[str, Mapping[str, int]]  # {source: {file: bytes}}

_MOST = 5  # files that a message names


def keep(home: RunFolder, files: Files) -> None:
    """Write the run's files to its folder, unless corpus.json there already says so. Raises DiskFull."""
    if files and stored(home.files) != files:
        write_json(home.files / FILE, files)


def stored(place: Folder) -> Files:
    """Return the files that a run's folder says it reads, or {} for a run of an older version, which does not say."""
    content = remote.read(place / FILE)
    try:
        sources = json.loads(content) if content else {}
    except ValueError:
        return {}
    is_whole = isinstance(sources, dict) and all(isinstance(files, dict) for files in sources.values())
    return sources if is_whole else {}


def changes(before: Files, after: Files) -> str:
    """Return in words what changed in the files of a corpus, for the first few of them; ``""`` if that is not known."""
    lines = [line for source in before if source in after for line in _changes(before[source], after[source])]
    more = len(lines) - _MOST
    return ", ".join(lines[:_MOST]) + (f" and {more} more" if more > 0 else "")


def _changes(before: Mapping[str, int], after: Mapping[str, int]) -> Iterator[str]:
    for name, size in before.items():
        if name not in after:
            yield f"{name} is gone"
        elif after[name] != size:
            yield f"{name} has {after[name]:,} bytes, it had {size:,}"
    yield from (f"{name} is new" for name in after if name not in before)
