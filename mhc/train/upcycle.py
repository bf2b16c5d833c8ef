"""Weights of one model as the start of another: which residuals compute the plain one's function, and what is new."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from mhc import kinds
from mhc.config import ResidualConfig
from mhc.errors import UserError
from mhc.model.decoder import DecoderDefinition
from mhc.sharding import path_of


def preserving(kind: str) -> dict[str, Any]:
    """Fields of config.residual under which a kind, freshly made, computes what the plain residual does.

    Empty where the kind is unknown, plain, or has no such initial maps.
    """
    inits = kinds.known()[kind].inits if kind in kinds.known() else ()
    if "equivalent" in inits:
        return {"init": "equivalent", "alpha": 0.0, "collapse": "mean"}
    return {"init": "hc", "collapse": "mean"} if "hc" in inits else {}


def check_preserving(residual: ResidualConfig) -> None:
    """Refuse a residual that, freshly made, does not compute the plain residual's function, saying why.

    ``equivalent``: every stream is the same, is read as the mean, and is mixed by rows that sum to 1; with alpha 0 the
    maps depend on nothing else. ``hc``: its projections are 0, so that any alpha will do.
    """
    kind = residual.kind
    if kind == "plain":
        if residual.scale != 1.0:
            raise UserError(f"residual.scale: given {residual.scale}, allowed: 1.0, to compute the source's function")
        return
    wanted = preserving(kind)
    if not wanted:
        can = ", ".join(name for name in kinds.names() if name == "plain" or preserving(name))
        raise UserError(
            f"residual.kind: given {kind!r}, allowed: {can}: it has no initial maps that make it the plain residual"
        )
    why = {
        "init": "other initial maps change the source's function",
        "alpha": "the maps would depend on their random projection",
        "collapse": "the streams are copies of the plain stream, and their mean is it",
    }
    preset = kinds.known()[kind].inits[0]
    given = {
        "init": residual.init or preset,
        "alpha": 0.0 if residual.alpha is None else residual.alpha,
        "collapse": residual.collapse or kinds.known()[kind].collapses[0],
    }
    for name, value in wanted.items():
        if given[name] != value:
            raise UserError(f"residual.{name}: given {given[name]!r}, allowed: {value!r} with kind={kind}: {why[name]}")


def fresh(definition: DecoderDefinition, seed: int, layout: Any, wanted: Callable[[str], bool]) -> dict[str, jax.Array]:
    """{path: initial value} of the wanted parameters alone, in their shards."""
    paths = [path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(definition.abstract())]
    chosen = [path for path in paths if wanted(path)]
    if not chosen:
        return {}
    by_path = {path_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(layout)}

    def init(key: jax.Array) -> dict[str, jax.Array]:
        leaves = jax.tree_util.tree_leaves_with_path(definition.init(key))
        return {path_of(path): leaf for path, leaf in leaves if path_of(path) in chosen}

    # Compiled, so that of the other parameters nothing is made; once, so that optimising costs more than it saves.
    once = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}
    made = jax.jit(init, out_shardings={path: by_path[path] for path in chosen}, compiler_options=once)
    return dict(made(jax.random.key(seed)))
