"""What the reference functions do to their arguments: the dtype that they compute in, and checks of shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jax.typing import ArrayLike


def wide(*arrays: ArrayLike) -> tuple[jax.Array, ...]:
    """Return the arrays in their common dtype, at least float32."""
    dtype = jnp.promote_types(jnp.result_type(*arrays), jnp.float32)
    return tuple(jnp.asarray(a, dtype) for a in arrays)


def check_square(name: str, shape: tuple[int, ...]) -> None:
    """Refuse, with a ValueError, a shape that does not end in two equal axes [..., N, N]."""
    if len(shape) < 2 or shape[-1] != shape[-2]:
        raise ValueError(f"{name} must end in two equal axes [..., N, N], got shape {shape}")
