"""Tell a checkout, which has ready configs and scripts beside this package, from an installed package."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]  # the root of a checkout, or the folder that the package is installed in
ONLY_THERE = ("bench", "configs", "eval", "examples", "tools", "tpu")  # top-level folders that no wheel has


def exists() -> bool:
    """Return whether this package runs from a checkout."""
    return all((ROOT / name).is_file() for name in ("train.py", "configs/__init__.py"))


def hint(parts: Iterable[str]) -> str:
    """Return what to add to a message that a file or module is not there: ``""``, or where it would be.

    Args:
      parts: of the path or of the dotted name: ``("configs", "demo.py")``.
    """
    first = next((part for part in parts if part in ONLY_THERE), None)
    if first is None or exists():
        return ""
    instead = "; mhc.config.default() gives the default config" if first == "configs" else ""
    if first == "eval":
        instead = "; mhc.eval has the programs"
    return f" ({first}/ lies in a checkout of the project, not in the installed package{instead})"
