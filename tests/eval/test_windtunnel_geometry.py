"""Test the geometry of attention against numpy, planted models and tasks."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mhc.data.windtunnel import Bijection, HiddenMarkov
from mhc.eval.windtunnel.geometry import Geometry, off_diagonal, principal, random_null, rank_correlation


def test_the_null_of_random_vectors_is_the_formulas() -> None:
    """√(2 / (π d)) is the limit for large d, from which the mean of |cosine| stays within 1 / (4 d) of it."""
    for size in (8, 32, 128):
        mean, low, high = random_null(20, size)
        assert low < mean < high
        assert mean == pytest.approx(math.sqrt(2 / (math.pi * size)), rel=1 / (2 * size) + 0.01)


def test_axes_have_cosine_0_and_equal_vectors_1() -> None:
    assert off_diagonal(3 * np.eye(4)) == 0
    assert off_diagonal(np.array([[1.0, 2.0], [-2.0, -4.0]])) == pytest.approx(1.0)
    vectors = np.random.default_rng(0).standard_normal((2, 5, 3))
    for stack, found in zip(vectors, off_diagonal(vectors), strict=True):
        pairs = [
            abs(stack[i] @ stack[j]) / np.linalg.norm(stack[i]) / np.linalg.norm(stack[j])
            for i in range(5)
            for j in range(i)
        ]
        assert found == pytest.approx(np.mean(pairs), rel=1e-12)


def test_symbols_that_were_not_seen_do_not_count() -> None:
    vectors = np.array([[1.0, 1.0], [np.nan, np.nan], [0.0, 0.0], [1.0, 0.0]])
    assert off_diagonal(vectors) == pytest.approx(math.sqrt(0.5))
    assert math.isnan(off_diagonal(vectors[1:]))


def test_principal_components() -> None:
    rng = np.random.default_rng(0)
    samples = rng.standard_normal((400, 6)) @ rng.standard_normal((6, 6))
    found = principal(np.cov(samples.T))
    _, singular, right = np.linalg.svd(samples - samples.mean(axis=0), full_matrices=False)
    share = singular**2 / (singular**2).sum()
    assert (found.first, found.second) == pytest.approx(tuple(share[:2]), rel=1e-10)
    assert found.participation == pytest.approx(1 / (share**2).sum(), rel=1e-10)
    assert abs(found.direction @ right[0]) == pytest.approx(1.0, abs=1e-10)


@pytest.mark.parametrize(("spread", "participation"), [([1.0, 0, 0], 1.0), ([2.0, 2, 2], 3.0), ([1.0, 1, 0], 2.0)])
def test_the_participation_ratio_counts_components(spread: list[float], participation: float) -> None:
    assert principal(np.diag(spread)).participation == pytest.approx(participation, rel=1e-12)


def test_without_variance_there_are_no_components() -> None:
    assert math.isnan(principal(np.zeros((3, 3))).first)


def test_rank_correlation() -> None:
    x = np.arange(20.0)
    assert rank_correlation(x, -np.exp(x)) == pytest.approx(1.0, rel=1e-12)
    assert rank_correlation(x, np.random.default_rng(0).standard_normal(20)) < 0.5
    assert math.isnan(rank_correlation(x, np.ones(20)))


def test_only_places_with_both_sorts_of_keys_count() -> None:
    matching = np.array([[[np.nan, 0.5, 0.7]]])
    others = np.array([[[np.nan, 0.1, np.nan]]])
    found = Geometry({}, {}, 4, matching, others, [], np.zeros(1)).contrast
    assert found is not None
    np.testing.assert_allclose(found, [[0.4]])


def test_the_evidence_of_a_bijection_is_the_values_so_far() -> None:
    chosen = Bijection(5)
    drawn = chosen.make(0, "validation", range(6))
    evidence = chosen.evidence(drawn.tokens)
    for row, place in np.ndindex(*evidence.shape[:2]):
        looked_up = drawn.tokens[row][evidence[row, place]] - chosen.symbols
        assert set(looked_up) == set(np.flatnonzero(drawn.posterior[row, place] == 0))
        assert len(looked_up) == place


def test_the_evidence_of_a_symbol_is_its_column_of_the_emission() -> None:
    chosen = HiddenMarkov(observations=4, states=3, symbols=2)
    tokens = chosen.make(0, "validation", range(6)).tokens
    evidence = chosen.evidence(tokens)
    for row in range(6):
        _, emission = chosen.matrices(0, "validation", row)
        for place, at in enumerate(chosen.places):
            symbol = tokens[row, at] - chosen.FIRST_SYMBOL
            np.testing.assert_array_equal(tokens[row][evidence[row, place]], emission[:, symbol])
            assert not evidence[row, place][chosen.header :].any()


@pytest.mark.parametrize("chosen", [Bijection(5), HiddenMarkov(observations=4, states=3, symbols=2)])
def test_symbols_have_ids_that_the_task_names(chosen: Bijection | HiddenMarkov) -> None:
    names = {group: [chosen.symbol(int(id_)) for id_ in ids] for group, ids in chosen.symbol_ids.items()}
    assert names in (
        {"keys": [f"k{n}" for n in range(5)], "values": [f"v{n}" for n in range(5)]},
        {"observations": ["o0", "o1"]},
    )
