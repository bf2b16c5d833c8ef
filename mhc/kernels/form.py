"""Describe how a kind makes the weights that a sublayer reads with, for kernels that read and project in one pass."""

from __future__ import annotations

from typing import NamedTuple


class Form(NamedTuple):
    """Describes the reading weights pre [N, ...] by the first N columns of a projection raw [C, ...]."""

    each: bool
    """Says whether each stream is normalised by itself, column c by the norm of stream c mod N (hc), or all by one."""
    squash: str
    """``sigmoid``: pre = sigmoid(gain raw + bias) + offset. ``tanh``, ``none``: pre = gain f(raw) + bias + offset."""
    offset: float
    eps: float
    """Inside the square root of the norm."""
