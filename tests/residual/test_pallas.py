"""Test the kernels for TPU, interpreted: two sublayers against float64, tiles that are not full, who takes them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mhc import kernels, residual
from mhc.kernels import pallas_tpu
from mhc.residual import TokenMaps
from mhc.residual.manifold import ManifoldHyperConnections, ManifoldMaps
from mhc.rng import path_key
from tests.small import relative_error

FAST = [
    ("mhc", {"n": 4}, (2, 9), 24),
    ("mhc", {"n": 3, "sinkhorn": "deepseek"}, (5,), 130),
    ("hc", {"n": 2}, (7, 3), 16),
]
MORE = [
    *[("mhc", {"n": n}, (3, 7), 40) for n in (1, 2, 5, 8)],
    *[("hc", {"n": n}, (3, 7), 40) for n in (1, 3, 4, 8)],
    ("hc", {"n": 4, "tanh": False}, (33,), 128),
    ("mhc_lite", {"n": 4}, (2, 3, 5), 256),
    ("kromhc", {"n": 4}, (1,), 7),
    ("shc", {"n": 4}, (17,), 48),
]
CASES = [*FAST, *(pytest.param(*case, marks=pytest.mark.product) for case in MORE)]


def two_sublayers(kind: str, options: dict[str, Any], width: int) -> tuple[Any, Any]:
    """Return (f, parameters): f(parameters, x, w) runs two sublayers tanh(u w) as a block does."""
    key = path_key(jax.random.key(0))
    topology = residual.build(kind, width, rngs=key, **options)
    made = [topology.connection(k, rngs=key / k) for k in range(2)]
    graphs, params = zip(*(nnx.split(connection) for connection in made), strict=True)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: leaf + 0.3 * jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), params)

    def run(params: Any, x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        first, second = (nnx.merge(graph, part) for graph, part in zip(graphs, params, strict=True))
        state, u, maps = first.enter(x)
        y = jnp.tanh(u @ w[0].astype(u.dtype))
        if second.follows(first, maps):
            state, u, maps = second.follow(first, state, y, maps)
        else:
            state, u, maps = second.enter(first.write(state, y, maps))
        return second.write(state, jnp.tanh(u @ w[1].astype(u.dtype)), maps), maps.pre

    return run, params


def value_and_gradients(run: Any, target: str, *arguments: Any) -> Any:
    """Return the values of two sublayers under a target, and the gradients of the streams' part of them."""

    def whole(params: Any, x: jax.Array, w: jax.Array) -> Any:
        with kernels.target(target):
            out, pull, pre = jax.vjp(lambda *given: run(*given), params, x, w, has_aux=True)
        cotangent = jnp.asarray(np.random.default_rng(1).normal(size=out.shape), out.dtype)
        return out, pre, pull(cotangent)

    return jax.jit(whole)(*arguments)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.product)])
@pytest.mark.parametrize(("kind", "options", "lead", "width"), CASES, ids=str)
def test_two_sublayers_against_float64(
    kind: str, options: dict[str, Any], lead: tuple[int, ...], width: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of sixteen tokens, of which the last is not full: the gradient of phi adds up over tiles."""
    monkeypatch.setattr(pallas_tpu, "BUDGET", 0)
    run, params = two_sublayers(kind, options, width)
    n, rng = options["n"], np.random.default_rng(2)
    x = jnp.asarray(rng.normal(size=(*lead, n, width)), dtype)
    w = jnp.asarray(rng.normal(size=(2, width, width)) / np.sqrt(width), jnp.float32)
    actual = value_and_gradients(run, "pallas_tpu", params, x, w)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, np.float64)), (params, x, w))
        expected = value_and_gradients(run, "reference", *wide)
    allowed = 2e-5 if dtype == "float32" else 3e-2  # y and u are rounded to bfloat16 between the kernels, as in xla
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        assert relative_error(a, b) <= allowed, jax.tree_util.keystr(path)


def test_one_kernel_in_bfloat16_is_within_a_hundredth() -> None:
    """The rounding of streams to bfloat16 is what is left."""
    rng, n, width = np.random.default_rng(0), 4, 64
    x, y = (
        jnp.asarray(rng.normal(size=(20, n, width)), jnp.bfloat16),
        jnp.asarray(rng.normal(size=(20, width)), "bfloat16"),
    )
    post, res = (jnp.asarray(rng.normal(size=(*axes, 20)), jnp.float32) for axes in ((n,), (n, n)))
    phi = jnp.asarray(rng.normal(size=(n, width, 24)), jnp.float32)
    gain, bias = (jnp.asarray(rng.normal(size=24), jnp.float32) for _ in range(2))
    form = kernels.Form(each=False, squash="sigmoid", offset=0.0, eps=1e-6)

    def plain(x: jax.Array, y: jax.Array, *rest: jax.Array) -> Any:
        post, res, phi, gain, bias = rest
        after = kernels.write(x, y, post, res)
        raw = kernels.project(after, phi, form.eps)
        return after, raw, kernels.read(after, jax.nn.sigmoid(gain[:n, None] * raw[:n] + bias[:n, None]))

    given = (x, y, post, res, phi, gain, bias)
    actual, pull = jax.vjp(lambda *given: pallas_tpu.follow(form, *given), *given)
    cotangent = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), actual)
    with jax.enable_x64(True), kernels.target("reference"):
        wide = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, np.float64)), (given, cotangent))
        expected, pull_wide = jax.vjp(plain, *wide[0])
        pulled = pull_wide(wide[1])
    for a, b in zip((*actual, *pull(cotangent)), (*expected, *pulled), strict=True):
        assert relative_error(a, b) <= 1e-2


def test_what_reads_otherwise_is_not_fused() -> None:
    """A subclass that makes its maps otherwise, and a mixing that is the identity, go the usual way."""

    class Halved(ManifoldMaps):
        def token_maps(self, x: jax.Array) -> TokenMaps:
            maps = super().token_maps(x)
            return maps._replace(pre=0.5 * maps.pre)

    class Topology(ManifoldHyperConnections):
        maps_class = Halved

    key = path_key(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (5, 4, 8))
    with kernels.target("pallas_tpu"):
        ours = residual.build("mhc", 8, rngs=key).connection(0, rngs=key)
        _, u, maps = ours.enter(x)
        assert ours.follows(ours, maps)
        halved = Topology(8, rngs=key).connection(0, rngs=key)
        np.testing.assert_allclose(halved.enter(x)[1], 0.5 * u, rtol=1e-5, atol=1e-6)
        assert not halved.follows(halved, maps)
        identity = residual.build("identity", 8, rngs=key).connection(0, rngs=key)
        _, _, of_identity = identity.enter(x)
        assert not identity.follows(identity, of_identity)
        single = residual.build("mhc", 8, rngs=key, single_pass=True)
        one = single.connection(0, rngs=key)
        _, u, context = one.enter(single.expand(x[:, 0]))
        assert not one.follows(one, context)
    assert not ours.follows(ours, maps)  # xla, the default


def test_the_usual_way_is_a_read_and_a_write() -> None:
    key = path_key(jax.random.key(0))
    connection = residual.build("mhc", 8, rngs=key).connection(0, rngs=key)
    x, y = jax.random.normal(jax.random.key(1), (5, 4, 8)), jax.random.normal(jax.random.key(2), (5, 8))
    state, u, maps = connection.enter(x)
    assert state is x
    np.testing.assert_array_equal(u, connection.read(x)[0])
    after, u, _ = connection.follow(connection, state, y, maps)
    np.testing.assert_array_equal(after, connection.write(x, y, maps))
    np.testing.assert_array_equal(u, connection.read(after)[0])
