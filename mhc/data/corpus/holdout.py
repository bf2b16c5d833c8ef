"""Choose the documents that are held out for validation: the same ones wherever the corpus lies."""

from __future__ import annotations

import hashlib
import math

import numpy as np

from mhc.errors import UserError


def of_split(
    owner: np.ndarray, number: np.ndarray, names: list[str], holdout: float, split: str, label: str
) -> np.ndarray:
    """Return bool[n]: which documents belong to a split, by `held_out`. Raises UserError if none does."""
    held = held_out(owner, number, names, holdout)
    wanted = held if split == "validation" else ~held
    if not wanted.any():
        raise UserError(
            f"{label}: nothing is left for {split} of {len(held)} document(s) at data.holdout={holdout}; "
            "change data.holdout or name another corpus in data.validation"
        )
    return wanted


def held_out(owner: np.ndarray, number: np.ndarray, names: list[str], holdout: float) -> np.ndarray:
    """Return bool[n]: which documents of a corpus are held out, at least one unless ``holdout`` is 0.

    `mhc.data.corpus.indexed` says by which rule.

    Args:
      owner, number: as in `Index`, of all documents.
      names: of the files, below the pattern's fixed part.
    """
    seeds = np.array([_hash(name) for name in names], np.uint64)
    score = seeds[owner]
    if not holds_out_files(len(np.unique(owner)), holdout):
        score = _mix(score + number.astype(np.uint64))
    held = score < np.uint64(holdout * 2**64)
    if holdout > 0 and not held.any():
        held = score == score.min()
    return held


def hold_out(count: int, holdout: float, name: str) -> np.ndarray:
    """Return bool[count]: which of ``count`` numbered documents are held out, by a hash of ``name`` and the number."""
    score = _mix(np.uint64(_hash(name)) + np.arange(count, dtype=np.uint64))
    return score < np.uint64(holdout * 2**64)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "big")


def _mix(value: np.ndarray) -> np.ndarray:
    """Return uint64 scores, unrelated for neighbouring numbers: the finaliser of splitmix64."""
    with np.errstate(over="ignore"):
        value = value + np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))


def holds_out_files(files: int, holdout: float) -> bool:
    """Return whether whole files are held out, rather than documents."""
    return holdout > 0 and files >= math.ceil(2 / holdout)
