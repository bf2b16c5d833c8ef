"""Configure the mHC paper's 3B model."""

from __future__ import annotations

from ml_collections import ConfigDict

from configs import paper


def get_config() -> ConfigDict:
    """Return 2.97 billion parameters, 612 million of them active.

    It was also trained on a trillion tokens: batch 2560, 100,000 steps, rate 9.0e-4.
    """
    return paper.get_config(
        layers=12, width=1280, expert_width=896, experts=64, heads=16, batch=320, steps=30_000, lr=8.6e-4
    )
