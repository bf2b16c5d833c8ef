"""Test what the mathematics promises, over random and extreme inputs."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mhc.residual import functional as F

N, D, TOKENS = 4, 3, 16
seeds = st.integers(0, 2**32 - 1)
stds = st.sampled_from([0.1, 1.0, 6.0, 50.0, 1e3])
# The presets of kinds that are doubly stochastic: (kind, Sinkhorn preset).
SINKHORN = [("mhc", "paper"), ("mhc", "deepseek")]
EXACT = [("mhc_lite", "paper"), ("kromhc", "paper")]
EXTREME = ("uniform", "equal", "one high", "one low")


@functools.cache
def maps_of(kind: str, preset: str) -> Any:
    """Return a compiled function: logits [..., 2N+R] -> Maps."""
    eps = {"iters": 20, "map_eps": 1e-6, "sinkhorn_eps": 1e-6}
    return jax.jit(lambda logits: F.maps_from_logits(logits, kind=kind, preset=preset, **eps))  # type: ignore[arg-type]


composite_gains = jax.jit(F.composite_gains)


def res_of(kind: str, preset: str, seed: int, std: float, count: int = TOKENS) -> np.ndarray:
    """Return H_res [count, N, N] of random logits, in float64 so that sums add no error."""
    logits = std * np.random.default_rng(seed).normal(size=(count, 2 * N + F.residual_logits(kind, N)))
    return np.asarray(maps_of(kind, preset)(jnp.asarray(logits, jnp.float32)).res, np.float64)


# The polytope ---------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(seed=seeds, std=stds)
@pytest.mark.parametrize(("kind", "preset"), SINKHORN + EXACT)
def test_marginals(kind: str, preset: str, seed: int, std: float) -> None:
    h = res_of(kind, preset, seed, std)
    exact = 1e-5 if preset == "deepseek" else 1e-6
    assert (h >= 0).all()
    assert np.abs(h.sum(-1) - 1).max() <= exact  # rows are normalised last under both presets
    if kind != "mhc":
        assert np.abs(h.sum(-2) - 1).max() <= 1e-6
    else:
        assert h.sum(-2).max() <= N  # what wide logits leave is measured by the probes, never assumed


@settings(max_examples=20)
@given(seed=seeds, std=stds)
@pytest.mark.parametrize(("kind", "preset"), EXACT)
def test_products_over_a_hundred_sublayers_keep_the_gains_at_one(kind: str, preset: str, seed: int, std: float) -> None:
    h = jnp.asarray(res_of(kind, preset, seed, std, count=100), jnp.float32)
    gains = composite_gains(h)
    assert np.abs(np.asarray(gains.forward) - 1).max() <= 1e-4
    assert np.abs(np.asarray(gains.backward) - 1).max() <= 1e-4


@settings(max_examples=20)
@given(seed=seeds, std=stds)
@pytest.mark.parametrize(("kind", "preset"), SINKHORN + EXACT)
def test_theorems(kind: str, preset: str, seed: int, std: float) -> None:
    """A doubly stochastic map expands no signal, keeps the sum of the streams, and stays in their convex hull."""
    h = res_of(kind, preset, seed, std)
    x = np.random.default_rng(seed + 1).normal(size=(TOKENS, N, D))
    mixed = np.asarray(F.write(x, np.zeros((TOKENS, D)), np.zeros((TOKENS, N)), h), np.float64)
    # Rows are exact: every output stream is a mean of input streams.
    room = 1e-5 * np.abs(x).max()
    assert (mixed <= x.max(axis=1, keepdims=True) + room).all()
    assert (mixed >= x.min(axis=1, keepdims=True) - room).all()
    if kind != "mhc":  # both marginals are exact
        assert np.linalg.norm(h, ord=2, axis=(-2, -1)).max() <= 1 + 1e-5
        assert np.linalg.norm(mixed, axis=1).max() <= (1 + 1e-5) * np.linalg.norm(x, axis=1).max()
        np.testing.assert_allclose(mixed.sum(1), x.sum(1), atol=1e-5)


@pytest.mark.parametrize(("kind", "preset"), SINKHORN + EXACT)
def test_the_identity_is_a_vertex_and_the_uniform_matrix_the_centre(kind: str, preset: str) -> None:
    """No preference gives J/N, a large gap gives I: a difference of streams dies at the one and lives at the other."""
    r = F.residual_logits(kind, N)
    gap = {
        "mhc": 40.0 * np.eye(N).ravel(),
        "mhc_lite": 40.0 * (np.arange(r) == 0),
        "kromhc": np.tile([40.0, 0.0], r // 2),
    }[kind]
    logits = np.stack([np.zeros(2 * N + r), np.concatenate([np.zeros(2 * N), gap])])
    centre, vertex = np.asarray(maps_of(kind, preset)(jnp.asarray(logits, jnp.float32)).res, np.float64)
    np.testing.assert_allclose(centre, np.full((N, N), 1 / N), atol=1e-6)
    np.testing.assert_allclose(vertex, np.eye(N), atol=1e-5)
    difference = np.array([1.0, -1.0, 0.0, 0.0])
    assert np.linalg.norm(centre @ difference) < 1e-6
    assert abs(np.linalg.norm(vertex @ difference) - 2**0.5) < 1e-5


def test_hc_is_bounded_by_nothing() -> None:
    """In contrast the same products of unconstrained maps leave 1, for most draws by far."""
    draws = np.random.default_rng(0).normal(size=(100, 64, N, N))  # 64 tokens
    gains = composite_gains(jnp.asarray(np.eye(N) + 0.1 * draws, jnp.float32))
    assert float(np.median(np.abs(np.log(gains.forward[-1])))) > 0.2
    assert float(np.max(gains.forward[-1])) > 5


@settings(max_examples=20)
@given(seed=seeds, n=st.sampled_from([2, 3, 5, 8]), iters=st.sampled_from([1, 3, 20]))
def test_presets_agree_up_to_the_transpose_without_eps(seed: int, n: int, iters: int) -> None:
    logits = jnp.asarray(np.random.default_rng(seed).normal(size=(n, n)), jnp.float32)
    paper = sinkhorn(n, iters, "paper", 0.0)(logits)
    deepseek = sinkhorn(n, iters, "deepseek", 0.0)(logits.T)
    np.testing.assert_allclose(deepseek, paper, atol=2e-6)


@functools.cache
def sinkhorn(n: int, iters: int, preset: str, eps: float) -> Any:
    return jax.jit(lambda logits: F.sinkhorn(logits, iters=iters, preset=preset, eps=eps))


# Sinkhorn where float32 ends ------------------------------------------------------------------------------------------


def extreme(kind: str, n: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if kind == "uniform":
        return rng.uniform(-1e4, 1e4, (TOKENS, n, n))
    if kind == "equal":
        return np.full((TOKENS, n, n), rng.uniform(-1e4, 1e4))
    sign = 1.0 if kind == "one high" else -1.0
    logits = np.full((TOKENS, n, n), -sign * 1e4)
    for token in range(TOKENS):
        logits[token, rng.integers(n), rng.integers(n)] = sign * 1e4
    return logits


@functools.cache
def sinkhorn_and_gradient(preset: str, eps: float) -> Any:
    """Return a compiled function: (logits, weight) -> (H_res, gradient, directional derivative)."""

    def function(logits: jax.Array) -> jax.Array:
        return F.sinkhorn(logits, preset=preset, eps=eps)

    def every(logits: jax.Array, weight: jax.Array) -> Any:
        h, pull = jax.vjp(function, logits)
        return h, pull(weight)[0], jax.jvp(function, (logits,), (weight,))[1]

    return jax.jit(every)


@settings(max_examples=10)
@given(seed=seeds)
@pytest.mark.parametrize("kind", EXTREME)
@pytest.mark.parametrize(("preset", "eps"), [("paper", 0.0), ("deepseek", 1e-6), ("deepseek", 0.0)])
def test_extreme_logits_are_finite_with_finite_gradients(preset: str, eps: float, kind: str, seed: int) -> None:
    logits = jnp.asarray(extreme(kind, N, seed), jnp.float32)
    weight = jnp.asarray(np.random.default_rng(seed).normal(size=logits.shape), jnp.float32)
    h, grad, tangent = sinkhorn_and_gradient(preset, eps)(logits, weight)
    for what in (h, grad, tangent):
        assert np.isfinite(what).all()
    assert (np.asarray(h) >= 0).all()
    assert np.abs(np.asarray(h, np.float64).sum(-1) - 1).max() <= (1e-5 if preset == "deepseek" else 1e-6)
    if kind == "equal":
        np.testing.assert_allclose(h, 1 / N, atol=1e-5)


@pytest.mark.parametrize("preset", F.SINKHORN_PRESETS)
def test_sinkhorn_under_every_transformation(preset: str) -> None:
    """jit, vmap, grad, jvp, jacrev and jacfwd agree with each other and with finite differences."""
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        logits, direction = (jnp.asarray(rng.normal(size=(3, 3))) for _ in range(2))

        def function(logits: jax.Array) -> jax.Array:
            return F.sinkhorn(logits, preset=preset)

        batch = jnp.stack([logits, 2 * logits])
        np.testing.assert_allclose(jax.jit(jax.vmap(function))(batch), function(batch), rtol=1e-12)
        jacobian = jax.jit(jax.jacrev(function))(logits)
        np.testing.assert_allclose(jax.jit(jax.jacfwd(function))(logits), jacobian, atol=1e-12)
        tangent = jax.jit(lambda: jax.jvp(function, (logits,), (direction,))[1])()
        np.testing.assert_allclose(tangent, np.einsum("ijkl,kl->ij", jacobian, direction), atol=1e-12)
        gradient = jax.jit(jax.grad(lambda logits: jnp.sum(direction * function(logits))))(logits)
        np.testing.assert_allclose(gradient, np.einsum("ijkl,ij->kl", jacobian, direction), atol=1e-12)
        step = 1e-6
        numeric = (function(logits + step * direction) - function(logits - step * direction)) / (2 * step)
        np.testing.assert_allclose(tangent, numeric, atol=1e-8)


def test_sinkhorn_refuses_what_makes_no_sense() -> None:
    for logits, options, said in (
        (jnp.zeros((3, 1)), {}, "two equal axes"),
        (jnp.zeros((3, 3)), {"iters": 0}, "at least 1"),
        (jnp.zeros((3, 3)), {"preset": "papre"}, "allowed: paper, deepseek"),
    ):
        with pytest.raises(ValueError, match=said):
            F.sinkhorn(logits, **options)


# Permuting the streams ------------------------------------------------------------------------------------------------


def manifold_params(kind: str, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    width = 2 * N + F.residual_logits(kind, N)
    return {
        "phi": rng.normal(size=(N * D, width)),
        "alpha": rng.normal(size=3),
        "bias": rng.normal(size=width),
    }


def permuted(kind: str, params: dict[str, np.ndarray], p: np.ndarray) -> dict[str, np.ndarray]:
    """Return parameters for streams of which stream i is what stream p[i] was."""

    def columns(a: np.ndarray) -> np.ndarray:
        pre, post, res = a[..., :N], a[..., N : 2 * N], a[..., 2 * N :]
        if kind == "mhc":
            res = res.reshape(*res.shape[:-1], N, N)[..., p, :][..., p].reshape(res.shape)
        elif kind == "mhc_lite":
            order = list(itertools.permutations(range(N)))
            # H'[i, j] = H[p i, p j]: P_k becomes the permutation i -> p^-1 (perm_k (p i)).
            inverse = np.argsort(p)
            moved = [order.index(tuple(int(inverse[perm[p[i]]]) for i in range(N))) for perm in order]
            res = np.stack([res[..., moved.index(k)] for k in range(len(order))], axis=-1)
        return np.concatenate([pre[..., p], post[..., p], res], axis=-1)

    phi = params["phi"].reshape(N, D, -1)[p]
    return {"phi": columns(phi).reshape(N * D, -1), "alpha": params["alpha"], "bias": columns(params["bias"])}


@functools.cache
def manifold_step(kind: str, preset: str) -> Any:
    """Return a compiled function: (x, y, params) -> (u, x')."""

    def step(x: jax.Array, y: jax.Array, params: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        maps = F.mhc_maps(x, params, kind=kind, preset=preset, iters=20)
        return F.read(x, maps.pre), F.write(x, y, maps.post, maps.res)

    return jax.jit(step)


def check_permutation(step: Any, x: np.ndarray, y: np.ndarray, params: Any, moved: Any, p: np.ndarray) -> None:
    u, following = step(x, y, params)
    u_moved, following_moved = step(x[:, p], y, moved)
    np.testing.assert_allclose(u_moved, u, atol=1e-4)
    np.testing.assert_allclose(following_moved, np.asarray(following)[:, p], atol=1e-4)


@settings(max_examples=15)
@given(seed=seeds, p=st.permutations(range(N)))
@pytest.mark.parametrize(
    ("kind", "preset"), [("mhc", "paper"), ("mhc", "deepseek"), ("mhc_lite", "paper"), ("identity", "paper")]
)
def test_permuting_streams_and_parameters_permutes_the_output(kind: str, preset: str, seed: int, p: list[int]) -> None:
    rng, params = np.random.default_rng(seed + 1), manifold_params(kind, seed)
    x, y = rng.normal(size=(5, N, D)), rng.normal(size=(5, D))
    order = np.asarray(p)
    check_permutation(manifold_step(kind, preset), x, y, params, permuted(kind, params, order), order)


@settings(max_examples=15)
@given(seed=seeds, shift=st.integers(0, N - 1), swap=st.booleans())
def test_kromhc_allows_translations_and_swapped_factors(seed: int, shift: int, swap: bool) -> None:
    """i -> i XOR shift leaves every Kronecker factor as it is; exchanging the bits of i exchanges the factors."""
    rng, params = np.random.default_rng(seed + 1), manifold_params("kromhc", seed)
    x, y = rng.normal(size=(5, N, D)), rng.normal(size=(5, D))
    p = np.arange(N) ^ shift
    if swap:
        p = ((p & 1) << 1) | (p >> 1)
    factors = np.array([2, 3, 0, 1]) if swap else np.arange(4)

    def columns(a: np.ndarray) -> np.ndarray:
        return np.concatenate([a[..., :N][..., p], a[..., N : 2 * N][..., p], a[..., 2 * N :][..., factors]], axis=-1)

    phi = columns(params["phi"].reshape(N, D, -1)[p]).reshape(N * D, -1)
    moved = {"phi": phi, "alpha": params["alpha"], "bias": columns(params["bias"])}
    check_permutation(manifold_step("kromhc", "paper"), x, y, params, moved, p)


@settings(max_examples=15)
@given(seed=seeds, p=st.permutations(range(N)))
def test_hc_permutes_too(seed: int, p: list[int]) -> None:
    rng, order = np.random.default_rng(seed), np.asarray(p)
    x, y = rng.normal(size=(5, N, D)), rng.normal(size=(5, D))
    shapes = {"w_pre": (D,), "w_post": (D,), "w_res": (D, N), "b_pre": (N,), "b_post": (N,), "b_res": (N, N)}
    params = {name: rng.normal(size=shape) for name, shape in shapes.items()} | {"alpha": rng.normal(size=3)}
    moved = params | {
        "w_res": params["w_res"][:, order],
        "b_pre": params["b_pre"][order],
        "b_post": params["b_post"][order],
        "b_res": params["b_res"][order][:, order],
    }
    check_permutation(hc_step(), x, y, params, moved, order)


@functools.cache
def hc_step() -> Any:
    def step(x: jax.Array, y: jax.Array, params: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        maps = F.hc_maps(x, params)
        return F.read(x, maps.pre), F.write(x, y, maps.post, maps.res)

    return jax.jit(step)


# The orientation ------------------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(seed=seeds)
def test_row_i_of_the_map_makes_output_stream_i(seed: int) -> None:
    """The result equals a sum written out, with an asymmetric map; the transposed map gives something else."""
    rng = np.random.default_rng(seed)
    x, y, post, res = rng.normal(size=(3, 2)), rng.normal(size=2), rng.normal(size=3), rng.normal(size=(3, 3))
    expected = np.stack([sum(res[i, j] * x[j] for j in range(3)) + post[i] * y for i in range(3)])
    np.testing.assert_allclose(F.write(x, y, post, res), expected, atol=1e-5)
    assert np.abs(F.write(x, y, post, res.T) - expected).max() > 1e-3
    np.testing.assert_allclose(F.read(x, post), sum(post[j] * x[j] for j in range(3)), atol=1e-5)
