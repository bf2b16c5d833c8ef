"""Check the shards of a folder, and that the files of the corpus stay as they were while it is prepared."""

from __future__ import annotations

import os
import time
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np

from mhc import remote
from mhc.data.corpus.text import TextFiles
from mhc.data.prepare.progress import TELL_EVERY, Tell
from mhc.data.shards.manifest import check_table
from mhc.data.shards.records import ENDINGS
from mhc.data.user_files.globs import sha256
from mhc.errors import UserError


class ChangedFile(UserError):
    """Reports the path of a file of the corpus that has changed since the start."""


def check_unchanged(documents: TextFiles) -> None:
    """Raise ChangedFile if a local file of these documents has another size or time of change than at the start."""
    for number in np.unique(documents.index.owner).tolist():
        file = documents.files[number]
        if not remote.is_remote(file.path) and not file.is_unchanged():
            raise ChangedFile(file.path)


def damaged_shards(manifest: dict[str, Any], folder: Path, tell: Tell) -> list[str]:
    """Return the names of the shards whose files are missing or differ from the manifest in size or SHA-256.

    Raises:
      UserError: the manifest contradicts the table of a shard that is whole.
    """
    shards = manifest["shards"]
    total = sum(shard["files"][ending]["size"] for shard in shards for ending in ENDINGS)
    tell(f"checking {len(shards)} shard(s), {total / 1e6:,.1f} MB")

    def is_whole(shard: dict[str, Any]) -> bool:
        for ending in ENDINGS:
            about = shard["files"][ending]
            path = folder / f"{shard['name']}.{ending}"
            try:
                if path.stat().st_size != about["size"] or sha256(path) != about["sha256"]:
                    return False
            except OSError:  # missing, or a sector that cannot be read
                return False
        table = np.load(folder / f"{shard['name']}.npy", allow_pickle=False)
        check_table(shard, table, len(manifest["files"]), folder)
        return True

    damaged, told = [], time.monotonic()
    with futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # hashing lets go of the interpreter
        for number, (shard, whole) in enumerate(zip(shards, pool.map(is_whole, shards), strict=True)):
            if not whole:
                damaged.append(shard["name"])
            if time.monotonic() - told > TELL_EVERY:
                told = time.monotonic()
                tell(f"checked {number + 1} of {len(shards)} shard(s)")
    return damaged
