"""Attention: rotations know differences of positions only, masks, both implementations, grouped heads."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhc.model.attention import IMPLEMENTATIONS, Attention, attend_xla, causal_mask, choose_implementation, rope
from mhc.rng import PathKey
from tests.small import distance, packed, relative_error, small


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def test_rope_scores_depend_on_the_difference_of_positions():
    q, k = normal(1, 8, 2, 6, seed=0), normal(1, 8, 2, 6, seed=1)
    positions = jnp.arange(8)[None]

    def scores(shift: int) -> np.ndarray:
        turned = (rope(x, positions + shift, 10_000.0) for x in (q, k))
        return np.asarray(jnp.einsum("bthk,buhk->bhtu", *turned))

    assert relative_error(scores(100), scores(0)) <= 1e-5
    assert relative_error(jnp.einsum("bthk,buhk->bhtu", q, k), scores(0)) > 0.1


def test_rope_turns_pairs_by_their_angles():
    """Against complex numbers: (x_i, x_{i+K/2}) times exp(i position theta^(-2i/K)), in float64."""
    x, positions, theta = normal(2, 5, 3, 8), jnp.asarray([[0, 1, 2, 0, 7], [3, 0, 1, 2, 500]]), 100.0
    pairs = np.asarray(x[..., :4], np.float64) + 1j * np.asarray(x[..., 4:], np.float64)
    angle = np.asarray(positions)[..., None, None] * theta ** (-2 * np.arange(4) / 8)
    turned = pairs * np.exp(1j * angle)
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    actual = np.asarray(rope(x, positions, theta))
    assert np.max(np.abs(actual - expected)) <= 1e-4  # an angle of 500 radians is known to 3e-5 in float32
    np.testing.assert_array_equal(actual[0, 0], x[0, 0])  # position 0: not turned
    assert rope(x.astype(jnp.bfloat16), positions, theta).dtype == jnp.bfloat16


def test_causal_mask():
    np.testing.assert_array_equal(causal_mask(None, 3)[0], [[1, 0, 0], [1, 1, 0], [1, 1, 1]])
    segments = jnp.asarray([[1, 1, 2], [1, 2, 2]])
    expected = [[[1, 0, 0], [1, 1, 0], [0, 0, 1]], [[1, 0, 0], [0, 1, 0], [0, 1, 1]]]
    np.testing.assert_array_equal(causal_mask(segments, 3), expected)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_implementations_agree(kv_heads):
    """Values and gradients, against softmax(q k / sqrt K + mask) v in float64 written out head by head."""
    q, k, v = (normal(2, 16, heads, 6, seed=seed) for seed, heads in enumerate((4, kv_heads, kv_heads)))
    weight = normal(2, 16, 4, 6, seed=9)
    mask = causal_mask(jnp.asarray(packed(2, seed=5)["segment_ids"]), 16)

    expected = np.zeros(q.shape)
    for head in range(4):
        source = head // (4 // kv_heads)
        scores = np.einsum("btk,buk->btu", *(np.asarray(x, np.float64) for x in (q[:, :, head], k[:, :, source])))
        raised = np.where(mask, np.exp(scores / np.sqrt(6)), 0.0)
        weights = raised / raised.sum(axis=-1, keepdims=True)
        expected[:, :, head] = weights @ np.asarray(v[:, :, source], np.float64)

    grads = {}
    for name, attend in IMPLEMENTATIONS.items():

        def objective(qkv: Any, attend: Any = attend) -> tuple[jax.Array, jax.Array]:
            out = attend(*qkv, mask)
            return jnp.sum(out * weight), out

        (_, out), grads[name] = jax.jit(jax.value_and_grad(objective, has_aux=True))((q, k, v))
        assert relative_error(out, expected) <= 2e-6, name
    assert distance(grads["sdpa"], grads["xla"]) <= 1e-5


def test_grouped_heads_equal_multi_head_attention_with_repeated_keys_and_values():
    grouped = Attention(small(attention={"heads": 4, "kv_heads": 2}), key=PathKey(jax.random.key(0)))
    full = Attention(small(attention={"heads": 4, "kv_heads": 4}), key=PathKey(jax.random.key(1)))
    assert grouped.key[...].shape == (16, 2, 4) and full.key[...].shape == (16, 4, 4)
    for name in ("query", "out"):
        getattr(full, name)[...] = getattr(grouped, name)[...]
    for name in ("key", "value"):
        getattr(full, name)[...] = jnp.repeat(getattr(grouped, name)[...], 2, axis=1)
    x, batch = normal(2, 16, 16), packed(2)
    mask = causal_mask(jnp.asarray(batch["segment_ids"]), 16)
    one, other = (jax.jit(module)(x, batch["positions"], mask) for module in (grouped, full))
    assert relative_error(one, other) <= 1e-6


def test_a_row_that_sees_one_key_returns_its_value():
    """Also where every other key is masked: no leak of the masked ones through rounding."""
    q, v = normal(1, 4, 2, 6), normal(1, 4, 2, 6, seed=1)
    mask = jnp.eye(4, dtype=bool)[None]
    for attend in IMPLEMENTATIONS.values():
        assert relative_error(jax.jit(attend)(100 * q, 100 * q, v, mask), v) <= 1e-6


def test_bfloat16_scores_are_taken_in_float32():
    """exp of scores that bfloat16 rounds by up to 0.5 would be off by half; here inputs and outputs are rounded."""
    q, k, v = (normal(1, 16, 2, 64, seed=seed).astype(jnp.bfloat16) for seed in range(3))
    q = q * 12  # scores of up to some 40
    mask = causal_mask(None, 16)
    attend = jax.jit(attend_xla)
    narrow, wide = (attend(*(x.astype(dtype) for x in (q, k, v)), mask) for dtype in (jnp.bfloat16, jnp.float32))
    assert narrow.dtype == jnp.bfloat16
    assert relative_error(narrow, wide) <= 0.02


def test_auto_is_the_reference_on_cpu_and_says_so(caplog):
    choose_implementation.cache_clear()
    with caplog.at_level("INFO", logger="mhc.model.attention"):
        assert choose_implementation("auto") == "xla"
        assert choose_implementation("sdpa") == "sdpa"
    assert "attention: xla (asked for auto, platform cpu)" in caplog.text
