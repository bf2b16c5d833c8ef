"""Run a train.py that kills itself with SIGKILL in a given phase: a kill from outside is late on a busy machine."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mhc import cli, distributed
from mhc.monitor.phases import Phases, Span
from mhc.train.run import Run


def unfinished(folder: Path) -> list[str]:
    """Return the names of checkpoints that are being written: orbax renames their folder when all of it lies there."""
    place = folder / "checkpoints"
    return [name for name in os.listdir(place) if "tmp" in name] if place.is_dir() else []


class FatalPhases(Phases):
    """Kills the process `delay` seconds after it enters `phase` for the first time past `after` steps.

    The phase ``commit`` is a checkpoint whose temporary folder exists.
    """

    def __init__(self, folder: Path, phase: str, after: int, delay: float):
        super().__init__()
        self._folder, self._where, self._after, self._delay = folder, phase, after, delay
        self._steps = 0

    @contextmanager
    def __call__(self, phase: str) -> Iterator[Span]:
        self._steps += phase == "step"
        wanted = "checkpoint" if self._where == "commit" else self._where
        if phase == wanted and self._steps >= self._after:
            threading.Thread(target=self._strike, daemon=True).start()
        with super().__call__(phase) as span:
            yield span

    def _strike(self) -> None:
        while self._where == "commit" and not unfinished(self._folder):
            time.sleep(0.0001)
        time.sleep(self._delay)
        os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: Sequence[str]) -> int:
    """Train as train.py does; returns its exit code, unless ``--phase`` comes before the end."""
    parser = cli.Parser(example="", fields=cli.EVERY_FIELD)
    parser.add_argument("--config")
    parser.add_argument("--workdir")
    parser.add_argument("--phase")
    parser.add_argument("--after", type=int, default=0)
    parser.add_argument("--delay", type=float, default=0.0)
    options = parser.parse_args(arguments)
    config = cli.load_config(options.config, [], parser)
    distributed.initialize(config.distributed)
    run = Run(config, Path(options.workdir))
    if options.phase is not None:
        run.phases = FatalPhases(Path(options.workdir), options.phase, options.after, options.delay)
    return run.execute()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
