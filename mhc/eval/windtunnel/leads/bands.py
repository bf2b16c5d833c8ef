"""Find when a measure leaves the band of healthy arms, and compare that with the loss, by pure functions of series.

The **band** of a measure, for an arm, comes from the healthy arms: those of its topology at the lowest rate, of every
seed, at the same step of training. Its centre is their median. Its half-width is four times their standard deviation
over seeds, of which the median over steps is taken, and at least a floor that the measure has. An arm that is itself
healthy is held against the others, so that it can raise a false alarm too. A band that follows the step, and not the
arm's own best value, lets a belief still grow, and asks whether it lags behind what a stable training gives.

Seeds settle on different geometries of attention, so that the level of one seed says nothing about another's. Such a
measure is judged by its **change**: less the value that the healthy arm of the same seed had before the rates part.

A measure **leaves** its band at the first checkpoint on the bad side of it that is followed by another one there. One
checkpoint outside is a wobble.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

DEVIATIONS = 4.0  # half-widths of a band, in standard deviations over seeds
STAY = 2  # checkpoints in a row outside the band

LED, LATE, FALSE, UNDECIDED, MISSED, QUIET = "led", "late", "false alarm", "undecided", "missed", "quiet"


@dataclasses.dataclass(frozen=True)
class Measure:
    """Describes a measure whose lead is asked for.

    Attributes:
        name: in leads.json.
        words: on the page.
        worse: 1 where a larger value is worse, -1 where a smaller one is.
        floor: the least half-width of its band, in its own unit.
        by_change: whether it is judged by its change since the rates part, because seeds differ in its level.
    """

    name: str
    words: str
    worse: int
    floor: float
    by_change: bool = False


class Series(NamedTuple):
    """Holds what an arm is judged by: float64 values [C] at the steps [C]."""

    steps: Floats
    values: Floats


class Band(NamedTuple):
    """Holds the band of a healthy measure: its centre [C] at each of the steps [C], and its half-width."""

    steps: Floats
    centre: Floats
    width: float


@dataclasses.dataclass(frozen=True)
class Trace:
    """Holds the measures of one arm's checkpoints, and when its loss was flagged. Steps count the whole training.

    Attributes:
        arm: its name.
        kind: of the residual.
        rate: the peak learning rate.
        seed: (seed.init, seed.data).
        steps: float64 [C], of the checkpoints, ascending.
        values: {measure: float64 [C]}; nan where it does not exist.
        loss: {detector: the first step that it flagged, or None}.
        last: the step up to which the loss was logged.
        window: steps within which an event at the end would have been missed.
    """

    arm: str
    kind: str
    rate: float
    seed: tuple[int, int]
    steps: Floats
    values: Mapping[str, Floats]
    loss: Mapping[str, int | None]
    last: int
    window: int


class Exit(NamedTuple):
    """Holds when a measure left its band, and the checkpoint at which that was sure."""

    step: int
    sure: int


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Describes how a measure of an arm compares with the arm's loss under one detector.

    Attributes:
        arm, measure: names.
        left: when the measure left its band, or None.
        loss: the step at which the loss said something, or None.
        verdict: led, late (the loss was first), false alarm (the loss said nothing), undecided (so near the end that
            what would have followed is not known), missed (the loss alone said something) or quiet (neither did).
    """

    arm: str
    measure: str
    left: Exit | None
    loss: int | None
    verdict: str

    @property
    def lead(self) -> int | None:
        """Return the steps from the exit to the loss; None without a lead."""
        return self.loss - self.left.step if self.verdict == LED and self.left and self.loss is not None else None


@dataclasses.dataclass(frozen=True)
class Record:
    """Describes the results of a measure over several arms: a row of the table of monitors.

    Attributes:
        measure: its name.
        arms: how many have it.
        crossings: arms that left the band: led + late + false_alarms + undecided.
        missed: arms whose loss said something while the measure never left its band; the late ones come on top.
        leads: of the arms that led, in steps, ascending.
    """

    measure: str
    arms: int
    crossings: int
    led: int
    late: int
    false_alarms: int
    undecided: int
    missed: int
    leads: tuple[int, ...]

    @property
    def lead(self) -> float | None:
        """Return the median lead in steps; None where no arm led."""
        return float(np.median(self.leads)) if self.leads else None


def healthy(trace: Trace, traces: Sequence[Trace]) -> list[Trace]:
    """Return the arms that define the band of an arm: its topology's at the lowest rate, without the arm itself."""
    same = [other for other in traces if other.kind == trace.kind]
    lowest = min(other.rate for other in same)
    return [other for other in same if other.rate == lowest and other is not trace]


def series(measure: Measure, trace: Trace, traces: Sequence[Trace]) -> Series | None:
    """Return what an arm is judged by: the values of a measure, or their change since the rates part.

    The change is taken from the last checkpoint of the healthy arm of the same topology and seed before any arm of
    that topology at a higher rate has one; if there is none, from that arm's first checkpoint. Earlier steps are left
    out.

    Returns:
        None for a measure that is judged by its change, where no healthy arm has the seed.
    """
    values = trace.values[measure.name]
    if not measure.by_change:
        return Series(trace.steps, values)
    same = [other for other in traces if other.kind == trace.kind]
    lowest = min(other.rate for other in same)
    at_home = [other for other in same if other.rate == lowest and other.seed == trace.seed and len(other.steps)]
    if not at_home:
        return None
    parting = min((other.steps[0] for other in same if other.rate > lowest and len(other.steps)), default=-np.inf)
    origin = max(int(np.searchsorted(at_home[0].steps, parting)) - 1, 0)
    kept = trace.steps >= at_home[0].steps[origin]
    return Series(trace.steps[kept], values[kept] - at_home[0].values[measure.name][origin])


def band(measure: Measure, arms: Sequence[Series]) -> Band | None:
    """Return the band that the series of healthy arms define, at the steps that all of them have.

    Returns:
        None where there are no arms, or no step that all of them have with a finite value.
    """
    each = [dict(zip(arm.steps.tolist(), arm.values.tolist(), strict=True)) for arm in arms]
    shared = [step for step in (each[0] if each else ()) if all(np.isfinite(arm.get(step, np.nan)) for arm in each)]
    if not shared:
        return None
    values = np.array([[arm[step] for step in shared] for arm in each])
    spread = float(np.median(values.std(axis=0, ddof=1))) if len(each) > 1 else 0.0
    return Band(np.array(shared), np.median(values, axis=0), max(measure.floor, DEVIATIONS * spread))


def band_of(measure: Measure, trace: Trace, traces: Sequence[Trace]) -> Band | None:
    """Return the band for an arm among others; None if no healthy arms define one."""
    every = (series(measure, other, traces) for other in healthy(trace, traces))
    return band(measure, [each for each in every if each is not None])


def exit_of(measure: Measure, trace: Trace, traces: Sequence[Trace]) -> tuple[bool, Exit | None]:
    """Return (whether a band judges the arm at any step, when the arm leaves it; None: it does not)."""
    judged_by, limits = series(measure, trace, traces), band_of(measure, trace, traces)
    if judged_by is None or limits is None or not np.isin(judged_by.steps, limits.steps).any():
        return False, None
    return True, leaves(measure, judged_by, limits)


def leaves(measure: Measure, judged_by: Series, limits: Band) -> Exit | None:
    """Return when a series leaves a band on the bad side and stays out for two checkpoints; None: it does not.

    A value that is not finite is outside. Checkpoints at steps that the band does not have are passed over.
    """
    known = dict(zip(limits.steps.tolist(), limits.centre.tolist(), strict=True))
    pairs = zip(judged_by.steps.tolist(), judged_by.values.tolist(), strict=True)
    judged = [(step, value) for step, value in pairs if step in known]
    outside = [not measure.worse * (value - known[step]) <= limits.width for step, value in judged]
    for index in range(len(judged) - STAY + 1):
        if all(outside[index : index + STAY]):
            return Exit(int(judged[index][0]), int(judged[index + STAY - 1][0]))
    return None


def outcome(measure: Measure, trace: Trace, traces: Sequence[Trace], detector: str) -> Outcome | None:
    """Return how a measure of an arm compares with its loss; None if no healthy arms define a band."""
    judged, left = exit_of(measure, trace, traces)
    if not judged:
        return None
    loss = trace.loss[detector]
    if left is None:
        verdict = QUIET if loss is None else MISSED
    elif loss is not None:
        verdict = LED if left.step <= loss else LATE
    else:
        verdict = UNDECIDED if left.step + trace.window > trace.last else FALSE
    return Outcome(trace.arm, measure.name, left, loss, verdict)


def judging(measure: Measure, detector: str, traces: Sequence[Trace]) -> list[Trace]:
    """Return the traces with one more detector of the loss: the step at which a measure leaves its band."""
    out = []
    for trace in traces:
        _, left = exit_of(measure, trace, traces)
        out.append(dataclasses.replace(trace, loss={**trace.loss, detector: left.step if left else None}))
    return out


def outcomes(measures: Sequence[Measure], traces: Sequence[Trace], detector: str) -> list[Outcome]:
    """Return the outcome of each measure of each arm that has one."""
    found = (outcome(measure, trace, traces, detector) for trace in traces for measure in measures)
    return [each for each in found if each is not None]


def record(measure: Measure, found: Sequence[Outcome]) -> Record:
    """Return the record of a measure over the outcomes of several arms."""
    mine = [each for each in found if each.measure == measure.name]
    count = {
        verdict: sum(each.verdict == verdict for each in mine) for verdict in (LED, LATE, FALSE, UNDECIDED, MISSED)
    }
    return Record(
        measure=measure.name,
        arms=len(mine),
        crossings=sum(each.left is not None for each in mine),
        led=count[LED],
        late=count[LATE],
        false_alarms=count[FALSE],
        undecided=count[UNDECIDED],
        missed=count[MISSED],
        leads=tuple(sorted(each.lead for each in mine if each.lead is not None)),
    )
