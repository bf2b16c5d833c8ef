"""Derive PRNG keys from parameters' paths, so that adding a parameter does not change the initial values of others."""

from __future__ import annotations

import zlib

import jax
from flax import nnx


class PathKey:
    """Holds a PRNG key and a path below it. ``/`` descends: by name, or by a (traced) index where layers are stacked.

    The whole path is folded into the key at once, in ``key``, because each fold is a threefry call to compile.
    """

    def __init__(self, root: jax.Array, path: str = "", index: int | jax.Array | None = None):
        self._root, self._path, self._index = root, path, index

    def __truediv__(self, step: str | int | jax.Array) -> PathKey:
        if isinstance(step, str):
            return PathKey(self._root, f"{self._path}/{step}", self._index)
        if self._index is not None:
            raise ValueError(f"{self._path} already has an index")
        return PathKey(self._root, f"{self._path}/*", step)

    @property
    def key(self) -> jax.Array:
        """Return the key of this path, a uint32 or typed key array like the root."""
        key = jax.random.fold_in(self._root, zlib.crc32(self._path.encode()))
        return key if self._index is None else jax.random.fold_in(key, self._index)


def path_key(rngs: nnx.Rngs | PathKey | jax.Array) -> PathKey:
    """Return the PathKey for a module: a PathKey unchanged, the root of a key, or of a key drawn from ``nnx.Rngs``."""
    if isinstance(rngs, PathKey):
        return rngs
    return PathKey(rngs.params() if isinstance(rngs, nnx.Rngs) else rngs)
