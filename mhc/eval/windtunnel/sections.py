"""List what `eval.windtunnel` measures beside the belief, one row for each measure.

Each measure is a module of this room with two functions: ``measure`` looks at one checkpoint, and ``page`` draws what
it found of all of them. A new measure is such a module and a row of `SECTIONS`.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from mhc.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from mhc.data.windtunnel import Task
    from mhc.eval.common.checkpoints import Checkpoint
    from mhc.eval.common.palette import Style

BELIEF = "belief"
"""The measure that every comparison starts with: distances from the posterior, of `mhc.eval.windtunnel.belief`."""


class Result(NamedTuple):
    """Holds the result of one measure for one checkpoint.

    Attributes:
        scalars: compared between topologies: means over seeds, and differences from plain paired by seed. A value that
            does not exist for a checkpoint is left out.
        json: everything, as windtunnel.json shows it under the measure's name.
    """

    scalars: dict[str, float]
    json: dict[str, Any]


class Shown(NamedTuple):
    """Holds a checkpoint's result with how a page names and draws it."""

    name: str  # of the checkpoint
    label: str  # of its topology, or that of the control
    style: Style
    result: Result


class Measure(Protocol):
    """Describes the functions that the module of a measure has."""

    def measure(self, checkpoint: Checkpoint, task: Task, sequences: int) -> Result:
        """Return the result for a checkpoint on so many held-out sequences of a task that it fits."""
        ...

    def page(self, results: Sequence[Shown], folder: Path) -> str:
        """Return the section's HTML, below its heading; figures and their numbers are written into the folder."""
        ...


@dataclasses.dataclass(frozen=True)
class Section:
    """Describes a measure.

    Attributes:
        name: of the measure, as ``--measures`` and windtunnel.json call it.
        words: its heading on the page.
        module: that has its functions.
        default: whether it is measured without ``--measures``: only those that cost about as much as the belief.
    """

    name: str
    words: str
    module: str
    default: bool = False

    def load(self) -> Measure:
        """Import the module."""
        return cast("Measure", importlib.import_module(f"mhc.eval.windtunnel.{self.module}"))


SECTIONS: tuple[Section, ...] = (
    Section("depth", "Where the posterior can be read", "depth"),
    Section("geometry", "Geometry of attention", "geometry"),
    Section("scales", "Two time scales", "scales"),
    Section("ablation", "Without a head or a sublayer", "ablation"),
    Section("gradients", "Gradient dynamics of attention", "gradients"),
    Section("signals", "Signals of doubt", "signals"),
)


def chosen(names: Sequence[str] | None) -> list[Section]:
    """Return the sections that ``--measures`` names, in their order on the page; None stands for the default.

    ``belief`` is measured in any case, and ``all`` stands for every one.

    Raises:
        UserError: a name is no measure's.
    """
    if names is None:
        return [section for section in SECTIONS if section.default]
    known = (BELIEF, *(section.name for section in SECTIONS), "all")
    for name in names:
        if name not in known:
            raise UserError(f"--measures: given {name}, allowed: {', '.join(known)}{did_you_mean(name, known)}")
    return [section for section in SECTIONS if "all" in names or section.name in names]
