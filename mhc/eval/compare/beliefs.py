"""Read the results of eval.windtunnel for the runs of a comparison, if they are trained on wind tunnels.

A comparison measures no belief itself: that would compile every model. It reads windtunnel.json and leads.json, which
`eval.windtunnel` leaves in the folder of the comparison or in the one that the runs have in common.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mhc.data.windtunnel import is_windtunnel
from mhc.errors import UserError
from mhc.eval.compare.runs import Arm
from mhc.files import read_json

BELIEF, LEADS = "windtunnel.json", "leads.json"
Bounds = Mapping[str, float | None]


@dataclasses.dataclass(frozen=True)
class Scalar:
    """Describes a measure of a topology: its mean over seeds, and its difference from plain at equal seeds.

    Attributes:
        topology: its label, with the learning rate where arms of several rates were measured.
        seeds: how many.
        measure: its name.
        value, beyond: {"value", "low", "high"}; None where there is none.
    """

    topology: str
    seeds: int
    measure: str
    value: Bounds | None
    beyond: Bounds | None


@dataclasses.dataclass(frozen=True)
class Lead:
    """Describes how a measure compares with one detector of the loss: a row of the table of monitors."""

    measure: str
    counts: tuple[int, ...]  # crossings, led, late, false alarms, undecided, missed
    median: float | None  # steps
    leads: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Beliefs:
    """Holds the results about the beliefs of runs on wind tunnels.

    Attributes:
        scalars: of windtunnel.json and leads.json.
        leads: {words of a detector: rows}.
    """

    scalars: Sequence[Scalar] = ()
    leads: Mapping[str, Sequence[Lead]] = dataclasses.field(default_factory=dict)


def read(arms: Sequence[Arm], folders: Sequence[Path | None]) -> Beliefs | None:
    """Return the results about the arms' beliefs; None if not every arm is trained on a wind tunnel.

    Args:
        arms: of the comparison.
        folders: where the files may lie; the first one that has a file counts.

    Raises:
        UserError: a file is not one of eval.windtunnel.
    """
    if not all(is_windtunnel(str(arm.flat.get("data.source"))) for arm in arms):
        return None
    scalars: list[Scalar] = []
    leads: dict[str, list[Lead]] = {}
    for name in (BELIEF, LEADS):
        path = next((folder / name for folder in folders if folder is not None and (folder / name).is_file()), None)
        if path is None:
            continue
        content = read_json(path)
        try:
            if name == BELIEF:
                scalars += [row for label, entry in content["topologies"].items() for row in _scalars(label, entry)]
            else:
                scalars += _by_rate(content)
                leads = _leads(content)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"{path}: is not a file of eval.windtunnel ({type(error).__name__}: {error}); write it anew, or move it"
            ) from None
    return Beliefs(scalars, leads)


def _scalars(label: str, entry: Mapping[str, Any], of: str = "") -> list[Scalar]:
    """Return the rows of a topology of windtunnel.json; those of a further measure stand under its name."""
    out: list[Scalar] = []
    for name, value in entry.items():
        if isinstance(value, Mapping) and "value" not in value:
            out += _scalars(label, {"seeds": entry["seeds"], **value}, f"{name}: ")
        elif name != "seeds" and f"{name}_beyond_plain" in entry:
            beyond = _bounds(entry[f"{name}_beyond_plain"])
            out.append(Scalar(str(label), int(entry["seeds"]), of + name, _bounds(value), beyond))
    return out


def _by_rate(content: Mapping[str, Any]) -> list[Scalar]:
    """Return the rows of leads.json, whose measures are those of the last checkpoint at each rate."""
    return [
        Scalar(
            f"{entry['kind']}, lr {entry['lr']:g}",
            int(entry["seeds"]),
            str(words),
            _bounds(entry[name]),
            _bounds(entry[f"{name}_beyond_plain"]),
        )
        for entry in content["topologies"]
        for name, words in content["measures"].items()
    ]


def _leads(content: Mapping[str, Any]) -> dict[str, list[Lead]]:
    columns = ("crossings", "led", "late", "false_alarms", "undecided", "missed")
    return {
        f"{words}: {int(content['events'][detector])} of {len(content['arms'])} arms": [
            Lead(
                str(content["measures"][row["measure"]]),
                tuple(int(row[column]) for column in columns),
                None if row["median_lead"] is None else float(row["median_lead"]),
                tuple(int(lead) for lead in row["leads"]),
            )
            for row in content["records"][detector]
        ]
        for detector, words in content["detectors"].items()
    }


def _bounds(value: Any) -> Bounds | None:
    if value is None:
        return None
    return {name: None if value[name] is None else float(value[name]) for name in ("value", "low", "high")}
