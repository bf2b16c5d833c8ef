"""Test detectors against golden values, and the properties that must hold for any series.

golden/spikes.npz was made in float64 by a reference that shares no code with the project: series with planted spikes,
shifts and non-finite values. It changes only if a detector's definition changes.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mhc.monitor.detectors import (
    RollingZScore,
    judged_score,
    lr_sensitivity,
    median_excess,
    rolling_zscore,
    spike_score,
    zclip,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "spikes.npz"
CASES = ("calm", "spikes", "shift", "nan", "short", "edge")

values = st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf])
series = st.lists(values, max_size=60)


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN) as file:
        return dict(file)


def test_every_golden_case_is_tested(golden: dict[str, np.ndarray]) -> None:
    assert {key.split("/")[0] for key in golden} == set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_golden(golden: dict[str, np.ndarray], case: str) -> None:
    x = golden[f"{case}/series"]
    z, flags = rolling_zscore(x)
    np.testing.assert_allclose(z, golden[f"{case}/z128"], rtol=1e-9, atol=1e-9)
    np.testing.assert_array_equal(flags, golden[f"{case}/flag_z128_6"])
    score, flags = spike_score(x)
    np.testing.assert_array_equal(flags, golden[f"{case}/flag_7sigma_1000"])
    assert score == pytest.approx(float(golden[f"{case}/spike_score"]), abs=1e-9)
    np.testing.assert_allclose(zclip(x), golden[f"{case}/zclip"], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_online_equals_batch_bit_for_bit(golden: dict[str, np.ndarray], case: str) -> None:
    x = golden[f"{case}/series"]
    detector = RollingZScore()
    online = [detector.update(value) for value in x]
    z, flags = rolling_zscore(x)
    np.testing.assert_array_equal([z for z, _ in online], z)
    assert [flag for _, flag in online] == flags.tolist()


@given(series, st.integers(3, 12), st.integers(0, 60))
@settings(deadline=None, max_examples=200)
def test_online_equals_batch_over_a_restore(x: list[float], window: int, cut: int) -> None:
    options: dict[str, Any] = {"window": window, "min_history": 3, "threshold": 2.0}
    first = RollingZScore(**options)
    online = [first.update(value) for value in x[:cut]]
    second = RollingZScore(first.state, **options)
    third = RollingZScore(x[:cut], **options)  # the whole past serves as well as the saved state
    assert second.state == third.state
    online += [second.update(value) for value in x[cut:]]
    z, flags = rolling_zscore(x, **options)
    np.testing.assert_array_equal([z for z, _ in online], z)
    assert [flag for _, flag in online] == flags.tolist()


@given(series, st.integers(2, 12), st.integers(2, 12))
@settings(deadline=None, max_examples=200)
def test_rolling_functions_equal_their_definition(x: list[float], window: int, min_history: int) -> None:
    min_history = min(window, min_history)
    z, z_flags = rolling_zscore(x, window=window, min_history=min_history, threshold=1.5)
    _, s_flags = spike_score(x, window=window, min_history=min_history, sigmas=1.5)
    m_flags = median_excess(x, window=window, excess=0.1)
    for i, value in enumerate(x):
        history = np.array([v for v in x[:i] if math.isfinite(v)][-window:])
        if not math.isfinite(value):
            assert math.isnan(z[i]) and z_flags[i] and s_flags[i] and m_flags[i]
            continue
        assert m_flags[i] == (len(history) > 0 and value > np.median(history) + 0.1)
        if len(history) < min_history:
            assert math.isnan(z[i]) and not z_flags[i] and not s_flags[i]
            continue
        assert z[i] == (value - history.mean()) / max(history.std(ddof=1), 1e-6)
        assert z_flags[i] == (z[i] > 1.5)
        assert s_flags[i] == (abs(value - history.mean()) > 1.5 * max(history.std(), 1e-6))


def test_window_boundary_and_chunks_agree_on_a_long_series() -> None:
    x = np.random.default_rng(0).normal(size=5000)
    x[::97] = np.nan
    z, _ = rolling_zscore(x, window=1000, min_history=100)
    for i in (150, 1009, 1011, 1012, 2100, 4999):
        history = x[:i][np.isfinite(x[:i])][-1000:]
        assert z[i] == (x[i] - history.mean()) / history.std(ddof=1)


def test_flat_history_uses_the_floor() -> None:
    z, flags = rolling_zscore([1.0] * 64 + [1.0 + 5e-6, 1.0 + 1e-4])
    assert z[64] == pytest.approx(5.0) and not flags[64]
    assert flags[65]


def test_zscore_flags_only_upward_and_spike_score_both_ways() -> None:
    x = np.random.default_rng(1).normal(size=300)
    x[200], x[250] = -50.0, 50.0
    _, z_flags = rolling_zscore(x)
    _, s_flags = spike_score(x)
    assert np.flatnonzero(z_flags).tolist() == [250]
    assert 200 in np.flatnonzero(s_flags)


@given(series, st.integers(1, 12))
def test_a_score_without_history_is_none(values: list[float], least: int) -> None:
    """Nothing was judged if no finite value has enough history and no value is non-finite."""
    finite = [value for value in values if math.isfinite(value)]
    score = judged_score(values, min_history=least)
    if len(finite) <= least and len(finite) == len(values):
        assert score is None
    else:
        assert score == spike_score(values, min_history=least)[0]


def test_spike_score_counts_non_finite_over_the_whole_series() -> None:
    assert spike_score([1.0, math.nan, math.inf, 1.0])[0] == 0.5
    assert spike_score([])[0] == 0.0


@given(st.lists(st.floats(0, 1e3) | st.just(math.inf), min_size=10, max_size=60))
@settings(deadline=None)
def test_zclip_never_raises_a_norm_and_passes_the_warmup(norms: list[float]) -> None:
    clipped = zclip(norms, warmup=5)
    finite = np.isfinite(norms)
    np.testing.assert_array_equal(np.isnan(clipped), ~finite)
    assert np.all(clipped[finite] <= np.array(norms)[finite] + 1e-9)
    first = np.flatnonzero(finite)[:5]
    np.testing.assert_array_equal(clipped[first], np.array(norms)[first])


def test_zclip_clips_a_spike_close_to_the_mean() -> None:
    norms = np.r_[1 + 0.1 * np.sin(np.arange(100)), 100.0, 1.0]
    clipped = zclip(norms)
    assert abs(clipped[100] - 1.0) < 0.05  # the reciprocal rule: the farther out, the closer to the mean
    assert clipped[101] == 1.0


def test_median_excess_ignores_what_one_spike_does_to_a_mean() -> None:
    x = [3.0] * 50 + [30.0] + [3.05] * 10 + [3.2]
    assert np.flatnonzero(median_excess(x)).tolist() == [50, 61]


def test_lr_sensitivity() -> None:
    assert lr_sensitivity([3.0, 3.0, 3.0], 6.0) == 0.0
    assert lr_sensitivity([3.0, 4.0, 9.0], 6.0) == pytest.approx((3 + 4 + 6) / 3 - 3)
    assert lr_sensitivity([3.0, math.nan, math.inf], 6.0) == pytest.approx(2.0)
    assert math.isnan(lr_sensitivity([math.nan], 6.0))


@pytest.mark.parametrize(
    "call",
    [
        lambda: rolling_zscore([[1.0]]),
        lambda: rolling_zscore([1.0], window=2, min_history=3),
        lambda: rolling_zscore([1.0], window=2, min_history=1),
        lambda: RollingZScore(window=2, min_history=3),
        lambda: spike_score([1.0], min_history=0),
        lambda: zclip([1.0], warmup=0),
        lambda: zclip([1.0], alpha=2.0),
        lambda: median_excess([1.0], window=0),
        lambda: lr_sensitivity([], 1.0),
        lambda: lr_sensitivity([1.0], math.inf),
    ],
)
def test_wrong_arguments(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError):
        call()
