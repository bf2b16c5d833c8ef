"""Load a run's model for evaluation: of one step or the mean of several, on one device or over a mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mhc import cli, remote
from mhc.config import Config, MeshConfig
from mhc.errors import UserError

if TYPE_CHECKING:
    import argparse

    from jax.sharding import Mesh

    from mhc.model.decoder import DecoderDefinition, Params


class Checkpoint(NamedTuple):
    """Holds a model as a run left it."""

    name: str  # as the user gave it, with its step
    config: Config  # resolved
    steps: tuple[int, ...]  # whose weights were averaged, ascending
    params: Params
    mesh: Mesh
    run: remote.Folder | None = None  # that keeps it; None: none does

    @property
    def definition(self) -> DecoderDefinition:
        """Return the model without its parameters."""
        from mhc.model.decoder import DecoderDefinition

        return DecoderDefinition(self.config)


def locate(checkpoint: str, step: int | None = None) -> tuple[remote.Folder, int | None]:
    """Return (run folder, step or None for the last) of RUN or RUN/checkpoints/STEP. Raises UserError for two steps."""
    path = remote.path(checkpoint)
    if path.parent.name != "checkpoints" or not path.name.isdigit():
        return path, step
    if step not in (None, int(path.name)):
        raise UserError(f"--step: given {step}, allowed: none, or that of --checkpoint {checkpoint}")
    return path.parent.parent, int(path.name)


def add_arguments(parser: argparse.ArgumentParser, several: bool = False, required: bool = True) -> None:
    """Add --checkpoint, --step and --average; mesh.* and data.* are changed as in train.py.

    Args:
      several: --checkpoint takes several.
      required: --checkpoint must be given.
    """
    parser.add_argument(
        "--checkpoint",
        required=required,
        nargs="+" if several else None,
        metavar="RUN",
        help="run folder, or RUN/checkpoints/STEP" + ("; several are compared" if several else ""),
    )
    parser.add_argument("--step", type=int, help="the checkpoint's step; without: the last")
    parser.add_argument(
        "--average", type=int, default=1, metavar="K", help="the mean of the weights of the last K checkpoints (1)"
    )


def load(
    checkpoint: str,
    step: int | None = None,
    *,
    average: int = 1,
    changes: dict[str, Any] | None = None,
    devices: Sequence[Any] | None = None,
) -> Checkpoint:
    """Return the model of a run, its parameters laid out over a mesh of all devices. The run's folder is only read.

    Args:
      checkpoint: RUN or RUN/checkpoints/STEP.
      step: which one; None: the last.
      average: the weights are the mean, in float32, of those of so many checkpoints up to that step.
      changes: {dotted field: value} over the run's config, of groups that leave its weights as they are.
      devices: those to use; None: all.

    Raises:
      UserError: no such run or step, fewer checkpoints than are to be averaged, weights that the config does not
      describe, or a mesh that does not fit the devices.
    """
    import jax
    import jax.numpy as jnp

    from mhc.model.decoder import DecoderDefinition
    from mhc.sharding import make_mesh, shardings
    from mhc.train.checkpoint import committed_steps, find_checkpoint, restore_parts

    run, step = locate(checkpoint, step)
    stored, last = find_checkpoint(run, step)
    # The run's mesh was that of its machine, and its batch had to fit it; weights lie on any.
    changes = changes or {}
    axes = {name.removeprefix("mesh."): value for name, value in changes.items() if name.startswith("mesh.")}
    config = changed(dataclasses.replace(stored, mesh=MeshConfig()), without_mesh(changes))
    if average < 1:
        raise UserError(f"--average: given {average}, allowed: 1 or more")
    steps = [number for number in committed_steps(run) if number <= last][-average:]
    if len(steps) < average:
        kept = ", ".join(map(str, steps))
        raise UserError(f"--average: given {average}, but {run} keeps {len(steps)} checkpoint(s) up to {last}: {kept}")
    mesh = _rows_on_one_axis(
        make_mesh(dataclasses.replace(MeshConfig(), **axes), None if devices is None else list(devices))
    )
    abstract = {"params": DecoderDefinition(config).abstract()}
    layout = shardings(abstract, mesh)
    total: Any = None
    add = jax.jit(functools.partial(jax.tree.map, jnp.add), donate_argnums=0)
    for number in steps:
        params = restore_parts(run, number, abstract, layout)["params"]
        total = params if total is None else add(total, params)
    if average > 1:
        total = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf / average, tree), donate_argnums=0)(total)
    which = f"step {steps[0]}" if average == 1 else f"mean of steps {', '.join(map(str, steps))}"
    return Checkpoint(f"{run}, {which}", config, tuple(steps), total, mesh, run)


def steps_until(checkpoint: Checkpoint) -> list[int]:
    """Return the steps of the checkpoints that a run keeps, ascending; the last is that of the given one."""
    from mhc.train.checkpoint import committed_steps

    last = checkpoint.steps[-1]
    earlier = [] if checkpoint.run is None else [step for step in committed_steps(checkpoint.run) if step < last]
    return [*earlier, last]


def at_step(checkpoint: Checkpoint, step: int) -> Checkpoint:
    """Return the model as its run left it at another step, laid out as the given one. Raises UserError as ``load``."""
    from mhc.sharding import shardings
    from mhc.train.checkpoint import restore_parts

    if (step,) == checkpoint.steps:
        return checkpoint
    if checkpoint.run is None:
        raise UserError(f"{checkpoint.name}: no run keeps other steps of it")
    abstract = {"params": checkpoint.definition.abstract()}
    params = restore_parts(checkpoint.run, step, abstract, shardings(abstract, checkpoint.mesh))["params"]
    return checkpoint._replace(name=f"{checkpoint.run}, step {step}", steps=(step,), params=params)


def _rows_on_one_axis(mesh: Mesh) -> Mesh:
    """Return the mesh with data merged into fsdp where it has both: without gradients they share rows alike.

    On a mesh with both, and tensor, XLA's partitioner mixes up the rows of decoding steps of one token (jax 0.10.2).
    """
    from mhc.sharding import make_mesh

    data, fsdp = mesh.shape["data"], mesh.shape["fsdp"]
    slices = {getattr(device, "slice_index", 0) for device in mesh.devices.flat}
    if data == 1 or fsdp == 1 or len(slices) > 1:
        return mesh
    return make_mesh(MeshConfig(**{**mesh.shape, "data": 1, "fsdp": data * fsdp}), list(mesh.devices.flat))


def short_names(names: Sequence[str]) -> list[str]:
    """Return names of checkpoints without the folders that all of them share."""
    parts = [name.split("/") for name in names]
    most = min(map(len, parts)) - 1
    shared = next((k for k in range(most) if len({one[k] for one in parts}) > 1), most)
    return ["/".join(one[shared:]) for one in parts]


# The config fields that a program over a checkpoint takes: groups that do not change what the weights compute.
FIELDS = ("mesh.", "data.", "validation.")


def parse_changes(arguments: Sequence[str], parser: cli.Parser) -> dict[str, Any]:
    """Return {dotted field: value} of the arguments ``--config.GROUP.FIELD=VALUE``.

    Raises UserError for a field that is not among the parser's ``fields``, and for any other argument.
    """
    return cli.overrides(arguments, parser, otherwise="the weights fix it")


def without_mesh(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes except those of ``mesh.*``, which do not affect what is computed."""
    return {name: value for name, value in changes.items() if not name.startswith("mesh.")}


def config_of(checkpoint: str, step: int | None, changes: Mapping[str, Any]) -> Config:
    """Return the config that a checkpoint is to be run under, except for its mesh. Only the stored config is read.

    Raises UserError where there is no such checkpoint, or where the changes do not go together.
    """
    from mhc.train.checkpoint import find_checkpoint

    return changed(find_checkpoint(*locate(checkpoint, step))[0], without_mesh(changes))


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return the config with other fields, by dotted name. Raises UserError where they do not go together."""
    for name, value in changes.items():
        group, _, field = name.partition(".")
        config = dataclasses.replace(config, **{group: dataclasses.replace(getattr(config, group), **{field: value})})
    return config
