"""Fit linear probes by ridge regression on some sequences, and measure their R² on others.

A probe reads targets y off features x by ŷ = m + Wᵀ(x − a), where a and m are means over the fitting sequences: of each
place by itself, so that the probe explains what differs within a place, or of all places together. Only sums over
sequences are kept, so that memory does not grow with their number. All arithmetic is in float64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from mhc.eval.common import statistics

PENALTIES = (*(10.0**power for power in range(-8, 3)), np.inf)
"""Penalties to choose from, in units of the features' mean variance; under the last one the probe is the mean."""
_CONSTANT = 1e-12  # a target whose variance is a smaller share of its mean square is constant, but for rounding
_quiet = np.errstate(invalid="ignore", over="ignore")  # a model that diverged gives nan, without a warning


class Sums:
    """Gathers the sums of K sets of features and their common targets, which is all that a ridge regression needs.

    Attributes:
        numbers: of the sequences that were added.
        x: float64 [K, P, D], sums of the features over sequences, by place.
        y: float64 [P, E], sums of the targets.
        xx: float64 [K, D, D], sums over sequences and places of x xᵀ.
        xy: float64 [K, D, E], of x yᵀ.
        yy: float64 [E], of y².
    """

    def __init__(self) -> None:
        self.numbers: set[int] = set()

    @_quiet
    def add(self, numbers: Iterable[int], x: np.ndarray, y: np.ndarray) -> None:
        """Add sequences.

        Args:
            numbers: of the B sequences.
            x: their features [K, B, P, D].
            y: their targets [B, P, E].

        Raises:
            ValueError: a sequence was added before, or the shapes do not fit.
        """
        numbers = _new(numbers, self.numbers, "these sums")
        if len(numbers) != len(y) or x.shape[1:3] != y.shape[:2]:
            raise ValueError(f"{len(numbers)} numbers, x {x.shape}, y {y.shape}: expected [K, B, P, D] and [B, P, E]")
        x, y = x.astype(np.float64), y.astype(np.float64)
        flat, targets = x.reshape(len(x), -1, x.shape[-1]), y.reshape(-1, y.shape[-1])
        parts = (x.sum(axis=1), y.sum(axis=0), flat.mT @ flat, flat.mT @ targets, (targets**2).sum(axis=0))
        self._add(numbers, parts)

    def _add(self, numbers: Iterable[int], parts: tuple[np.ndarray, ...]) -> None:
        if not self.numbers:
            self.x, self.y, self.xx, self.xy, self.yy = parts
        else:
            for total, part in zip(self._parts(), parts, strict=True):
                total += part
        self.numbers |= set(numbers)

    def _parts(self) -> tuple[np.ndarray, ...]:
        return self.x, self.y, self.xx, self.xy, self.yy

    def __add__(self, other: Sums) -> Sums:
        """Return the sums over the sequences of both. Raises ValueError where they share one."""
        both = Sums()
        both._add(self.numbers, tuple(part.copy() for part in self._parts()))
        both._add(_new(other.numbers, both.numbers, "both sums"), other._parts())
        return both

    @_quiet
    def means(self, within: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return the means (x [K, P, D], y [P, E]): of each place, or of all places together unless ``within``."""
        x, y = self.x / len(self.numbers), self.y / len(self.numbers)
        if within:
            return x, y
        return np.broadcast_to(x.mean(axis=1, keepdims=True), x.shape), np.broadcast_to(y.mean(axis=0), y.shape)

    @_quiet
    def about(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the moments (xx [K, D, D], xy [K, D, E], yy [E]) about given centres x [K, P, D] and y [P, E]."""
        count = len(self.numbers)
        cross = self.x.mT @ x
        xx = self.xx - cross - cross.mT + count * x.mT @ x
        xy = self.xy - self.x.mT @ y - x.mT @ self.y + count * x.mT @ y
        return xx, xy, self.yy - 2 * (self.y * y).sum(axis=0) + count * (y**2).sum(axis=0)


@dataclasses.dataclass(frozen=True)
class Scores:
    """Holds squares over places of each scored sequence; G groups of targets.

    Attributes:
        error: float64 [B, K, G], of the probe.
        spread: float64 [B, G], of the mean over the fitting sequences: of each place, or of all.
        size: float64 [B, G], of the targets themselves.
    """

    error: np.ndarray
    spread: np.ndarray
    size: np.ndarray


@dataclasses.dataclass(frozen=True)
class Probe:
    """Holds K fitted probes.

    Attributes:
        numbers: of the sequences that they were fitted on, and that they may not be scored on.
        groups: of the E targets; each has an R² and a penalty of its own.
        x: float64 [K, P, D], the centres of the features.
        y: float64 [P, E], the centres of the targets.
        weights: float64 [K, D, E].
        penalty: float64 [K, G], as chosen among `PENALTIES`.
    """

    numbers: frozenset[int]
    groups: tuple[slice, ...]
    x: np.ndarray
    y: np.ndarray
    weights: np.ndarray
    penalty: np.ndarray

    @_quiet
    def score(self, numbers: Iterable[int], x: np.ndarray, y: np.ndarray) -> Scores:
        """Return the squared errors on other sequences than those of the fit.

        Args:
            numbers: of the B sequences.
            x: their features [K, B, P, D].
            y: their targets [B, P, E].

        Raises:
            ValueError: a probe was fitted on one of the sequences.
        """
        _new(numbers, self.numbers, "the probe's own fit")
        from_mean = y.astype(np.float64) - self.y
        shape = (*x.shape[:3], y.shape[-1])
        centred = (x.astype(np.float64) - self.x[:, None]).reshape(len(x), -1, x.shape[-1])
        error = ((from_mean - (centred @ self.weights).reshape(shape)) ** 2).sum(axis=2)  # [K, B, E]
        return Scores(
            np.moveaxis(self._by_group(error), 0, 1),
            self._by_group((from_mean**2).sum(axis=1)),
            self._by_group((y.astype(np.float64) ** 2).sum(axis=1)),
        )

    def _by_group(self, squares: np.ndarray) -> np.ndarray:
        return np.stack([squares[..., group].sum(axis=-1) for group in self.groups], axis=-1)


@_quiet
def fit(fitting: Sums, validation: Sums, groups: Sequence[slice], *, within: bool) -> Probe:
    """Fit probes; the penalty of each is the one of `PENALTIES` with the least error on the validation sequences.

    The probe is then fitted on both parts together, with the penalty that was chosen.

    Args:
        groups: of the targets; each has a penalty of its own.
        within: the means are those of each place, so that only what differs between sequences is explained.

    Raises:
        ValueError: the two parts share a sequence.
    """
    every = fitting + validation
    centres = fitting.means(within)
    solved = _Ridge(*fitting.about(*centres)[:2])
    xx, xy, yy = validation.about(*centres)
    errors = []
    for penalty in PENALTIES:
        weights = solved.weights(np.full((len(xx), xy.shape[-1]), penalty))
        # Σ (y − Wᵀx)² from the moments
        errors.append(yy - 2 * (weights * xy).sum(axis=1) + (weights * (xx @ weights)).sum(axis=1))
    by_group = np.stack([np.stack(errors)[..., group].sum(axis=-1) for group in groups], axis=-1)
    penalty = np.asarray(PENALTIES)[by_group.argmin(axis=0)]  # [K, G]
    by_target = np.empty((len(xx), xy.shape[-1]))
    for number, group in enumerate(groups):
        by_target[:, group] = penalty[:, number, None]
    x, y = every.means(within)
    weights = _Ridge(*every.about(x, y)[:2]).weights(by_target)
    return Probe(frozenset(every.numbers), tuple(groups), x, y, weights, penalty)


class _Ridge:
    """Solves K ridge regressions for any penalty from one eigendecomposition of each."""

    def __init__(self, xx: np.ndarray, xy: np.ndarray) -> None:
        # Features of a model that diverged may not be finite: their probes are nan, and the others are as they were.
        finite = np.isfinite(xx).all(axis=(-2, -1), keepdims=True)
        self._values, self._vectors = np.linalg.eigh(np.where(finite, xx, 0.0))
        self._values = np.maximum(self._values, 0.0)
        self._turned = np.where(finite, self._vectors.mT @ np.where(finite, xy, 0.0), np.nan)
        self._unit = self._values.mean(axis=-1)[:, None, None]  # the features' mean variance, times the samples

    def weights(self, penalty: np.ndarray) -> np.ndarray:
        """Return weights [K, D, E] under penalties [K, E]; those of features that do not vary are 0."""
        with np.errstate(invalid="ignore"):
            below = self._values[..., None] + np.where(self._unit > 0, penalty[:, None] * self._unit, np.inf)
        return self._vectors @ (self._turned / below)


@_quiet
def r2(scores: Sequence[Scores]) -> statistics.Estimate:
    """Return R² [K, G] over all scored sequences, with bootstrap intervals over them.

    It is 1 for a probe without error and 0 for one no better than the mean, and may be negative. It is nan for targets
    that do not differ from that mean in any sequence, but for rounding, and for features that are not finite.
    """
    error, spread, size = (
        np.concatenate([getattr(part, name) for part in scores]) for name in ("error", "spread", "size")
    )
    constant = spread.sum(axis=0) <= _CONSTANT * size.sum(axis=0)
    flat = error.reshape(len(error), -1)

    def statistic(total: statistics.Total) -> np.ndarray:
        of_mean = np.where(constant, np.nan, total(spread))
        sums = total(flat)
        with np.errstate(divide="ignore", invalid="ignore"):
            return 1.0 - sums.reshape(len(sums), *error.shape[1:]) / of_mean[:, None]

    return statistics.bootstrap(statistic, len(error))


def _new(numbers: Iterable[int], known: Iterable[int], where: str) -> list[int]:
    """Return the numbers as a list. Raises ValueError where one of them is known, or occurs twice."""
    listed = list(numbers)
    shared = set(listed) & set(known)
    if shared or len(set(listed)) < len(listed):
        raise ValueError(f"sequences {sorted(shared)[:5] or 'given twice'}: they are in {where}; others are needed")
    return listed
