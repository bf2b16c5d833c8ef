"""Test connections under transformations of Flax and jax, copied and stored, and in the groups of an optimiser."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import export

from mhc.residual import HyperConnection

WIDTH, DEPTH, BATCH, LENGTH = 8, 3, 2, 5
# One kind stands for the rest where a test compiles: mhc, which has a kernel of its own.
FEW = ("mhc",)
KINDS = [
    pytest.param(kind, marks=() if kind in FEW else pytest.mark.product)
    for kind in ("plain", "hc", "mhc", "mhc_lite", "kromhc", "identity")
]


class Layer(nnx.Module):
    """Runs one sublayer with its connection."""

    def __init__(self, kind: str, k: int | jax.Array, rngs: nnx.Rngs, **options: Any):
        self.connection = HyperConnection(WIDTH, k, kind=kind, rngs=rngs, **options)
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        out: jax.Array = self.connection(x, self.linear)
        return out


class Net(nnx.Module):
    """Runs a list of layers."""

    def __init__(self, kind: str, rngs: nnx.Rngs, **options: Any):
        self.layers = nnx.List([Layer(kind, k, rngs, **options) for k in range(DEPTH)])

    def __call__(self, h: jax.Array) -> jax.Array:
        x = self.layers[0].connection.expand(h)
        for layer in self.layers:
            x = layer(x)
        out: jax.Array = self.layers[-1].connection.collapse(x)
        return out


def network(kind: str, **options: Any) -> Net:
    """Return a network whose parameters are moved from where they start, where some maps are constant."""
    net = Net(kind, nnx.Rngs(0), **options)
    rng = np.random.default_rng(0)
    nnx.update(net, jax.tree.map(lambda leaf: leaf + 0.1 * rng.normal(size=leaf.shape), nnx.state(net)))
    return net


def tokens(dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=(BATCH, LENGTH, WIDTH)), dtype)


def loss(net: Callable[[jax.Array], jax.Array], h: jax.Array) -> jax.Array:
    return jnp.mean((net(h) - h[::-1]) ** 2)


def paths(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def assert_close(one: Any, other: Any, tolerance: float = 2e-6) -> None:
    one, other = paths(one), paths(other)
    assert one.keys() == other.keys()
    for path, leaf in one.items():
        np.testing.assert_allclose(leaf, other[path], rtol=10 * tolerance, atol=tolerance, err_msg=path)


def assert_equal(one: Any, other: Any) -> None:
    one, other = paths(one), paths(other)
    assert one.keys() == other.keys()
    for path, leaf in one.items():
        np.testing.assert_array_equal(leaf, other[path], err_msg=path)


# A stack over depth ---------------------------------------------------------------------------------------------------


def stacked(kind: str) -> Layer:
    """Return DEPTH layers as one, whose parameters have depth as their first axis."""

    @nnx.split_rngs(splits=DEPTH)
    @nnx.vmap(in_axes=(0, 0))
    def make(k: jax.Array, rngs: nnx.Rngs) -> Layer:
        return Layer(kind, k, rngs)

    return make(jnp.arange(DEPTH), nnx.Rngs(0))


def through(layers: Layer, h: jax.Array, *, remat: bool = False) -> jax.Array:
    """Return the result of a stack for h, by a scan over depth."""

    def step(layer: Layer, x: jax.Array) -> jax.Array:
        return nnx.remat(Layer.__call__)(layer, x) if remat else layer(x)

    x = layers.connection.expand(h)
    out: jax.Array = layers.connection.collapse(nnx.scan(step, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(layers, x))
    return out


def one_by_one(state: nnx.State, graph: Any, h: jax.Array) -> jax.Array:
    """Return the same by a loop over the parameters of each depth."""
    layers = [nnx.merge(graph, jax.tree.map(lambda leaf, k=k: leaf[k], state)) for k in range(DEPTH)]
    x = layers[0].connection.expand(h)
    for layer in layers:
        x = layer(x)
    out: jax.Array = layers[-1].connection.collapse(x)
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_a_scan_over_a_stack_equals_the_layers_one_by_one(kind: str) -> None:
    """Values and gradients are equal, with and without rematerialisation of each layer."""
    layers, h = stacked(kind), tokens()
    graph, state = nnx.split(layers)
    expected = jax.jit(jax.value_and_grad(lambda state: loss(lambda h: one_by_one(state, graph, h), h)))(state)
    for remat in (False, True):
        run = nnx.jit(
            nnx.value_and_grad(lambda layers, remat=remat: loss(lambda h: through(layers, h, remat=remat), h))
        )
        value, grads = run(layers)
        assert_close((value, nnx.to_pure_dict(grads)), (expected[0], nnx.to_pure_dict(expected[1])))


@pytest.mark.parametrize("kind", KINDS)
def test_each_layer_of_a_stack_starts_as_its_number_says(kind: str) -> None:
    """The parameters that depend on k, and do not draw, are those of connections made one after the other."""
    made = nnx.to_pure_dict(nnx.state(stacked(kind).connection))
    for k in range(DEPTH):
        alone = nnx.to_pure_dict(nnx.state(HyperConnection(WIDTH, k, kind=kind, rngs=nnx.Rngs(7))))
        assert_equal(jax.tree.map(lambda leaf, k=k: leaf[k], made), alone)


def test_layers_of_a_stack_draw_different_parameters() -> None:
    @nnx.split_rngs(splits=DEPTH)
    @nnx.vmap(in_axes=(0, 0))
    def make(k: jax.Array, rngs: nnx.Rngs) -> HyperConnection:
        return HyperConnection(WIDTH, k, init="v4", rngs=rngs)

    phi = paths(nnx.to_pure_dict(nnx.state(make(jnp.arange(DEPTH), nnx.Rngs(0)))))["['connection']['phi']"]
    assert phi.shape[0] == DEPTH
    assert np.abs(np.diff(phi, axis=0)).max(axis=(1, 2, 3)).min() > 0.01


# Memory: recomputation and donation -----------------------------------------------------------------------------------


@pytest.mark.product
@pytest.mark.parametrize("kind", KINDS)
def test_every_checkpoint_policy_gives_the_same_gradients(kind: str) -> None:
    net, h = network(kind), tokens()
    graph, state = nnx.split(net)

    def run(state: nnx.State) -> jax.Array:
        return loss(nnx.merge(graph, state), h)

    expected = jax.jit(jax.grad(run))(state)
    policies = jax.checkpoint_policies
    for policy in (None, policies.everything_saveable, policies.dots_with_no_batch_dims_saveable):
        assert_close(jax.jit(jax.grad(jax.checkpoint(run, policy=policy)))(state), expected)


def test_what_is_recomputed_is_not_kept() -> None:
    """Under the default policy the backward pass keeps the streams that it was given, and no others."""
    net = network("mhc")
    graph, state = nnx.split(net)
    x = net.layers[0].connection.expand(tokens())

    def run(state: nnx.State, x: jax.Array) -> jax.Array:
        net = nnx.merge(graph, state)
        for layer in net.layers:
            x = layer(x)
        return x

    def streams(function: Callable[..., jax.Array]) -> int:
        backward = jax.eval_shape(lambda state, x: jax.vjp(function, state, x)[1], state, x)
        return sum(leaf.shape == x.shape for leaf in jax.tree.leaves(backward))

    assert streams(jax.checkpoint(run)) == 1
    assert streams(run) >= DEPTH


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_may_take_over_the_buffers_of_its_state(kind: str) -> None:
    """With donation the old parameters are gone, and the new ones are the same as without."""
    h = tokens()
    graph, state = nnx.split(network(kind))

    def step(state: nnx.State, h: jax.Array) -> nnx.State:
        grads = jax.grad(lambda state: loss(nnx.merge(graph, state), h))(state)
        return jax.tree.map(lambda leaf, slope: leaf - 0.1 * slope, state, grads)

    expected = jax.jit(step)(state, h)
    given = jax.tree.map(jnp.copy, state)
    assert_equal(jax.jit(step, donate_argnums=0)(given, h), expected)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))


# Copies and storage ---------------------------------------------------------------------------------------------------

COPIES: dict[str, Callable[[Net], Net]] = {
    "deepcopy": copy.deepcopy,
    "clone": nnx.clone,
    "pickle": lambda net: pickle.loads(pickle.dumps(net)),
    "split, copied and merged": lambda net: nnx.merge(*nnx.split(net), copy=True),
    "pickled parts": lambda net: nnx.merge(*pickle.loads(pickle.dumps(nnx.split(net)))),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize(
    "options",
    [
        {"kind": "mhc", "collapse": "head"},
        pytest.param({"kind": "hc"}, marks=pytest.mark.product),
        pytest.param({"kind": "plain"}, marks=pytest.mark.product),
    ],
)
def test_a_copy_computes_the_same_and_shares_nothing(options: dict[str, Any], how: str) -> None:
    net, h = network(**options), tokens()
    other = COPIES[how](net)
    assert_equal(nnx.to_pure_dict(nnx.state(other)), nnx.to_pure_dict(nnx.state(net)))
    expected = net(h)
    np.testing.assert_array_equal(other(h), expected)
    assert [layer.connection.kind for layer in other.layers] == [options["kind"]] * DEPTH
    nnx.update(other, jax.tree.map(jnp.zeros_like, nnx.state(other)))
    np.testing.assert_array_equal(net(h), expected)
    assert np.abs(other(h) - expected).max() > 0.01


@pytest.mark.parametrize("kind", FEW)
def test_a_dict_of_arrays_fills_a_fresh_network(kind: str) -> None:
    """The dict is flat, by names, as from npz or safetensors, and comes back equal."""
    net, h = network(kind, collapse="head" if kind == "mhc" else None), tokens()
    stored = {"/".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(net))}
    assert {name.rsplit("/", 1)[-1] for name in stored} >= ({"phi", "fn"} if kind == "mhc" else {"w_pre", "b_res"})
    fresh = Net(kind, nnx.Rngs(9), collapse="head" if kind == "mhc" else None)
    state = nnx.state(fresh)
    pure = nnx.to_pure_dict(state)
    assert np.abs(fresh(h) - net(h)).max() > 0.01
    filled = jax.tree_util.tree_map_with_path(lambda path, _: stored["/".join(str(key.key) for key in path)], pure)
    nnx.replace_by_pure_dict(state, filled)
    nnx.update(fresh, state)
    np.testing.assert_array_equal(fresh(h), net(h))


@pytest.mark.product
@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_network_takes_any_batch_and_length(kind: str) -> None:
    """So does its gradient."""
    net = network(kind)
    graph, state = nnx.split(net)

    def run(state: nnx.State, h: jax.Array) -> jax.Array:
        out: jax.Array = nnx.merge(graph, state)(h)
        return out

    leaves, structure = jax.tree.flatten(state)
    batch, length = export.symbolic_shape("batch, length")
    made = export.export(jax.jit(lambda leaves, h: run(jax.tree.unflatten(structure, leaves), h)))(
        leaves, jax.ShapeDtypeStruct((batch, length, WIDTH), jnp.float32)
    )
    for shape in ((BATCH, LENGTH), (1, 1), (3, 7)):
        h = jnp.asarray(np.random.default_rng(0).normal(size=(*shape, WIDTH)), jnp.float32)
        assert_close(made.call(leaves, h), run(state, h))
    h = tokens()
    slopes = jax.grad(lambda leaves: jnp.mean(made.call(leaves, h) ** 2))(leaves)
    assert_close(slopes, jax.tree.leaves(jax.grad(lambda state: jnp.mean(run(state, h) ** 2))(state)))


# What an optimiser does to them ---------------------------------------------------------------------------------------


def is_of_a_map(path: Any) -> bool:
    """Return whether a parameter is one of a connection."""
    return "'connection'" in jax.tree_util.keystr(path)


def labels(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: "map" if is_of_a_map(path) else "other", params)


@pytest.mark.parametrize("kind", [kind for kind in ("hc", "mhc", "mhc_lite", "kromhc", "identity")])
def test_a_mask_by_path_keeps_weight_decay_off_the_maps(kind: str) -> None:
    """Without a gradient nothing of a connection moves, the learned collapse included, and every other one shrinks."""
    net = network(kind, **({"collapse": "head"} if kind == "mhc" else {}))
    start = paths(nnx.to_pure_dict(nnx.state(net)))

    def decays(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: not is_of_a_map(path), params)

    optimizer = nnx.Optimizer(net, optax.adamw(0.1, weight_decay=0.5, mask=decays), wrt=nnx.Param)
    optimizer.update(net, jax.tree.map(jnp.zeros_like, nnx.state(net, nnx.Param)))
    end = paths(nnx.to_pure_dict(nnx.state(net)))
    still = {path for path, leaf in end.items() if np.array_equal(leaf, start[path])}
    assert still == {path for path in start if "['connection']" in path}
    names = {path.rsplit("['", 1)[-1].removesuffix("']") for path in still}
    expected = (
        {"w_pre", "w_post", "w_res", "b_pre", "b_post", "b_res", "alpha"} if kind == "hc" else {"phi", "alpha", "bias"}
    )
    assert names == expected | ({"fn", "base", "scale"} if kind == "mhc" else set())
    for path in start.keys() - still:
        np.testing.assert_allclose(end[path], 0.95 * start[path], rtol=1e-6)


def test_groups_by_path_have_rules_of_their_own() -> None:
    """optax.multi_transform gives maps one rate of SGD, the rest another; a rule that sets to zero freezes them."""
    h = tokens()
    for rule, rate in ((optax.sgd(0.5), 0.5), (optax.set_to_zero(), 0.0)):
        net = network("mhc")
        start = paths(nnx.to_pure_dict(nnx.state(net)))
        both = optax.multi_transform({"map": rule, "other": optax.sgd(0.1)}, labels)
        optimizer = nnx.Optimizer(net, both, wrt=nnx.Param)
        grads = nnx.grad(lambda net: loss(net, h))(net)
        slopes = paths(nnx.to_pure_dict(grads))
        optimizer.update(net, grads)
        for path, leaf in paths(nnx.to_pure_dict(nnx.state(net))).items():
            by = rate if "['connection']" in path else 0.1
            np.testing.assert_allclose(leaf, start[path] - by * slopes[path], rtol=1e-5, atol=1e-7, err_msg=path)
