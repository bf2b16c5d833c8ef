"""Estimates with intervals: one bootstrap over samples, Wilson's interval of shares, Student's t of means."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

LEVEL = 0.95  # of every interval
_ENDS = (2.5, 97.5)  # its percentiles

Bounds = dict[str, float | None]
"""An estimate in JSON: value, low, high; the last two are None where there is no interval."""


class Estimate(NamedTuple):
    """Holds values of one shape with their 95 % intervals; bounds and errors of a single sample are nan."""

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray
    error: np.ndarray  # standard error
    samples: int

    def part(self, *index: int) -> Estimate:
        """Return the estimate of the values at an index."""
        value, low, high, error = (part[index] for part in (self.value, self.low, self.high, self.error))
        return Estimate(value, low, high, error, self.samples)

    def at(self, *index: int) -> Bounds:
        """Return the value at an index (none for a single value) with its bounds, for JSON."""
        value, low, high = (float(part[index]) for part in (self.value, self.low, self.high))
        return {"value": value, "low": None, "high": None} if self.samples < 2 else bounds(value, low, high)


def bounds(value: float, low: float | None, high: float | None) -> Bounds:
    """Return an estimate for JSON."""
    return {"value": value, "low": low, "high": high}


def resampled(samples: int, draws: int = 2000, seed: int = 0) -> np.ndarray:
    """Return bootstrap weights [draws, samples]: how often each sample is drawn. They are equal for equal arguments."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(samples, np.full(samples, 1.0 / samples), size=draws)


Total = Callable[[np.ndarray], np.ndarray]
"""A sum over samples: from [samples, ...] to [K, ...], once for the samples themselves and once for each draw."""


def bootstrap(statistic: Callable[[Total], np.ndarray], samples: int) -> Estimate:
    """Estimate a statistic of sums over samples, with percentile intervals over samples drawn with replacement.

    Args:
      statistic: gives its values [K, ...] from a `Total`.
      samples: the number of independent samples, such as documents.
    """
    value = statistic(lambda values: np.sum(values, axis=0, keepdims=True))[0]
    if samples < 2:
        return _estimate(value, None, samples)
    weights = resampled(samples)
    return _estimate(value, statistic(lambda values: weights @ values), samples)


def _estimate(value: np.ndarray, drawn: np.ndarray | None, samples: int) -> Estimate:
    """Return the estimate of which ``drawn`` [draws, ...] are the values under resampling."""
    if drawn is None:
        nothing = np.full_like(value, np.nan, np.float64)
        return Estimate(value, nothing, nothing, nothing, samples)
    low, high = np.percentile(drawn, _ENDS, axis=0)
    return Estimate(value, low, high, drawn.std(axis=0), samples)


def mean(values: np.ndarray) -> Estimate:
    """Estimate the mean of one value a sample, [samples]."""
    values = np.asarray(values, np.float64)
    return bootstrap(lambda total: total(values) / len(values), len(values))


def ratio(
    sums: np.ndarray, counts: np.ndarray, transform: Callable[[np.ndarray], np.ndarray] = lambda values: values
) -> Estimate:
    """Estimate ``transform(sum over samples of sums / sum of counts)``.

    Args:
      sums: [samples, ...].
      counts: [samples].
    """
    flat, counts = np.reshape(sums, (len(sums), -1)).astype(np.float64), np.asarray(counts, np.float64)
    shape = np.shape(sums)[1:]

    def statistic(total: Total) -> np.ndarray:
        # A draw may hold only samples that count nothing.
        return transform(total(flat) / np.maximum(total(counts), 1e-30)[:, None]).reshape(-1, *shape)

    return bootstrap(statistic, len(flat))


def quantile(values: Sequence[float], q: float) -> Estimate:
    """Estimate the quantile ``q`` of values, by linear interpolation between the nearest two."""
    ordered = np.sort(np.asarray(values, np.float64))
    last = len(ordered) - 1
    value, below = np.asarray(np.quantile(ordered, q)), math.floor(q * last)
    if not last:
        return _estimate(value, None, 1)
    ends = np.cumsum(resampled(len(ordered)), axis=1)  # the k-th drawn value is the first one whose end exceeds k
    low, high = (ordered[(ends <= k).sum(axis=1)] for k in (below, min(below + 1, last)))
    return _estimate(value, low + (q * last - below) * (high - low), len(ordered))


def share_interval(hits: float, samples: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share: ``hits`` of so many samples, as probabilities.

    Hits that are no whole number, where one was shared among equals, have the bounds between those of their neighbours.
    """
    from scipy import stats

    def of_whole(hits: int) -> np.ndarray:
        interval = stats.binomtest(min(hits, samples), samples).proportion_ci(LEVEL, method="wilson")
        return np.array([interval.low, interval.high])

    below = math.floor(hits)
    part = hits - below
    low, high = (1.0 - part) * of_whole(below) + part * of_whole(below + 1) if part else of_whole(below)
    return float(low), float(high)


def t_interval(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of the mean of two or more values, by Student's t with n - 1 degrees of freedom."""
    from scipy import stats

    middle, error = float(np.mean(values)), float(np.std(values, ddof=1) / math.sqrt(len(values)))
    reach = float(stats.t.ppf((1.0 + LEVEL) / 2.0, len(values) - 1)) * error
    return middle - reach, middle + reach


def auc(scores: np.ndarray, positive: np.ndarray, baseline: np.ndarray | None = None) -> Estimate:
    """Estimate the area under the ROC curve of scores, with an interval over samples, or what it adds to a baseline's.

    It is the probability that a positive place has a higher score than a negative one, equal scores counted half.

    Args:
      scores: [samples, places].
      positive: [samples, places] bool; both values occur.
      baseline: other scores of the same places, whose area is taken away, draw by draw.
    """
    parts = [_by_rank(values, positive) for values in (scores, baseline) if values is not None]

    def statistic(total: Total) -> np.ndarray:
        areas = []
        for of_positive, of_negative in parts:
            hits, misses = total(of_positive), total(of_negative)
            below = np.cumsum(misses, axis=1) - misses / 2
            areas.append((hits * below).sum(axis=1) / np.maximum(hits.sum(axis=1) * misses.sum(axis=1), 1e-30))
        return np.asarray(areas[0] if len(areas) == 1 else areas[0] - areas[1])

    return bootstrap(statistic, len(scores))


def _by_rank(scores: np.ndarray, positive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return how many positive and how many negative places of each sample have each score, ascending [samples, G]."""
    _, group = np.unique(scores, return_inverse=True)
    group = group.reshape(scores.shape)
    counts = np.zeros((2, len(scores), int(group.max()) + 1))
    rows = np.arange(len(scores))[:, None]
    for number, there in enumerate((positive, ~positive)):
        np.add.at(counts[number], (np.broadcast_to(rows, group.shape)[there], group[there]), 1.0)
    return counts[0], counts[1]
