"""Measure how long a training step compiles, by residual kind and depth.

    python -m bench.compile --kinds plain,hc,mhc --blocks 12,24,48,60 --json compile.json
    python -m bench.compile --kinds plain,mhc --blocks 12 --topology v5e:1x1

Here: the time to trace and lower, and to compile for this machine, with no cache and each step in turn. With
``--topology``: the time to compile for a TPU slice ahead, in a process of its own, as ``tpu.compile_ahead`` does.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bench import arguments, timing
from bench.model import Sizes, add_sizes, random_batch, sizes_of
from mhc import cli
from tpu import compile_ahead, xla_process
from tpu.slices import Slice, parse_slice

SIZES = Sizes(width=256, heads=4, length=256, batch=4)


def measure(
    kinds: Sequence[str], depths: Sequence[int], sizes: Sizes, rounds: int, slice_: Slice | None = None
) -> dict[str, Any]:
    """Compile the step of every kind at every depth; return {kind: {depth: figures}}.

    The figures are {trace, compile, total, cpu_seconds} in seconds and of_first, the ratio of ``total`` to that of the
    first kind at this depth, each {median, low, high}. For a slice there is no trace: it is part of ``compile``.
    """
    rows: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
    for depth in depths:
        taken: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
        for _ in range(rounds):
            for kind in kinds:
                taken[kind].append(_compiled(dataclasses.replace(sizes, blocks=depth), kind, slice_))
        base = [each["total"] for each in taken[kinds[0]]]
        for kind, each in taken.items():
            row = {name: timing.spread([figures[name] for figures in each]) for name in each[0]}
            ratios = [figures["total"] / first for figures, first in zip(each, base, strict=True)]
            rows[kind][str(depth)] = row | {"of_first": timing.spread(ratios)}
    return rows


def _compiled(sizes: Sizes, kind: str, slice_: Slice | None) -> dict[str, float]:
    config = sizes.config(kind, probe_every=0)
    if slice_ is not None:
        outcome = xla_process.compile_step(compile_ahead.placed(config, config.mesh, slice_), slice_, plan_only=False)
        return {"compile": outcome.seconds, "total": outcome.seconds, "cpu_seconds": outcome.cpu_seconds}

    import jax
    import jax.numpy as jnp

    from mhc import sharding
    from mhc.train.step import Trainer

    jax.clear_caches()
    trainer = Trainer(config, sharding.make_mesh(config.mesh, jax.devices()[:1]))
    batch = {name: jax.ShapeDtypeStruct(a.shape, jnp.dtype(a.dtype)) for name, a in random_batch(config).items()}
    with _uncached():
        start, cpu = time.perf_counter(), time.process_time()
        lowered = trainer.step.lower(trainer.abstract, batch)  # type: ignore[attr-defined]
        traced = time.perf_counter()
        lowered.compile()
        end = time.perf_counter()
    return {
        "trace": traced - start,
        "compile": end - traced,
        "total": end - start,
        "cpu_seconds": time.process_time() - cpu,
    }


@contextmanager
def _uncached() -> Iterator[None]:
    """Compile within the block without the persistent cache."""
    import jax

    before = getattr(jax.config, "jax_enable_compilation_cache")  # noqa: B009 - it is declared at run time
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


def print_table(rows: dict[str, dict[str, Any]]) -> None:
    """Print the figures, a kind and depth a line."""
    sys.stdout.write(f"{'kind':14} {'blocks':>6} {'seconds':>9} {'CPU s':>9} {'of ' + next(iter(rows)):>10}\n")
    for kind, by_depth in rows.items():
        for depth, row in by_depth.items():
            total, cpu, of_first = (row[name]["median"] for name in ("total", "cpu_seconds", "of_first"))
            sys.stdout.write(f"{kind:14} {depth:>6} {total:9.2f} {cpu:9.2f} {of_first:10.3f}\n")


def main(arguments_: Sequence[str]) -> int:
    """Read the command line, compile, print a table; return the exit code.

    Raises:
      UserError: a mistake of the user's.
    """
    parser = cli.Parser(
        description="Measure how long a training step compiles, by residual kind and depth.",
        example=(
            "{prog} --kinds plain,hc,mhc --blocks 12,24,48,60 --json compile.json",
            "{prog} --kinds plain,mhc --blocks 12 --topology v5e:1x1",
        ),
    )
    parser.add_argument("--kinds", default="plain,hc,mhc", metavar="KIND,…", help="the first is the base")
    parser.add_argument("--blocks", default="12,24,48,60", metavar="L,…", help="depths (default 12,24,48,60)")
    parser.add_argument("--rounds", type=int, default=3, help="compilations of each (default 3)")
    parser.add_argument("--topology", metavar="CHIP:SHAPE", help="compile for a TPU slice, e.g. v5e:1x1")
    add_sizes(parser, SIZES, without="blocks")
    arguments.add_json(parser)
    options = parser.parse_args(arguments_)
    kinds, depths = arguments.kind_names(options.kinds, "--kinds"), arguments.numbers(options.blocks, "--blocks")
    rounds = arguments.at_least(options.rounds, "--rounds")
    sizes = sizes_of(options, SIZES, without="blocks")
    arguments.check_json(options.json)
    slice_ = parse_slice(options.topology) if options.topology else None
    rows = measure(kinds, depths, sizes, rounds, slice_)
    print_table(rows)
    figures = {**timing.machine(), "compiled_for": str(slice_ or "this machine"), "rounds": rounds, "kinds": rows}
    timing.write(figures, options.json)
    return 0


if __name__ == "__main__":
    cli.run_main(main)
