"""Test linear probes: what is planted is found where it was planted, and what is not there is not found."""

from __future__ import annotations

import numpy as np
import pytest

from mhc.data.windtunnel import Bijection, HiddenMarkov, Task
from mhc.eval.windtunnel import probes
from mhc.eval.windtunnel.depth import FLOOR, parts, targets

TASKS: dict[str, Task] = {"bijection": Bijection(6), "hmm": HiddenMarkov(observations=6, states=3, symbols=3)}
GROUPS = (slice(0, 1), slice(1, None))
tasks = pytest.mark.parametrize("name", list(TASKS))


def posterior(name: str, numbers: range) -> np.ndarray:
    return TASKS[name].make(0, "validation", numbers).posterior


def noise(numbers: range, places: int, width: int, of: int = 0) -> np.ndarray:
    """Return features that tell nothing, [B, P, D]; each sequence has its own."""
    return np.stack([np.random.default_rng([of, number]).standard_normal((places, width)) for number in numbers])


def planted(name: str, numbers: range, *, width: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """Return (features [3, B, P, D] of three streams, of which number 1 holds the targets with noise; the targets)."""
    y = targets(posterior(name, numbers))
    streams = np.stack([noise(numbers, y.shape[1], width, of) for of in range(3)])
    streams[1, ..., : y.shape[2]] = y
    mixing = np.random.default_rng(7).standard_normal((width, width))
    return 50 * streams @ mixing + 3, y


def fitted(
    name: str, sequences: int, *, within: bool, shuffled: bool = False
) -> tuple[probes.Probe, list[probes.Scores]]:
    """Return a probe of the planted features, and its scores; ``shuffled`` gives each sequence another's posterior."""

    def features(numbers: range) -> tuple[np.ndarray, np.ndarray]:
        x, y = planted(name, numbers)
        return x, np.random.default_rng(1).permutation(y) if shuffled else y

    scored, *fitting = parts(sequences)
    sums = []
    for numbers in fitting:
        part = probes.Sums()
        for block in (numbers[:10], numbers[10:]):
            part.add(block, *features(block))
        sums.append(part)
    probe = probes.fit(sums[0], sums[1], GROUPS, within=within)
    return probe, [probe.score(scored, *features(scored))]


@tasks
@pytest.mark.parametrize("within", [True, False])
def test_a_planted_belief_is_found_in_its_stream_alone(name: str, within: bool) -> None:
    found = probes.r2(fitted(name, 60, within=within)[1])
    posterior_ = found.value[:, 1]
    assert posterior_[1] > 0.999999
    others = posterior_[[0, 2]]
    if within:
        assert (others <= 0.01).all()
    else:  # an intercept for all places: noise still tells nothing
        assert (others < 0.05).all()
    assert (found.low[:, 1] <= posterior_).all() and (posterior_ <= found.high[:, 1]).all()


def test_an_entropy_that_the_place_tells_has_no_r2_within_a_place() -> None:
    assert np.isnan(probes.r2(fitted("bijection", 60, within=True)[1]).value[:, 0]).all()
    assert probes.r2(fitted("bijection", 60, within=False)[1]).value[1, 0] > 0.999999
    assert probes.r2(fitted("hmm", 60, within=True)[1]).value[1, 0] > 0.999999


@tasks
def test_a_shuffled_posterior_is_not_found(name: str) -> None:
    found = probes.r2(fitted(name, 60, within=True, shuffled=True)[1])
    assert (found.value[:, 1] < 0.02).all()


def test_random_labels_are_learnt_on_the_fit_alone() -> None:
    """With many features a probe knows its own sequences by heart, and is worse than the mean on others."""
    scored, fitting, validation = range(40), range(40, 60), range(60, 64)

    def sums(numbers: range) -> probes.Sums:
        part = probes.Sums()
        part.add(numbers, noise(numbers, 3, 40)[None], noise(numbers, 3, 2, 1))
        return part

    for penalties in (probes.PENALTIES, probes.PENALTIES[:1]):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(probes, "PENALTIES", penalties)
            probe = probes.fit(sums(fitting), sums(validation), GROUPS, within=True)
        x, y = noise(scored, 3, 40)[None], noise(scored, 3, 2, 1)
        assert (probes.r2([probe.score(scored, x, y)]).value <= 0).all()
        own = (noise(fitting, 3, 40)[None], noise(fitting, 3, 2, 1))
        for numbers in (fitting, validation, range(39, 42)):
            with pytest.raises(ValueError, match="the probe's own fit"):
                probe.score(numbers, *own)
        if len(penalties) == 1:  # what that refusal keeps out
            by_heart = probes.Probe(
                frozenset(), *[getattr(probe, f) for f in ("groups", "x", "y", "weights", "penalty")]
            )
            assert probes.r2([by_heart.score(fitting, *own)]).value.min() > 0.4


def test_a_sequence_counts_once() -> None:
    part = probes.Sums()
    x, y = planted("hmm", range(4))
    part.add(range(4), x, y)
    with pytest.raises(ValueError, match="these sums"):
        part.add(range(3, 7), x, y)
    with pytest.raises(ValueError, match="both sums"):
        part + part
    with pytest.raises(ValueError, match="given twice"):
        probes.Sums().add([1, 1, 2, 3], x, y)
    with pytest.raises(ValueError, match="expected"):
        probes.Sums().add(range(3), x, y)


def test_the_parts_share_no_sequence() -> None:
    for sequences in (2, 3, 512):
        ranges = parts(sequences)
        assert all(ranges) and len(set().union(*ranges)) == sum(map(len, ranges))


@pytest.mark.parametrize("within", [True, False])
def test_the_fit_is_ridge_regression(within: bool) -> None:
    """It solves the normal equations over all samples at once."""
    probe, _ = fitted("hmm", 40, within=within)
    _, *fitting = parts(40)
    blocks = [planted("hmm", numbers[a:b]) for numbers in fitting for a, b in ((0, 5), (5, None))]
    x, y = np.concatenate([x for x, _ in blocks], axis=1), np.concatenate([y for _, y in blocks])
    axes = (0,) if within else (0, 1)
    y = (y - y.mean(axis=axes, keepdims=True)).reshape(-1, y.shape[-1])
    for view in range(3):
        centred = (x[view] - x[view].mean(axis=axes, keepdims=True)).reshape(len(y), -1)
        gram = centred.T @ centred
        for number, group in enumerate(GROUPS):
            penalty = probe.penalty[view, number]
            if not np.isfinite(penalty):
                assert not probe.weights[view][:, group].any()
                continue
            expected = np.linalg.solve(
                gram + penalty * np.trace(gram) / len(gram) * np.eye(len(gram)), centred.T @ y[:, group]
            )
            np.testing.assert_allclose(probe.weights[view][:, group], expected, rtol=1e-6, atol=1e-9)


def test_features_that_do_not_vary_tell_nothing() -> None:
    def sums(numbers: range) -> probes.Sums:
        part = probes.Sums()
        part.add(numbers, np.ones((1, len(numbers), 6, 4)), targets(posterior("hmm", numbers)))
        return part

    probe = probes.fit(sums(range(10, 20)), sums(range(20, 24)), GROUPS, within=True)
    found = probes.r2([probe.score(range(8), np.ones((1, 8, 6, 4)), targets(posterior("hmm", range(8))))])
    np.testing.assert_allclose(found.value, 0.0, atol=1e-12)


def test_zeros_of_a_posterior_have_a_logarithm() -> None:
    read = targets(np.array([[[0.5, 0.5, 0.0, 0.0]]]))
    np.testing.assert_allclose(read[0, 0], [1.0, -1.0, -1.0, *2 * [np.log2(FLOOR / 4)]], rtol=0, atol=1e-15)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_features_that_are_not_finite_have_no_r2(bad: float) -> None:
    """The other streams' probes are as they were."""

    def features(numbers: range) -> tuple[np.ndarray, np.ndarray]:
        x, y = planted("hmm", numbers)
        x[0, :, 2, 1] = bad
        return x, y

    scored, *fitting = parts(30)
    sums = []
    for numbers in fitting:
        part = probes.Sums()
        part.add(numbers, *features(numbers))
        sums.append(part)
    probe = probes.fit(sums[0], sums[1], GROUPS, within=True)
    r2 = probes.r2([probe.score(scored, *features(scored))])
    assert np.isnan(r2.value[0]).all() and np.isnan(r2.low[0]).all()
    np.testing.assert_allclose(r2.value[1:], probes.r2(fitted("hmm", 30, within=True)[1]).value[1:], atol=1e-9)
