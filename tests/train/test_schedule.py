"""Test learning rates at the edges of every schedule."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from mhc.config import Config
from mhc.train.optimizer import learning_rate
from tests.small import small

PEAK, WARMUP, STEPS = 0.02, 5, 20
KINDS = ("constant", "cosine", "linear", "step", "wsd")


def config(kind: str, warmup: int = WARMUP, steps: int = STEPS, **schedule: object) -> Config:
    return small(
        optimizer={"lr": PEAK}, train={"steps": steps}, schedule={"kind": kind, "warmup_steps": warmup, **schedule}
    )


def rates(made: Config, count: int) -> np.ndarray:
    """Return the rates of the updates 1 .. count."""
    return np.asarray(learning_rate(made, jnp.arange(count)), np.float64)


def expected(kind: str, step: int) -> float:
    """Return the rate of update `step` of `config(kind)`, 1-based, from the definitions."""
    if step < WARMUP:
        return PEAK * step / WARMUP
    progress = min((step - WARMUP) / (STEPS - WARMUP), 1.0)
    wsd = min(max(step - 16, 0) / 4, 1.0)  # the last fifth of 20 steps
    return (
        PEAK
        * {
            "constant": 1.0,
            "cosine": 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2,
            "linear": 1 - 0.9 * progress,
            "step": 1.0 if step <= 16 else 0.316 if step <= 18 else 0.1,
            "wsd": 1 - 0.9 * wsd,
        }[kind]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_step(kind):
    """The steps include the first, warm-up − 1, warm-up, warm-up + 1, the last, and those past the last."""
    np.testing.assert_allclose(
        rates(config(kind), STEPS + 5), [expected(kind, step) for step in range(1, STEPS + 6)], rtol=1e-6
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("warmup", "steps"), [(0, 20), (1, 20), (5, 20), (19, 20), (20, 20), (0, 1), (1, 1), (0, 2)])
def test_edges(kind, warmup, steps):
    if kind == "wsd" and warmup == steps:
        pytest.skip("a config that leaves no step for the decay is refused")
    got = rates(config(kind, warmup, steps, wsd_fraction=0.05), steps + 3)
    assert np.all(np.isfinite(got)) and np.all(got > 0) and np.all(got <= PEAK * (1 + 1e-6))
    if warmup:
        np.testing.assert_allclose(got[: warmup - 1], PEAK * np.arange(1, warmup) / warmup, rtol=1e-6)
    if warmup and kind != "step":
        assert got[warmup - 1] == pytest.approx(PEAK, rel=1e-6)
    last = got[steps - 1] if steps > max(warmup, 1) or kind in ("constant", "step") else 0.1 * PEAK
    np.testing.assert_allclose(got[steps:], last, rtol=1e-6)  # it holds
    assert np.all(np.diff(got[max(warmup, 1) - 1 :]) <= 0)  # after the warm-up it never rises


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_the_peak_is_reached_once_at_the_end_of_the_warm_up(kind):
    got = rates(config(kind), STEPS)
    assert np.flatnonzero(got >= PEAK * (1 - 1e-6)).tolist() == [WARMUP - 1]


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_the_decay_ends_at_its_step_and_not_at_the_run_s(kind):
    got = rates(config(kind, decay_steps=10, final_ratio=0.0), STEPS)
    np.testing.assert_allclose(got[9:], 0.0, atol=1e-9)
    assert got[8] > 0


def test_scalars_and_arrays_agree_and_are_float32():
    made = config("cosine")
    one = learning_rate(made, 7)
    assert one.dtype == jnp.float32 and one.shape == ()
    assert float(one) == pytest.approx(rates(made, 8)[7], rel=1e-7)


@pytest.mark.parametrize("shape", ["linear", "sqrt"])
def test_a_decay_of_given_steps_and_shape(shape: str) -> None:
    """The rate is stable up to the first step of the decay, and zero in the last."""
    got = rates(config("wsd", wsd_steps=4, wsd_shape=shape, final_ratio=0.0), STEPS + 2) / PEAK
    done = np.arange(1, 5) / 4
    decay = 1 - (np.sqrt(done) if shape == "sqrt" else done)
    np.testing.assert_allclose(got, [0.2, 0.4, 0.6, 0.8, *[1.0] * 12, *decay, 0.0, 0.0], atol=1e-6)


def test_a_branch_enters_the_schedule_where_its_source_left_it() -> None:
    """A decay_steps of None is the last step of the branch, counted from the source's first."""
    taken = {"init_from": "runs/stable@100", "init_optimizer": True, "steps": 20}
    made = small(train=taken, optimizer={"lr": PEAK}, schedule={"kind": "wsd", "wsd_steps": 10, "final_ratio": 0.0})
    assert made.decay_steps == 120
    got = np.asarray(learning_rate(made, 100 + jnp.arange(20)), np.float64) / PEAK
    np.testing.assert_allclose(got, [*[1.0] * 10, *(1 - np.arange(1, 11) / 10)], atol=1e-6)
    for changed in ({"init_optimizer": False}, {"init_from": "runs/stable"}):
        assert small(train=taken | changed, schedule={"kind": "wsd"}).decay_steps == 20
