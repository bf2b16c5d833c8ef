"""Group arms into topologies over learning rates and seeds; find each one's best rate, and compare paired seeds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mhc.eval.common.statistics import t_interval
from mhc.eval.compare.runs import RATE, SEEDS, Arm, differing_fields, is_plain, material, outside
from mhc.monitor.detectors import lr_sensitivity

Seeds = tuple[int, int]

_LONGEST_LABEL = 50


@dataclasses.dataclass(frozen=True)
class Rate:
    """Holds the arms of a topology at one learning rate.

    Attributes:
        lr: the peak rate.
        arms: one a seed.
        scores: {seeds: final validation bits per byte}; infinity where the run diverged or was halted, no entry where
            it has not validated yet.
        mean: over the seeds with a score; infinity where one diverged, NaN without any.
    """

    lr: float
    arms: tuple[Arm, ...]
    scores: Mapping[Seeds, float]
    mean: float


@dataclasses.dataclass(frozen=True)
class Topology:
    """Holds arms that differ in learning rate and seeds alone.

    Attributes:
        label: the kind, and what else tells it from others of its kind.
        rates: ascending.
        best: the one with the lowest mean; of equal ones the lowest rate.
        sensitivity: ``detectors.lr_sensitivity`` of the mean final validation loss (nats) over the rates; None for a
            single rate.
    """

    label: str
    rates: tuple[Rate, ...]
    best: Rate
    sensitivity: float | None

    @property
    def kind(self) -> str:
        return self.best.arms[0].kind

    @property
    def arms(self) -> tuple[Arm, ...]:
        """Return the arms at the best rate."""
        return self.best.arms

    @property
    def every_arm(self) -> list[Arm]:
        """Return the arms at all rates."""
        return [arm for rate in self.rates for arm in rate.arms]

    @property
    def at_edge(self) -> bool:
        """Return whether the best rate is the smallest or largest tried: a better one may lie beyond."""
        return len(self.rates) > 1 and self.best in (self.rates[0], self.rates[-1])

    @property
    def std(self) -> float | None:
        """Return the standard deviation over seeds at the best rate (n − 1 below); None for fewer than two."""
        values = [value for value in self.best.scores.values() if math.isfinite(value)]
        return float(np.std(values, ddof=1)) if len(values) > 1 else None


@dataclasses.dataclass(frozen=True)
class Paired:
    """Compares a topology with plain, seed by seed, each at its own best rate, in final validation bits per byte.

    Attributes:
        topology, reference: labels.
        differences: {seeds: topology minus reference}, of the seeds that both have.
        mean: of the differences; NaN without any.
        interval: 95 % confidence interval of the mean, by Student's t; None for fewer than two seeds.
        verdict: what may be said of it.
    """

    topology: str
    reference: str
    differences: Mapping[Seeds, float]
    mean: float
    interval: tuple[float, float] | None
    verdict: str

    @property
    def separated(self) -> bool:
        """Return whether the interval excludes 0."""
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)


def topologies(arms: Sequence[Arm]) -> list[Topology]:
    """Return the topologies in the order of their first arms."""
    return [_topology(label, group) for label, group in _groups(arms).items()]


def reference_of(topology: Topology, topologies: Sequence[Topology]) -> Topology | None:
    """Return the plain topology that differs from ``topology`` in the residual only, or None.

    Learning rate and seeds may differ as well.
    """
    ours = outside(topology.arms[0])
    for other in topologies:
        if other is not topology and is_plain(other.arms[0]) and outside(other.arms[0]) == ours:
            return other
    return None


def paired(topologies: Sequence[Topology]) -> list[Paired]:
    """Return the comparison with plain of every topology that has a plain reference and a seed in common with it."""
    out = []
    for topology in topologies:
        reference = reference_of(topology, topologies)
        if reference is None:
            continue
        ours, theirs = topology.best.scores, reference.best.scores
        shared = [seeds for seeds in ours if seeds in theirs and math.isfinite(ours[seeds] - theirs[seeds])]
        if shared:
            differences = {seeds: ours[seeds] - theirs[seeds] for seeds in shared}
            out.append(_paired(topology.label, reference.label, differences))
    return out


def score(arm: Arm) -> float | None:
    """Return final validation bits per byte: infinity where the run diverged or was halted, None without any."""
    _, bits = arm.column("val_bits_per_byte")
    if arm.summary is not None and arm.summary.get("exit_reason") == "halted":
        return math.inf
    if not len(bits):
        return None
    return float(bits[-1]) if math.isfinite(bits[-1]) else math.inf


def _paired(topology: str, reference: str, differences: Mapping[Seeds, float]) -> Paired:
    values = np.array(list(differences.values()))
    n, mean = len(values), float(values.mean())
    if n < 2:
        return Paired(topology, reference, differences, mean, None, "one seed has no spread: it cannot separate them")
    interval = t_interval(values)
    words = f"the 95 % interval of the mean over {n} paired seeds is {interval[0]:+.4f} to {interval[1]:+.4f}"
    apart = interval[0] > 0 or interval[1] < 0
    verdict = (
        f"the seeds separate them: {words}" if apart else f"the seeds do not separate them: {words} and includes 0"
    )
    return Paired(topology, reference, differences, mean, interval, verdict)


def _topology(label: str, arms: Sequence[Arm]) -> Topology:
    by_rate: dict[float, list[Arm]] = {}
    for arm in arms:
        by_rate.setdefault(float(arm.flat[RATE]), []).append(arm)
    rates = tuple(_rate(lr, group) for lr, group in sorted(by_rate.items()))
    best = min(rates, key=lambda rate: math.inf if math.isnan(rate.mean) else rate.mean)
    return Topology(label, rates, best, _sensitivity(rates) if len(rates) > 1 else None)


def _rate(lr: float, arms: Sequence[Arm]) -> Rate:
    scores = {arm.seeds: value for arm in arms if (value := score(arm)) is not None}
    return Rate(lr, tuple(arms), scores, float(np.mean(list(scores.values()))) if scores else math.nan)


def _sensitivity(rates: Sequence[Rate]) -> float | None:
    """Return ``lr_sensitivity``.

    The loss of step 1 stands for the loss before training, since the initial weights gave it.
    """
    first = [float(loss[0]) for rate in rates for arm in rate.arms if len(loss := arm.column("loss")[1])]
    finals = []
    for rate in rates:
        losses = [
            float(values[-1]) if score(arm) != math.inf else math.nan
            for arm in rate.arms
            if len(values := arm.column("val_loss")[1])
        ]
        finals.append(float(np.mean(losses)) if losses else math.nan)
    start = float(np.mean(first)) if first else math.nan
    return lr_sensitivity(finals, start) if math.isfinite(start) and np.isfinite(finals).any() else None


def _groups(arms: Sequence[Arm]) -> dict[str, list[Arm]]:
    """Return the arms of each topology by its label."""
    out: dict[str, list[Arm]] = {}
    details: dict[str, list[str]] = {}
    for arm in arms:
        if arm.kind not in details:
            same_kind = [other for other in arms if other.kind == arm.kind]
            fields = differing_fields(same_kind)
            details[arm.kind] = [field for field in fields if field not in (RATE, *SEEDS) and material(field)]
        words = ", ".join(f"{field.split('.')[-1]} {_value(arm.flat.get(field))}" for field in details[arm.kind])
        out.setdefault(f"{arm.kind} ({words})" if words else arm.kind, []).append(arm)
    return {_short(label, group): group for label, group in out.items()}


def _short(label: str, group: Sequence[Arm]) -> str:
    """Return a topology's label; an arm that differs in many fields from the others keeps its own name."""
    return f"{group[0].kind} ({group[0].name})" if len(label) > _LONGEST_LABEL and len(group) == 1 else label


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
