"""Test connections and functions under jax's strict settings, which a program may set for itself: the same bits.

Maps are float32 where streams are narrower, so nothing here may count on promotion.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mhc import kernels, residual
from mhc.kernels.checks import accumulation_dtype, common_dtype
from mhc.residual import HyperConnection, functional

WIDTH, DEPTH = 8, 2
KINDS = residual.kinds()
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in KINDS),
    ("plain", {"scale": 0.5}),
    ("hc", {"dynamic": False}),
    ("mhc", {"sinkhorn": "deepseek", "init": "v4", "collapse": "head"}),
]
FEW = ("mhc", "ortho", "attn_res")  # of those that compute alike, one is fast


def fast(chosen: bool) -> Any:
    """Return the marks of a case: none where `make test` tries it."""
    return () if chosen else pytest.mark.product


@contextlib.contextmanager
def strict() -> Iterator[None]:
    """Allow no promotion, neither of dtypes nor of ranks, and no NaN, and check what jax checks only on request."""
    with (
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
        jax.enable_checks(True),
        jax.debug_nans(True),
    ):
        yield


def network(kind: str, **options: Any) -> tuple[Any, nnx.State]:
    """Return the graph and the parameters of connections, drawn at random so that no map is at a special point."""
    options |= {"kind": kind, "sublayers": DEPTH}
    connections = [HyperConnection(WIDTH, k, rngs=nnx.Rngs(k), **options) for k in range(DEPTH)]
    graph, state = nnx.split(connections)
    rng = np.random.default_rng(0)
    return graph, jax.tree.map(lambda leaf: leaf + jnp.asarray(0.1 * rng.normal(size=leaf.shape), leaf.dtype), state)


def streams_of(dtype: str) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, WIDTH)), dtype)


def everything(graph: Any, sublayer: Callable[[jax.Array], jax.Array] = jnp.tanh) -> Callable[..., Any]:
    """Return a network's output, its maps, and the gradients by parameters and input."""

    def loss(state: nnx.State, h: jax.Array) -> tuple[jax.Array, Any]:
        connections = nnx.merge(graph, state)
        x = connections[0].expand(h)
        maps = []
        for connection in connections:
            u, context = connection.read(x)
            x = connection.write(x, sublayer(u), context)
            maps.append((connection.maps(context), connection.measures(context)))
        out = connections[-1].collapse(x)
        return jnp.sum(out.astype(accumulation_dtype(out)) ** 2), (out, maps)

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)


def assert_same_bits(strictly: Any, ordinary: Any) -> None:
    for (path, a), b in zip(jax.tree.leaves_with_path(strictly), jax.tree.leaves(ordinary), strict=True):
        assert a.dtype == b.dtype, path
        np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64), str(path))


@pytest.mark.parametrize(
    "dtype",
    [
        "bfloat16",
        pytest.param("float16", marks=pytest.mark.product),
        pytest.param("float32", marks=pytest.mark.product),
    ],
)
@pytest.mark.parametrize(
    ("kind", "options"), [pytest.param(kind, options, marks=fast(kind in FEW)) for kind, options in OPTIONS]
)
def test_a_connection_gives_the_same_bits(kind: str, options: dict[str, Any], dtype: str) -> None:
    """Outputs, maps, measures and gradients have the same bits."""
    graph, state = network(kind, **options)
    h = streams_of(dtype)
    with strict():
        strictly = jax.jit(everything(graph))(state, h)
    ordinary = jax.jit(everything(graph))(state, h)
    assert_same_bits(strictly, ordinary)
    assert strictly[0][1][0].dtype == dtype


@pytest.mark.parametrize("kind", ["hc", pytest.param("mhc", marks=pytest.mark.product)])
def test_the_reference_takes_narrow_streams(kind: str) -> None:
    """It also takes them in forward mode, which the kernels do not have."""
    graph, state = network(kind)
    h = streams_of("bfloat16")

    def run(state: nnx.State, h: jax.Array) -> jax.Array:
        connections = nnx.merge(graph, state)
        x = connections[0].expand(h)
        for connection in connections:
            x = connection(x, jnp.tanh)
        out: jax.Array = connections[-1].collapse(x)
        return out

    with kernels.target("reference"):
        ordinary = jax.jvp(run, (state, h), (state, h))
        with strict():
            strictly = jax.jvp(run, (state, h), (state, h))
    assert_same_bits(strictly, ordinary)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=fast(kind in FEW)) for kind in KINDS])
def test_a_sublayer_may_answer_in_another_dtype(kind: str) -> None:
    """Streams of bfloat16 go with a sublayer that computes in float32, and the other way round."""
    graph, state = network(kind)
    for dtype, other in (("bfloat16", "float32"), ("float32", "bfloat16")):
        h = streams_of(dtype)
        run = everything(graph, lambda u, other=other: jnp.tanh(u).astype(other))  # type: ignore[misc]
        with strict():
            (_, (out, _)), _ = jax.eval_shape(run, state, h)
        assert out.dtype == dtype


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=fast(kind == "mhc")) for kind in ("hc", "mhc", "mhc_lite", "kromhc", "identity")]
)
def test_other_parameters_and_streams_than_float32(kind: str) -> None:
    """Somebody has cast the parameters, or float64 streams meet float32 parameters: maps get the wider dtype."""
    graph, state = network(kind)
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state)
    with strict():
        (_, (out, maps)), _ = jax.eval_shape(everything(graph), narrow, streams_of("float32"))
        assert out.dtype == maps[0][0].pre.dtype == jnp.float32
        with jax.enable_x64():
            (_, (out, maps)), _ = jax.eval_shape(everything(graph), state, streams_of("float64"))
            assert out.dtype == maps[0][0].pre.dtype == jnp.float64


def test_a_network_trains_in_bfloat16() -> None:
    """The usual step works with Flax's layers, parameters stay float32. optax's own Adam promotes, so this is SGD."""

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, dtype=jnp.bfloat16, rngs=rngs) for _ in range(DEPTH)])
            self.connections = nnx.List([HyperConnection(WIDTH, k, rngs=rngs) for k in range(DEPTH)])

        def __call__(self, h: jax.Array) -> jax.Array:
            x = self.connections[0].expand(h)
            for connection, layer in zip(self.connections, self.layers, strict=True):
                x = connection(x, layer)
            out: jax.Array = self.connections[-1].collapse(x)
            return out

    @nnx.jit
    def train_step(model: Net, optimizer: nnx.Optimizer, h: jax.Array) -> jax.Array:
        def loss_of(model: Net) -> jax.Array:
            return jnp.mean((model(h) - h[::-1]).astype(jnp.float32) ** 2)

        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return loss

    with strict():
        model = Net(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
        losses = [float(train_step(model, optimizer, streams_of("bfloat16"))) for _ in range(10)]
    assert losses[-1] < losses[0]
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype("float32")}


HEAD: dict[str, Any] = functional.head_params(4, WIDTH, key=jax.random.key(0))
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "hc_maps": lambda x: functional.hc_maps(x, functional.hc_params(4, WIDTH)),
    "mhc_maps": lambda x: functional.mhc_maps(x, functional.mhc_params(4, WIDTH)),
    "deepseek": lambda x: functional.mhc_maps(x, functional.mhc_params(4, WIDTH), preset="deepseek"),
    "read": lambda x: functional.read(x, jnp.ones((3, 4), jnp.float32)),
    "write": lambda x: functional.write(x, x[:, 0], jnp.ones((3, 4)), jnp.ones((3, 4, 4), jnp.float16)),
    "collapse_head": lambda x: functional.collapse_head(x, **HEAD),
    "sinkhorn": lambda x: functional.sinkhorn(x[..., :4]),
    "composite_gains": lambda x: functional.composite_gains(x[..., :4]),
    "composite_maps": lambda x: functional.composite_maps(x[..., :4]),
    "single_gains": lambda x: functional.single_gains(x[..., :4]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.product)])
def test_a_function_gives_the_same_bits(name: str, dtype: str) -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4, WIDTH)), dtype)
    ordinary = FUNCTIONS[name](x)
    with strict():
        assert_same_bits(FUNCTIONS[name](x), ordinary)
    assert {leaf.dtype for leaf in jax.tree.leaves(ordinary)} == {jnp.dtype("float32")}


def test_dtypes_are_those_of_the_standard_promotion() -> None:
    pairs = [("bfloat16", "float32"), ("float16", "bfloat16"), ("int32", "bfloat16"), ("int8", "float16")]
    for a, b in pairs:
        expected = jnp.promote_types(a, b), jnp.promote_types(jnp.promote_types(a, b), jnp.float32)
        arrays = jnp.ones(3, a), jnp.ones(3, b)
        with strict():
            assert (common_dtype(*arrays), accumulation_dtype(*arrays)) == expected
    with strict():
        assert common_dtype(jnp.ones(3, jnp.bfloat16), 2.0) == jnp.bfloat16  # a scalar of Python has no dtype
        with pytest.raises(ValueError, match="no available implicit dtype promotion"):
            accumulation_dtype(jnp.ones(3, jnp.float8_e4m3fn), jnp.ones(3, jnp.float32))
