"""Measure what monitoring costs a training step, by turning it off.

    python -m bench.probes --kinds plain,mhc --json probes.json

Three steps of the same model, in turns, and the probe:

- ``off``: the state alone is asked for, so that XLA leaves out whatever only the metrics need. The check for
  non-finite values is part of the update and stays.
- ``metrics``: what every step logs: loss, norms of gradients and updates, and the gradient's norms by group and depth.
- ``norms``: with ``monitor.probe_every`` also the norms of parameters and updates by group and depth.
- ``probe``: the forward pass that measures maps and streams on ``monitor.probe_sequences`` rows, every
  ``monitor.probe_every`` steps. Its seconds are divided by that number.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from bench import arguments, timing
from bench.model import Sizes, add_sizes, random_batch, sizes_of, stepping
from mhc import cli
from mhc.errors import UserError


def measure(kind: str, sizes: Sizes, rounds: int, probe_every: int, probe_sequences: int) -> dict[str, Any]:
    """Time the steps and the probe of a kind.

    Returns:
      {off, metrics, norms, probe: {seconds, cpu_seconds}; metrics_of_off, norms_of_off: the ratio of two steps;
      share: (norms + probe / probe_every) / off - 1, what all monitoring adds to a step}. Each ends in
      {median, low, high}.
    """
    import jax

    from mhc import sharding
    from mhc.monitor import probes
    from mhc.train.step import Trainer

    functions: dict[str, Callable[[], Any]] = {}
    for name, every in (("off", 0), ("metrics", 0), ("norms", probe_every)):
        config = sizes.config(kind, probe_every=every, probe_sequences=probe_sequences)
        mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
        trainer = Trainer(config, mesh)
        batch = sharding.put_batch(random_batch(config), mesh)
        step = _state_alone(trainer) if name == "off" else trainer.step
        functions[name] = stepping(step, trainer.init(0), batch)
    rows = {name: leaf[:probe_sequences] for name, leaf in random_batch(config).items() if name in probes.BATCH_FIELDS}
    compiled, params = probes.compile_probe(trainer.definition, mesh), trainer.init(0).params
    probed = sharding.put_whole(rows, mesh)
    functions["probe"] = lambda: compiled(params, probed)
    samples = timing.interleaved(functions, rounds)
    figures: dict[str, Any] = {name: timing.seconds(sample) for name, sample in samples.items()}
    figures["metrics_of_off"] = timing.ratio(samples["metrics"], samples["off"])
    figures["norms_of_off"] = timing.ratio(samples["norms"], samples["off"])
    rounds_of = zip(*(samples[name].wall for name in ("norms", "probe", "off")), strict=True)
    figures["share"] = timing.spread([(norms + probe / probe_every) / off - 1.0 for norms, probe, off in rounds_of])
    return figures


def _state_alone(trainer: Any) -> Callable[..., Any]:
    """Return the trainer's step without its metrics, compiled as the trainer compiles it."""
    import jax

    from mhc.sharding import traced_for

    def step(state: Any, batch: Any) -> tuple[Any, tuple[()]]:
        return trainer._step(state, batch)[0], ()

    return jax.jit(traced_for(step, trainer.mesh), donate_argnums=0)


def print_table(by_kind: dict[str, dict[str, Any]]) -> None:
    """Print the figures, a kind a line."""
    names = ("off", "metrics", "norms", "probe")
    sys.stdout.write(f"{'kind':14}" + "".join(f"{name + ' ms':>12}" for name in names) + f"{'all of it':>12}\n")
    for kind, figures in by_kind.items():
        times = "".join(f"{1e3 * figures[name]['seconds']['median']:12.2f}" for name in names)
        sys.stdout.write(f"{kind:14}{times}{100 * figures['share']['median']:11.2f}%\n")


def main(arguments_: Sequence[str]) -> int:
    """Read the command line, measure, print a table; return the exit code.

    Raises:
      UserError: a mistake of the user's.
    """
    parser = cli.Parser(
        description="Measure what monitoring costs a training step, by turning it off.",
        example="{prog} --kinds plain,mhc --json probes.json",
    )
    parser.add_argument("--kinds", default="plain,mhc", metavar="KIND,…", help="default plain,mhc")
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds (default 20)")
    parser.add_argument("--probe_every", type=int, default=50, help="steps between probes (default 50)")
    parser.add_argument("--probe_sequences", type=int, default=4, help="rows of a probe (default 4)")
    add_sizes(parser, Sizes())
    arguments.add_json(parser)
    options = parser.parse_args(arguments_)
    kinds = arguments.kind_names(options.kinds, "--kinds")
    rounds, every, rows = (
        arguments.at_least(getattr(options, name), f"--{name}") for name in ("rounds", "probe_every", "probe_sequences")
    )
    sizes = sizes_of(options, Sizes())
    if rows > sizes.batch:
        raise UserError(f"--probe_sequences: {rows}, allowed: up to --batch {sizes.batch}")
    arguments.check_json(options.json)
    by_kind = {kind: measure(kind, sizes, rounds, every, rows) for kind in kinds}
    print_table(by_kind)
    figures = {**timing.machine(), "rounds": rounds, "probe_every": every, "probe_sequences": rows, "kinds": by_kind}
    timing.write(figures, options.json)
    return 0


if __name__ == "__main__":
    cli.run_main(main)
