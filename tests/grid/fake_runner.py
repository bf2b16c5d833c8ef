"""Run a runner of fake arms in a process of its own: ``fake_runner.py WORKDIR JOBS ARM ...``."""

from __future__ import annotations

import sys
from pathlib import Path

from mhc.grid.devices import Slot
from mhc.grid.local import Runner

FAKE = Path(__file__).with_name("fake_arm.py")


def command(workdir: Path, arm: str) -> list[str]:
    """Return the command of an arm."""
    return [sys.executable, "-S", str(FAKE), str(workdir), arm]


def say(line: str) -> None:
    """Print a line to stdout at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    arms = dict.fromkeys(sys.argv[3:], 10)
    sys.exit(Runner(Path(sys.argv[1]), arms, [Slot()] * int(sys.argv[2]), command=command, say=say).run())
