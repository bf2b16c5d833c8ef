"""Guard a run against spikes and non-finite values: the part inside the compiled step, and the causes of events.

Inside the step, every action obeys one rule: a non-finite loss or gradient never reaches the parameters. ``clip``
scales the gradient by the zclip rule, ``skip`` leaves the update out; both read windows that are held in the train
state and so are checkpointed. ``rewind`` and ``halt`` are the run's (mhc.train.run); for a non-finite value they
freeze the state inside the step, because the host learns of it one step late.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mhc.config import Config, GuardConfig


class Window(NamedTuple):
    """Holds the last finite values of a series: a ring [W] float32, NaN where none was written, and the next place."""

    values: jax.Array
    place: jax.Array

    @classmethod
    def empty(cls, size: int) -> Window:
        return cls(jnp.full((size,), jnp.nan, jnp.float32), jnp.zeros((), jnp.int32))

    def zscore(self, value: jax.Array, min_history: int) -> jax.Array:
        """Return z of ``value`` against the window (ddof 1, std at least 1e-6); NaN if not finite or too early."""
        present = jnp.isfinite(self.values)
        count = jnp.sum(present)
        mean = jnp.sum(jnp.where(present, self.values, 0.0)) / jnp.maximum(count, 1)
        spread = jnp.sum(jnp.where(present, jnp.square(self.values - mean), 0.0)) / jnp.maximum(count - 1, 1)
        z = (value - mean) / jnp.maximum(jnp.sqrt(spread), 1e-6)
        return jnp.where((count >= min_history) & jnp.isfinite(value), z, jnp.nan)

    def push(self, value: jax.Array) -> Window:
        """Return the window after ``value``; a non-finite one leaves it as it was."""
        fine = jnp.isfinite(value)
        values = jnp.where(fine, self.values.at[self.place].set(value), self.values)
        return Window(values, jnp.where(fine, (self.place + 1) % self.values.shape[0], self.place))


class ZClip(NamedTuple):
    """Holds the running mean and variance of the gradient norm (float32), and the number of norms so far (int32)."""

    seen: jax.Array
    mean: jax.Array
    variance: jax.Array

    @classmethod
    def empty(cls) -> ZClip:
        return cls(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))

    def update(self, norm: jax.Array, guard: GuardConfig) -> tuple[jax.Array, ZClip]:
        """Return (clipped norm, the next state) for one norm, by the rule of ``detectors.zclip``."""
        threshold, alpha = guard.zclip_threshold, guard.zclip_alpha
        warming, number = self.seen < guard.zclip_warmup, self.seen.astype(jnp.float32)
        std = jnp.sqrt(self.variance)
        z = (norm - self.mean) / (std + 1e-6)
        clipped = jnp.where(~warming & (z > threshold), self.mean + threshold * std / (z / threshold), norm)
        # Warm-up: mean and population variance of the norms so far (Welford).
        first_mean = self.mean + (norm - self.mean) / (number + 1)
        first_variance = (number * self.variance + (norm - self.mean) * (norm - first_mean)) / (number + 1)
        mean = alpha * self.mean + (1 - alpha) * clipped
        variance = alpha * self.variance + (1 - alpha) * jnp.square(clipped - mean)
        following = ZClip(
            self.seen + 1, jnp.where(warming, first_mean, mean), jnp.where(warming, first_variance, variance)
        )
        fine = jnp.isfinite(norm)
        return clipped, jax.tree.map(lambda new, old: jnp.where(fine, new, old), following, self)


class GuardState(NamedTuple):
    """Holds what the guard remembers between steps; None where the configured action does not use it."""

    frozen: jax.Array | None  # bool: a non-finite step was met that the run is to act on
    losses: Window | None
    norms: Window | None
    zclip: ZClip | None


class Verdict(NamedTuple):
    """Holds what the guard decided about one step."""

    apply: jax.Array  # bool: the update reaches the parameters
    finite: jax.Array  # bool: loss and gradient are
    scale: jax.Array | None  # factor of the gradient
    spike: jax.Array | None  # bool, under ``skip``
    z_loss: jax.Array | None
    z_grad_norm: jax.Array | None


def initial(config: Config) -> GuardState:
    """Return the state before the first step."""
    guard, window = config.guard, config.monitor.zscore_window
    skip = guard.on_spike == "skip"
    return GuardState(
        frozen=jnp.zeros((), bool) if guard.on_nonfinite != "skip" else None,
        losses=Window.empty(window) if skip else None,
        norms=Window.empty(window) if skip else None,
        zclip=ZClip.empty() if guard.on_spike == "clip" else None,
    )


def judge(config: Config, state: GuardState, loss: jax.Array, norm: jax.Array) -> tuple[Verdict, GuardState]:
    """Return (verdict on a step, the guard's state after it) by loss and gradient norm, float32 scalars."""
    monitor = config.monitor
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    apply, scale, spike, z_loss, z_norm = finite, None, None, None, None
    losses, norms, zclip, frozen = state.losses, state.norms, state.zclip, state.frozen
    if losses is not None and norms is not None:
        z_loss = losses.zscore(loss, config.zscore_min_history)
        z_norm = norms.zscore(norm, config.zscore_min_history)
        spike = (z_loss > monitor.zscore_threshold) | (z_norm > monitor.zscore_threshold) | ~finite
        apply = apply & ~spike
        losses, norms = losses.push(loss), norms.push(norm)  # skipped values enter the history
    if zclip is not None:
        clipped, zclip = zclip.update(norm, config.guard)
        scale = jnp.where(finite, clipped / jnp.maximum(norm, 1e-30), 1.0)
    if frozen is not None:
        apply = apply & ~frozen
        frozen = frozen | ~finite
    return Verdict(apply, finite, scale, spike, z_loss, z_norm), GuardState(frozen, losses, norms, zclip)


# ------------------------------------------------------------------------------------------------------------- causes

# Measures that are watched against a threshold of the guard's config: name -> (key of the probe record, config field).
MONITORS: dict[str, tuple[str, str]] = {
    "forward_gain": ("gain/forward_composite_mean", "forward_gain"),
    "backward_gain": ("gain/backward_composite_mean", "backward_gain"),
    "residual_rms": ("activation/residual_rms", "residual_rms"),
    "attention_logit": ("activation/attention_logit_max", "attention_logit"),
}
# Measures that collapse: an alarm when one falls below half the median of its last window of probes.
COLLAPSING: dict[str, str] = {"representation_rank": "representation/rank", "effective_streams": "stream/effective"}
COLLAPSE_WINDOW = 16
COLLAPSE_MIN_HISTORY = 4

CAUSES = (
    "nonfinite",
    "signal_explosion",
    "attention_logit_growth",
    "representation_collapse",
    "gradient_explosion",
    "loss_spike",
)


class ProbeWatch:
    """Tracks which of the probes' measures are past their threshold, and since which step.

    ``update`` takes a probe record and returns the monitors that crossed with it; ``active`` holds those past their
    threshold at the last probe. Fed the records of an interrupted run, it has the state that it had in that run.
    """

    def __init__(self, guard: GuardConfig):
        self._guard = guard
        self._history: dict[str, list[float]] = {name: [] for name in COLLAPSING}
        self.active: dict[str, int] = {}

    def update(self, record: Mapping[str, Any]) -> dict[str, dict[str, float]]:
        """Return {monitor: {value, threshold}} for the monitors that crossed at this probe and had not before."""
        past: dict[str, dict[str, float]] = {}
        for name, (key, field) in MONITORS.items():
            values = _measured(record.get(key))
            if values.size:
                value, threshold = float(np.max(values)), float(getattr(self._guard, field))
                if not value <= threshold:  # NaN is past every threshold
                    past[name] = {"value": value, "threshold": threshold}
        for name, key in COLLAPSING.items():
            values = _measured(record.get(key))
            if not values.size:
                continue
            value = float(np.min(values[1:] if values.size > 1 else values))
            history = self._history[name]
            if len(history) >= COLLAPSE_MIN_HISTORY:
                threshold = 0.5 * float(np.median(history))
                if value < threshold:
                    past[name] = {"value": value, "threshold": threshold}
            history.append(value)
            del history[:-COLLAPSE_WINDOW]
        step = int(record["step"])
        crossed = {name: what for name, what in past.items() if name not in self.active}
        self.active = {name: self.active.get(name, step) for name in past}
        return crossed


def _measured(value: Any) -> np.ndarray:
    """Return the numbers of a measure, float64 [n], without the nulls that stand for what was not measured."""
    flat = np.asarray(value, object).reshape(-1)
    return np.array([number for number in flat if number is not None], np.float64)


def cause(*, finite: bool, loss_flag: bool, grad_flag: bool, grad_flag_before: bool, active: Mapping[str, int]) -> str:
    """Return why a step was flagged, by the first rule that holds.

    1. ``nonfinite``: loss or gradient is not finite.
    2. ``signal_explosion``: the forward composite gain or the residual's RMS is past its threshold.
    3. ``attention_logit_growth``: the largest attention logit is.
    4. ``representation_collapse``: the representation's rank or the effective streams fell below half their median.
    5. ``gradient_explosion``: the gradient norm was flagged before the loss or with it, or the backward composite gain
       is past its threshold.
    6. ``loss_spike``: none of these.

    The measures of the stream come before the gradient's: a stream that explodes takes the gradient norm with it.

    Args:
      finite: whether loss and gradient norm are finite.
      loss_flag, grad_flag: the z-score flags of this step.
      grad_flag_before: whether the gradient norm was flagged at one of the steps just before.
      active: the monitors past their threshold (``ProbeWatch.active``).
    """
    if not finite:
        return "nonfinite"
    if "forward_gain" in active or "residual_rms" in active:
        return "signal_explosion"
    if "attention_logit" in active:
        return "attention_logit_growth"
    if any(name in active for name in COLLAPSING):
        return "representation_collapse"
    if grad_flag or (loss_flag and grad_flag_before) or "backward_gain" in active:
        return "gradient_explosion"
    return "loss_spike"
