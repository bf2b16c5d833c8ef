"""Test kinds whose state grows with depth in a model of ``HyperConnection``s: each period is handed on at its end."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mhc.residual import HyperConnection, functional

WIDTH, SUBLAYERS = 8, 6


def random(*shape: int, seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def sublayer(k: int, u: jax.Array) -> jax.Array:
    return jnp.tanh(u * (k + 1.0)) - 0.3 * u


def through(connections: list[HyperConnection], h: jax.Array) -> jax.Array:
    x = connections[0].expand(h)
    for k, connection in enumerate(connections):
        x = connection(x, lambda u, k=k: sublayer(k, u))
    return connections[-1].collapse(x)


@pytest.mark.parametrize("traced", [False, True], ids=["a number", "an array"])
@pytest.mark.parametrize("block", [0, 2, 3, 4])
def test_attention_over_depth_reads_what_is_complete(block: int, traced: bool) -> None:
    connections, h, queries = [], random(5, WIDTH, seed=0), random(SUBLAYERS + 1, WIDTH, seed=1)
    for k in range(SUBLAYERS):
        number = jnp.int32(k) if traced else k
        made = HyperConnection(WIDTH, number, kind="attn_res", block=block, sublayers=SUBLAYERS, rngs=nnx.Rngs(k))
        vars(made.connection)["query"][...] = queries[k]
        connections.append(made)
    vars(connections[-1].residual)["end"].query[...] = queries[-1]
    sources = [h]
    for k in range(SUBLAYERS):
        y = sublayer(k, functional.depth_read(jnp.stack(sources), queries[k], jnp.ones(WIDTH))[0])
        sources = [*sources, y] if k % (block or 1) == 0 else [*sources[:-1], sources[-1] + y]
    expected, _ = functional.depth_read(jnp.stack(sources), queries[-1], jnp.ones(WIDTH))
    np.testing.assert_allclose(through(connections, h), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dilation", [1, 2])
def test_an_average_ends_each_block(dilation: int) -> None:
    connections, h = [], random(5, WIDTH, seed=0)
    weights = random(SUBLAYERS // 2, SUBLAYERS // 2 + 1, seed=1)
    for k in range(SUBLAYERS):
        made = HyperConnection(WIDTH, k, kind="denseformer", dilation=dilation, sublayers=SUBLAYERS, rngs=nnx.Rngs(k))
        vars(made.residual)["weights"][...] = weights
        connections.append(made)
    past, y = [h], h
    for block in range(SUBLAYERS // 2):
        for k in (2 * block, 2 * block + 1):
            y = y + sublayer(k, y)
        past.append(y)
        chosen = [j for j in range(block + 2) if (block + 1 - j) % dilation == 0]
        y = sum((weights[block, j] * past[j] for j in chosen), jnp.zeros_like(h))
    np.testing.assert_allclose(through(connections, h), y, rtol=1e-5, atol=1e-5)
