"""Two topologies that carry more than streams, registered from here: the decoder must not notice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mhc import kernels, kinds
from mhc.kinds import Kind
from mhc.residual import Maps, TokenMaps, protocol
from mhc.residual.manifold import ManifoldHyperConnections, ManifoldMaps
from mhc.rng import PathKey

Streams = tuple[jax.Array, ...]


class SinglePassMaps(ManifoldMaps):
    """The read weights of sublayer k are those that sublayer k - 1 computed: one pass over the streams gives both."""

    def read(self, state: Any) -> tuple[jax.Array, Any]:
        x, pre = state
        return kernels.read(x, pre), (pre, self.token_maps(x))

    def write(self, state: Any, y: jax.Array, context: Any) -> Any:
        x, _ = state
        _, maps = context
        return kernels.write(x, y, maps.post, maps.res), maps.pre

    def maps(self, context: Any) -> Maps:
        applied, maps = context
        return super().maps(maps._replace(pre=applied))


class SinglePass(ManifoldHyperConnections):
    """State: (streams [..., N, D], pre [N, ...] float32). Sublayer 0 reads the mean."""

    def expand(self, h: jax.Array) -> Any:
        return super().expand(h), jnp.full((self.n, *h.shape[:-1]), 1.0 / self.n, jnp.float32)

    def connection(self, k: int | jax.Array, *, rngs: nnx.Rngs | PathKey) -> SinglePassMaps:
        return SinglePassMaps(self, k, rngs=rngs)

    def collapse(self, state: Any) -> jax.Array:
        return super().collapse(state[0])

    def streams(self, state: Any) -> jax.Array:
        return state[0]


def settle(state: tuple[Streams, tuple[jax.Array, TokenMaps]]) -> Streams:
    """The streams after the write that is still due."""
    streams, (y, maps) = state
    assert maps.res is not None
    res, wide = maps.res[..., None], jnp.promote_types(y.dtype, jnp.float32)
    return tuple(
        (sum(res[i, j] * x for j, x in enumerate(streams)) + maps.post[i, ..., None] * y.astype(wide)).astype(y.dtype)
        for i in range(len(streams))
    )


class DeferredMaps(ManifoldMaps):
    """The write of sublayer k is done by the read of sublayer k + 1, where a kernel can fuse the two."""

    def read(self, state: Any) -> tuple[jax.Array, Any]:
        streams = settle(state)
        maps = self.token_maps(jnp.stack(streams, axis=-2))
        u = sum(maps.pre[j, ..., None] * x for j, x in enumerate(streams))
        return jnp.asarray(u).astype(streams[0].dtype), (streams, maps)

    def write(self, state: Any, y: jax.Array, context: Any) -> Any:
        streams, maps = context
        return streams, (y, maps)

    def maps(self, context: Any) -> Maps:
        return super().maps(context[1])


class Deferred(ManifoldHyperConnections):
    """State: (N arrays [..., D], the write that is due: (y, maps))."""

    def expand(self, h: jax.Array) -> Any:
        n, lead = self.n, h.shape[:-1]
        eye = jnp.eye(n, dtype=jnp.float32).reshape(n, n, *(1,) * len(lead))
        none = jnp.zeros((n, *lead), jnp.float32)
        return (h,) * n, (jnp.zeros_like(h), TokenMaps(none, none, jnp.broadcast_to(eye, (n, n, *lead))))

    def connection(self, k: int | jax.Array, *, rngs: nnx.Rngs | PathKey) -> DeferredMaps:
        return DeferredMaps(self, k, rngs=rngs)

    def streams(self, state: Any) -> jax.Array:
        return jnp.stack(settle(state), axis=-2)

    def collapse(self, state: Any) -> jax.Array:
        return super().collapse(self.streams(state))


def _kind(name: str) -> Kind:
    mhc = kinds.MHC
    return Kind(
        name,
        streams=(2,),
        why_streams="one N is enough for a test",
        inits=("home", "equivalent"),
        options=mhc.options,
        parameters=mhc.parameters,
    )


SINGLE_PASS, DEFERRED = _kind("single_pass"), _kind("deferred")
BUILDERS = {"single_pass": (SINGLE_PASS, SinglePass), "deferred": (DEFERRED, Deferred)}


@contextlib.contextmanager
def registry_restored() -> Iterator[None]:
    """What is registered within is forgotten afterwards: other tests look at the registry as it is."""
    tables: tuple[dict[str, Any], ...] = (protocol._REGISTRY, kinds._KINDS, kinds._PARAMETERS)
    before = [dict(table) for table in tables]
    try:
        yield
    finally:
        for table, content in zip(tables, before, strict=True):
            table.clear()
            table.update(content)
