"""Test intervals: they cover, they equal those of the books, and one sample has none."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mhc.eval.common.statistics import mean, quantile, ratio, resampled, share_interval, t_interval


def test_students_interval_holds_its_share_of_the_density() -> None:
    """The interval of values of mean 0 and standard error 1 ends at the 0.975 quantile."""
    for freedom in (*range(1, 31), 40, 60, 120):
        values = np.resize([1.0, -1.0], freedom + 1)
        values -= values.mean()
        values *= math.sqrt(freedom + 1) / values.std(ddof=1)
        low, high = t_interval(values)
        assert low == pytest.approx(-high)
        x = np.linspace(0, high, 200_001)
        scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
        density = scale * (1 + x * x / freedom) ** (-(freedom + 1) / 2)
        assert 0.5 + np.trapezoid(density, x) == pytest.approx(0.975, abs=1e-6)


def test_intervals_of_shares_are_wilsons() -> None:
    """The bounds are those of the formula of 1927 for whole numbers of hits; others lie between their neighbours'."""
    z2 = 1.959963984540054**2
    for samples in (1, 7, 20, 500):
        for hits in {0, 1, samples // 2, samples}:
            share = hits / samples
            middle = (share + z2 / (2 * samples)) / (1 + z2 / samples)
            reach = math.sqrt(z2 * (share * (1 - share) / samples + z2 / (4 * samples**2))) / (1 + z2 / samples)
            np.testing.assert_allclose(share_interval(hits, samples), (middle - reach, middle + reach), atol=1e-12)
    between, below, above = (share_interval(hits, 20) for hits in (3.25, 3, 4))
    np.testing.assert_allclose(between, 0.75 * np.array(below) + 0.25 * np.array(above))
    assert share_interval(19.5, 20)[1] <= 1.0


def test_an_estimate_is_the_statistic_of_the_samples() -> None:
    rng = np.random.default_rng(0)
    values, counts = rng.normal(size=30), rng.integers(1, 9, 30)
    assert mean(values).value == pytest.approx(values.mean())
    assert ratio(values, counts).value == pytest.approx(values.sum() / counts.sum())
    for q in (0.0, 0.3, 0.5, 0.95, 1.0):
        assert quantile(list(values), q).value == pytest.approx(np.quantile(values, q))
    table = ratio(rng.normal(size=(30, 2, 3)), counts, np.square)
    assert table.value.shape == table.low.shape == table.error.shape == (2, 3)
    assert (table.low <= table.value).all() and (table.value <= table.high).all()


def test_a_drawn_quantile_is_that_of_the_drawn_values() -> None:
    """It is numpy's quantile of the values, each repeated as often as it was drawn."""
    values, weights = np.sort(np.random.default_rng(1).normal(size=9)), resampled(9)
    for q in (0.1, 0.5, 0.95):
        drawn = [np.quantile(np.repeat(values, row), q) for row in weights]
        estimate = quantile(list(values), q)
        np.testing.assert_allclose((estimate.low, estimate.high), np.percentile(drawn, (2.5, 97.5)))


def test_intervals_of_means_cover() -> None:
    rng = np.random.default_rng(2)
    estimates = [mean(rng.exponential(size=60)) for _ in range(200)]
    held = sum(bool(one.low <= 1.0 <= one.high) for one in estimates)
    assert 178 <= held <= 198
    error = np.mean([one.error for one in estimates])
    assert error == pytest.approx(1 / math.sqrt(60), rel=0.05)


def test_one_sample_has_no_interval() -> None:
    for estimate in (mean(np.array([2.0])), ratio(np.array([4.0]), np.array([2])), quantile([2.0], 0.5)):
        assert estimate.at() == {"value": 2.0, "low": None, "high": None}
        assert np.isnan(estimate.error)
