"""Detect instability with pure functions of a series (numpy in, numpy out).

A *history* always means the last ``window`` finite values before the current one, the current one excluded. Values that
were flagged stay in it, non-finite ones never enter it. Everything is computed in float64 from the values of the window
itself (two passes, no running sums), so a long run has no drift and the online detector equals the batch function bit
for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

STD_FLOOR = 1e-6
_CHUNK = 1 << 15  # values gathered at a time: 256 KiB of windows stay in cache


def rolling_zscore(
    series: ArrayLike, *, window: int = 128, min_history: int = 64, ddof: int = 1, threshold: float = 6.0
) -> tuple[Floats, Flags]:
    """Return the z-score of every value against its history, and whether it is a spike.

    Args:
        series: [n], any real dtype; NaN and infinities allowed.
        window: number of finite values in a full history.
        min_history: finite values needed before a z-score is given.
        ddof: delta degrees of freedom of the standard deviation (floored at 1e-6).
        threshold: a value is flagged when z > threshold (one-sided: only upward jumps are spikes).

    Returns:
        (z float64[n], flags bool[n]). z is NaN where the history is too short and at non-finite values, which are
        always flagged.

    Raises:
        ValueError: on a series that is not one-dimensional, or min_history outside [ddof + 1, window].
    """
    values = _series(series)
    _check_window(window, min_history, ddof)
    finite = np.isfinite(values)
    z = np.full(len(values), np.nan)
    scored = values[finite]
    mean, std = _rolling(scored, window, min_history, lambda rows: _mean_std(rows, ddof))
    z[finite] = (scored - mean) / std
    return z, _above(z, threshold) | ~finite


class RollingZScore:
    """Runs :func:`rolling_zscore` online: fed a series value by value, it returns exactly the same z and flags.

    Args:
        past: values already seen (for example ``state`` of a saved detector, or the column of a metrics file);
            non-finite ones are dropped and the last ``window`` are kept.
        window, min_history, ddof, threshold: as in :func:`rolling_zscore`.

    Raises:
        ValueError: min_history outside [ddof + 1, window].
    """

    def __init__(
        self,
        past: Iterable[float] = (),
        *,
        window: int = 128,
        min_history: int = 64,
        ddof: int = 1,
        threshold: float = 6.0,
    ) -> None:
        _check_window(window, min_history, ddof)
        self._window, self._min_history, self._ddof, self._threshold = window, min_history, ddof, threshold
        self._history = [value for value in map(float, past) if math.isfinite(value)][-window:]

    def update(self, value: float) -> tuple[float, bool]:
        """Return (z, flag) of ``value`` against what came before; then ``value`` enters the history if it is finite."""
        value = float(value)
        if not math.isfinite(value):
            return math.nan, True
        z = math.nan
        if len(self._history) >= self._min_history:
            mean, std = _mean_std(np.array([self._history]), self._ddof)
            z = float((value - mean[0]) / std[0])
        self._history.append(value)
        del self._history[: -self._window]
        return z, z > self._threshold

    @property
    def state(self) -> list[float]:
        """Return the history, oldest first: hand it to the constructor to go on from here."""
        return list(self._history)


def spike_score(
    series: ArrayLike, *, window: int = 1000, min_history: int = 100, sigmas: float = 7.0
) -> tuple[float, Flags]:
    """Return the share of values farther than ``sigmas`` population standard deviations from their history's mean.

    Args:
        series: [n], any real dtype.
        window: number of finite values in a full history.
        min_history: finite values needed before a finite value can be a spike.
        sigmas: distance, either way, in standard deviations (floored at 1e-6).

    Returns:
        (score, flags bool[n]): flags.mean(), 0 for an empty series. Non-finite values count as spikes.

    Raises:
        ValueError: on a series that is not one-dimensional, or min_history outside [1, window].
    """
    values = _series(series)
    _check_window(window, min_history, 0)
    flags = ~np.isfinite(values)
    scored = values[~flags]
    mean, std = _rolling(scored, window, min_history, lambda rows: _mean_std(rows, 0))
    flags[~flags] = _above(np.abs(scored - mean), sigmas * std)
    return (float(flags.mean()) if len(flags) else 0.0), flags


def judged_score(series: ArrayLike, *, min_history: int = 100) -> float | None:
    """Return the spike score of a series; None if the series is too short for any value to have enough history."""
    score, flags = spike_score(series, min_history=min_history)
    finite = int(np.isfinite(_series(series)).sum())
    return score if finite > min_history or flags.any() else None


def zclip(norms: ArrayLike, *, alpha: float = 0.97, threshold: float = 2.5, warmup: int = 25) -> Floats:
    """Return gradient norms after adaptive clipping (ZClip, arXiv:2504.02507, reciprocal rule).

    With z = (norm − mean) / (std + 1e-6), a norm of z > threshold becomes c = mean + threshold·std / (z / threshold),
    any other stays (c = norm). Then mean ← α·mean + (1−α)·c and var ← α·var + (1−α)·(c − mean)² with the new mean.

    Args:
        norms: [n], any real dtype.
        alpha: decay of the running mean and variance.
        threshold: z-score above which a norm is clipped.
        warmup: finite norms that pass as they are and give the first mean and population variance.

    Returns:
        clipped float64[n]; NaN where the norm is not finite (it changes neither mean nor variance).

    Raises:
        ValueError: on a series that is not one-dimensional, alpha outside [0, 1], or warmup < 1.
    """
    values = _series(norms)
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must lie in [0, 1], not {alpha}")
    if warmup < 1:
        raise ValueError(f"warmup must be at least 1, not {warmup}")
    clipped = np.where(np.isfinite(values), values, np.nan)
    where = np.flatnonzero(np.isfinite(values))
    if len(where) < warmup:
        return clipped
    first = values[where[:warmup]]
    mean, var = float(first.mean()), float(first.var())
    for index in where[warmup:]:
        norm = float(values[index])
        std = math.sqrt(var)
        z = (norm - mean) / (std + STD_FLOOR)
        if z > threshold:
            norm = mean + threshold * std / (z / threshold)
            clipped[index] = norm
        mean = alpha * mean + (1 - alpha) * norm
        var = alpha * var + (1 - alpha) * (norm - mean) ** 2
    return clipped


def median_excess(series: ArrayLike, *, window: int = 201, excess: float = 0.1) -> Flags:
    """Flag values that lie more than ``excess`` above the median of their history, and non-finite ones.

    Args:
        series: [n], any real dtype (a loss, in nats).
        window: number of finite values in a full history; a shorter one (of at least one value) is used as it is.
        excess: in the unit of the series.

    Returns:
        flags bool[n].

    Raises:
        ValueError: on a series that is not one-dimensional, or window < 1.
    """
    values = _series(series)
    _check_window(window, 1, 0)
    flags = ~np.isfinite(values)
    scored = values[~flags]
    (median,) = _rolling(scored, window, 1, lambda rows: (np.median(rows, axis=-1),))
    flags[~flags] = _above(scored, median + excess)
    return flags


def lr_sensitivity(final_losses: ArrayLike, init_loss: float) -> float:
    """Return the learning-rate sensitivity (arXiv:2309.14322): mean over the grid of min(ℓ, ℓ_init), minus min ℓ.

    Args:
        final_losses: [rates], the final loss at each learning rate of the grid; a run that diverged to a non-finite
            loss counts as ℓ_init.
        init_loss: ℓ_init, the loss before training, same unit.

    Returns:
        The sensitivity in the unit of the losses; NaN when no final loss is finite.

    Raises:
        ValueError: on an empty grid, one that is not one-dimensional, or a non-finite init_loss.
    """
    losses = _series(final_losses)
    if not len(losses):
        raise ValueError("lr_sensitivity needs at least one final loss")
    if not math.isfinite(init_loss):
        raise ValueError(f"init_loss must be finite, not {init_loss}")
    finite = losses[np.isfinite(losses)]
    if not len(finite):
        return math.nan
    capped = np.minimum(np.where(np.isfinite(losses), losses, init_loss), init_loss)
    return float(capped.mean() - finite.min())


def _series(values: ArrayLike) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise ValueError(f"a series has one dimension, not shape {array.shape}")
    return array


def _check_window(window: int, min_history: int, ddof: int) -> None:
    if not ddof + 1 <= min_history <= window:
        raise ValueError(f"min_history must lie in [{ddof + 1}, window = {window}], not {min_history}")


def _above(values: Floats, bound: Floats | float) -> Flags:
    """Return values > bound; a comparison with NaN (no history) is False."""
    with np.errstate(invalid="ignore"):
        return np.asarray(values > bound)


def _mean_std(rows: Floats, ddof: int) -> tuple[Floats, Floats]:
    """Return mean and floored standard deviation [m] of each history; rows [m, h] are contiguous."""
    return rows.mean(axis=-1), np.maximum(rows.std(axis=-1, ddof=ddof), STD_FLOOR)


def _rolling(
    values: Floats, window: int, min_history: int, statistics: Callable[[Floats], Sequence[Floats]]
) -> list[Floats]:
    """Return statistics of the history of each finite value [n]; NaN where it has fewer than min_history values.

    ``statistics`` maps contiguous histories [m, h] to arrays [m]. Rows are copied before they are reduced, so a row's
    result does not depend on how many rows are reduced together.
    """
    n = len(values)
    out: list[Floats] | None = None

    def put(start: int, rows: Floats) -> None:
        nonlocal out
        results = statistics(rows)
        if out is None:
            out = [np.full(n, np.nan) for _ in results]
        for target, result in zip(out, results, strict=True):
            target[start : start + len(rows)] = result

    put(n, np.zeros((0, window)))  # how many statistics there are, also when no value has a history
    for index in range(min_history, min(window, n)):
        put(index, np.array([values[:index]]))
    if n > window:
        windows = np.lib.stride_tricks.sliding_window_view(values, window)
        step = max(1, _CHUNK // window)
        for start in range(window, n, step):
            stop = min(start + step, n)
            put(start, np.ascontiguousarray(windows[start - window : stop - window]))
    assert out is not None
    return out
