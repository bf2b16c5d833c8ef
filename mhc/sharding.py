"""Lay arrays out over the mesh; this is the one file that knows how.

Axes of the mesh: ``data`` (replicas; may span slices), ``fsdp`` (parameters and optimiser state in shards), ``tensor``
(heads, feed-forward columns, vocabulary, and the width of streams between sublayers), ``expert``. The batch is split
over data, fsdp and expert; sequences and the streams of a token never are. A parameter's axes have logical names, found
by its path; a rule says on which mesh axes a logical axis lies.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import itertools
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from mhc.config import MeshConfig
from mhc.errors import UserError
from mhc.model.parameters import parameter
from mhc.xla_options import known_options

log = logging.getLogger(__name__)

T = TypeVar("T")

MESH_AXES = ("data", "fsdp", "tensor", "expert")
BATCH_AXES = ("data", "fsdp", "expert")

# Logical axis -> mesh axes, the outermost first; none: whole on every device. Streams are never split: every map needs
# all N of them. Weights that meet the streams' own width lie first as the streams do, over tensor, and each part over
# fsdp: gathered over fsdp they are what a device multiplies its part of the streams by, and so are their gradients.
RULES: dict[str, tuple[str, ...]] = {
    "vocab": ("tensor",),
    "embed": ("fsdp",),
    "stream_width": ("tensor", "fsdp"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "mlp": ("tensor",),
    "experts": ("expert",),
    "latent": (),
    "latent_rows": ("fsdp",),
    "positions": (),
    "streams": (),
    "maps": (),
    "layers": (),
    "norm": (),
    "window": (),
}


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """Return the mesh over all devices, with axes of type Auto. One axis may be -1: it gets what the others leave.

    Devices of several slices, joined by a slower network, are parts of ``data``: what they exchange is gradients, once
    a step.

    Raises:
      UserError: the axes do not multiply to the number of devices, or data not to that of slices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {axis: getattr(config, axis) for axis in MESH_AXES}
    fixed = math.prod(size for size in sizes.values() if size != -1)
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    wanted = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    if len(devices) % fixed or (not open_axes and fixed != len(devices)):
        raise UserError(f"mesh: {wanted} does not fit {len(devices)} devices; their product must be {len(devices)}")
    for axis in open_axes:
        sizes[axis] = len(devices) // fixed
    return Mesh(_arranged(tuple(sizes.values()), devices), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def _arranged(shape: tuple[int, ...], devices: list[jax.Device]) -> np.ndarray:
    if devices[0].platform in ("cpu", "gpu"):
        # To jax their hosts are slices as well, but any axis may span hosts: one follows another.
        return np.array(sorted(devices, key=lambda device: device.id), dtype=object).reshape(shape)
    slices = collections.Counter(getattr(device, "slice_index", 0) for device in devices)
    if len(set(slices.values())) > 1:
        raise UserError(f"mesh: slices of {', '.join(map(str, slices.values()))} devices; allowed: slices of one size")
    number, (data, *within) = len(slices), shape
    if data % number:
        raise UserError(f"mesh.data: {data} over {number} slices of devices; allowed: a multiple of {number}")
    if number == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return mesh_utils.create_hybrid_device_mesh(
        (data // number, *within), (number, 1, 1, 1), devices, allow_split_physical_axes=True
    )


def check_rules(axes: tuple[str, ...]) -> None:
    """Refuse logical axes of one array that would lie on the same mesh axis.

    Raises:
      ValueError: naming the axes that collide, or an unknown one.
    """
    taken: dict[str, str] = {}
    for axis in axes:
        if axis not in RULES:
            raise ValueError(f"unknown logical axis {axis!r}; allowed: {', '.join(RULES)}")
        for mesh_axis in RULES[axis]:
            if mesh_axis in taken:
                raise ValueError(
                    f"logical axes {taken[mesh_axis]!r} and {axis!r} of one array both lie on {mesh_axis!r}"
                )
            taken[mesh_axis] = axis


def logical_axes(path: str, ndim: int) -> tuple[str, ...]:
    """Return the logical axes of the leaf at ``path`` (a/b/c), a parameter or the optimiser's copy of one.

    Raises:
      ValueError: no row of `mhc.model.parameters` covers the path, or it has another number of axes.
    """
    # What is no copy of a parameter lies whole on every device: the guard's windows, Muon's polynomial coefficients.
    if ndim == 0 or re.search(r"(^|/)guard/|/ns_coeffs$", path):
        return ("window",) * ndim
    axes = parameter(path).axes
    full = ("layers", *axes) if re.search(r"(^|/)(leading_)?blocks/", path) else axes
    if len(full) != ndim:
        raise ValueError(f"{path} has {ndim} axes, its layout rule has {full}")
    check_rules(full)
    return full


def path_of(key_path: tuple[Any, ...]) -> str:
    """Return a jax key path as a/b/c."""
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in key_path)


def partition_spec(path: str, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Return the layout of a leaf. An axis stays whole over mesh axes that do not divide it, and that is logged."""
    spec = []
    for axis, size in zip(logical_axes(path, len(shape)), shape, strict=True):
        split = _dividing(size, RULES[axis], mesh)
        left = [f"{name}={mesh.shape[name]}" for name in RULES[axis] if name not in split]
        if left:
            log.info("%s: axis %s of %d is not split over %s", path, axis, size, ", ".join(left))
        spec.append(split[0] if len(split) == 1 else split or None)
    return PartitionSpec(*spec)


def _dividing(size: int, axes: tuple[str, ...], mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Return all of ``axes``, or else those that split ``size`` into the most even parts."""
    choices = [chosen for count in range(len(axes), -1, -1) for chosen in itertools.combinations(axes, count)]
    parts = {chosen: math.prod(mesh.shape[axis] for axis in chosen) for chosen in choices}
    return max((chosen for chosen in choices if size % parts[chosen] == 0), key=parts.__getitem__)


def shardings(tree: Any, mesh: Mesh) -> Any:
    """Return the NamedSharding of every leaf of a tree of parameters or optimiser state (arrays or their shapes)."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, partition_spec(path_of(path), leaf.shape, mesh)), tree
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the layout of [B, ...] arrays: rows over data, fsdp and expert."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the layout of arrays that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def check_batch(rows: int, mesh: Mesh, name: str) -> None:
    """Refuse a number of rows that the mesh cannot share evenly.

    Raises:
      UserError: naming the field and the number of shards.
    """
    shards = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    if rows % shards:
        raise UserError(f"{name}: {rows} rows cannot be shared evenly by {shards} devices (mesh data x fsdp x expert)")


def local_rows(mesh: Mesh, rows: int) -> list[int]:
    """Return the rows of a global batch of ``rows`` that this process' devices hold, ascending.

    Processes may hold the same rows, where the batch is not split between them.
    """
    held = batch_sharding(mesh).addressable_devices_indices_map((rows,)).values()
    return sorted({row for index in held if index is not None for row in range(*index[0].indices(rows))})


def put_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Return this process' rows of a batch (`local_rows`) as arrays over the whole mesh."""
    layout = batch_sharding(mesh)
    shards = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    ours = local_rows(mesh, shards)  # of each array, equal parts in this order

    def put(array: np.ndarray) -> jax.Array:
        part = len(array) // len(ours)

        def rows(index: tuple[slice, ...] | None) -> np.ndarray:
            start = (index[0].start or 0) if index else 0
            first = ours.index(start // part) * part
            return array[first : first + part]

        return jax.make_array_from_callback((part * shards, *array.shape[1:]), layout, rows)

    with jax.transfer_guard("allow"):  # the transfer that is meant
        return {name: put(array) for name, array in batch.items()}


def put_whole(arrays: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Return arrays that every process has, whole on every device of the mesh."""
    layout = replicated(mesh)
    with jax.transfer_guard("allow"):
        return {
            name: jax.make_array_from_callback(array.shape, layout, array.__getitem__) for name, array in arrays.items()
        }


def threads_of_one_cpu(mesh: Mesh) -> bool:
    """Return whether the mesh's devices are threads of a CPU, as tests and trials have them."""
    return mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"


def in_order(result: T, mesh: Mesh) -> T:
    """Return the result of a program; where devices are threads of a CPU, wait for it first.

    They wait for each other inside a program's collectives: two programs at once on too few cores can starve each other
    for ever, and there is nothing to overlap.
    """
    return jax.block_until_ready(result) if threads_of_one_cpu(mesh) else result


def jit(function: Callable[..., Any], mesh: Mesh | None, **options: Any) -> Any:
    """Apply ``jax.jit`` with these options to a program with collectives over the mesh.

    Where devices are threads of a CPU, two independent collectives of one program may be entered in different orders by
    different devices, and wait for each other for ever. So their order is fixed by a compiler option, where XLA has
    it; and since a program that is read from the persistent compilation cache has lost it (jax 0.10.2), it is never
    written there.
    """
    if mesh is None or not threads_of_one_cpu(mesh):
        return jax.jit(function, **options)
    given = options.pop("compiler_options", None) or {}
    return _Uncached(jax.jit(function, compiler_options=known_options(_IN_ORDER) | given, **options))


_IN_ORDER = {"xla_cpu_enable_concurrency_optimized_scheduler": False}
_CACHED_FROM = "jax_persistent_cache_min_compile_time_secs"


class _Uncached:
    """Holds a function of jax.jit whose programs the persistent compilation cache does not keep."""

    def __init__(self, jitted: Any):
        self._jitted = jitted

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = getattr(jax.config, _CACHED_FROM)
        jax.config.update(_CACHED_FROM, math.inf)
        try:
            return self._jitted(*args, **kwargs)
        finally:
            jax.config.update(_CACHED_FROM, before)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jitted, name)


# The mesh that a program is traced for. Few parts of the model need it: kernels that no compiler can partition.
_MESH: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("mesh", default=None)


@contextlib.contextmanager
def tracing_for(mesh: Mesh | None) -> Iterator[None]:
    """Trace the functions within the block for this mesh, which ``current_mesh`` then gives."""
    token = _MESH.set(mesh)
    try:
        yield
    finally:
        _MESH.reset(token)


def traced_for(function: Callable[..., Any], mesh: Mesh | None) -> Callable[..., Any]:
    """Return the function, traced for this mesh whenever it is traced."""

    @functools.wraps(function)
    def traced(*args: Any) -> Any:
        with tracing_for(mesh):
            return function(*args)

    return traced


def current_mesh() -> Mesh | None:
    """Return the mesh of ``tracing_for``, None outside of it."""
    return _MESH.get()


def compiles_for_tpu() -> bool:
    """Return whether the program that is traced will run on a TPU, also if this process has none."""
    mesh = _MESH.get()
    return mesh is not None and mesh.devices.flat[0].platform == "tpu"


def _width(width: int, mesh: Mesh) -> str | None:
    """Return the mesh axis over which activations split a width."""
    return None if width % mesh.shape["tensor"] else "tensor"


def _streams_spec(shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    return PartitionSpec(BATCH_AXES, *(None,) * (len(shape) - 2), _width(shape[-1], mesh))


def _constrained(x: jax.Array, spec: PartitionSpec, mesh: Mesh) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def _mesh_to_split() -> Mesh | None:
    mesh = _MESH.get()
    return None if mesh is None or mesh.size == 1 else mesh


def constrain_batch(x: jax.Array) -> jax.Array:
    """Return ``x`` [B, ...], its rows split over the mesh of ``tracing_for``; without a mesh, as it is."""
    mesh = _mesh_to_split()
    return x if mesh is None else _constrained(x, PartitionSpec(BATCH_AXES), mesh)


def constrain_streams(x: jax.Array) -> jax.Array:
    """Lay ``x`` [B, T, ..., D], streams or one of them, out: rows over the batch axes, D over tensor, the rest whole.

    A connection then works on its part of D, and what devices exchange are the maps' logits: a few numbers a token.
    """
    mesh = _mesh_to_split()
    return x if mesh is None else _constrained(x, _streams_spec(x.shape, mesh), mesh)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _moved(x: jax.Array, to: PartitionSpec, back: PartitionSpec, mesh: Mesh) -> jax.Array:
    """Return ``x`` laid out as ``to``, its gradient as ``back``: a constraint alone would lay out both as ``to``."""
    return _constrained(x, to, mesh)


_moved.defvjp(
    lambda x, to, back, mesh: (_constrained(x, to, mesh), None),
    lambda to, back, mesh, _, g: (_constrained(g, back, mesh),),
)


def gather_width(u: jax.Array) -> jax.Array:
    """Return a sublayer's input ``u`` [B, T, D], D whole; its gradient, a sum over tensor, is split as the streams."""
    mesh = _mesh_to_split()
    return u if mesh is None else _moved(u, PartitionSpec(BATCH_AXES), _streams_spec(u.shape, mesh), mesh)


def split_width(y: jax.Array) -> jax.Array:
    """Return a sublayer's output ``y`` [B, T, D], a sum over tensor, D split as the streams'; its gradient is whole."""
    mesh = _mesh_to_split()
    return y if mesh is None else _moved(y, _streams_spec(y.shape, mesh), PartitionSpec(BATCH_AXES), mesh)


def by_rows(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Apply a row by row ``function`` from [B, ...] to [B, ...] on each device's own rows of ``x``.

    It is for operations that the compiler would run on all rows everywhere.
    """
    mesh = _mesh_to_split()
    if mesh is None or x.shape[0] % math.prod(mesh.shape[axis] for axis in BATCH_AXES):
        return function(x)
    rows = PartitionSpec(BATCH_AXES)
    return jax.shard_map(function, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)(x)


def whole_rows(table: jax.Array, axis: str) -> jax.Array:
    """Lay a ``table`` [rows, D], in which tokens look up rows, out: rows as the logical ``axis`` lies, D whole.

    With D split over fsdp, as the batch is, each device would get a part of every token, and gather all of them.
    """
    mesh = _mesh_to_split()
    if mesh is None:
        return table
    return _constrained(table, PartitionSpec(_dividing(table.shape[0], RULES[axis], mesh) or None, None), mesh)
