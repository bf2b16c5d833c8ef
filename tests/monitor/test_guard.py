"""Test the guard inside the step against the detectors, the probes' alarms, and the causes' rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhc.config import GuardConfig
from mhc.monitor import detectors, guard

GOLDEN = Path(__file__).parent.parent / "golden" / "spikes.npz"


def series() -> dict[str, np.ndarray]:
    with np.load(GOLDEN) as archive:
        return {key.split("/")[0]: archive[key] for key in archive.files if key.endswith("/series")}


@pytest.mark.parametrize("case", sorted(series()))
def test_window_is_the_rolling_zscore(case: str) -> None:
    values = series()[case]
    window, min_history = 128, 64
    expected, flags = detectors.rolling_zscore(values, window=window, min_history=min_history)

    def step(state: guard.Window, value: jax.Array) -> tuple[guard.Window, jax.Array]:
        return state.push(value), state.zscore(value, min_history)

    _, z = jax.lax.scan(step, guard.Window.empty(window), jnp.asarray(values, jnp.float32))
    np.testing.assert_array_equal(np.isnan(z), np.isnan(expected))
    seen = ~np.isnan(expected)
    if seen.any():
        assert (
            np.max(np.abs(z - expected)[seen] / np.maximum(1.0, np.abs(expected[seen]))) < 1e-3
        )  # float32 mean and std
    clear = np.abs(expected - 6.0) > 0.01
    np.testing.assert_array_equal((np.asarray(z) > 6.0)[seen & clear], flags[seen & clear])


@pytest.mark.parametrize("case", sorted(series()))
def test_zclip_is_the_detectors_rule(case: str) -> None:
    values = series()[case]
    expected = detectors.zclip(values)

    def step(state: guard.ZClip, value: jax.Array) -> tuple[guard.ZClip, jax.Array]:
        clipped, state = state.update(value, GuardConfig())
        return state, clipped

    _, clipped = jax.lax.scan(step, guard.ZClip.empty(), jnp.asarray(values, jnp.float32))
    finite = np.isfinite(expected)
    np.testing.assert_allclose(np.asarray(clipped)[finite], expected[finite], rtol=1e-4)


def probe(step: int, **values: Any) -> dict[str, Any]:
    quiet = {
        "gain/forward_composite_mean": [1.0, 1.0],
        "gain/backward_composite_mean": [1.0, 1.0],
        "activation/residual_rms": [1.0, 2.0],
        "activation/attention_logit_max": [3.0],
        "representation/rank": [8.0, 8.0],
        "stream/effective": [1.0, 2.0, 2.0],
    }
    return {"step": step, **quiet, **{name.replace("__", "/"): value for name, value in values.items()}}


def test_a_monitor_alarms_once_and_stays_active() -> None:
    watch = guard.ProbeWatch(GuardConfig(forward_gain=10.0))
    assert watch.update(probe(0)) == {}
    high = {"gain__forward_composite_mean": [1.0, 11.0]}
    assert watch.update(probe(10, **high)) == {"forward_gain": {"value": 11.0, "threshold": 10.0}}
    assert watch.update(probe(20, **high)) == {}
    assert watch.active == {"forward_gain": 10}
    watch.update(probe(30))
    assert watch.active == {}


def test_a_nan_measure_is_an_alarm() -> None:
    watch = guard.ProbeWatch(GuardConfig())
    assert "residual_rms" in watch.update(probe(0, activation__residual_rms=[1.0, float("nan")]))


def test_collapse_needs_history() -> None:
    watch = guard.ProbeWatch(GuardConfig())
    fallen = {"representation__rank": [1.0, 1.0]}
    assert watch.update(probe(0, **fallen)) == {}
    watch = guard.ProbeWatch(GuardConfig())
    for step in range(guard.COLLAPSE_MIN_HISTORY):
        watch.update(probe(step))
    assert set(watch.update(probe(99, **fallen))) == {"representation_rank"}


def test_watch_of_an_interrupted_run_stands_where_it_stood() -> None:
    rng = np.random.default_rng(0)
    records = [
        probe(step, representation__rank=[8.0, rng.uniform(1, 9)], activation__residual_rms=[rng.uniform(0, 2000)])
        for step in range(40)
    ]
    whole, again = guard.ProbeWatch(GuardConfig()), guard.ProbeWatch(GuardConfig())
    crossings = [whole.update(record) for record in records]
    assert any(crossings)
    for record in records[:20]:
        again.update(record)
    assert [again.update(record) for record in records[20:]] == crossings[20:]
    assert again.active == whole.active


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"finite": False, "active": {"forward_gain": 1}}, "nonfinite"),
        ({"active": {"forward_gain": 1, "backward_gain": 1}, "grad_flag": True}, "signal_explosion"),
        ({"active": {"residual_rms": 1}}, "signal_explosion"),
        ({"active": {"attention_logit": 1}, "grad_flag": True}, "attention_logit_growth"),
        ({"active": {"representation_rank": 1}, "loss_flag": True}, "representation_collapse"),
        ({"active": {"effective_streams": 1}, "loss_flag": True}, "representation_collapse"),
        ({"grad_flag": True}, "gradient_explosion"),
        ({"loss_flag": True, "grad_flag": True}, "gradient_explosion"),
        ({"loss_flag": True, "grad_flag_before": True}, "gradient_explosion"),
        ({"loss_flag": True, "active": {"backward_gain": 3}}, "gradient_explosion"),
        ({"loss_flag": True}, "loss_spike"),
    ],
)
def test_cause_is_the_first_rule_that_holds(facts: dict[str, Any], expected: str) -> None:
    quiet: dict[str, Any] = {"finite": True, "loss_flag": False, "grad_flag": False, "grad_flag_before": False}
    assert guard.cause(**{**quiet, "active": {}, **facts}) == expected
    assert expected in guard.CAUSES
