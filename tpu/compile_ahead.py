"""Compile a config's training step for a TPU slice on a machine without a TPU, and say whether it fits.

    python -m tpu.compile_ahead --config configs/paper_27b.py --topology v5p:2x2x4 --config.mesh.fsdp=16
    python -m tpu.compile_ahead --config configs/paper_3b.py --smallest v5p

It needs libtpu (`pip install -e '.[tpu]'`). Exit codes: 0 it fits, 1 it does not, 2 a user's mistake.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mhc import cli
from mhc import config as configs
from mhc.chips import GIB, TPUS
from mhc.config import Config, MeshConfig
from mhc.errors import UserError, did_you_mean
from tpu import hlo, xla_process
from tpu.slices import Slice, parse_slice

# The search guesses with these how many rows a device has room for; XLA's plan decides. A block needs so many bytes of
# temporaries for each token and unit of width, and so many more for each stream, as XLA planned the paper's models.
WORKSPACE, WORKSPACE_OF_STREAM = 120, 45
GUESSED_SHARE = 0.92  # of the memory that the guess fills


class Held(NamedTuple):
    """Holds the bytes of one device that a layout determines, whatever the compiler does."""

    parameters: int
    optimizer: int
    streams: int  # what a micro-batch's forward pass leaves for its backward pass

    @property
    def bound(self) -> int:
        """Return the least that any step holds: these bytes, and a gradient as large as the parameters."""
        return 2 * self.parameters + self.optimizer + self.streams


def held(config: Config) -> Held:
    """Return the bytes of the config that a device of its mesh holds, without a device and without libtpu."""
    import jax
    from jax.sharding import AbstractMesh

    from mhc import sharding

    sizes = tuple(getattr(config.mesh, axis) for axis in sharding.MESH_AXES)
    mesh = AbstractMesh(sizes, sharding.MESH_AXES)
    params, optimizer = _shapes(_accumulating(dataclasses.replace(config, mesh=MeshConfig()), 1))

    def size(tree: Any) -> int:
        total = 0
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            spec = sharding.partition_spec(sharding.path_of(path), leaf.shape, mesh)
            axes = [axis for entry in spec for axis in ((entry,) if isinstance(entry, str) else entry or ())]
            total += leaf.size * leaf.dtype.itemsize // math.prod(mesh.shape[axis] for axis in axes)
        return total

    return Held(size(params), size(optimizer), _row_bytes(config) * _rows(config))


@functools.lru_cache(maxsize=4)
def _shapes(config: Config) -> tuple[Any, Any]:
    """Return (parameters, the optimiser's state) as shapes, which are the same for every mesh and batch."""
    import jax

    from mhc.model.decoder import DecoderDefinition
    from mhc.train.optimizer import make_optimizer

    params = DecoderDefinition(config).abstract()
    return params, jax.eval_shape(make_optimizer(config, params).init, params)


def _rows(config: Config) -> int:
    """Return the rows of a micro-batch that a device works on."""
    shards = config.mesh.data * config.mesh.fsdp * config.mesh.expert
    return config.train.batch_size // config.train.accumulation // shards


def _row_numbers(config: Config) -> int:
    """Return how many numbers of one row's streams a device holds."""
    width, tensor = config.model.width, config.mesh.tensor
    return config.data.sequence_length * config.streams * (width if width % tensor else width // tensor)


def _row_bytes(config: Config) -> int:
    """Return the bytes of one row's streams that are kept: those before each group of blocks that is recomputed."""
    layers, leading = config.model.layers, config.leading_layers
    size = config.remat_blocks if config.model.remat == "streams" else 1
    groups = sum(-(-count // size) for count in (leading, layers - leading))
    return groups * _row_numbers(config) * (2 if config.model.dtype == "bfloat16" else 4)


def report(config: Config, slice_: Slice, *, plan_only: bool = False) -> dict[str, Any]:
    """Compile the step, and return what one device holds, moves and computes in it.

    The report is {topology, chips, residual, mesh, accumulation, rows_per_device (of a micro-batch), hbm_bytes, fits,
    per_device_bytes {parameters, optimizer, arguments, temporaries, code, peak}, flops, bytes_accessed, collectives
    {kind: {count, bytes}}, plan_only, compile_seconds, cpu_seconds, compile_peak_host_bytes}. XLA counts the body of a
    loop once in FLOPs and bytes accessed. A plan has None for code, FLOPs and bytes accessed. Where the step does not
    fit, everything that XLA then does not say is None.
    """
    config = placed(config, config.mesh, slice_)
    mesh = config.mesh
    outcome = xla_process.compile_step(config, slice_, plan_only=plan_only)
    sizes, memory = held(config), outcome.memory
    peak = outcome.used if memory is None else memory.peak + (outcome.code or 0)
    assert peak is not None
    return {
        "topology": str(slice_),
        "chips": slice_.chips,
        "residual": config.residual.kind,
        "mesh": dataclasses.asdict(mesh),
        "accumulation": config.train.accumulation,
        "rows_per_device": _rows(config),
        "hbm_bytes": slice_.hbm,
        "fits": memory is not None and peak <= slice_.hbm,
        "per_device_bytes": {
            "parameters": sizes.parameters,
            "optimizer": sizes.optimizer,
            "arguments": memory and memory.arguments,
            "temporaries": memory and memory.temporaries,
            "code": outcome.code,
            "peak": peak,
        },
        "flops": outcome.flops,
        "bytes_accessed": outcome.bytes_accessed,
        "collectives": hlo.as_json(outcome.collectives),
        "plan_only": plan_only,
        "compile_seconds": outcome.seconds,
        "cpu_seconds": outcome.cpu_seconds,
        "compile_peak_host_bytes": outcome.host_bytes,
    }


def placed(config: Config, mesh: MeshConfig, slice_: Slice) -> Config:
    """Return the config with this mesh, whose open axis (-1) gets what is left of the slice's chips.

    Raises:
      UserError: the axes do not multiply to the number of chips, or do not share the rows evenly.
    """
    sizes = dataclasses.asdict(mesh)
    fixed = math.prod(sizes[axis] for axis in _AXES if sizes[axis] != -1)
    if slice_.chips % fixed or (fixed != slice_.chips and all(sizes[axis] != -1 for axis in _AXES)):
        wanted = " x ".join(f"{axis} {sizes[axis]}" for axis in _AXES)
        raise UserError(
            f"config.mesh: {wanted} does not fit {slice_}; their product must be {slice_.chips},"
            f" e.g. --config.mesh.data=1 --config.mesh.fsdp={slice_.chips}"
        )
    filled = {axis: slice_.chips // fixed if sizes[axis] == -1 else sizes[axis] for axis in _AXES}
    rows, shards = config.train.batch_size // config.train.accumulation, slice_.chips // filled["tensor"]
    if rows % shards:
        listed = TPUS[slice_.chip].slices
        others = "" if slice_.shape in listed else f"; listed slices of {slice_.chip}: {', '.join(listed)}"
        raise UserError(
            f"--topology {slice_}: the rows of a micro-batch, train.batch_size / train.accumulation = {rows}, are split"
            f" over mesh data {filled['data']} x fsdp {filled['fsdp']} x expert {filled['expert']} = {shards}, allowed:"
            f" a divisor of {rows}{others}"
        )
    return dataclasses.replace(config, mesh=dataclasses.replace(mesh, **filled))


_AXES = ("data", "fsdp", "tensor", "expert")


def meshes(config: Config, chips: int) -> Iterator[MeshConfig]:
    """Yield meshes worth trying on so many chips: fsdp alone, then tensor over 2 or 4, then experts over 2, 4 or 8."""
    rows = config.train.batch_size // config.train.accumulation
    experts = [e for e in (2, 4, 8) if config.moe.experts and config.moe.experts % e == 0]
    for tensor, expert in [(1, 1), (2, 1), (4, 1), *((1, e) for e in experts)]:
        if chips % (tensor * expert) == 0 and rows % (chips // tensor) == 0:
            sizes = {"data": 1, "fsdp": chips // (tensor * expert), "tensor": tensor, "expert": expert}
            yield dataclasses.replace(config.mesh, **sizes)


def candidates(config: Config, slice_: Slice) -> Iterator[Config]:
    """Yield configs to compile for a slice, mesh after mesh, leaving out those whose bound exceeds its memory.

    A config that accumulates keeps its number of micro-batches. If it does not accumulate, each mesh comes first with
    as many rows as a device is guessed to have room for, and then with one row.
    """
    for mesh in meshes(config, slice_.chips):
        on_mesh = dataclasses.replace(config, mesh=mesh)
        counts = [config.train.accumulation]
        if counts == [1]:
            most = _rows(on_mesh)  # rows of a device without accumulation
            room = GUESSED_SHARE * slice_.hbm - _fixed_bytes(on_mesh)
            workspace = (WORKSPACE / config.streams + WORKSPACE_OF_STREAM) * _row_numbers(on_mesh)
            guess = max(1, int(room / (_row_bytes(on_mesh) + workspace)))
            counts = sorted({most // max(d for d in _divisors(most) if d <= guess), most})
        for count in counts:
            candidate = _accumulating(on_mesh, count)
            if held(candidate).bound <= slice_.hbm:
                yield candidate


def _fixed_bytes(config: Config) -> int:
    """Return the bytes that do not grow with the rows: parameters, optimiser, a micro-batch's gradients, their sums."""
    sizes = held(config)
    return 3 * sizes.parameters + sizes.optimizer


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number, smallest first."""
    return [d for d in range(1, number + 1) if number % d == 0]


def _accumulating(config: Config, count: int) -> Config:
    """Return the config with ``count`` micro-batches."""
    return dataclasses.replace(config, train=dataclasses.replace(config.train, accumulation=count))


def smallest(config: Config, chip: str) -> list[dict[str, Any]]:
    """Plan slices and meshes, smallest first, until one fits; return the reports in the order tried."""
    reports = []
    for shape in TPUS[chip].slices:
        slice_ = Slice(chip, shape)
        for candidate in candidates(config, slice_):
            reports.append(report(candidate, slice_, plan_only=True))
            print_report(reports[-1])
            if reports[-1]["fits"]:
                return reports
    return reports


def print_report(figures: dict[str, Any]) -> None:
    """Print a report in a few lines."""
    sizes = {name: f"{size / GIB:.2f}" for name, size in figures["per_device_bytes"].items() if size is not None}
    mesh = " ".join(f"{axis}={size}" for axis, size in figures["mesh"].items() if axis in _AXES)
    verdict = "fits" if figures["fits"] else "does not fit"
    where = f"{figures['chips']} chips; {mesh}; accumulation {figures['accumulation']}"
    print(f"{figures['topology']} ({where}): {verdict} {figures['hbm_bytes'] / GIB:.0f} GiB a chip")
    print("  GiB a chip: " + ", ".join(f"{name} {size}" for name, size in sizes.items()))
    for kind, total in figures["collectives"].items():
        print(f"  {kind}: {total['count']} a step, {total['bytes'] / GIB:.2f} GiB")
    host = figures["compile_peak_host_bytes"] / GIB
    verb = "planned" if figures["plan_only"] else "compiled"
    spent = f"{figures['compile_seconds']} s, {figures['cpu_seconds']} CPU s and {host:.1f} GiB of this machine"
    print(f"  {verb} in {spent}", flush=True)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split off the mesh's fields, ``--config.mesh.FIELD=VALUE`` or with a space for ``=``; return (others, these)."""
    others: list[str] = []
    mesh_fields: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        part = mesh_fields if argument.lstrip("-").startswith("config.mesh.") else others
        part.append(argument)
        if "=" not in argument:
            part.extend(itertools.islice(rest, 1))
    return others, mesh_fields


def main(arguments: Sequence[str]) -> int:
    """Read the command line, compile, report; return the exit code.

    Raises:
      UserError: a mistake of the user's.
    """
    parser = cli.Parser(
        description="Compile a training step for a TPU slice, without one.",
        example="{prog} --config configs/paper_27b.py --topology v5p:4x4x8 --config.mesh.fsdp=128",
        fields=cli.EVERY_FIELD,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="config file, e.g. configs/paper_27b.py")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--topology", metavar="CHIP:SHAPE", help=f"slice, e.g. v5p:4x4x8; chips: {', '.join(TPUS)}")
    where.add_argument(
        "--smallest",
        metavar="CHIP",
        help="plan slices and meshes, smallest first, until one fits; where train.accumulation is 1 it is chosen too",
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="stop once XLA has given every buffer its place, before it generates code: several times faster, no FLOPs",
    )
    parser.add_argument("--json", metavar="FILE", help="write the report there")
    options, overrides = parser.parse_known_args(arguments)
    if options.smallest and options.smallest not in TPUS:
        given = options.smallest
        raise UserError(f"--smallest: {given!r}, allowed: {', '.join(TPUS)}{did_you_mean(given, TPUS)}")
    slice_ = parse_slice(options.topology) if options.topology else None
    if options.json:
        cli.check_file(options.json, "--json")
    # The mesh is checked against the slice and not against this machine's devices.
    overrides, mesh_fields = _split(overrides)
    config = cli.load_config(options.config, overrides, parser)
    sizes = {name.removeprefix("mesh."): value for name, value in cli.overrides(mesh_fields, parser).items()}
    if slice_ is None and sizes:
        raise UserError(f"{mesh_fields[0]}: --smallest chooses the mesh, allowed: with --topology")
    if config.model.vocab_size is None:
        from mhc.data import tokenizers

        config = configs.resolve(config, tokenizers.load(config.data.tokenizer).vocab_size)
    else:
        config = configs.resolve(config, config.model.vocab_size)
    if slice_ is None:
        reports = smallest(config, options.smallest)
        written: Any = reports
        fits = bool(reports) and reports[-1]["fits"]
        missing = f"no listed slice of {options.smallest} fits"
        print(f"smallest that fits: {reports[-1]['topology']}" if fits else missing)
    else:
        config = placed(config, dataclasses.replace(config.mesh, **sizes), slice_)
        written = report(config, slice_, plan_only=options.plan)
        print_report(written)
        fits = written["fits"]
    if options.json:
        Path(options.json).write_text(json.dumps(written, indent=2) + "\n")
    return 0 if fits else 1


if __name__ == "__main__":
    cli.run_main(main)
