"""Interpret events of events.jsonl, in the same way for all comparisons of runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flags_loss(event: Mapping[str, Any]) -> bool:
    """Return whether an event reports a flagged loss or a non-finite value."""
    name = event["event"]
    return name == "nonfinite" or (name == "spike" and "loss" in event.get("flagged", ()))


def lead_window(probe_every: int) -> int:
    """Return the number of steps within which a crossing counts as leading: two probes, and at least 32."""
    return max(32, 2 * probe_every)
