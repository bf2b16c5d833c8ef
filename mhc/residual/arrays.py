"""Check the reference functions' arguments: the dtype that they compute in, and the shapes of arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from mhc.errors import did_you_mean
from mhc.kernels.checks import accumulation_dtype, is_whole

if TYPE_CHECKING:
    from jax.typing import ArrayLike


def promoted(**arrays: ArrayLike) -> tuple[jax.Array, ...]:
    """Return the arrays, given by name, in their common dtype, at least float32.

    Raises:
      TypeError: one of them is no array of real numbers, or has a dtype that jax promotes to nothing (float8).
    """
    for name, array in arrays.items():
        try:
            real = jnp.issubdtype(accumulation_dtype(array), jnp.floating)
        except (TypeError, ValueError):
            real = False
        if not real:
            kind = getattr(array, "dtype", type(array).__name__)
            raise TypeError(f"{name} must be an array of real numbers that jax promotes to float32, got {kind}")
    dtype = accumulation_dtype(*arrays.values())
    return tuple(jnp.asarray(array, dtype) for array in arrays.values())


def named(params: Mapping[str, ArrayLike], names: Iterable[str], function: str) -> dict[str, ArrayLike]:
    """Return the parameters that a function takes, by their names.

    Raises:
      ValueError: one is missing.
    """
    names = tuple(names)
    for name in names:
        if name not in params:
            near = did_you_mean(name, [str(key) for key in params if key not in names])
            raise ValueError(f"{function} takes the parameters {', '.join(names)}; {name} is missing{near}")
    return {name: params[name] for name in names}


def check_count(name: str, count: object) -> None:
    """Raise ValueError for a value that is no whole number of at least 1."""
    if not is_whole(count) or int(count) < 1:  # type: ignore[call-overload]
        raise ValueError(f"{name} must be at least 1 and a whole number, got {count!r}")


def check_streams(name: str, x: Any) -> tuple[int, int]:
    """Return (N, D) of streams [..., N, D]. Raises ValueError where the array has fewer than two axes."""
    if x.ndim < 2:
        raise ValueError(f"{name} must be streams [..., N, D], got shape {x.shape}")
    return x.shape[-2], x.shape[-1]


def check_axes(name: str, array: Any, *axes: tuple[str, int], leading: bool = True) -> None:
    """Refuse an array that does not end in these axes.

    Args:
      axes: the letter and the size of each.
      leading: whether more axes may stand before them.

    Raises:
      ValueError: a shape of another rank or size, with what was expected.
    """
    sizes = tuple(size for _, size in axes)
    shape = tuple(array.shape)
    if (shape[len(shape) - len(sizes) :] if leading else shape) != sizes:
        words = ", ".join(["..."] * leading + [f"{letter}={size}" for letter, size in axes])
        raise ValueError(f"{name} must be [{words}], got shape {shape}")


def check_leading(**leading: tuple[int, ...]) -> None:
    """Refuse leading axes, given by the arrays' names, that do not broadcast. Raises ValueError."""
    try:
        jnp.broadcast_shapes(*leading.values())
    except ValueError:
        words = ", ".join(f"{name} {axes}" for name, axes in leading.items())
        raise ValueError(f"the leading axes do not broadcast: {words}") from None


def check_square(name: str, shape: tuple[int, ...]) -> None:
    """Refuse, with a ValueError, a shape that does not end in two equal axes [..., N, N]."""
    if len(shape) < 2 or shape[-1] != shape[-2]:
        raise ValueError(f"{name} must end in two equal axes [..., N, N], got shape {shape}")
