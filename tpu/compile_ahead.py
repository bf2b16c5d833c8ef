"""Compiles a config's training step for a TPU slice on a machine that has none, and says whether it fits.

    python -m tpu.compile_ahead --config configs/paper_27b.py --topology v5p:2x2x4 --config.mesh.fsdp=16
    python -m tpu.compile_ahead --config configs/paper_3b.py --smallest v5p

Needs libtpu (`pip install -e '.[tpu]'`), no TPU. Exit codes: 0 it fits, 1 it does not, 2 a user's mistake.
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

# For the search's first guess of how many rows a device can work on at once; what XLA plans decides. Bytes of a block's
# temporaries for each token and unit of width, and for each stream of it besides: as XLA planned the paper's models.
WORKSPACE, WORKSPACE_OF_STREAM = 120, 45
GUESSED_SHARE = 0.92  # of the memory


class Held(NamedTuple):
    """Bytes of one device that a layout determines, whatever the compiler does."""

    parameters: int
    optimizer: int
    streams: int  # that a micro-batch's forward pass leaves for its backward pass

    @property
    def bound(self) -> int:
        """What every step holds at least: these, and a gradient as large as the parameters."""
        return 2 * self.parameters + self.optimizer + self.streams


def held(config: Config) -> Held:
    """Of the config on its mesh. Touches no device and needs no libtpu."""
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
    """(parameters, the optimiser's state) as shapes: the same for every mesh and batch."""
    import jax

    from mhc.model.decoder import DecoderDefinition
    from mhc.train.optimizer import make_optimizer

    params = DecoderDefinition(config).abstract()
    return params, jax.eval_shape(make_optimizer(config, params).init, params)


def _rows(config: Config) -> int:
    """Rows of a micro-batch that a device works on."""
    shards = config.mesh.data * config.mesh.fsdp * config.mesh.expert
    return config.train.batch_size // config.train.accumulation // shards


def _row_numbers(config: Config) -> int:
    """Numbers of one row's streams on one device."""
    width, tensor = config.model.width, config.mesh.tensor
    return config.data.sequence_length * config.streams * (width if width % tensor else width // tensor)


def _row_bytes(config: Config) -> int:
    """Bytes of the streams of one row that are kept: those before each group of blocks that is computed again."""
    layers, leading = config.model.layers, config.leading_layers
    size = config.remat_blocks if config.model.remat == "streams" else 1
    groups = sum(-(-count // size) for count in (leading, layers - leading))
    return groups * _row_numbers(config) * (2 if config.model.dtype == "bfloat16" else 4)


def report(config: Config, slice_: Slice, *, plan_only: bool = False) -> dict[str, Any]:
    """Compile the step and say what one device holds, moves and computes.

    {topology, chips, residual, mesh, accumulation, rows_per_device (of a micro-batch), hbm_bytes, fits,
    per_device_bytes {parameters, optimizer, arguments, temporaries, code, peak}, flops, bytes_accessed, collectives
    {kind: {count, bytes}}, plan_only, compile_seconds, cpu_seconds, compile_peak_host_bytes}: bytes and FLOPs of one
    device and one step; FLOPs and bytes accessed as XLA counts them, which is once for the body of a loop. Where it
    does not fit, what XLA does not say then is None; so are code, FLOPs and bytes accessed of a plan.
    """
    config = placed(config, config.mesh, slice_)
    mesh = config.mesh
    found = xla_process.compile_step(config, slice_, plan_only=plan_only)
    sizes, memory = held(config), found.memory
    peak = found.used if memory is None else memory.peak + (found.code or 0)
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
            "code": found.code,
            "peak": peak,
        },
        "flops": found.flops,
        "bytes_accessed": found.bytes_accessed,
        "collectives": hlo.as_json(found.collectives),
        "plan_only": plan_only,
        "compile_seconds": found.seconds,
        "cpu_seconds": found.cpu_seconds,
        "compile_peak_host_bytes": found.host_bytes,
    }


def placed(config: Config, mesh: MeshConfig, slice_: Slice) -> Config:
    """The config on a slice: with this mesh, its open axis filled in.

    Raises UserError where it does not multiply to the slice's chips, or does not share the rows evenly.
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
    """Meshes worth trying on so many chips: all fsdp, then tensor over 2 or 4, then experts over 2, 4 or 8."""
    rows = config.train.batch_size // config.train.accumulation
    experts = [e for e in (2, 4, 8) if config.moe.experts and config.moe.experts % e == 0]
    for tensor, expert in [(1, 1), (2, 1), (4, 1), *((1, e) for e in experts)]:
        if chips % (tensor * expert) == 0 and rows % (chips // tensor) == 0:
            sizes = {"data": 1, "fsdp": chips // (tensor * expert), "tensor": tensor, "expert": expert}
            yield dataclasses.replace(config.mesh, **sizes)


def candidates(config: Config, slice_: Slice) -> Iterator[Config]:
    """What to compile for a slice, in this order: those whose bound fits, on each mesh.

    A config that accumulates keeps its number of micro-batches. Of one that does not, each mesh comes with the rows
    that a device is guessed to have room for, and then with one row.
    """
    for mesh in meshes(config, slice_.chips):
        there = dataclasses.replace(config, mesh=mesh)
        counts = [config.train.accumulation]
        if counts == [1]:
            most = _rows(there)  # of a device, were all done at once
            room = GUESSED_SHARE * slice_.hbm - _standing(there)
            workspace = (WORKSPACE / config.streams + WORKSPACE_OF_STREAM) * _row_numbers(there)
            guess = max(1, int(room / (_row_bytes(there) + workspace)))
            counts = sorted({most // max(d for d in _divisors(most) if d <= guess), most})
        for count in counts:
            tried = _accumulating(there, count)
            if held(tried).bound <= slice_.hbm:
                yield tried


def _standing(config: Config) -> int:
    """Bytes that do not grow with the rows: parameters, optimiser, gradients of a micro-batch and their sums."""
    sizes = held(config)
    return 3 * sizes.parameters + sizes.optimizer


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _accumulating(config: Config, count: int) -> Config:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, accumulation=count))


def smallest(config: Config, chip: str) -> list[dict[str, Any]]:
    """Plans of slices and meshes in the order tried; the last one fits, if any does."""
    tried = []
    for shape in TPUS[chip].slices:
        slice_ = Slice(chip, shape)
        for candidate in candidates(config, slice_):
            tried.append(report(candidate, slice_, plan_only=True))
            print_report(tried[-1])
            if tried[-1]["fits"]:
                return tried
    return tried


def print_report(found: dict[str, Any]) -> None:
    """A few lines for a reader."""
    sizes = {name: f"{size / GIB:.2f}" for name, size in found["per_device_bytes"].items() if size is not None}
    mesh = " ".join(f"{axis}={size}" for axis, size in found["mesh"].items() if axis in _AXES)
    verdict = "fits" if found["fits"] else "does not fit"
    where = f"{found['chips']} chips; {mesh}; accumulation {found['accumulation']}"
    print(f"{found['topology']} ({where}): {verdict} {found['hbm_bytes'] / GIB:.0f} GiB a chip")
    print("  GiB a chip: " + ", ".join(f"{name} {size}" for name, size in sizes.items()))
    for kind, total in found["collectives"].items():
        print(f"  {kind}: {total['count']} a step, {total['bytes'] / GIB:.2f} GiB")
    host = found["compile_peak_host_bytes"] / GIB
    verb = "planned" if found["plan_only"] else "compiled"
    spent = f"{found['compile_seconds']} s, {found['cpu_seconds']} CPU s and {host:.1f} GiB of this machine"
    print(f"  {verb} in {spent}", flush=True)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(other arguments, those that are ``--config.mesh.FIELD=VALUE`` or with a space for ``=``)."""
    others: list[str] = []
    of_mesh: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        part = of_mesh if argument.lstrip("-").startswith("config.mesh.") else others
        part.append(argument)
        if "=" not in argument:
            part.extend(itertools.islice(rest, 1))
    return others, of_mesh


def main(arguments: Sequence[str]) -> int:
    """Reads the command line, compiles, reports. Raises UserError for a user's mistake."""
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
        help="plan for one slice and mesh after another until one fits; chooses train.accumulation too where it is 1",
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
    # A mesh is judged by its slice, not by the config that it would make elsewhere.
    overrides, of_mesh = _split(overrides)
    config = cli.load_config(options.config, overrides, parser)
    sizes = {name.removeprefix("mesh."): value for name, value in cli.overrides(of_mesh, parser).items()}
    if slice_ is None and sizes:
        raise UserError(f"{of_mesh[0]}: --smallest chooses the mesh, allowed: with --topology")
    if config.model.vocab_size is None:
        from mhc.data import tokenizers

        config = configs.resolve(config, tokenizers.load(config.data.tokenizer).vocab_size)
    else:
        config = configs.resolve(config, config.model.vocab_size)
    if slice_ is None:
        tried = smallest(config, options.smallest)
        found: Any = tried
        fits = bool(tried) and tried[-1]["fits"]
        print(f"smallest that fits: {tried[-1]['topology']}" if fits else f"no listed slice of {options.smallest} fits")
    else:
        config = placed(config, dataclasses.replace(config.mesh, **sizes), slice_)
        found = report(config, slice_, plan_only=options.plan)
        print_report(found)
        fits = found["fits"]
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n")
    return 0 if fits else 1


if __name__ == "__main__":
    cli.run_main(main)
