"""Configure the mHC paper's 27B model."""

from __future__ import annotations

from ml_collections import ConfigDict

from configs import paper


def get_config() -> ConfigDict:
    """Return 27.0 billion parameters, 4.14 billion of them active."""
    return paper.get_config(
        layers=30, width=2560, expert_width=1536, experts=72, heads=32, batch=1280, steps=50_000, lr=4.0e-4
    )
