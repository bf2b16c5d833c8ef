"""Register topologies each of which asks something of the protocol that no kind of the library asks.

The decoder, the step, the probes and the programs must not notice which they serve.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from mhc import kind_table, kinds
from mhc.kinds import Kind, Option, Parameter
from mhc.residual import Connection, Maps, Mixing, ResidualTopology, TokenMaps, protocol
from mhc.residual.manifold import ManifoldHyperConnections, ManifoldMaps
from mhc.residual.single_pass import SinglePassHyperConnections

Streams = tuple[jax.Array, ...]
EPS = 1e-6


# Single pass: the state holds more than streams -----------------------------------------------------------------------


def single_pass(width: int, *, collapse: str | None = None, **options: Any) -> SinglePassHyperConnections:
    """Build mhc with single_pass as a kind of its own, so that the option is tested as kinds are."""
    return SinglePassHyperConnections(width, **options)


# Deferred: a write is pending, and its maps lie tokens last -----------------------------------------------------------


class DeferredMaps(ManifoldMaps):
    """Leaves the write of sublayer k to the read of sublayer k + 1, where a kernel can fuse the two."""

    def read(self, state: Any) -> tuple[jax.Array, Any]:
        streams = written(state)
        maps = self.token_maps(jnp.stack(streams, axis=-2))
        u = sum(maps.pre[j, ..., None] * x for j, x in enumerate(streams))
        return jnp.asarray(u).astype(streams[0].dtype), (streams, maps)

    def write(self, state: Any, y: jax.Array, context: Any) -> Any:
        streams, maps = context
        return streams, (y, maps)

    def maps(self, context: Any) -> Maps:
        return super().maps(context[1])


def written(state: tuple[Streams, tuple[jax.Array, TokenMaps]]) -> Streams:
    """Return the streams after the write that is pending."""
    streams, (y, maps) = state
    assert maps.res is not None
    res, wide = maps.res[..., None], jnp.promote_types(y.dtype, jnp.float32)
    return tuple(
        (sum(res[i, j] * x for j, x in enumerate(streams)) + maps.post[i, ..., None] * y.astype(wide)).astype(y.dtype)
        for i in range(len(streams))
    )


class Deferred(ManifoldHyperConnections):
    """Keeps the state (N arrays [..., D], the write that is pending: (y, maps with the tokens last))."""

    maps_class = DeferredMaps

    def nothing(self, y: jax.Array) -> tuple[jax.Array, TokenMaps]:
        n, lead = self.n, y.shape[:-1]
        eye = jnp.eye(n, dtype=jnp.float32).reshape(n, n, *(1,) * len(lead))
        none = jnp.zeros((n, *lead), jnp.float32)
        return jnp.zeros_like(y), TokenMaps(none, none, jnp.broadcast_to(eye, (n, n, *lead)))

    def expand(self, h: jax.Array) -> Any:
        return (h,) * self.n, self.nothing(h)

    def each(self, state: Any, f: Callable[[jax.Array], jax.Array]) -> Any:
        streams, (y, (pre, post, res)) = state

        def tokens_first(leaf: jax.Array, axes: int) -> jax.Array:
            lead, last = tuple(range(axes)), tuple(range(-axes, 0))
            return jnp.moveaxis(f(jnp.moveaxis(leaf, lead, last)), last, lead)

        maps = TokenMaps(tokens_first(pre, 1), tokens_first(post, 1), tokens_first(res, 2))
        return tuple(map(f, streams)), (f(y), maps)

    def settle(self, state: Any) -> Any:
        streams = written(state)
        return streams, self.nothing(streams[0])

    def streams(self, state: Any) -> jax.Array:
        return jnp.stack(state[0], axis=-2)

    def collapse(self, state: Any) -> jax.Array:
        return super().collapse(self.streams(state))


# Sixteen streams, with a mixing and two options of its own ------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Turning(Mixing):
    """Computes H_res = (1 - a) I + a S; S turns the streams by ``places``, a = limit sigmoid(logit); R = 1."""

    places: int = 1
    limit: float = 1.0

    def logits(self, n: int) -> int:
        return 1

    def initial(self, n: int, gap: float) -> jax.Array:
        return jnp.full((1,), -gap, jnp.float32)

    def reference(self, logits: jax.Array, n: int) -> jax.Array:
        a = (self.limit * jax.nn.sigmoid(logits))[..., None]
        eye = jnp.eye(n, dtype=logits.dtype)
        eye, turn = (jax.lax.broadcast_to_rank(m, a.ndim) for m in (eye, jnp.roll(eye, self.places, axis=1)))
        return (1.0 - a) * eye + a * turn


def sixteen(width: int, **options: Any) -> ManifoldHyperConnections:
    """Build the topology from everything that it declares."""
    return ManifoldHyperConnections(width, mixing=Turning, **{"n": 16, **options})


# Sources over depth: the state grows by periods, and no map mixes streams ---------------------------------------------


class SourcesConnection(Connection):
    """Computes u = sum_j a_j s_j over the sums s_j of earlier periods and the running one.

    The weights a are the softmax of a learned query's products. Parameters, float32: query [D], zero at init.
    """

    def __init__(self, width: int):
        self.query = nnx.Param(jnp.zeros((width,), jnp.float32))

    def read(self, state: Any) -> tuple[jax.Array, Any]:
        every = jnp.concatenate([state["sources"], state["running"][..., None, :]], axis=-2).astype(jnp.float32)
        there = jnp.arange(every.shape[-2] - 1) <= state["complete"]
        has = jnp.concatenate([there, (state["terms"] > 0)[None]])
        unit = every * jax.lax.rsqrt(jnp.mean(every * every, axis=-1, keepdims=True) + EPS)
        a = jax.nn.softmax(jnp.where(has, unit @ self.query[...], -jnp.inf), axis=-1)
        u = jnp.einsum("...j,...jd->...d", a, every)
        return u.astype(state["running"].dtype), a

    def write(self, state: Any, y: jax.Array, context: Any) -> Any:
        return {**state, "running": state["running"] + y, "terms": state["terms"] + 1}

    def maps(self, context: Any) -> None:
        return None

    def measures(self, context: Any) -> dict[str, jax.Array]:
        return {"embedding_weight": context[..., 0], "newest_weight": context[..., -1]}


class Sources(ResidualTopology):
    """Keeps the sums of complete periods [..., M, D], the embedding first, the running sum [..., D], two counts."""

    n = 1

    def __init__(
        self,
        width: int,
        *,
        rngs: Any = None,
        sublayers: int | None = None,
        n: int | None = None,
        collapse: str | None = None,
        every: int = 1,
    ):
        if sublayers is None:
            raise ValueError("sources needs sublayers, the depth of the network")
        self.width, self.period = width, every
        self.places = -(-sublayers // (2 * every)) + 1

    def expand(self, h: jax.Array) -> Any:
        first = h[..., None, :]
        rest = jnp.zeros((*h.shape[:-1], self.places - 1, h.shape[-1]), h.dtype)
        zero = jnp.zeros((), jnp.int32)
        return {
            "sources": jnp.concatenate([first, rest], axis=-2),
            "running": jnp.zeros_like(h),
            "complete": zero,
            "terms": zero,
        }

    def connection(self, k: int | jax.Array, *, rngs: Any = None) -> SourcesConnection:
        return SourcesConnection(self.width)

    def held(self, state: Any) -> tuple[Any, Any]:
        return state["sources"], {name: leaf for name, leaf in state.items() if name != "sources"}

    def joined(self, held: Any, moving: Any) -> Any:
        return {**moving, "sources": held}

    def hand_on(self, state: Any) -> Any:
        place = state["complete"] + 1
        sources = jax.lax.dynamic_update_index_in_dim(state["sources"], state["running"], place, axis=-2)
        zero = jnp.zeros((), jnp.int32)
        return {"sources": sources, "running": jnp.zeros_like(state["running"]), "complete": place, "terms": zero}

    def collapse(self, state: Any) -> jax.Array:
        total = jnp.sum(state["sources"].astype(jnp.float32), axis=-2) + state["running"].astype(jnp.float32)
        return total.astype(state["running"].dtype)

    def streams(self, state: Any) -> jax.Array:
        return self.collapse(state)[..., None, :]

    def multiplies(self, k: int) -> int:
        return 3 * (k // (2 * (self.period or 1)) + 2) * self.width

    def end_multiplies(self) -> int:
        return self.places * self.width


# A topology that owns the norms ---------------------------------------------------------------------------------------


def normalised(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    unit = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + EPS)
    return jnp.mean(unit * jax.lax.broadcast_to_rank(weight, x.ndim), axis=-2).astype(x.dtype)


class NormedConnection(Connection):
    """Computes u = mean_j w_j RMSNorm(x_j), x'_i = x_i + s_i y. Parameters, float32: norm_weight [N, D], inject [N]."""

    def __init__(self, k: int | jax.Array, n: int, width: int):
        self.norm_weight = nnx.Param(jnp.ones((n, width), jnp.float32))
        self.inject = nnx.Param(0.5 + jax.nn.one_hot(k % n, n, dtype=jnp.float32))

    def read(self, state: jax.Array) -> tuple[jax.Array, Any]:
        return normalised(state, self.norm_weight[...]), state.shape[:-2]

    def write(self, state: jax.Array, y: jax.Array, context: Any) -> jax.Array:
        inject = jax.lax.broadcast_to_rank(self.inject[...][:, None], state.ndim)
        return (state + inject * y[..., None, :].astype(jnp.float32)).astype(state.dtype)

    def maps(self, context: Any) -> None:
        return None

    def measures(self, context: Any) -> dict[str, jax.Array]:
        return {"inject": jnp.broadcast_to(jnp.mean(self.inject[...]), context)}


class Normed(ResidualTopology):
    """Keeps N streams that are normalised where they are read, and at the end."""

    owns_norm: ClassVar[bool] = True

    def __init__(self, width: int, *, rngs: Any = None, n: int | None = None, collapse: str | None = None):
        self.width, self.n = width, 2 if n is None else n
        self.end_weight = nnx.Param(jnp.ones((self.n, width), jnp.float32))

    def expand(self, h: jax.Array) -> jax.Array:
        return jnp.broadcast_to(h[..., None, :], (*h.shape[:-1], self.n, h.shape[-1]))

    def connection(self, k: int | jax.Array, *, rngs: Any = None) -> NormedConnection:
        return NormedConnection(k, self.n, self.width)

    def collapse(self, state: jax.Array) -> jax.Array:
        return normalised(state, self.end_weight[...])

    def streams(self, state: jax.Array) -> jax.Array:
        return state

    def multiplies(self, k: int) -> int:
        return 4 * self.n * self.width


# The registry ---------------------------------------------------------------------------------------------------------


def _manifold(name: str, **fields: Any) -> Kind:
    mhc = kinds.MHC
    return Kind(
        name,
        why_streams="one N is enough for a test",
        inits=("home", "equivalent"),
        preserving=mhc.preserving,
        options=dict(mhc.options) | fields.pop("options", {}),
        parameters=mhc.parameters,
        **fields,
    )


SINGLE_PASS, DEFERRED = _manifold("single_pass", streams=(2,)), _manifold("deferred", streams=(2,))
SIXTEEN = _manifold(
    "sixteen",
    streams=(16,),
    options={
        "places": Option("places that streams turn by", default=1, low=1),
        "limit": Option("largest share that turns", default=1.0, above=0, high=1),
    },
)
SOURCES = Kind(
    "sources",
    streams=(1,),
    why_streams="it has one stream and its past",
    collapses=("sum",),
    options={"every": Option("blocks of a period", default=1, low=1)},
    parameters={"query": Parameter(("stream_width",))},
)
NORMED = Kind(
    "normed",
    streams=(2,),
    collapses=("mean",),
    parameters={
        "norm_weight": Parameter(("streams", "stream_width")),
        "inject": Parameter(("maps",)),
        "end_weight": Parameter(("streams", "stream_width")),
    },
)
BUILDERS: dict[str, tuple[Kind, protocol.Builder]] = {
    "single_pass": (SINGLE_PASS, single_pass),
    "deferred": (DEFERRED, Deferred),
    "sixteen": (SIXTEEN, sixteen),
    "sources": (SOURCES, Sources),
    "normed": (NORMED, Normed),
}
DOUBLY_STOCHASTIC = ("single_pass", "deferred", "sixteen")
WITHOUT_MAPS = ("sources", "normed")


@contextlib.contextmanager
def registry_restored() -> Iterator[None]:
    """Forget afterwards what is registered within the block, since other tests look at the registry as it is."""
    tables: tuple[dict[str, Any], ...] = (
        protocol._REGISTRY,
        kind_table._KINDS,
        kind_table._PARAMETERS,
        kind_table._OPTIONS,
        kind_table._MODULES,
    )
    before = [dict(table) for table in tables]
    try:
        yield
    finally:
        for table, content in zip(tables, before, strict=True):
            table.clear()
            table.update(content)
