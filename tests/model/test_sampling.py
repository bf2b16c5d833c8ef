"""Test sampling: what each option keeps, frequencies, guidance by entropy, and rows that do not affect each other."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhc.model.sampling import (
    Sampling,
    adjust,
    entropy_bits,
    min_p_mask,
    sample,
    token_keys,
    top_k_mask,
    top_p_mask,
)

V = 7
draw = functools.partial(jax.jit, static_argnames="how")(lambda logits, keys, how: sample(logits, keys, how))


def keys(rows: int, seed: int = 0) -> jax.Array:
    return jax.random.split(jax.random.key(seed), rows)


def shares(logits: Any) -> np.ndarray:
    raised = np.exp(np.asarray(logits, np.float64) - np.max(logits, axis=-1, keepdims=True))
    return raised / raised.sum(axis=-1, keepdims=True)


@functools.cache
def masks(k: int, top_p: float, min_p: float) -> Any:
    return jax.jit(lambda logits: (top_k_mask(logits, k), top_p_mask(logits, top_p), min_p_mask(logits, min_p)))


@hypothesis.given(
    logits=hnp.arrays(np.float32, (3, V), elements=st.floats(-8, 8, width=16)),
    options=st.sampled_from([(1, 0.05, 0.0), (3, 0.5, 0.1), (V, 0.999, 1.0), (50, 1.0, 0.5)]),
)
@hypothesis.settings(max_examples=60)
def test_what_is_kept(logits: np.ndarray, options: tuple[int, float, float]) -> None:
    """The most probable tokens are kept, so many and no more, also where several are equal."""
    k, top_p, min_p = options
    logits += np.float32(0.0)  # of -0.0 and 0.0 the second counts as larger
    by_count, by_share, by_first = (np.asarray(mask) for mask in masks(k, top_p, min_p)(logits))
    p = shares(logits)
    assert (by_count.sum(axis=-1) == min(k, V)).all()
    for row in range(3):
        for kept in (by_count[row], by_share[row], by_first[row]):
            assert kept[np.argmax(logits[row])]
            assert logits[row, kept].min() >= logits[row, ~kept].max(initial=-np.inf)
        total, least = p[row, by_share[row]].sum(), p[row, by_share[row]].min()
        assert total >= top_p - 1e-6  # enough,
        assert by_share[row].sum() == 1 or total - least <= top_p + 1e-6  # and one less would not be
        certain = np.abs(p[row] - min_p * p[row].max()) > 1e-6
        np.testing.assert_array_equal(by_first[row][certain], (p[row] >= min_p * p[row].max())[certain])


def test_options_act_one_after_the_other() -> None:
    """Temperature acts first, then top-k, then top-p of what remains, then min-p."""
    logits = jnp.log(jnp.asarray([[0.4, 0.3, 0.2, 0.1]]))
    assert np.isfinite(adjust(logits, 1.0, top_k=2, top_p=0.57)[0]).tolist() == [
        True,
        False,
        False,
        False,
    ]  # 4/7 of two
    assert np.isfinite(adjust(logits, 1.0, top_p=0.57)[0]).tolist() == [True, True, False, False]
    assert np.isfinite(adjust(logits, 1.0, min_p=0.6)[0]).tolist() == [True, True, False, False]
    assert np.isfinite(adjust(logits, 0.5, min_p=0.6)[0]).tolist() == [True, False, False, False]  # 9/16 of the first
    np.testing.assert_allclose(shares(adjust(logits, 0.5)), [np.array([16, 9, 4, 1]) / 30], rtol=1e-5)
    np.testing.assert_array_equal(adjust(logits, 0.0)[0], [0.0, *[-np.inf] * 3])


@pytest.mark.parametrize(
    "how", [Sampling(), Sampling(temperature=0.5), Sampling(top_k=3), Sampling(top_p=0.8)], ids=str
)
def test_tokens_come_as_often_as_they_should(how: Sampling) -> None:
    """4,000 draws are within five standard deviations and never a token that is left out."""
    logits = jnp.asarray([1.0, 0.5, 0.0, -0.5, -1.0, 2.0, -3.0])
    rows = jnp.broadcast_to(logits, (4000, V))
    counts = np.bincount(np.asarray(draw(rows, keys(4000), how)), minlength=V) / 4000
    expected = shares(adjust(logits[None], how.temperature, how.top_k, how.top_p, how.min_p))[0]
    assert (np.abs(counts - expected) <= 5 * np.sqrt(expected * (1 - expected) / 4000)).all()


def test_greedy_is_the_first_of_the_most_probable() -> None:
    logits = jnp.asarray([[0.0, 3.0, 3.0, 1.0], [5.0, 1.0, 2.0, 3.0]])
    np.testing.assert_array_equal(draw(logits, keys(2), Sampling(temperature=0)), [1, 0])
    np.testing.assert_array_equal(draw(logits, keys(2), Sampling(top_k=1)), [1, 0])


def test_entropy_in_bits() -> None:
    p = np.array([[0.5, 0.25, 0.125, 0.125], [0.25] * 4, [1.0, 0.0, 0.0, 0.0]])
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(entropy_bits(jnp.log(p)), [1.75, 2.0, 0.0], atol=1e-6)


def test_entropy_guides() -> None:
    """Entropy decides over the other options, here with 256 nearly equal tokens (8 bits).

    Above entropy_high tokens come that top-k would have left out; below entropy_low the most probable one comes;
    between them the other options hold.
    """
    rows, flat = 400, jnp.zeros(256).at[7].set(0.05)
    logits = jnp.broadcast_to(flat, (rows, 256))
    asked = Sampling(temperature=0.3, top_k=3)
    above = np.asarray(draw(logits, keys(rows), replace(asked, entropy_high=7.5)))
    expected = np.asarray(draw(logits, keys(rows), Sampling(temperature=1.2, top_p=0.95)))
    np.testing.assert_array_equal(above, expected)
    assert len(set(above.tolist())) > 100
    between = np.asarray(draw(logits, keys(rows), replace(asked, entropy_low=7.5, entropy_high=8.5)))
    np.testing.assert_array_equal(between, draw(logits, keys(rows), asked))
    assert len(set(between.tolist())) == 3
    assert set(np.asarray(draw(logits, keys(rows), Sampling(entropy_low=8.5, entropy_high=9.0))).tolist()) == {7}
    mixed = logits.at[: rows // 2].multiply(400.0)  # rows of 0 bits and rows of 8 bits, each by its own
    out = np.asarray(draw(mixed, keys(rows), Sampling(entropy_low=0.5, entropy_high=7.5)))
    assert set(out[: rows // 2].tolist()) == {7} and len(set(out[rows // 2 :].tolist())) > 100


def test_a_row_samples_what_it_samples_alone() -> None:
    logits = jax.random.normal(jax.random.key(1), (5, 40))
    every, how = keys(5, seed=3), Sampling(top_p=0.9, entropy_high=4.0)
    together = draw(logits, every, how)
    order = np.array([3, 0, 4, 2, 1])
    np.testing.assert_array_equal(draw(logits[order], every[order], how), together[order])
    for row in range(5):
        assert draw(logits[row : row + 1], every[row : row + 1], how)[0] == together[row]
    places = [token_keys(every, jnp.full(5, place)) for place in range(30)]
    drawn = np.stack([draw(logits, at, how) for at in places])
    assert all(len(set(column.tolist())) > 3 for column in drawn.T)  # another position, another token
    np.testing.assert_array_equal(draw(logits, token_keys(every, jnp.full(5, 7)), how), drawn[7])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.1}, "temperature: given -0.1, allowed: 0 .greedy. or more"),
        ({"temperature": math.nan}, "temperature: given nan"),
        ({"top_k": 0}, "top_k: given 0, allowed: 1 or more"),
        ({"top_p": 0.0}, "top_p: given 0.0, allowed: above 0 and at most 1"),
        ({"min_p": 1.5}, "min_p: given 1.5, allowed: from 0 to 1"),
        ({"entropy_low": -1.0}, "entropy_low: given -1.0, allowed: 0 bits or more"),
        ({"entropy_low": 3.0, "entropy_high": 2.0}, "entropy_high: given 2.0, allowed: at least entropy_low=3.0"),
    ],
)
def test_what_is_not_allowed(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**fields)
