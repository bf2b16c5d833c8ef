"""Say what an event of events.jsonl means: the one reading that comparisons of runs share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flags_loss(event: Mapping[str, Any]) -> bool:
    """Return whether an event says that something is wrong with the loss: it was flagged, or something not finite."""
    name = event["event"]
    return name == "nonfinite" or (name == "spike" and "loss" in event.get("flagged", ()))


def lead_window(probe_every: int) -> int:
    """Return the number of steps within which a crossing counts as leading: two probes, and at least 32."""
    return max(32, 2 * probe_every)
