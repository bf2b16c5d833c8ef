"""Recompute in the backward pass from arrays that only gain rows, and keep them once for the whole depth.

Under recomputation a scan keeps, for every step, what the step starts from. Of arrays that gain a row now and then and
lose none, such as the sources of attention over depth, this is a copy for each step of what the last one has anyway. So
here a step keeps everything else, and gets the arrays back in the backward pass as they are after the last step.

They come as a cotangent. A *return path* accompanies the carry: zeros of their shapes, which every step hands on as it
got them. ``turned`` ends it, and sends the arrays back along it in place of a cotangent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Path = list[jax.Array]
"""The return path: an array for each leaf of floats of what is kept once."""


def path_for(held: Any) -> Path:
    """Return a return path for these arrays."""
    return [jnp.zeros_like(leaf) for leaf in jax.tree.leaves(held) if _returns(leaf)]


def _returns(leaf: jax.Array) -> bool:
    """Return whether a leaf comes back by the return path; counts are kept by each step as they are."""
    return jnp.issubdtype(leaf.dtype, jnp.floating)


@jax.custom_vjp
def turned(held: Any, moving: Any, path: Path) -> tuple[Any, Any]:
    """Return (held, moving), and let the held arrays go back along the path in the backward pass.

    Args:
      held: what is kept once, after the last step.
      moving: the rest of what the last step leaves. The arrays go back if the gradient of any of the two is asked for,
        and what follows may use the rest alone.
      path: the return path after the last step.
    """
    return held, moving


def _turn(held: Any, moving: Any, path: Path) -> tuple[tuple[Any, Any], Path]:
    return (held, moving), [leaf for leaf in jax.tree.leaves(held) if _returns(leaf)]


def _turn_back(kept: Path, cotangents: tuple[Any, Any]) -> tuple[Any, Any, Path]:
    return (*cotangents, kept)


turned.defvjp(_turn, _turn_back)


def recomputed(f: Callable[..., Any], held: Any, path: Path, *rest: Any, prevent_cse: bool) -> tuple[Any, Path]:
    """Return (f(held, *rest), path), where the backward pass computes f again and keeps all that f needs but ``held``.

    Args:
      f: may use traced arrays of the surrounding function. What it reads of ``held`` must not change once further rows
        are there.
      held: arrays that only gain rows, and counts.
      path: the return path of these arrays.
      rest: further arguments.
      prevent_cse: whether the recomputation needs to be kept apart from the forward pass, as outside of a scan.
    """
    # A function with a derivative of its own must not use traced arrays of others: they become arguments.
    closed, shapes = jax.make_jaxpr(f, return_shape=True)(held, *rest)
    out = jax.tree.structure(shapes)

    def pure(used: list[Any], *arguments: Any) -> Any:
        flat = jax.core.eval_jaxpr(closed.jaxpr, used, *jax.tree.leaves(arguments))
        return jax.tree.unflatten(out, flat)

    @jax.custom_vjp
    def run(used: list[Any], held: Any, path: Path, rest: tuple[Any, ...]) -> tuple[Any, Path]:
        return pure(used, held, *rest), path

    def forward(used: list[Any], held: Any, path: Path, rest: tuple[Any, ...]) -> tuple[Any, Any]:
        counts = [None if _returns(leaf) else leaf for leaf in jax.tree.leaves(held)]
        return run(used, held, path, rest), (used, counts, rest)

    def backward(kept: Any, cotangents: tuple[Any, Path]) -> tuple[Any, ...]:
        cotangent, last = cotangents
        used, counts, rest = jax.lax.optimization_barrier(kept) if prevent_cse else kept
        returned = iter(last)
        leaves = [next(returned) if count is None else count for count in counts]
        again = jax.tree.unflatten(jax.tree.structure(held), leaves)
        _, pull = jax.vjp(pure, used, again, *rest)
        of_used, of_held, *of_rest = pull(cotangent)
        return of_used, of_held, last, tuple(of_rest)

    run.defvjp(forward, backward)
    return run(closed.consts, held, path, rest)
