"""Keys that follow a parameter's path, so that adding a parameter changes no other one's initial value."""

from __future__ import annotations

import zlib

import jax
from flax import nnx


class PathKey:
    """A PRNG key and a place below it. ``/`` descends: by name, or by (traced) index where layers are stacked.

    Names are gathered and folded in once, at the leaf: every fold is a threefry call to compile.
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
        """The key of this place."""
        key = jax.random.fold_in(self._root, zlib.crc32(self._path.encode()))
        return key if self._index is None else jax.random.fold_in(key, self._index)


def path_key(rngs: nnx.Rngs | PathKey | jax.Array) -> PathKey:
    """The root for a module: a ``PathKey`` as it is, a key, or one key drawn from ``nnx.Rngs``."""
    if isinstance(rngs, PathKey):
        return rngs
    return PathKey(rngs.params() if isinstance(rngs, nnx.Rngs) else rngs)
