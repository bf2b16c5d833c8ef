"""Test what new parameters start from: functions and modules agree, and the presets are what their words say."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mhc import kinds, residual
from mhc.residual import functional as F
from mhc.rng import PathKey
from tests.small import relative_error

WIDTH, SUBLAYERS = 6, 4
MANIFOLD = tuple(name for name, kind in kinds.known().items() if kind.mixing)
every_relative = pytest.mark.parametrize("kind", MANIFOLD)


def of_module(kind: str, k: int, **options: Any) -> dict[str, jax.Array]:
    """Return the parameters of connection ``k`` of a topology, whose key is that of seed 3."""
    topology = residual.build(kind, WIDTH, rngs=PathKey(jax.random.key(3)), sublayers=SUBLAYERS, **options)
    return nnx.to_pure_dict(nnx.state(topology.connection(k, rngs=PathKey(jax.random.key(3)))))


def test_the_table_of_kinds_has_the_presets() -> None:
    for name in MANIFOLD:
        from_zero = kinds.referred(kinds.known()[name].mixing).from_zero
        assert kinds.known()[name].inits == (F.PRESETS if from_zero else ("home", "equivalent"))
        for preset in set(F.PRESETS) - set(kinds.known()[name].inits):
            with pytest.raises(ValueError, match="allowed: home, equivalent"):
                F.mhc_params(4, WIDTH, kind=name, init=preset, key=jax.random.key(0))
    assert {preset for preset in F.PRESETS if F.draws(preset)} == {"equivalent", "fanin", "v4"}


@pytest.mark.parametrize(
    ("kind", "n"),
    [
        pytest.param(kind, n, marks=() if n in (1, 4) else pytest.mark.product)
        for kind in MANIFOLD
        for n in kinds.known()[kind].streams
    ],
)
def test_the_modules_start_from_the_functions(kind: str, n: int) -> None:
    """They agree bit for bit: every preset, with and without a gate and a gap of one's own."""
    key = (PathKey(jax.random.key(3)) / "phi").key
    for init in kinds.known()[kind].inits:
        for k, chosen in ((0, {}), (n + 1, {"alpha": 0.5, "res_gap": 2.0})):
            expected = F.mhc_params(n, WIDTH, kind=kind, init=init, k=k, key=key, **chosen)
            found = of_module(kind, k, n=n, init=init, **chosen)
            assert set(found) == set(expected)
            for name, leaf in found.items():
                assert leaf.dtype == expected[name].dtype == jnp.float32
                np.testing.assert_array_equal(leaf.reshape(expected[name].shape), expected[name])


@pytest.mark.parametrize("dynamic", [True, False])
def test_hc_and_the_head_start_from_the_functions(dynamic: bool) -> None:
    for k, alpha in ((0, None), (5, 0.5)):
        options = {} if alpha is None else {"alpha": alpha}
        found = of_module("hc", k, n=4, dynamic=dynamic, **options)
        expected = F.hc_params(4, WIDTH, k=k, alpha=alpha, dynamic=dynamic)
        assert set(found) == set(expected)
        for name, leaf in found.items():
            np.testing.assert_array_equal(leaf, expected[name])
    root = PathKey(jax.random.key(3))
    topology = residual.build("hc", WIDTH, rngs=root, n=4, collapse="head")
    head = F.head_params(4, WIDTH, key=(root / "head" / "fn").key)
    for name, leaf in nnx.to_pure_dict(nnx.state(topology))["head"].items():
        np.testing.assert_array_equal(leaf.reshape(head[name].shape), head[name])


def maps_of(x: jax.Array, params: dict[str, jax.Array], kind: str) -> F.Maps:
    return F.mhc_maps(x, params, kind=kind, gamma=0.25 if kind == "circulant" else None)


@functools.partial(jax.jit, static_argnums=(0, 1))
def tower(kind: str, init: str, h: jax.Array, sublayers: int = SUBLAYERS) -> jax.Array:
    """Return the streams after some sublayers, computed by functions alone."""
    x = jnp.broadcast_to(h[..., None, :], (*h.shape[:-1], 4, h.shape[-1]))
    for k in range(sublayers):
        if kind == "hc":
            maps = F.hc_maps(x, F.hc_params(4, WIDTH, k=k))
        else:
            maps = maps_of(x, F.mhc_params(4, WIDTH, kind=kind, init=init, k=k, key=jax.random.key(k)), kind)
        x = F.write(x, jnp.tanh(F.read(x, maps.pre)), maps.post, maps.res)
    return x


def plain(h: jax.Array, sublayers: int = 4) -> jax.Array:
    for _ in range(sublayers):
        h = h + jnp.tanh(h)
    return h


def some_tokens() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=(5, WIDTH)), jnp.float32)


@pytest.mark.parametrize("kind", ["hc", *MANIFOLD])
def test_equivalent_is_the_plain_residual(kind: str) -> None:
    h = some_tokens()
    x = tower(kind, "equivalent", h)
    assert relative_error(x.mean(-2), plain(h)) <= 2e-5
    assert relative_error(x, jnp.broadcast_to(plain(h)[:, None], x.shape)) <= 2e-5


@every_relative
def test_home_parts_the_streams(kind: str) -> None:
    """A bias of zeros does not, which is why there is a preset: N equal streams are one stream."""
    h = some_tokens()
    x = tower(kind, "home", h)
    assert float(jnp.min(jnp.max(jnp.abs(x - jnp.roll(x, 1, axis=-2)), axis=(0, -1)))) > 1e-2
    home = F.mhc_params(4, WIDTH, kind=kind, key=jax.random.key(0))
    nothing = {**home, "bias": jnp.zeros_like(home["bias"])}
    assert not home["phi"].any()
    x = jnp.broadcast_to(h[..., None, :], (*h.shape[:-1], 4, WIDTH))
    for _ in range(4):
        maps = maps_of(x, nothing, kind)
        x = F.write(x, jnp.tanh(F.read(x, maps.pre)), maps.post, maps.res)
    assert float(jnp.max(jnp.abs(x - jnp.roll(x, 1, axis=-2)))) < 1e-5


def test_the_number_of_a_sublayer_may_be_traced() -> None:
    traced = jax.jit(lambda k: F.mhc_bias(4, k=k) + F.hc_params(4, WIDTH, k=k)["b_pre"].sum())(6)
    np.testing.assert_array_equal(traced, F.mhc_bias(4, k=6) + 1.0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: F.mhc_params(4, WIDTH, init="hom"),
            r"unknown preset 'hom'; allowed: home, .* \(did you mean home\?\)",
        ),
        (lambda: F.mhc_params(4, WIDTH, init="v4"), "init='v4' draws phi at random and needs a key"),
        (lambda: F.mhc_params(4, WIDTH, kind="mch"), "unknown kind 'mch'"),
        (lambda: F.mhc_params(6, WIDTH, kind="mhc_lite"), "N <= 5, got 6"),
        (lambda: F.mhc_params(3, WIDTH, kind="kromhc"), "power of two, got 3"),
        (lambda: F.mhc_params(4, WIDTH, kind="go_mhc"), "Orthostochastic draws its residual logits at random"),
        (lambda: F.mhc_bias(0), "n must be at least 1 and a whole number, got 0"),
        (lambda: F.hc_params(2.0, WIDTH), "n must be at least 1 and a whole number, got 2.0"),  # type: ignore[arg-type]
        (lambda: F.mhc_phi(4, 0, 16), "width must be at least 1 and a whole number, got 0"),
        (lambda: F.head_params(4, -1, key=jax.random.key(0)), "width must be at least 1"),
        (lambda: F.mhc_alpha(init=None), "unknown preset None"),  # type: ignore[arg-type]
    ],
)
def test_a_mistake_is_one_line(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)
