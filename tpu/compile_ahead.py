"""Compiles a config's training step for a TPU slice on a machine that has none, and says whether it fits.

    python -m tpu.compile_ahead --config configs/paper_27b.py --topology v5p:4x4x8 --config.mesh.fsdp=128
    python -m tpu.compile_ahead --config configs/paper_3b.py --smallest v5p

Needs libtpu (`pip install -e '.[tpu]'`), no TPU. Exit codes: 0 it fits, 1 it does not, 2 a user's mistake.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mhc import cli
from mhc import config as configs
from mhc.config import Config, MeshConfig
from mhc.errors import UserError, did_you_mean


class Chip(NamedTuple):
    """A generation of TPU."""

    prefix: str  # what libtpu calls it
    hbm: int  # bytes of a chip
    slices: tuple[str, ...]  # common ones, smallest first


GIB = 2**30
CHIPS = {
    "v4": Chip("v4", 32 * GIB, ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")),
    "v5e": Chip("v5e", 16 * GIB, ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")),
    "v5p": Chip("v5", 95 * GIB, ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")),
    "v6e": Chip("v6e", 32 * GIB, ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")),
}


class Slice(NamedTuple):
    """A slice of a generation."""

    chip: str
    shape: str

    @property
    def chips(self) -> int:
        """Their number."""
        return math.prod(int(side) for side in self.shape.split("x"))

    def __str__(self) -> str:
        return f"{self.chip}:{self.shape}"


def parse_slice(text: str) -> Slice:
    """``v5p:4x4x8``. Raises UserError for another generation or shape."""
    chip, _, shape = text.partition(":")
    if chip not in CHIPS:
        raise UserError(f"--topology: {text!r}, allowed: {', '.join(CHIPS)} and a shape{did_you_mean(chip, CHIPS)}")
    sides = shape.split("x")
    dimensions = CHIPS[chip].slices[0].count("x") + 1
    if len(sides) != dimensions or not all(side.isdigit() and int(side) > 0 for side in sides):
        example = f"{chip}:{CHIPS[chip].slices[-3]}"
        raise UserError(f"--topology: {text!r}, allowed: {dimensions} sides, such as {example}")
    return Slice(chip, shape)


def devices_of(slice_: Slice) -> list[Any]:
    """The devices of a slice that is not there. Raises UserError where libtpu is missing or does not know it."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    import jax
    from jax.experimental import topologies

    jax.config.update("jax_platforms", "cpu")  # nothing runs: arrays of this process, if any, live on the host
    name = f"{CHIPS[slice_.chip].prefix}:{slice_.shape}"
    try:
        options = {"chips_per_host_bounds": [1, 1, 1]} if slice_.chips == 1 else {}
        topology = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        first = (str(error).splitlines() or ["no reason given"])[0]
        raise UserError(f"--topology: libtpu has no {slice_}: {first} (pip install -e '.[tpu]')") from None
    return list(topology.devices)


def report(config: Config, slice_: Slice) -> dict[str, Any]:
    """Compile the step and say what one device holds, moves and computes.

    {topology, chips, mesh, hbm_bytes, fits, per_device_bytes {parameters, optimizer, arguments, temporaries, peak},
    flops, bytes_accessed, collectives {kind: {count, bytes}}, compile_seconds}: bytes and FLOPs of one device and one
    step; FLOPs and bytes accessed as XLA counts them, which is once for the body of a loop.
    """
    import jax
    import jax.numpy as jnp

    from mhc import sharding
    from mhc.train.step import Trainer
    from tpu import hlo

    devices = devices_of(slice_)
    mesh = sharding.make_mesh(config.mesh, devices)
    rows = config.train.batch_size // config.train.accumulation
    sharding.check_batch(rows, mesh, "train.batch_size / train.accumulation")
    trainer = Trainer(config, mesh)
    batch_layout = sharding.batch_sharding(mesh)
    shape = (config.train.batch_size, config.data.sequence_length)
    fields = {"tokens": "int32", "targets": "int32", "segment_ids": "int32", "positions": "int32", "weights": "float32"}
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.dtype(d), sharding=batch_layout) for name, d in fields.items()}
    state = jax.tree.map(
        lambda leaf, layout: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout),
        trainer.abstract,
        trainer.layout,
    )

    def held(tree: Any) -> int:
        leaves = jax.tree.leaves(tree)
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)

    start = time.perf_counter()
    compiled = trainer.step.lower(state, batch).compile()  # type: ignore[attr-defined]
    seconds = time.perf_counter() - start
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    peak = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.generated_code_size_in_bytes
    )
    limit = CHIPS[slice_.chip].hbm
    return {
        "topology": str(slice_),
        "chips": len(devices),
        "mesh": dict(mesh.shape),
        "hbm_bytes": limit,
        "fits": peak <= limit,
        "per_device_bytes": {
            "parameters": held(state.params),
            "optimizer": held(state.opt_state),
            "arguments": memory.argument_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "peak": peak,
        },
        "flops": cost.get("flops"),
        "bytes_accessed": cost.get("bytes accessed"),
        "collectives": hlo.as_json(hlo.collectives(compiled.as_text())),
        "compile_seconds": round(seconds, 1),
    }


def meshes(config: Config, chips: int) -> Iterator[MeshConfig]:
    """Meshes worth trying on so many chips: all fsdp, then with experts over 8, 4 or 2, then tensor over 2 or 4."""
    rows = config.train.batch_size // config.train.accumulation
    experts = [e for e in (1, 8, 4, 2) if e == 1 or (config.moe.experts and config.moe.experts % e == 0)]
    for tensor in (1, 2, 4):
        for expert in experts:
            if chips % (tensor * expert) == 0 and rows % (chips // tensor) == 0:
                yield MeshConfig(data=1, fsdp=chips // (tensor * expert), tensor=tensor, expert=expert)


def smallest(config: Config, chip: str) -> list[dict[str, Any]]:
    """Reports of slices and meshes in the order tried; the last one fits, if any does."""
    tried = []
    for shape in CHIPS[chip].slices:
        slice_ = Slice(chip, shape)
        # What does not hold the state in even shards fits under no mesh.
        if _state_bytes(config) / slice_.chips > CHIPS[chip].hbm:
            continue
        for mesh in meshes(config, slice_.chips):
            tried.append(report(dataclasses.replace(config, mesh=mesh), slice_))
            print_report(tried[-1])
            if tried[-1]["fits"]:
                return tried
    return tried


def _state_bytes(config: Config) -> int:
    """Parameters and two moments in float32, over all devices."""
    from mhc.model.decoder import DecoderDefinition
    from mhc.model.flops import count_parameters

    return 12 * count_parameters(DecoderDefinition(config))["total"]


def print_report(found: dict[str, Any]) -> None:
    """A few lines for a reader."""
    held = {name: f"{size / GIB:.2f}" for name, size in found["per_device_bytes"].items()}
    mesh = " ".join(f"{axis}={size}" for axis, size in found["mesh"].items())
    verdict = "fits" if found["fits"] else "does not fit"
    print(f"{found['topology']} ({found['chips']} chips; {mesh}): {verdict} {found['hbm_bytes'] / GIB:.0f} GiB a chip")
    print("  GiB a chip: " + ", ".join(f"{name} {size}" for name, size in held.items()))
    for kind, total in found["collectives"].items():
        print(f"  {kind}: {total['count']} a step, {total['bytes'] / GIB:.2f} GiB")
    print(f"  compiled in {found['compile_seconds']} s", flush=True)


def main(arguments: Sequence[str]) -> int:
    """Reads the command line, compiles, reports. Raises UserError for a user's mistake."""
    parser = cli.Parser(prog="tpu.compile_ahead", description="Compile a training step for a TPU slice, without one.")
    parser.add_argument("--config", required=True, metavar="FILE", help="config file, e.g. configs/paper_27b.py")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--topology", metavar="CHIP:SHAPE", help=f"slice, e.g. v5p:4x4x8; chips: {', '.join(CHIPS)}")
    where.add_argument("--smallest", metavar="CHIP", help="search for the smallest slice and mesh that fit")
    parser.add_argument("--json", metavar="FILE", help="write the report there")
    options, overrides = parser.parse_known_args(arguments)
    if options.smallest and options.smallest not in CHIPS:
        given = options.smallest
        raise UserError(f"--smallest: {given!r}, allowed: {', '.join(CHIPS)}{did_you_mean(given, CHIPS)}")
    config = cli.load_config(options.config, overrides, parser)
    if config.model.vocab_size is None:
        from mhc.data import tokenizers

        config = configs.resolve(config, tokenizers.load(config.data.tokenizer).vocab_size)
    else:
        config = configs.resolve(config, config.model.vocab_size)
    if options.smallest:
        tried = smallest(config, options.smallest)
        found: Any = tried
        fits = bool(tried) and tried[-1]["fits"]
        print(f"smallest that fits: {tried[-1]['topology']}" if fits else f"no listed slice of {options.smallest} fits")
    else:
        found = report(config, parse_slice(options.topology))
        print_report(found)
        fits = found["fits"]
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n")
    return 0 if fits else 1


if __name__ == "__main__":
    cli.run_main(main)
