"""Read from events.jsonl (in older runs from the metrics) spikes, what led up to them, and what was done about them.

A *loss event* is a run of flagged steps, no more than ``GAP`` apart, at least one of which has a flagged loss or
something non-finite; its step is the first such one. A *crossing* is a monitor passing its threshold: the z-score of
the gradient norm, or a measure of the probes (``mhc.monitor.guard``). A crossing *leads* a loss event that comes at
most a window later. One that comes after the loss, up to a window behind the event, is *late*: a consequence. One is
*undecided* if the end or a rewind came too soon to see what would have followed. Any other is a *false alarm*.

A rewind undoes the steps after the one that it goes back to: what crossed there cannot lead what comes after it. Events
of undone steps still count, since they happened.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mhc.config import GuardConfig
from mhc.eval.common.events import flags_loss, lead_window
from mhc.eval.common.words import listed
from mhc.eval.compare.runs import Arm
from mhc.monitor.guard import COLLAPSING, MONITORS, ProbeWatch

GAP = 8  # flagged steps so close together are one event
GRADIENT = "gradient_norm"
NAMES = (GRADIENT, *MONITORS, *COLLAPSING)
NOT_RECORDED = "not recorded"


@dataclasses.dataclass(frozen=True)
class Episode:
    """Describes flagged steps that belong together.

    Attributes:
        arm: its name.
        first, last, count: of the flagged steps.
        loss_step: the first with a flagged loss or something non-finite; None: the gradient norm alone was flagged.
        finite: everything was.
        cause: as the run recorded it, at loss_step.
        tensor: the first non-finite one.
        action: what the guard was told to do.
        leads: {monitor: steps from its crossing to loss_step}, of those within the window.
        standing: {monitor: step since which it was past its threshold}, of those that crossed before the window.
        value, grad_norm: at loss_step, or at the first step.
        batch: hash of that step's batch.
        undone: a rewind threw the step away.
        rewinds: before it.
    """

    arm: str
    first: int
    last: int
    count: int
    loss_step: int | None
    finite: bool
    cause: str
    tensor: str | None
    action: str
    leads: Mapping[str, int]
    standing: Mapping[str, int]
    value: float
    grad_norm: float
    batch: str | None
    undone: bool
    rewinds: int

    @property
    def step(self) -> int:
        """Return the step at which figures mark the episode."""
        return self.first if self.loss_step is None else self.loss_step

    @property
    def leader(self) -> str | None:
        """Return the monitor that crossed first within the window; None if none did."""
        return max(self.leads, key=lambda name: self.leads[name]) if self.leads else None


@dataclasses.dataclass
class Crossing:
    """Describes a monitor passing its threshold."""

    monitor: str
    step: int
    rewinds: int  # before it
    lead: int | None = None  # steps to the loss event that it led
    late: bool = False
    undecided: bool = False


@dataclasses.dataclass(frozen=True)
class History:
    """Describes what happened in one arm."""

    arm: str
    window: int  # steps
    episodes: tuple[Episode, ...]
    crossings: tuple[Crossing, ...]
    skipped: int  # updates
    clipped: int  # steps whose gradient the zclip rule scaled
    rewinds: tuple[tuple[int, int, int], ...]  # (from step, to step, batches left out)
    halted: str | None  # the reason
    steps: int  # that the arm logged
    judged_after: int  # steps of history that a judgement needs
    judged_from: int | None  # the first step with so much history before it; None: there is none

    @property
    def loss_events(self) -> list[Episode]:
        """Return the episodes with a flagged or non-finite loss."""
        return [episode for episode in self.episodes if episode.loss_step is not None]


@dataclasses.dataclass(frozen=True)
class MonitorRecord:
    """Describes how a monitor did over several arms."""

    monitor: str
    crossings: int  # led + late + false_alarms + undecided
    led: int
    late: int
    false_alarms: int
    undecided: int
    missed: int  # loss events that it did not lead
    lead: float | None  # median, in steps


def window_of(arm: Arm) -> int:
    """Return the number of steps within which a crossing counts as leading: two probes, and at least 32."""
    return lead_window(int(arm.flat.get("monitor.probe_every") or 0))


def history(arm: Arm) -> History:
    """Read one arm's events."""
    window = window_of(arm)
    crossings: list[Crossing] = []
    standing: list[Crossing] = []  # those that no rewind undid
    open_: list[Mapping[str, Any]] = []  # flagged steps of the current episode
    episodes: list[Episode] = []
    rewinds: list[tuple[int, int, int]] = []
    halted = None

    def close(undone_after: int | None = None) -> None:
        if open_:
            episodes.append(_episode(arm, open_, standing, window, undone_after, len(rewinds)))
            open_.clear()

    def cross(monitor: str, step: int) -> None:
        crossing = Crossing(monitor, step, len(rewinds))
        crossings.append(crossing)
        standing.append(crossing)

    for event in _events(arm):
        step, name = int(event["step"]), event["event"]
        if open_ and (step - int(open_[-1]["step"]) > GAP):
            close()
        if name == "monitor":
            cross(str(event["monitor"]), step)
        elif name in ("spike", "nonfinite"):
            if "grad_norm" in event.get("flagged", ()) and not any(
                crossing.monitor == GRADIENT and step - crossing.step <= GAP for crossing in _extend(standing, open_)
            ):
                cross(GRADIENT, step)
            open_.append(event)
        elif name == "rewind":
            to = int(event["to"])
            close(undone_after=to)
            rewinds.append((step, to, int(event.get("skipped_batches", 0))))
            for crossing in standing:  # what it would have led to was not seen
                crossing.undecided |= crossing.step > to and crossing.lead is None
            standing[:] = [crossing for crossing in standing if crossing.step <= to]
        elif name == "halt":
            halted = str(event.get("reason", ""))
    close()
    for crossing in crossings:
        if crossing.lead is None:
            crossing.late = any(
                episode.loss_step is not None
                and episode.rewinds == crossing.rewinds
                and episode.loss_step < crossing.step <= episode.last + window
                for episode in episodes
            )
            crossing.undecided |= crossing.step + window > arm.steps and halted is None
            crossing.undecided &= not crossing.late
    _, scale = arm.column("clip_scale")
    return History(
        arm.name,
        window,
        tuple(episodes),
        tuple(crossings),
        int(np.max(arm.column("skipped")[1], initial=0)),
        int((scale < 1).sum()),
        tuple(rewinds),
        halted,
        arm.steps,
        arm.judged_after,
        arm.judged[0] if arm.judged else None,
    )


def unjudged(histories: Sequence[History]) -> list[str]:
    """Return sentences that name the arms, and the first steps of arms, with too little history to be judged.

    What is not finite is flagged in any case.
    """
    out = []
    never: dict[int, list[str]] = {}
    late: dict[int, list[str]] = {}
    for arm in histories:
        if arm.judged_from is None:
            never.setdefault(arm.judged_after, []).append(f"{arm.arm} ({arm.steps} steps)")
        elif arm.judged_from > 1:
            late.setdefault(arm.judged_from, []).append(arm.arm)
    for after, names in sorted(never.items()):
        out.append(
            f"Not judged, for a z-score needs {after} steps before it: loss and gradient norm of {listed(names)}."
        )
    if late:
        parts = [
            f"{step:,}" if len(late) == 1 else f"{step:,} ({listed(names)})" for step, names in sorted(late.items())
        ]
        rest = "of the other arms " if never else ""
        out.append(f"Loss and gradient norm {rest}are judged from step {listed(parts)} on.")
    return out


def monitors(histories: Sequence[History]) -> list[MonitorRecord]:
    """Return a record of each monitor that crossed in any arm; if there are loss events, of every monitor."""
    events = [episode for one in histories for episode in one.loss_events]
    out = []
    for name in NAMES:
        mine = [crossing for one in histories for crossing in one.crossings if crossing.monitor == name]
        leads = [episode.leads[name] for episode in events if name in episode.leads]
        if mine or events:
            led = sum(crossing.lead is not None for crossing in mine)
            late = sum(crossing.late for crossing in mine)
            undecided = sum(crossing.undecided for crossing in mine)
            out.append(
                MonitorRecord(
                    name,
                    len(mine),
                    led,
                    late,
                    len(mine) - led - late - undecided,
                    undecided,
                    len(events) - len(leads),
                    float(np.median(leads)) if leads else None,
                )
            )
    return out


def _extend(standing: Sequence[Crossing], flagged: Sequence[Mapping[str, Any]]) -> list[Crossing]:
    """Return the crossings with each flagged gradient norm of the current episode: a long explosion crosses once."""
    more = [Crossing(GRADIENT, int(event["step"]), 0) for event in flagged if "grad_norm" in event.get("flagged", ())]
    return [*standing, *more]


def _episode(
    arm: Arm,
    flagged: Sequence[Mapping[str, Any]],
    standing: Sequence[Crossing],
    window: int,
    undone_after: int | None,
    rewinds: int,
) -> Episode:
    finite = all(event["event"] == "spike" for event in flagged)
    of_loss = [event for event in flagged if flags_loss(event)]
    main = of_loss[0] if of_loss else flagged[0]
    step = int(main["step"])
    leads: dict[str, int] = {}
    past = {str(name): int(since) for name, since in (main.get("monitors") or {}).items()}
    if of_loss:
        for crossing in standing:
            if 0 <= step - crossing.step <= window:
                crossing.lead = step - crossing.step if crossing.lead is None else crossing.lead
                leads[crossing.monitor] = max(leads.get(crossing.monitor, 0), step - crossing.step)
    return Episode(
        arm=arm.name,
        first=int(flagged[0]["step"]),
        last=int(flagged[-1]["step"]),
        count=len(flagged),
        loss_step=step if of_loss else None,
        finite=finite,
        cause=str(main.get("cause", NOT_RECORDED)),
        tensor=main.get("tensor"),
        action=str(main.get("action", NOT_RECORDED)),
        leads=leads,
        standing={name: since for name, since in past.items() if name not in leads and since < step},
        value=float(main.get("loss", math.nan)),
        grad_norm=float(main.get("grad_norm", math.nan)),
        batch=(main.get("batch") or {}).get("hash"),
        undone=undone_after is not None and step > undone_after,
        rewinds=rewinds,
    )


def _events(arm: Arm) -> list[Mapping[str, Any]]:
    """Return the arm's events.

    An older run wrote none: its flagged steps and crossings are found from its metrics and probes.
    """
    events = list(arm.events)
    names = {event["event"] for event in events}
    if not names & {"spike", "nonfinite"}:
        events += _flagged_steps(arm)
    if "monitor" not in names:
        events += _probe_crossings(arm)
    if "rewind" not in names:  # else their order tells the story
        order = {"monitor": 0, "spike": 1, "nonfinite": 1}
        events.sort(key=lambda event: (event["step"], order.get(event["event"], 2)))
    return events


def _flagged_steps(arm: Arm) -> list[Mapping[str, Any]]:
    threshold = float(arm.flat.get("monitor.zscore_threshold", 6.0))
    out: list[Mapping[str, Any]] = []
    for row in arm.metrics:
        if not row.get("spike"):
            continue
        values = {name: float(row.get(name, math.nan)) for name in ("loss", "grad_norm")}
        z = {"loss": row.get("z_loss"), "grad_norm": row.get("z_grad_norm")}
        flagged = [name for name, x in values.items() if not math.isfinite(x) or (z[name] or 0.0) > threshold]
        finite = all(map(math.isfinite, values.values()))
        out.append({"step": row["step"], "event": "spike" if finite else "nonfinite", "flagged": flagged, **values})
    return out


def _probe_crossings(arm: Arm) -> list[dict[str, Any]]:
    fields = {field.name for field in dataclasses.fields(GuardConfig)}
    given = {name: value for name, value in (arm.config.get("guard") or {}).items() if name in fields}
    watch = ProbeWatch(GuardConfig(**given))
    return [
        {"step": row["step"], "event": "monitor", "monitor": name} for row in arm.probes for name in watch.update(row)
    ]
