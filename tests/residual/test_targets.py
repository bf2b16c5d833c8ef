"""Test the choice of kernels: one function under every target, differentiable in every mode under ``reference``."""

from __future__ import annotations

import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mhc import kernels, kinds, residual
from mhc.kernels import dispatch
from mhc.residual import HyperConnection
from tests.small import definition, packed, relative_error, small

WIDTH, TOKENS = 6, (3,)
every_kind = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "mhc" else pytest.mark.product) for kind in residual.kinds()]
)


def two_sublayers(kind: str) -> Any:
    """Return a function [*TOKENS, WIDTH] -> [*TOKENS, WIDTH] of two connections whose maps depend on the input."""
    inits = kinds.known()[kind].inits
    options: dict[str, Any] = {"init": next((init for init in ("fanin", "equivalent") if init in inits), None)}
    first, second = (HyperConnection(WIDTH, k, kind=kind, rngs=nnx.Rngs(k), sublayers=2, **options) for k in range(2))
    if kind == "hc":
        vars(first.connection)["w_pre"][...] = jnp.linspace(-1.0, 1.0, WIDTH)

    def function(h: jax.Array) -> jax.Array:
        x = first(first.expand(h), jnp.tanh)
        return second.collapse(second(x, lambda u: u * jnp.roll(u, 1, axis=-1)))

    return function


def point() -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return a point, a tangent and a cotangent."""
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=(*TOKENS, WIDTH)), jnp.float32) for _ in range(3))  # type: ignore[return-value]


@every_kind
def test_a_target_changes_no_number(kind: str) -> None:
    """Values and gradients agree up to float32's rounding, and what is compiled already is traced again."""
    function, (h, _, cotangent) = two_sublayers(kind), point()
    both = jax.jit(lambda h: jax.vjp(function, h)[1](cotangent)[0] + function(h))
    expected = both(h)
    with kernels.target("reference"):
        assert relative_error(both(h), expected) <= 1e-5
        for name, implementation in dispatch.TARGETS.items():
            assert (name == kernels.current_target()) == (implementation == "mhc.residual.reference")


@every_kind
def test_the_reference_is_differentiable_in_forward_mode(kind: str) -> None:
    function, (h, tangent, cotangent) = two_sublayers(kind), point()
    compiled = jax.jit(function)
    pulled = jax.jit(lambda h: jax.vjp(compiled, h)[1](cotangent)[0])(h)  # by the default, which a stale trace would be
    with kernels.target("reference"):
        pushed, linear = jax.jit(
            lambda h: (jax.jvp(compiled, (h,), (tangent,))[1], jax.linearize(function, h)[1](tangent))
        )(h)
        eager = jax.jvp(lambda h: kernels.read(h[:, None], jnp.ones((1, *TOKENS))), (h,), (tangent,))[1]
    np.testing.assert_array_equal(eager, tangent)
    assert relative_error(linear, pushed) <= 1e-5
    np.testing.assert_allclose(jnp.vdot(cotangent, pushed), jnp.vdot(pulled, tangent), rtol=1e-4)


@pytest.mark.product
@pytest.mark.parametrize("kind", residual.kinds())
def test_every_mode_gives_one_derivative(kind: str) -> None:
    """Jacobians of either mode agree under the reference, hessians (forward over reverse) under either target."""
    function, (h, _, cotangent) = two_sublayers(kind), point()
    hessian = jax.jit(jax.hessian(lambda h: jnp.vdot(cotangent, function(h))))
    expected = np.asarray(hessian(h)).reshape(h.size, h.size)
    with kernels.target("reference"):
        assert relative_error(jax.jit(jax.jacfwd(function))(h), jax.jit(jax.jacrev(function))(h)) <= 1e-4
        assert relative_error(np.asarray(hessian(h)).reshape(expected.shape), expected) <= 1e-4
    assert np.abs(expected - expected.T).max() <= 1e-4 * np.abs(expected).max()
    assert np.abs(expected).max() > 1e-3


def test_a_kernel_has_a_hessian_under_the_default() -> None:
    """Its backward pass is differentiable itself, in forward mode too."""
    x, pre = jnp.arange(6.0).reshape(3, 2), jnp.ones(3)
    hessian = jax.jit(jax.hessian(lambda x: jnp.sum(kernels.read(x, pre) ** 2)))(x)
    np.testing.assert_allclose(hessian, 2.0 * np.einsum("i,k,jl->ijkl", pre, pre, np.eye(2)), rtol=1e-6)


def test_without_it_the_error_says_what_to_do() -> None:
    """It does if jax raises it while a kernel runs; under jit the error comes later, in words that the page quotes."""
    function, (h, tangent, _) = two_sublayers("mhc"), point()
    words = r'mhc\.kernels\.project has a backward pass alone: .* within `with mhc\.kernels\.target\("reference"\):`'
    for differentiate in (lambda: jax.jvp(function, (h,), (tangent,)), lambda: jax.jacfwd(function)(h)):
        with pytest.raises(TypeError, match=words):
            differentiate()
    with pytest.raises(TypeError, match=r"forward-mode autodiff \(jvp\) to a custom_vjp function"):
        jax.jvp(jax.jit(function), (h,), (tangent,))


def test_another_type_error_is_left_alone() -> None:
    with pytest.raises(TypeError, match="must be real number, not NoneType"):
        kernels.sinkhorn(jnp.ones((2, 2, 3)), 20, "paper", None)  # type: ignore[arg-type]


def test_a_choice_holds_within_and_is_undone() -> None:
    assert kernels.current_target() == "xla"
    with kernels.target("reference"):
        with kernels.target("xla"):
            assert kernels.current_target() == "xla"
        assert kernels.current_target() == "reference"

    def fail() -> None:
        with kernels.target("reference"):
            raise RuntimeError("within")

    with pytest.raises(RuntimeError, match="within"):
        fail()
    assert kernels.current_target() == "xla"


@pytest.mark.parametrize("name", ["referense", "", None, 3, True])
def test_an_unknown_target_is_refused(name: Any) -> None:
    with (
        pytest.raises(ValueError, match=r"^unknown target of the kernels .*; allowed: xla, reference"),
        kernels.target(name),
    ):
        pass


def test_a_kernel_that_a_target_lacks_is_the_default_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later implementation need not have all kernels."""
    only_read = types.ModuleType("only_read")
    vars(only_read)["read"] = lambda x, pre: jnp.full(x.shape[:-2] + x.shape[-1:], 7.0)
    monkeypatch.setitem(sys.modules, "only_read", only_read)
    monkeypatch.setitem(dispatch.TARGETS, "only_read", "only_read")
    x, maps = jnp.ones((3, 2, 5)), jnp.full((2, 3), 0.5)
    with kernels.target("only_read"):
        assert float(kernels.read(x, maps).max()) == 7.0
        assert float(kernels.add(x, jnp.ones((3, 5)), maps).max()) == 1.5
    assert float(kernels.read(x, maps).max()) == 1.0


@pytest.mark.product
@pytest.mark.parametrize("kind", residual.kinds())
def test_a_decoder_is_differentiable_in_forward_mode(kind: str) -> None:
    """Over all parameters the tangent of a loss is its gradient's product with the direction, recomputed or not."""
    config, batch = small(kind, model={"remat": "full"}), {name: jnp.asarray(leaf) for name, leaf in packed(2).items()}
    rng = np.random.default_rng(0)

    def loss(params: Any) -> jax.Array:
        h = definition(config).bind(params).forward(batch["tokens"], batch["segment_ids"], batch["positions"]).h
        return jnp.mean(jnp.square(h - 1.0))

    params = jax.jit(definition(config).init)(jax.random.key(0))
    direction = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), params)
    slope = jax.jit(jax.grad(loss))(params)
    expected = sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(slope), jax.tree.leaves(direction), strict=True))
    with kernels.target("reference"):
        _, tangent = jax.jit(lambda params, direction: jax.jvp(loss, (params,), (direction,)))(params, direction)
        _, curvature = jax.jit(lambda params, direction: jax.jvp(jax.grad(loss), (params,), (direction,)))(
            params, direction
        )
    np.testing.assert_allclose(tangent, expected, rtol=2e-3)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(curvature))
