"""Test that what only gains rows is kept once for the backward pass, and that nothing else depends on it."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mhc import kinds, residual
from mhc.config import Config
from mhc.model import kept_once
from mhc.residual import ResidualTopology
from tests.small import LENGTH, definition, initial, relative_error, small

WIDTH, SUBLAYERS = 8, 12
ROWS = 2


def built(kind: str) -> ResidualTopology:
    options = {"block": 4} if "block" in kinds.known()[kind].options else {}
    return residual.build(kind, WIDTH, rngs=nnx.Rngs(0), sublayers=SUBLAYERS, **options)


GROWING = [
    name
    for name, kind in kinds.known().items()
    if kind.builder and getattr(kinds.referred(kind.builder), "gains_rows", False)
]


def test_the_depth_kinds_are_here() -> None:
    assert {"attn_res", "denseformer"} <= set(GROWING)


@pytest.mark.parametrize("kind", GROWING)
def test_rows_of_later_periods_change_nothing(kind: str) -> None:
    """What a topology says by ``gains_rows``: reads, handing on and their gradients are the same bits."""
    topology, rng = built(kind), np.random.default_rng(0)
    graph, params = nnx.split(topology)
    topology = nnx.merge(graph, jax.tree.map(lambda leaf: leaf + rng.standard_normal(leaf.shape, np.float32), params))
    assert topology.period is not None
    state = topology.expand(jnp.asarray(rng.standard_normal((ROWS, WIDTH)), jnp.float32))
    seen: list[tuple[Any, Any]] = []
    for k in range(SUBLAYERS):
        if k and k % (2 * topology.period) == 0:
            state = topology.hand_on(topology.settle(state))
        connection = topology.connection(k, rngs=nnx.Rngs(0))
        for leaf in jax.tree.leaves(nnx.state(connection)):
            assert leaf.ndim <= 1  # a query and a scale
        if hasattr(connection, "query"):
            connection.query[...] = jnp.asarray(rng.standard_normal(WIDTH), jnp.float32)
        seen.append((connection, state))
        u, context = connection.read(state)
        state = connection.write(state, jnp.tanh(u + k), context)
    last = topology.held(state)[0]
    for connection, then in seen:
        held, moving = topology.held(then)
        later = jax.tree.map(lambda new, old: new if jnp.issubdtype(old.dtype, jnp.floating) else old, last, held)

        def outcome(held: Any, moving: Any = moving, connection: Any = connection) -> Any:
            whole = topology.joined(held, moving)
            return connection.read(whole)[0], topology.held(topology.hand_on(whole))[1]

        for got, expected in zip(jax.tree.leaves(outcome(later)), jax.tree.leaves(outcome(held)), strict=True):
            np.testing.assert_array_equal(got, expected)

        def total(held: Any, outcome: Any = outcome) -> jax.Array:
            floats = [leaf for leaf in jax.tree.leaves(outcome(held)) if jnp.issubdtype(leaf.dtype, jnp.floating)]
            return jnp.sum(jnp.stack([jnp.sum(jnp.sin(leaf)) for leaf in floats]))

        for got, expected in zip(
            jax.tree.leaves(jax.grad(total, allow_int=True)(later)),
            jax.tree.leaves(jax.grad(total, allow_int=True)(held)),
            strict=True,
        ):
            np.testing.assert_array_equal(got, expected)


def test_arrays_of_the_surrounding_function_get_their_gradients() -> None:
    """A step may use a traced array that is no argument, of floats or of integers."""

    def run(weight: jax.Array, shift: jax.Array, kept: bool) -> jax.Array:
        held = (jnp.stack([jnp.sin(weight), 0 * weight, 0 * weight]), jnp.asarray(0))
        path = kept_once.path_for(held)

        def step(held: Any, x: jax.Array, row: jax.Array) -> jax.Array:
            rows, count = held
            there = (jnp.arange(3) <= count)[:, None]
            return jnp.tanh(x + jnp.sum(jnp.where(there, rows * weight[None], 0.0), axis=0) * row + shift)

        x = weight
        for number in range(2):
            if kept:
                x, path = kept_once.recomputed(step, held, path, x, jnp.float32(number), prevent_cse=True)
            else:
                x = step(held, x, jnp.float32(number))
            held = (held[0].at[number + 1].set(x), held[1] + 1)
        held, x = kept_once.turned(held, x, path) if kept else (held, x)
        return jnp.sum(held[0] ** 2)

    weight, shift = jnp.asarray([0.3, -0.2]), jnp.asarray([1, 2])
    one, other = (jax.jit(jax.value_and_grad(run), static_argnums=2)(weight, shift, kept) for kept in (True, False))
    np.testing.assert_allclose(one[0], other[0], rtol=1e-6)
    np.testing.assert_allclose(one[1], other[1], rtol=1e-5)


def deep(kind: str, **options: Any) -> Config:
    """Return the config of 24 layers that docs/topologies.md counts, at a small width and in float32."""
    return small(kind, residual={"kind": kind, **options}, model={"layers": 24, "width": WIDTH, "remat": "full"})


def kept(config: Config) -> int:
    """Return how many numbers of the size of activations the backward pass gets from the forward pass."""
    tokens = jnp.zeros((ROWS, LENGTH), jnp.int32)

    def pulls(params: Any) -> Any:
        return jax.vjp(lambda params: definition(config).bind(params).forward(tokens).h, params)[1]

    params = definition(config).abstract()
    leaves = jax.tree.leaves(jax.eval_shape(pulls, params))
    return sum(math.prod(leaf.shape) for leaf in leaves if leaf.shape[-3:] == (ROWS, LENGTH, WIDTH))


@pytest.mark.parametrize(("kind", "options", "rows"), [("attn_res", {"block": 8}, 7), ("denseformer", {}, 25)])
def test_the_backward_pass_keeps_the_rows_once_and_the_stream_once_a_layer(
    kind: str, options: dict[str, Any], rows: int
) -> None:
    """By shapes: beyond plain's it keeps the rows after the last block, and at most two arrays [T, D] a period."""
    unit = ROWS * LENGTH * WIDTH
    plain, other = kept(deep("plain")) / unit, kept(deep(kind, **options)) / unit
    assert 24 <= plain <= 28  # the stream before each layer, and what the ends keep
    period = residual.build(kind, WIDTH, rngs=nnx.Rngs(0), sublayers=48, **options).period
    assert period is not None
    assert rows <= other - plain + 1 <= rows + 2 * (24 // period) + 2


@pytest.mark.product
@pytest.mark.parametrize(
    ("kind", "groups"),
    [
        # Two stacks of blocks, which share a period.
        ("attn_res", {"moe": {"experts": 4, "dense_layers": 1}, "residual": {"kind": "attn_res", "block": 4}}),
        ("denseformer", {}),
    ],
)
@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.product)])
def test_the_numbers_are_those_of_a_pass_that_keeps_everything(
    kind: str, groups: dict[str, dict[str, Any]], scan: bool
) -> None:
    """Loss and gradient agree with remat=none, scanned or unrolled."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 32, (ROWS, LENGTH)))

    def values(model: dict[str, Any]) -> tuple[jax.Array, Any]:
        config = small(kind, model={"layers": 5, **model}, **groups)

        def loss(params: Any) -> jax.Array:
            return jnp.mean(jnp.square(definition(config).bind(params).forward(tokens).h - 1.0))

        return jax.jit(jax.value_and_grad(loss))(initial(config))

    (expected, slope), (got, grads) = values({}), values({"remat": "full", "scan": scan})
    assert relative_error(got, expected) <= 1e-6
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(slope), strict=True):
        assert np.max(np.abs(a - b)) <= 1e-5 * np.max(np.abs(b)) + 1e-8
    if kind == "denseformer":
        assert np.count_nonzero(grads["residual"]["weights"]) >= 5 * 6 // 2  # of every block that counts
