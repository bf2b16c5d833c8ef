"""Test HyperConnection in Flax Linen: it trains by the bridge; without it, it is refused or warned of if seen."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from mhc import residual
from mhc.residual import HyperConnection

WIDTH, N = 6, 4
REFUSED = (
    r"HyperConnection is made within \w+, a Flax Linen module, .*: "
    r"write nnx\.bridge\.to_linen\(HyperConnection, (6, 0|width, k), …\), without rngs, in its place"
)


def bridged(k: int | jax.Array = 0, **options: Any) -> nn.Module:
    """Return a connection as a Linen module, whose maps depend on the input."""
    return nnx.bridge.to_linen(HyperConnection, WIDTH, k, **{"n": N, "init": "fanin", **options})


def made(k: int | jax.Array = 0) -> HyperConnection:
    """Return a connection in the way that a Linen module must not make one."""
    return HyperConnection(WIDTH, k, n=N, init="fanin", rngs=nnx.Rngs(0))


class InCompact(nn.Module):
    """Makes a sublayer and its connection where they are called."""

    good: bool

    @nn.compact
    def __call__(self, h: jax.Array) -> jax.Array:
        connection: Any = bridged() if self.good else made()
        return connection.collapse(connection(connection.expand(h), nn.Dense(WIDTH)))


class InSetup(nn.Module):
    """Makes a sublayer and its connection beforehand."""

    good: bool

    def setup(self) -> None:
        self.dense = nn.Dense(WIDTH)
        self.connection: Any = bridged() if self.good else made()

    def __call__(self, h: jax.Array) -> jax.Array:
        return self.connection.collapse(self.connection(self.connection.expand(h), self.dense))


class InAnotherNnxModule(nn.Module):
    """Makes or bridges an nnx module that makes a sublayer and its connection."""

    good: bool

    @nn.compact
    def __call__(self, h: jax.Array) -> jax.Array:
        return nnx.bridge.to_linen(Net)(h) if self.good else Net(rngs=nnx.Rngs(0))(h)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.connection = HyperConnection(WIDTH, 0, n=N, init="fanin", rngs=rngs)

    def __call__(self, h: jax.Array) -> jax.Array:
        return self.connection.collapse(self.connection(self.connection.expand(h), self.dense))


class Layer(nn.Module):
    good: bool

    @nn.compact
    def __call__(self, x: jax.Array, k: jax.Array) -> tuple[jax.Array, None]:
        connection: Any = bridged(k, init="home") if self.good else made(k)
        return connection(x, nn.Dense(WIDTH)), None


class InScan(nn.Module):
    """Scans three sublayers, each with its own number."""

    good: bool

    @nn.compact
    def __call__(self, h: jax.Array) -> jax.Array:
        layers = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)(self.good)
        x, _ = layers(jnp.repeat(h[:, None], N, axis=1), jnp.arange(3))
        return x.mean(1)


def nested(good: bool) -> nn.Module:
    return nn.Sequential([nn.Dense(WIDTH), InCompact(good), InSetup(good)])


PLACES: dict[str, Any] = {
    "compact": InCompact,
    "setup": InSetup,
    "another nnx module": InAnotherNnxModule,
    "jit": nn.jit(InCompact),
    "remat": nn.remat(InCompact),
    "remat setup": nn.remat(InSetup),
    "scan": InScan,
    "nested": nested,
}
everywhere = pytest.mark.parametrize("place", PLACES)
mostly_slow = pytest.mark.parametrize(
    "place",
    [pytest.param(place, marks=() if place in ("compact", "scan") else pytest.mark.product) for place in PLACES],
)


def tokens() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=(5, WIDTH)), jnp.float32)


@everywhere
def test_without_the_bridge_it_is_refused(place: str) -> None:
    model = PLACES[place](good=False)
    for run in (
        lambda: model.init(jax.random.key(0), tokens()),
        lambda: jax.jit(model.init)(jax.random.key(0), tokens()),
    ):
        with pytest.raises(RuntimeError, match=REFUSED) as caught:
            run()
        assert "\n" not in str(caught.value).partition("\n----")[0]


@mostly_slow
def test_by_the_bridge_every_parameter_trains(place: str) -> None:
    model = PLACES[place](good=True)
    params = jax.jit(model.init)(jax.random.key(0), tokens())["params"]
    names = {jax.tree_util.keystr(path).split("'")[-2] for path, _ in jax.tree.leaves_with_path(params)}
    assert names == {"kernel", "bias", "phi", "alpha"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grads = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(model.apply({"params": p}, tokens())))))(params)
    for path, leaf in jax.tree.leaves_with_path(grads):
        if "alpha" in jax.tree_util.keystr(path) and place == "scan":
            continue  # phi is zero at first
        assert np.isfinite(leaf).all() and float(jnp.max(jnp.abs(leaf))) > 0, path


def test_scanned_connections_have_their_own_numbers() -> None:
    params = InScan(True).init(jax.random.key(0), tokens())["params"]
    (bias,) = (leaf for path, leaf in jax.tree.leaves_with_path(params) if leaf.shape == (3, 24))
    for k in range(3):
        np.testing.assert_array_equal(bias[k], residual.functional.mhc_bias(N, k=k))


def test_a_bridged_model_computes_what_the_nnx_model_does() -> None:
    model = nnx.bridge.to_linen(Net)
    params = model.init(jax.random.key(0), tokens())["params"]
    net = Net(nnx.Rngs(1))
    nnx.update(net, params)
    np.testing.assert_allclose(model.apply({"params": params}, tokens()), net(tokens()), rtol=1e-6)


class Attribute(nn.Module):
    """Holds a connection that was made elsewhere, which Linen takes for a constant."""

    connection: HyperConnection

    @nn.compact
    def __call__(self, h: jax.Array) -> jax.Array:
        x = self.connection(self.connection.expand(nn.Dense(WIDTH)(h)), nn.Dense(WIDTH))
        return self.connection.collapse(x)


def test_a_connection_that_is_a_constant_is_warned_of() -> None:
    model: Any = Attribute(made())
    params = model.init(jax.random.key(0), tokens())  # nothing is traced: nothing is said
    words = r"HyperConnection is an attribute of Attribute, a Flax Linen module, which does not train its parameters"
    with pytest.warns(UserWarning, match=words):
        jax.grad(lambda p: jnp.sum(model.apply(p, tokens())))(params)
    plain: Any = Attribute(HyperConnection(WIDTH, 0, kind="plain", rngs=nnx.Rngs(0)))
    jax.grad(lambda p: jnp.sum(plain.apply(p, tokens())))(params)  # has no parameters to train


def test_parameters_that_a_linen_module_owns_are_no_constants() -> None:
    """This is a bridge of one's own: split outside, parameters by self.param, merged within."""
    graph, start = nnx.split(made())

    class Own(nn.Module):
        @nn.compact
        def __call__(self, h: jax.Array) -> jax.Array:
            connection = nnx.merge(graph, self.param("connection", lambda key: start))
            return connection.collapse(connection(connection.expand(nn.Dense(WIDTH)(h)), nn.Dense(WIDTH)))

    model: Any = Own()
    params = model.init(jax.random.key(0), tokens())
    grads = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(model.apply(p, tokens())))))(params)
    assert all(float(jnp.max(jnp.abs(leaf))) > 0 for leaf in jax.tree.leaves(grads))


def test_outside_of_linen_nothing_is_said() -> None:
    """Nothing is said even after a Linen model has run, or failed."""
    InCompact(True).init(jax.random.key(0), tokens())
    with pytest.raises(RuntimeError, match="Flax Linen"):
        InCompact(False).init(jax.random.key(0), tokens())
    assert jax.jit(lambda connection, h: connection.expand(h))(made(), tokens()).shape == (5, N, WIDTH)
