"""Measure what a residual kind makes a TPU move and hold, on a machine without one.

    python -m bench.traffic --kinds plain,hc,mhc --json traffic.json
    python -m bench.traffic --kinds plain,mhc --plan

Two figures a kind, from training steps that XLA compiles ahead for one chip of a TPU slice:

- ``block``: the bytes accessed of one block, forward and backward: the difference of a step with more unrolled blocks
  and one with fewer, divided by their difference, so that the optimiser's part of a block counts and the rest does not.
- ``scanned``: the temporaries of a step whose blocks are scanned. XLA counts a loop's body once in its bytes accessed,
  so those of a scanned step say nothing, and the block's are taken from unrolled ones.

Bytes accessed are XLA's own count of the compiled program. It needs machine code: minutes a step. ``--plan`` counts
them in the scheduled program instead (``tpu.hlo_bytes``), several times faster, and says which part of the step moves
them. The two counts differ by some per cent, their ratios by less. It needs libtpu (`pip install -e '.[tpu]'`).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

from bench import arguments, timing
from mhc import cli
from mhc import config as configs
from mhc.chips import GIB
from mhc.config import Config
from mhc.errors import UserError
from tpu import compile_ahead, hlo_bytes, xla_process
from tpu.slices import Slice, parse_slice

Compile = Callable[[Config, Slice, bool], xla_process.Outcome]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Holds the sizes of the model; the defaults are those of the table in docs/performance.md."""

    width: int = 1024
    heads: int = 8
    length: int = 2048
    batch: int = 4
    blocks: tuple[int, int] = (2, 4)  # unrolled, of the block's bytes
    vocabulary: int = 1024
    scanned: int = 12  # blocks of the temporaries; 0: they are not measured
    scanned_vocabulary: int = 32_768
    dtype: str = "bfloat16"
    remat: str = "full"
    attention: str = "flash"
    kernels: str = "auto"

    def config(self, kind: str, blocks: int, *, scan: bool) -> Config:
        """Return the config of a training step."""
        vocabulary = self.scanned_vocabulary if scan else self.vocabulary
        groups: dict[str, dict[str, Any]] = {
            "model": {
                "layers": blocks,
                "width": self.width,
                "vocab_size": vocabulary,
                "dtype": self.dtype,
                "remat": self.remat,
                "scan": scan,
            },
            "attention": {"heads": self.heads, "impl": self.attention},
            "residual": {"kind": kind},
            "data": {"sequence_length": self.length},
            "train": {"batch_size": self.batch},
            "kernels": {"impl": self.kernels},
            "monitor": {"probe_every": 0},
        }
        return configs.resolve(configs.from_config_dict(groups), vocabulary)


def measure(
    kinds: Sequence[str], sizes: Sizes, slice_: Slice, *, plan: bool, compile_step: Compile | None = None
) -> dict[str, Any]:
    """Compile the steps of every kind; return {…, kinds: {kind: {block, scanned}}}.

    ``block`` is {bytes, of_first, unrolled: {blocks: bytes}}, with ``plan`` also {parts: {pass and part: bytes}};
    ``scanned`` is {temporaries, of_first}. ``of_first`` divides by the first kind's figure.

    Args:
      compile_step: (config, slice, plan only) -> the outcome; None: ``tpu.xla_process``.

    Raises:
      UserError: libtpu is missing, or a step does not fit the chip.
    """
    compiled = compile_step or (lambda config, slice_, plan: xla_process.compile_step(config, slice_, plan_only=plan))

    def outcome(kind: str, blocks: int, *, scan: bool, plan: bool) -> xla_process.Outcome:
        config = sizes.config(kind, blocks, scan=scan)
        result = compiled(compile_ahead.placed(config, config.mesh, slice_), slice_, plan)
        how = "scanned" if scan else "unrolled"
        if result.memory is None:
            raise UserError(f"{kind}, {blocks} blocks {how}: it does not fit {slice_}; allowed: smaller sizes")
        sys.stderr.write(f"{kind}, {blocks} blocks {how}: {result.seconds:.0f} s, {result.cpu_seconds:.0f} CPU s\n")
        return result

    few, many = sizes.blocks
    rows: dict[str, dict[str, Any]] = {}
    for kind in kinds:
        unrolled = {blocks: outcome(kind, blocks, scan=False, plan=plan) for blocks in (few, many)}
        if plan:
            parts = {blocks: hlo_bytes.bytes_by_scope(result.program) for blocks, result in unrolled.items()}
            moved = {blocks: float(sum(by_part.values())) for blocks, by_part in parts.items()}
        else:
            moved = {blocks: float(result.bytes_accessed or 0.0) for blocks, result in unrolled.items()}
        row: dict[str, Any] = {"block": {"bytes": (moved[many] - moved[few]) / (many - few), "unrolled": moved}}
        if plan:
            names = parts[many]
            row["block"]["parts"] = {
                name: (parts[many][name] - parts[few].get(name, 0)) / (many - few) for name in names
            }
        if sizes.scanned:
            memory = outcome(kind, sizes.scanned, scan=True, plan=True).memory
            assert memory is not None
            row["scanned"] = {"temporaries": memory.temporaries}
        rows[kind] = row
    first = rows[kinds[0]]
    for row in rows.values():
        row["block"]["of_first"] = row["block"]["bytes"] / first["block"]["bytes"]
        if sizes.scanned:
            row["scanned"]["of_first"] = row["scanned"]["temporaries"] / first["scanned"]["temporaries"]
    return {
        **timing.machine(),
        "topology": f"{slice_}, compiled ahead, never run",
        "counted_by": "plan" if plan else "xla",
        "sizes": dataclasses.asdict(sizes),
        "kinds": rows,
    }


def print_table(figures: dict[str, Any]) -> None:
    """Print the figures, a kind a line."""
    kinds = figures["kinds"]
    first = next(iter(kinds))
    sys.stdout.write(f"{'kind':14} {'GB a block':>11} {'of ' + first:>9} {'temporaries GiB':>16} {'of ' + first:>9}\n")
    for kind, row in kinds.items():
        block, scanned = row["block"], row.get("scanned")
        line = f"{kind:14} {block['bytes'] / 1e9:11.2f} {block['of_first']:9.3f}"
        if scanned is not None:
            line += f" {scanned['temporaries'] / GIB:16.2f} {scanned['of_first']:9.3f}"
        sys.stdout.write(line + "\n")
    for kind, row in kinds.items():
        parts = row["block"].get("parts")
        if parts:
            words = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items() if size >= 5e6)
            sys.stdout.write(f"  {kind}, GB a block: {words}\n")


def main(arguments_: Sequence[str]) -> int:
    """Read the command line, compile, print a table; return the exit code.

    Raises:
      UserError: a mistake of the user's.
    """
    sizes = Sizes()
    parser = cli.Parser(
        description="Measure the bytes that a TPU accesses for one block, and the temporaries of a scanned step.",
        example=(
            "{prog} --kinds plain,hc,mhc --json traffic.json",
            "{prog} --kinds plain,mhc --plan --scanned 0",
        ),
    )
    parser.add_argument("--kinds", default="plain,hc,mhc", metavar="KIND,…", help="the first is the base")
    parser.add_argument("--plan", action="store_true", help="count in XLA's plan, and by part: minutes faster a step")
    parser.add_argument("--topology", default="v5e:1x1", metavar="CHIP:SHAPE", help="slice (default v5e:1x1)")
    parser.add_argument(
        "--kernels", default="auto", choices=("auto", "xla", "pallas_tpu"), help="kernels.impl (default auto)"
    )
    parser.add_argument("--blocks", default="2,4", metavar="FEW,MANY", help="unrolled blocks (default 2,4)")
    parser.add_argument("--scanned", type=int, default=sizes.scanned, help="blocks that are scanned; 0: none")
    for name in ("width", "heads", "length", "batch", "vocabulary", "scanned_vocabulary"):
        default = getattr(sizes, name)
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    arguments.add_json(parser)
    options = parser.parse_args(arguments_)
    blocks = arguments.numbers(options.blocks, "--blocks")
    if len(blocks) != 2 or blocks[0] > blocks[1]:
        raise UserError(f"--blocks: {options.blocks!r}, allowed: two numbers, the smaller first")
    arguments.at_least(options.scanned, "--scanned", 0)
    names = ("width", "heads", "length", "batch", "vocabulary", "scanned_vocabulary")
    given: dict[str, Any] = {name: arguments.at_least(getattr(options, name), f"--{name}") for name in names}
    sizes = dataclasses.replace(
        sizes, **given, blocks=(blocks[0], blocks[1]), scanned=options.scanned, kernels=options.kernels
    )
    arguments.check_json(options.json)
    kinds = arguments.kind_names(options.kinds, "--kinds")
    figures = measure(kinds, sizes, parse_slice(options.topology), plan=options.plan)
    print_table(figures)
    timing.write(figures, options.json)
    return 0


if __name__ == "__main__":
    cli.run_main(main)
