"""Test positions: rotations see differences only; scalings have their limits; sinusoids, slopes, buckets."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhc.model.positions import (
    alibi_slopes,
    base_frequencies,
    bucket,
    logit_bias,
    rotary_frequencies,
    rotate,
    sinusoidal,
)
from tests.small import relative_error, small


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def test_rope_scores_depend_on_the_difference_of_positions():
    q, k = normal(1, 8, 2, 6, seed=0), normal(1, 8, 2, 6, seed=1)
    positions = jnp.arange(8)[None]

    def scores(shift: int) -> np.ndarray:
        turned = (rotate(x, positions + shift, base_frequencies(6, 10_000.0)) for x in (q, k))
        return np.asarray(jnp.einsum("bthk,buhk->bhtu", *turned))

    assert relative_error(scores(100), scores(0)) <= 1e-5
    assert relative_error(jnp.einsum("bthk,buhk->bhtu", q, k), scores(0)) > 0.1


def test_rope_turns_pairs_by_their_angles():
    """Rotation equals (x_i, x_{i+K/2}) as a complex number times exp(i position theta^(-2i/K)), in float64."""
    x, positions, theta = normal(2, 5, 3, 8), jnp.asarray([[0, 1, 2, 0, 7], [3, 0, 1, 2, 500]]), 100.0
    pairs = np.asarray(x[..., :4], np.float64) + 1j * np.asarray(x[..., 4:], np.float64)
    angle = np.asarray(positions)[..., None, None] * theta ** (-2 * np.arange(4) / 8)
    turned = pairs * np.exp(1j * angle)
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    actual = np.asarray(rotate(x, positions, base_frequencies(8, theta)))
    assert np.max(np.abs(actual - expected)) <= 1e-4  # an angle of 500 radians is known to 3e-5 in float32
    np.testing.assert_array_equal(actual[0, 0], x[0, 0])  # position 0: not turned
    assert rotate(x.astype(jnp.bfloat16), positions, base_frequencies(8, theta)).dtype == jnp.bfloat16


def frequencies(scaling: str, size: int = 16, **fields: Any) -> np.ndarray:
    config = small(positions={"scaling": scaling, "original_length": 64, **fields})
    return np.asarray(rotary_frequencies(config, size, jnp.full((1, 1), 64))[0]).reshape(-1)


PLAIN = np.asarray(base_frequencies(16, 10_000.0))


@pytest.mark.parametrize("scaling", ["linear", "ntk", "dynamic", "yarn", "llama3"])
def test_a_factor_of_one_scales_nothing(scaling):
    assert relative_error(frequencies(scaling, factor=1.0), PLAIN) <= 1e-6


def test_scalings_by_their_limits():
    """Each scaling slows the pairs that it should.

    linear slows all pairs by the factor; ntk leaves the fastest and slows the slowest by the factor; yarn and llama3
    leave pairs that turn often within the original length, and slow by the factor pairs that hardly turn.
    """
    np.testing.assert_allclose(frequencies("linear", factor=4.0), PLAIN / 4, rtol=1e-6)
    ntk = frequencies("ntk", factor=4.0) / PLAIN
    np.testing.assert_allclose(ntk[[0, -1]], [1.0, 0.25], rtol=1e-5)
    scalings: tuple[tuple[str, dict[str, Any]], ...] = (("yarn", {"beta_fast": 8.0}), ("llama3", {}))
    for scaling, fields in scalings:
        ratio = frequencies(scaling, factor=4.0, **fields) / PLAIN
        turns = 64 * PLAIN / (2 * math.pi)
        assert np.all(np.diff(ratio) <= 1e-6)
        np.testing.assert_allclose(ratio[turns > 8], 1.0, rtol=1e-6)
        np.testing.assert_allclose(ratio[turns < 0.1], 0.25, rtol=1e-5)


def test_yarn_scales_the_logits_by_its_attention_factor():
    config = small(positions={"scaling": "yarn", "factor": 4.0})
    assert rotary_frequencies(config, 8)[1] == pytest.approx(0.1 * math.log(4) + 1)
    config = small(positions={"scaling": "yarn", "factor": 4.0, "attention_factor": 1.5})
    assert rotary_frequencies(config, 8)[1] == 1.5


def test_dynamic_scaling_follows_each_documents_length():
    """Nothing is scaled up to the original length O; factor 2 at length 2 O equals ntk with a factor of 3."""
    config = small(positions={"scaling": "dynamic", "factor": 2.0, "original_length": 8})
    lengths = jnp.asarray([[4, 8, 16]])
    found = rotary_frequencies(config, 16, lengths)[0]
    assert found.shape == (1, 3, 8)
    np.testing.assert_allclose(found[0, 0], PLAIN, rtol=1e-6)
    np.testing.assert_allclose(found[0, 1], PLAIN, rtol=1e-6)
    ntk = small(positions={"scaling": "ntk", "factor": 3.0})
    np.testing.assert_allclose(found[0, 2], rotary_frequencies(ntk, 16)[0], rtol=1e-5)


def test_sinusoids_have_a_constant_norm_and_a_product_that_knows_the_difference():
    table = np.asarray(sinusoidal(jnp.arange(40)[None], 32)[0], np.float64)
    np.testing.assert_allclose(np.sum(table**2, axis=-1), 16.0, rtol=1e-5)
    products = table @ table.T
    for shift in (1, 7):
        np.testing.assert_allclose(np.diagonal(products, shift), products[0, shift], rtol=1e-4)
    assert sinusoidal(jnp.arange(3)[None], 5).shape == (1, 3, 5)


def test_slopes_of_alibi():
    np.testing.assert_allclose(alibi_slopes(8), [2.0**-i for i in range(1, 9)])
    np.testing.assert_allclose(alibi_slopes(6), [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3])


def test_buckets_are_exact_then_logarithmic():
    found = np.asarray(bucket(jnp.arange(-3, 400), 32, 128))
    np.testing.assert_array_equal(found[:3], 0)  # the future
    past = found[3:]
    np.testing.assert_array_equal(past[:16], np.arange(16))
    assert np.all(np.diff(past) >= 0) and set(past) == set(range(32))
    assert past[127] == 31 and past[112] == 31 - 1 + (112 >= 113) and np.all(past[128:] == 31)


def test_biases_know_differences_only_and_punish_distance():
    table = normal(32, 2)
    for kind, given in (("alibi", None), ("relative_bias", table)):
        config = small(positions={"kind": kind})
        places = jnp.arange(12)[None]
        bias = np.asarray(logit_bias(config, given, places, places))
        assert bias.shape == (1, 2, 12, 12)
        np.testing.assert_array_equal(bias, np.asarray(logit_bias(config, given, places + 5, places + 5)))
        if kind == "alibi":
            np.testing.assert_allclose(bias[0, :, 5, 2], -3 * alibi_slopes(2))
    assert logit_bias(small(), None, places, places) is None
