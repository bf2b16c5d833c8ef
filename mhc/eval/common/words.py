"""Put numbers and lists into words."""

from __future__ import annotations

import math
from collections.abc import Sequence


def number(value: float | None, digits: int = 4) -> str:
    """Return ``value`` as people read it, with ``digits`` significant digits; an en dash for None."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "not finite"
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}g}"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    rounded = abs(float(f"{value:.{digits - 1}e}"))  # 0.0999… is 0.1, which has a digit less behind the point
    places = digits - 1 - (math.floor(math.log10(rounded)) if value else 0)
    return f"{value:.{max(places, 0)}f}"


def listed(parts: Sequence[str]) -> str:
    """Return names for a sentence: "a, b and c"; of more than nine the rest are counted."""
    if len(parts) > 9:
        parts = [*parts[:7], f"{len(parts) - 7} more"]
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 step", "2 steps"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def times(number: int) -> str:
    """Return "once" or "N times"."""
    return "once" if number == 1 else f"{number} times"
