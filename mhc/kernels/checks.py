"""Check the arguments of kernels, functions and modules, and choose the dtype that they compute in.

The dtypes are those of jax's standard promotion, whatever ``jax_numpy_dtype_promotion`` is: code that promotes by
``strict`` may hold bfloat16 streams, whose maps are float32.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mhc.errors import did_you_mean
from mhc.kinds import SINKHORN_PRESETS

FLOATS = ("float32", "bfloat16", "float16", "float64")
"""Dtypes of streams. The narrower floats are none: jax promotes them to nothing."""


def common_dtype(*arrays: Any) -> Any:
    """Return the dtype that arrays, scalars and dtypes promote to. Raises ValueError for the narrower floats."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*arrays)


def accumulation_dtype(*arrays: Any) -> Any:
    """Return the dtype to accumulate in: promote_types(arrays, float32)."""
    return common_dtype(common_dtype(*arrays), jnp.float32)


def is_whole(value: object) -> bool:
    """Return whether a value is a whole number: an int or one of numpy's, no bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def check_sinkhorn(preset: str, iters: int = 1, eps: float = 0.0) -> None:
    """Refuse an unknown preset, fewer than one iteration, or an eps that no sum can be divided by.

    Raises:
      ValueError: the argument is refused; the message says what is allowed.
    """
    if preset not in SINKHORN_PRESETS:
        near = did_you_mean(preset, SINKHORN_PRESETS) if isinstance(preset, str) else ""
        raise ValueError(f"unknown Sinkhorn preset {preset!r}; allowed: {', '.join(SINKHORN_PRESETS)}{near}")
    if not is_whole(iters) or iters < 1:
        raise ValueError(f"iters must be at least 1 and a whole number, got {iters!r}")
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps must be a finite number of at least 0, got {eps!r}")


def check_float(name: str, array: Any) -> None:
    """Refuse an array that is not of floating point: results have its dtype, and integers would truncate them.

    Raises:
      TypeError: no array, or one of another dtype than ``FLOATS``.
    """
    dtype = getattr(array, "dtype", None)
    if str(dtype) not in FLOATS:
        got = f"{dtype}{list(array.shape)}" if hasattr(array, "shape") else type(array).__name__
        words = f"{', '.join(FLOATS[:-1])} or {FLOATS[-1]}"
        raise TypeError(f"{name} must be an array of {words}, got {got}")
