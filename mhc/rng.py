"""Keys that follow a parameter's path, so that adding a parameter changes no other one's initial value."""

from __future__ import annotations

import zlib

import jax
from flax import nnx


class PathKey:
    """A PRNG key with a place: children fold their name (or an index, which may be traced) into it."""

    def __init__(self, key: jax.Array):
        self.key = key

    def __truediv__(self, name: str | int | jax.Array) -> PathKey:
        return PathKey(jax.random.fold_in(self.key, zlib.crc32(name.encode()) if isinstance(name, str) else name))


def path_key(rngs: nnx.Rngs | PathKey | jax.Array) -> PathKey:
    """The root for a module: a ``PathKey`` as it is, a key, or one key drawn from ``nnx.Rngs``."""
    if isinstance(rngs, PathKey):
        return rngs
    return PathKey(rngs.params() if isinstance(rngs, nnx.Rngs) else rngs)
