"""Run a tower of small sublayers over a topology: what the functional contract needs, without a decoder around it.

The presets of a group differ in values alone, so that each program runs them all at once: their maps are stacked on a
leading axis P.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from mhc import residual
from mhc.model import depth
from mhc.residual import ResidualTopology
from mhc.rng import PathKey
from tests.contracts.cases import Group

WIDTH, TOKENS = 16, (2, 5)
DEEP = 24  # sublayers of 12 blocks
SHALLOW = 8  # of them, as deep as what equals the plain residual is compared: 4 blocks
STEPS = 10

Params = dict[str, Any]  # {"maps": [P, S, ...] by name, "w": [P, S, D, D], "topology": [P, ...] by name}


class Whole(NamedTuple):
    """Holds the carry from block to block."""

    state: Any


class Forward(NamedTuple):
    """Holds the results of DEEP sublayers, per preset [P, ...]."""

    out: jax.Array  # [P, DEEP, *TOKENS, D]: the state after each sublayer, collapsed
    streams: jax.Array  # [P, *TOKENS, N, D] at the end
    maps: residual.Maps | None  # [P, DEEP, *TOKENS, ...]
    measures: dict[str, jax.Array]  # [P, DEEP, *TOKENS]: the topology's own


class History(NamedTuple):
    """Holds the results of STEPS Adam steps at 1e-3 over SHALLOW sublayers, [P, STEPS + 1, ...], before each update."""

    loss: jax.Array
    streams: jax.Array  # [..., *TOKENS, N, D] after the last sublayer
    params: Params  # [..., SHALLOW, ...]
    grads: Params


class Tower:
    """Runs sublayers F_k(u) = tanh(norm(u) W_k) between the connections of a group."""

    def __init__(self, group: Group):
        self.group = group
        self.topology = self.build(group.inits[0])
        key = PathKey(jax.random.key(0))
        self._graph, self._state = nnx.split(nnx.eval_shape(lambda: self.topology.connection(0, rngs=key / "c" / 0)))

    def build(self, init: str | None) -> ResidualTopology:
        options = self.group.options | ({"init": init} if init else {})
        return residual.build(self.group.kind, WIDTH, rngs=PathKey(jax.random.key(0)), sublayers=DEEP, **options)

    def maps(self, init: str | None) -> Params:
        """Return the initial map parameters of a preset, [DEEP, ...]."""
        topology, key = self.build(init), PathKey(jax.random.key(0)) / "connections"

        def one(k: jax.Array) -> Params:
            return nnx.to_pure_dict(nnx.state(topology.connection(k, rngs=key / k)))

        return jax.vmap(one)(jnp.arange(DEEP))

    @functools.cached_property
    def initial(self) -> Params:
        """Return the parameters of every preset, [P, DEEP, ...]."""

        @jax.jit
        def maps() -> Params:
            return jax.tree.map(lambda *leaves: jnp.stack(leaves), *[self.maps(init) for init in self.group.inits])

        ends = [nnx.to_pure_dict(nnx.state(self.build(init))) for init in self.group.inits]
        return {
            "maps": maps(),
            "w": jnp.stack([weights()] * len(self.group.inits)),
            "topology": jax.tree.map(lambda *leaves: jnp.stack(leaves), *ends),
        }

    def with_params(self, params: Params) -> ResidualTopology:
        """Return the topology with its own parameters."""
        graph, state = nnx.split(self.topology)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)

    def connection(self, params: Params) -> residual.Connection:
        state = jax.tree.map(lambda leaf: leaf, self._state)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(self._graph, state)

    def sublayer(self, state: Any, one: Params, scale: float, topology: ResidualTopology) -> tuple[Any, Any]:
        """Return (next state, (its collapse, maps, own measures)) of one sublayer with its parameters."""
        connection = self.connection(one["maps"])
        u, context = connection.read(state)
        state = connection.write(state, feed_forward(u, one["w"], scale), context)
        collapsed = topology.collapse(topology.settle(state))
        return state, (collapsed, connection.maps(context), connection.measures(context))

    def run(self, params: Params, h: jax.Array) -> Forward:
        """Run h [*TOKENS, D] through as many sublayers as ``params`` [S, ...] has, two a block."""
        topology = self.with_params(params["topology"])
        step = functools.partial(self.sublayer, scale=scale_of(params["w"].shape[0]), topology=topology)
        params = {name: params[name] for name in ("maps", "w")}
        if topology.period is None:
            state, (out, maps, measures) = jax.lax.scan(step, topology.expand(h), params)
        else:

            def block(carry: Whole, two: Params) -> tuple[Whole, Any]:
                state, seen = jax.lax.scan(step, carry.state, two)
                return Whole(state), seen

            blocks = jax.tree.map(lambda leaf: leaf.reshape(-1, 2, *leaf.shape[1:]), params)
            begin = Whole(topology.expand(h))
            end, seen = depth.through(topology, depth.scanned, block, begin, blocks, first=0, scan=True)
            state, (out, maps, measures) = (
                end.state,
                jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), seen),
            )
        return Forward(out, topology.streams(topology.settle(state)), maps, measures)

    def unrolled(self, params: Params) -> jax.Array:
        """Return [2, *TOKENS, D]: the collapsed state after each of the first two sublayers, without a scan."""
        topology = self.with_params(params["topology"])
        state, out = topology.expand(inputs()), []
        for k in range(2):
            one = jax.tree.map(lambda leaf, k=k: leaf[k], {name: params[name] for name in ("maps", "w")})
            state, (collapsed, _, _) = self.sublayer(state, one, scale_of(DEEP), topology)
            out.append(collapsed)
        return jnp.stack(out)

    @functools.cached_property
    def forward(self) -> tuple[Forward, Forward]:
        """Return the results at init, with float32 and with bfloat16 streams."""

        def both(params: Params) -> tuple[Forward, ...]:
            return tuple(self.run(params, inputs().astype(dtype)) for dtype in (jnp.float32, jnp.bfloat16))

        return jax.jit(lambda params: jax.lax.map(both, params))(self.initial)

    def loss(self, params: Params) -> tuple[jax.Array, jax.Array]:
        made = self.run(params, inputs())
        return jnp.mean((made.out[-1] - targets()) ** 2), made.streams

    @functools.cached_property
    def train(self) -> Any:
        """Return the History of training params [P, SHALLOW, ...]; it is compiled."""
        adam = optax.adam(1e-3)

        def step(carry: Any, _: None) -> Any:
            params, state = carry
            (loss, streams), grads = jax.value_and_grad(self.loss, has_aux=True)(params)
            updates, state = adam.update(grads, state)
            return (optax.apply_updates(params, updates), state), History(loss, streams, params, grads)

        def one(params: Params) -> History:
            return jax.lax.scan(step, (params, adam.init(params)), None, STEPS + 1)[1]

        return jax.jit(lambda params: jax.lax.map(one, params))

    @functools.cached_property
    def history(self) -> History:
        sublayers = max(SHALLOW, self.group.n)  # streams come apart where each is some sublayer's home
        params = {name: jax.tree.map(lambda leaf: leaf[:, :sublayers], self.initial[name]) for name in ("maps", "w")}
        return self.train({**params, "topology": self.initial["topology"]})


def scale_of(sublayers: int) -> float:
    """Return the scale of what a sublayer adds, as in deep models: the stream neither drowns in it nor hides it."""
    return (2.0 / sublayers) ** 0.5


def feed_forward(u: jax.Array, w: jax.Array, scale: float) -> jax.Array:
    """Return [..., D] for u [..., D], with its own norm, computed in float32 and returned in the dtype of u."""
    wide = u.astype(jnp.float32)
    norm = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (scale * jnp.tanh(norm @ w)).astype(u.dtype)


def inputs() -> jax.Array:
    return jnp.asarray(np.random.default_rng(10).normal(size=(*TOKENS, WIDTH)), jnp.float32)


def targets() -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=(*TOKENS, WIDTH)), jnp.float32)


def weights() -> jax.Array:
    return jnp.asarray(np.random.default_rng(2).normal(size=(DEEP, WIDTH, WIDTH)) / WIDTH**0.5, jnp.float32)


@functools.cache
def tower(group: Group) -> Tower:
    """Return the tower of a group; it is shared, so that each of its programs is compiled once."""
    return Tower(group)
