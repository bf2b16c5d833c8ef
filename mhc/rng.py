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
    """Return the PathKey for a module: a PathKey unchanged, the root of a key, or of a key drawn from ``nnx.Rngs``.

    Raises:
      TypeError: it is none of these.
      ValueError: more than one key, or ``nnx.Rngs`` without a stream for parameters.
    """
    if isinstance(rngs, PathKey):
        return rngs
    if isinstance(rngs, nnx.RngStream):
        return PathKey(rngs())
    if isinstance(rngs, nnx.Rngs):
        if not ("params" in rngs or "default" in rngs):
            raise ValueError(f"rngs: given streams {', '.join(rngs)}, allowed: nnx.Rngs(0), with a stream for params")
        return PathKey(rngs.params())
    typed = isinstance(rngs, jax.Array) and jax.dtypes.issubdtype(rngs.dtype, jax.dtypes.prng_key)
    if not typed and not (hasattr(rngs, "dtype") and rngs.dtype == "uint32"):
        words = f"{rngs.dtype}{list(rngs.shape)}" if hasattr(rngs, "dtype") else repr(rngs)
        raise TypeError(f"rngs: given {words}, allowed: nnx.Rngs(0), a key such as jax.random.key(0), or a PathKey")
    if rngs.ndim != (0 if typed else 1):
        raise ValueError(f"rngs: given keys of shape {rngs.shape}, allowed: one key")
    return PathKey(rngs)
