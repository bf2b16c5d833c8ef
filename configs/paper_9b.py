"""Configure the mHC paper's 9B model."""

from __future__ import annotations

from ml_collections import ConfigDict

from configs import paper


def get_config() -> ConfigDict:
    """Return 9.18 billion parameters, 1.66 billion of them active."""
    return paper.get_config(
        layers=18, width=1920, expert_width=1280, experts=64, heads=24, batch=512, steps=50_000, lr=5.9e-4
    )
