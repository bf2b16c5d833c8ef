"""Run train.py with a fault: the loss of step 7 is not finite."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp

from mhc import cli, distributed
from mhc.train.run import Run
from mhc.train.step import Faults

NOT_FINITE = Faults(loss=lambda completed, loss: jnp.where(completed == 6, jnp.nan, loss))


def main(arguments: Sequence[str]) -> int:
    """Train with --config FILE --workdir DIR, as train.py does."""
    parser = cli.Parser(example="", fields=cli.EVERY_FIELD)
    parser.add_argument("--config")
    parser.add_argument("--workdir")
    options = parser.parse_args(arguments)
    config = cli.load_config(options.config, [], parser)
    distributed.initialize(config.distributed)
    return Run(config, Path(options.workdir), faults=NOT_FINITE).execute()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
