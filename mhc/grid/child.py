"""Run one arm of a planned grid: ``python -m mhc.grid.child WORKDIR ARM``; exit codes as of train.py."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from mhc import cli
from mhc.grid import plan


def main(arguments: Sequence[str]) -> int:
    """Train the arm in its folder, from its last checkpoint if there is one, and return the exit code."""
    # Slurm sends SIGUSR2 to every process of a job near its time limit; the job answers by SIGTERM (mhc.grid.slurm).
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    parser = cli.Parser(
        description="Run one arm of a grid, as its runner does.", example="{prog} runs/topologies plain-1"
    )
    parser.add_argument("workdir", type=Path, help="folder of the grid")
    parser.add_argument("arm", help="name of the arm")
    options = parser.parse_args(arguments)
    config = plan.read(options.workdir).placed(options.arm, options.workdir)
    from mhc.train import run

    return run.run(config, options.workdir / options.arm)


if __name__ == "__main__":
    cli.run_main(main)
