"""Make the report's section of events: loss events with what led up to them, monitors, and what was done."""

from __future__ import annotations

from collections.abc import Sequence

from mhc.eval.common.page import cell, heading, table, text
from mhc.eval.common.words import counted, number
from mhc.eval.compare.spikes import GAP, Episode, History, monitors, unjudged

MOST_EVENTS = 60  # rows of the page's table

NOT_JUDGED = "Loss and gradient norm were not judged; no monitor crossed its threshold in any arm."

_HOW_EVENTS = """Flagged steps no more than {gap} apart are one event. A crossing leads a loss event that comes within
the window of {window} (two probes, at least 32 steps); without one it is a false alarm. Late: after the loss.
Undecided: the run ended, or was rewound, within the window. Standing: past its threshold since before the window. No
loss step: the gradient norm alone was flagged. Undone: a rewind threw the step away. Monitors of the probes are as fine
as the probes' spacing. <code>python -m mhc.eval.replay RUN --step s</code> does a step again."""


def section(histories: Sequence[History]) -> str:
    """Return the section: loss events with their lead times, the record of each monitor, and what was done."""
    judged = [history.judged_from is not None for history in histories]
    where = "any arm" if all(judged) else "any arm that was judged"
    note = "".join(f'<p class="note">{text(line)}</p>' for line in unjudged(histories))
    if not any(history.episodes or history.crossings for history in histories):
        none = f"No loss and no gradient norm was flagged, and no monitor crossed its threshold, in {where}."
        return f"<p>{none if any(judged) else NOT_JUDGED}</p>{note}"
    none = f"None: no loss and no gradient norm was flagged in {where}." if any(judged) else "Not judged in any arm."
    return f"{_events(histories, none, note)}{_monitors(histories)}{_actions(histories)}<p></p>"


def _events(histories: Sequence[History], none: str, note: str) -> str:
    """Return the table of events; ``none`` stands where there are none, ``note`` below."""
    episodes = [(history.arm, episode) for history in histories for episode in history.episodes]
    words = ("cause", "crossed first,<br>before the loss", "others", "standing", "action", "batch")
    header = ["arm", "flagged<br>steps", "loss at<br>step", *map(heading, words)]
    rows = [_event(arm, episode) for arm, episode in episodes[:MOST_EVENTS]]
    out = "<h3>Loss events and what led up to them</h3>"
    out += (table(header, rows) if rows else f"<p>{none}</p>") + note
    if len(episodes) > MOST_EVENTS:
        out += f'<p class="note">The first {MOST_EVENTS} of {len(episodes)}; data/events.csv holds all.</p>'
    windows = sorted({history.window for history in histories})
    window = f"{windows[0]} steps" if len(windows) == 1 else f"{windows[0]} to {windows[-1]} steps, by the arm's probes"
    return out + f'<p class="note">{_HOW_EVENTS.format(gap=GAP, window=window)}</p>'


def _event(arm: str, episode: Episode) -> list[str]:
    steps = f"{episode.first:,}" if episode.first == episode.last else f"{episode.first:,}–{episode.last:,}"
    leads = sorted(episode.leads.items(), key=lambda item: -item[1])
    first = f"{leads[0][0]}, {_steps_before(leads[0][1])}" if leads and episode.loss_step is not None else "–"
    others = ", ".join(f"{name} {lead}" for name, lead in leads[1:]) or "–"
    standing = ", ".join(f"{name} since {since:,}" for name, since in episode.standing.items()) or "–"
    cause = f"{episode.cause}: {episode.tensor}" if episode.tensor else episode.cause
    return [
        cell(text(arm)),
        cell(steps),
        cell(f"{episode.loss_step:,}" if episode.loss_step is not None else "–"),
        cell(text(cause), "text"),
        cell(text(first), "text"),
        cell(text(others), "text"),
        cell(text(standing), "text"),
        cell(text(episode.action + (" (undone)" if episode.undone else "")), "text"),
        cell(f"<code>{text(episode.batch or '–')}</code>", "text"),
    ]


def _steps_before(lead: int) -> str:
    return "at the same step" if lead == 0 else f"{counted(lead, 'step')} before"


def _monitors(histories: Sequence[History]) -> str:
    """Return the table of monitors; "" where none crossed and there were no loss events."""
    records = monitors(histories)
    if not records:
        return ""
    header = [
        "monitor",
        "crossings",
        "led a<br>loss event",
        "late",
        "false<br>alarms",
        "undecided",
        "events<br>missed",
        "median lead<br>(steps)",
    ]
    rows = []
    for record in records:
        counts = (record.crossings, record.led, record.late, record.false_alarms, record.undecided, record.missed)
        rows.append([cell(text(record.monitor)), *(cell(str(n)) for n in counts), cell(number(record.lead, 3))])
    return "<h3>Monitors over all arms</h3>" + table(header, rows)


def _actions(histories: Sequence[History]) -> str:
    """Return the table of what was done about events; "" where nothing was."""
    rows = []
    for history in histories:
        if history.skipped or history.clipped or history.rewinds or history.halted is not None:
            rewinds = "; ".join(f"{at:,} → {to:,}, {left} batches left out" for at, to, left in history.rewinds)
            rows.append(
                [
                    cell(text(history.arm)),
                    cell(str(history.skipped)),
                    cell(str(history.clipped)),
                    cell(text(rewinds or "–"), "text"),
                    cell(text("–" if history.halted is None else history.halted), "text"),
                ]
            )
    header = ["arm", "updates<br>left out", "steps<br>clipped", heading("rewinds"), heading("halted")]
    return "<h3>What was done</h3>" + table(header, rows) if rows else ""
