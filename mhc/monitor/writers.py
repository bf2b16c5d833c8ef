"""Define the writers that a training loop reports to; a writer takes one record after another.

A record (`mhc.files.Record`) of a step has the key ``step`` (completed updates).
"""

from __future__ import annotations

from typing import Protocol

from mhc.files import Record


class Writer(Protocol):
    """Takes the records of a run."""

    def write(self, record: Record) -> None:
        """Take one record."""

    def close(self) -> None:
        """Finish; no record may follow."""


class NoWriter:
    """Takes records and keeps none."""

    def write(self, record: Record) -> None:
        """Forget the record."""

    def close(self) -> None:
        """Do nothing."""
