"""Tell kinds apart by what they carry through depth: the form of their state, and whether they have maps."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from mhc import kinds, residual
from mhc.model.block import build_topology
from mhc.rng import path_key

if TYPE_CHECKING:
    from mhc.config import Config

# What no kind carries by default.
_OPTIONS: dict[str, dict[str, Any]] = {
    "single pass": {"kind": "mhc", "single_pass": True},
    "value residual": {"kind": "plain", "value_residual": True},
}


@functools.cache
def state_forms() -> dict[str, dict[str, Any]]:
    """Return ``residual.*`` of the first kind with each form of state, by the kind's name, and of both options.

    Kinds come from the registry. Two states have one form if their leaves have the same places and numbers of axes.
    """
    chosen: dict[Any, str] = {}
    for name, kind in kinds.known().items():
        if not kind.builder:
            continue  # a test's, and not this project's

        def begin(h: jax.Array, name: str = name) -> object:
            return residual.build(name, 8, sublayers=4, rngs=nnx.Rngs(0)).expand(h)

        state = jax.eval_shape(begin, jax.ShapeDtypeStruct((2, 3, 8), "float32"))
        chosen.setdefault((jax.tree.structure(state), *(leaf.ndim for leaf in jax.tree.leaves(state))), name)
    return {name: {"kind": name} for name in chosen.values()} | _OPTIONS


def has_maps(config: Config) -> bool:
    """Return whether connections of the config's kind have maps between streams."""

    def maps(h: jax.Array) -> object:
        topology = build_topology(config, path_key(jax.random.key(0)))
        connection = topology.connection(0, rngs=path_key(jax.random.key(1)))
        return connection.maps(connection.read(topology.expand(h))[1])

    return jax.eval_shape(maps, jax.ShapeDtypeStruct((1, 2, config.model.width), "float32")) is not None
