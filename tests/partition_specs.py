"""Write the layout of the train state of the paper's models as text: what tests/golden/partition_specs holds.

    python -m tests.partition_specs

writes the files anew, after a decision about the rules of mhc.sharding.
"""

from __future__ import annotations

import functools
import importlib
import math
from pathlib import Path

import jax
from jax.sharding import AbstractMesh, PartitionSpec

from mhc.config import from_config_dict, resolve
from mhc.sharding import MESH_AXES, partition_spec, path_of
from mhc.train.step import Trainer

FOLDER = Path(__file__).parent / "golden" / "partition_specs"
PAPER = ("paper_3b", "paper_9b", "paper_27b")
MESH = {"data": 2, "fsdp": 16, "tensor": 2, "expert": 4}


@functools.cache
def state_of(name: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Return every leaf of the train state of configs/<name>.py by path."""
    config = from_config_dict(importlib.import_module(f"configs.{name}").get_config())
    config = resolve(config, config.model.vocab_size or 0)
    one = jax.make_mesh((1,) * 4, MESH_AXES, devices=jax.devices()[:1])  # shapes do not depend on it
    leaves = jax.tree_util.tree_leaves_with_path(Trainer(config, one).abstract)
    return {path_of(path): leaf for path, leaf in leaves}


def specs_of(name: str, sizes: dict[str, int] | None = None) -> dict[str, PartitionSpec]:
    """Return the layout of each leaf over a mesh of MESH's sizes, or of others."""
    sizes = MESH if sizes is None else sizes
    mesh = AbstractMesh(tuple(sizes[axis] for axis in MESH_AXES), MESH_AXES)
    return {path: partition_spec(path, leaf.shape, mesh) for path, leaf in state_of(name).items()}


def parts(spec: PartitionSpec, sizes: dict[str, int]) -> int:
    """Return over how many devices a leaf is split."""
    axes = [axis for entry in spec if entry for axis in ((entry,) if isinstance(entry, str) else entry)]
    return math.prod(sizes[axis] for axis in axes)


def render(name: str) -> str:
    """Return a line for each leaf: path, shape, and the mesh axes of each of its axes (-: whole)."""

    def entry(axes: str | tuple[str, ...] | None) -> str:
        return "-" if axes is None else axes if isinstance(axes, str) else "+".join(axes)

    lines = [f"# configs/{name}.py over {', '.join(f'{axis} {size}' for axis, size in MESH.items())}"]
    for path, spec in sorted(specs_of(name).items()):
        shape = state_of(name)[path].shape
        lines.append(f"{path} [{', '.join(map(str, shape))}] ({', '.join(map(entry, spec))})")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for name in PAPER:
        (FOLDER / f"{name}.txt").write_text(render(name))
