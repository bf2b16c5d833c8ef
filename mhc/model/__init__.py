"""Define the decoder around the residual stream."""

from __future__ import annotations

from typing import Any

__all__ = ["Decoder"]


def __getattr__(name: str) -> Any:
    """Load the decoder when it is asked for: `mhc.sharding`, which it needs, reads `mhc.model.parameters` first."""
    if name == "Decoder":
        from mhc.model.decoder import Decoder

        return Decoder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
