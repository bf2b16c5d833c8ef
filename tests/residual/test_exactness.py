"""What each mixing says is exact, held for every kind of the registry: one map of wide logits, and products of 100."""

from __future__ import annotations

from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhc import kinds
from mhc.residual import functional as F
from mhc.residual.mixing import mixing_of
from mhc.residual.mixing.transport import Transport, TransportRunner

N, TOKENS, DEPTH = 4, 8, 100
MIXED = [name for name, kind in kinds.known().items() if kind.mixing]


def maps_of(kind: str) -> np.ndarray:
    """H_res [DEPTH, TOKENS, N, N], float32, of logits of standard deviation 5."""
    mixing = mixing_of(kind, sublayers=DEPTH)
    mixing = mixing.with_own(mixing.own())
    logits = 5.0 * np.random.default_rng(0).normal(size=(DEPTH, TOKENS, mixing.logits(N)))
    return np.asarray(jax.jit(lambda x: mixing.reference(x, N))(jnp.asarray(logits, jnp.float32)))


@pytest.mark.parametrize("kind", MIXED)
def test_what_is_exact_is_and_stays_so_in_products(kind: str) -> None:
    exact, res = mixing_of(kind).exact, maps_of(kind)
    products = np.asarray(F.composite_maps(jnp.asarray(res)), np.float64)
    for maps, marginal, isometry in ((res.astype(np.float64), 1e-5, 1e-5), (products, 1e-4, 1e-4)):
        if "rows" in exact:
            assert np.abs(maps.sum(-1) - 1).max() <= marginal
        if "columns" in exact:
            assert np.abs(maps.sum(-2) - 1).max() <= marginal
        if "signs" in exact:
            assert maps.min() >= -1e-6
        if "norm" in exact:
            assert np.linalg.svd(maps, compute_uv=False).max() <= 1 + isometry
        if "isometry" in exact:
            assert np.abs(np.linalg.svd(maps, compute_uv=False) - 1).max() <= isometry
            assert np.abs(maps).sum(-1).max() <= N**0.5 + 1e-4
    if kind == "circulant":
        share = min(4.0 / (2 * DEPTH), 0.25)
        smallest = np.linalg.svd(products[-1], compute_uv=False).min()
        assert smallest >= (1 - 2 * share) ** DEPTH


@pytest.mark.parametrize("kind", MIXED)
def test_a_program_of_eight_streams_is_not_long(kind: str) -> None:
    """XLA compiles a longer program in more than proportional time: loops over streams are loops in it, too."""
    mixing = mixing_of(kind, sublayers=DEPTH)
    mixing = mixing.with_own(mixing.own())
    lines = {}
    for n in (4, 8):
        if n in kinds.known()[kind].streams:
            gradient = jax.jit(jax.grad(lambda logits, n=n: jnp.sum(mixing.reference(logits, n) ** 2)))
            logits = jax.ShapeDtypeStruct((TOKENS, mixing.logits(n)), jnp.float32)
            lines[n] = len(gradient.lower(logits).as_text().splitlines())
    assert max(lines.values()) <= 1500, lines


@pytest.mark.parametrize("n", [2, 4, 5, 8])
def test_entries_of_tbp_mhc_are_filled_in_alike_in_a_loop_and_unrolled(n: int) -> None:
    """Numpy's loop, which exported models run, is the reference; from N = 5 the rows are a scan."""
    mixing = Transport(minorize=False)
    logits = 3.0 * np.random.default_rng(n).normal(size=(TOKENS, mixing.logits(n)))
    res = mixing.reference(jnp.asarray(logits, jnp.float32), n)
    filled = TransportRunner.mixing(Mock(), logits, n)  # it reads nothing of the model
    np.testing.assert_allclose(res, filled, rtol=0, atol=2e-6)
