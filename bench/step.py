"""Time the training steps of several arms, and compare each with the first arm.

    python -m bench.step --config configs/dense_10m.py --arms plain,hc,mhc --steps 20 --json step.json

A round runs one step of each arm in turn, so that other load on the machine hits all arms alike. An arm's relative
speed is the median over rounds of the first arm's seconds divided by the arm's. Tokens are random: they cost what text
costs.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import arguments as shared
from bench.model import random_batch
from mhc import cli, kinds
from mhc import config as configs
from mhc.config import Config


def main(arguments: Sequence[str]) -> int:
    """Read the command line, measure, print a table; return the exit code.

    Raises:
      UserError: a mistake of the user's.
    """
    parser = cli.Parser(
        description="Time training steps of several residual kinds, in turns.",
        example="{prog} --config configs/dense_10m.py --arms plain,hc,mhc --steps 20 --json step.json",
        fields=cli.EVERY_FIELD,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="config file, e.g. configs/dense_10m.py")
    parser.add_argument("--arms", default="plain,mhc", metavar="KIND,…", help="residual kinds; the first is the base")
    parser.add_argument("--steps", type=int, default=20, help="timed rounds (default 20)")
    shared.add_json(parser)
    options, overrides = parser.parse_known_args(arguments)
    config = cli.load_config(options.config, overrides, parser)
    arms = shared.kind_names(options.arms, "--arms")
    shared.at_least(options.steps, "--steps")
    shared.check_json(options.json)
    figures = measure(config, arms, options.steps)
    sys.stdout.write(f"{'arm':10} {'ms a step':>10} {'tokens/s':>10} {'of ' + arms[0]:>10} {'compile s':>10}\n")
    for arm, row in figures["arms"].items():
        sys.stdout.write(
            f"{arm:10} {1e3 * row['median_seconds']:10.1f} {row['tokens_per_second']:10.0f} "
            f"{row['relative_speed']:10.3f} {row['compile_seconds']:10.1f}\n"
        )
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def measure(config: Config, arms: Sequence[str], rounds: int) -> dict[str, Any]:
    """Time ``rounds`` steps of each arm; return the figures.

    They are {date, machine, jax, shape, rounds, arms: {kind: {median_seconds, tokens_per_second, relative_speed,
    compile_seconds}}}. ``relative_speed`` is the median over rounds of the first arm's seconds divided by the arm's.
    """
    import jax

    from mhc import sharding
    from mhc.train.step import Trainer

    # A residual field that only one kind has would be refused by the others, so arms take their kind's defaults.
    given = [(name, value) for name, value in config.residual.options if kinds.options()[name].anywhere]
    shape = (config.train.batch_size, config.data.sequence_length)
    vocabulary = config.model.vocab_size or 259
    mesh = sharding.make_mesh(config.mesh)
    batch = sharding.put_batch(random_batch(configs.resolve(config, vocabulary)), mesh)
    running: dict[str, Any] = {}
    for arm in arms:
        residual = configs.ResidualConfig(kind=arm, module=config.residual.module, options=given)
        trainer = Trainer(configs.resolve(dataclasses.replace(config, residual=residual), vocabulary), mesh)
        state = trainer.init(0)
        start = time.perf_counter()
        state, _ = jax.block_until_ready(trainer.step(state, batch))
        compiled = time.perf_counter() - start
        state, _ = jax.block_until_ready(trainer.step(state, batch))
        running[arm] = {"step": trainer.step, "state": state, "compile": compiled, "seconds": []}
    for _ in range(rounds):
        for row in running.values():
            start = time.perf_counter()
            row["state"], _ = jax.block_until_ready(row["step"](row["state"], batch))
            row["seconds"].append(time.perf_counter() - start)
    base = running[arms[0]]["seconds"]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {jax.device_count()} × {jax.devices()[0].device_kind}",
        "jax": jax.__version__,
        "shape": {"batch": shape[0], "sequence": shape[1], "dtype": config.model.dtype},
        "rounds": rounds,
        "arms": {
            arm: {
                "median_seconds": statistics.median(row["seconds"]),
                "tokens_per_second": shape[0] * shape[1] / statistics.median(row["seconds"]),
                "relative_speed": statistics.median(b / s for b, s in zip(base, row["seconds"], strict=True)),
                "compile_seconds": row["compile"],
            }
            for arm, row in running.items()
        },
    }


if __name__ == "__main__":
    cli.run_main(main)
