"""Make small models, batches and measures that tests of the model, of training and of the layout share."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mhc.config import Config, from_config_dict, resolve
from mhc.model.decoder import DecoderDefinition, Params
from mhc.sharding import make_mesh, path_of
from mhc.train.step import Trainer

VOCAB, LENGTH = 32, 16


def small(kind: str = "plain", **groups: dict[str, Any]) -> Config:
    """Return a resolved config: 2 blocks of width 16, T = 16, V = 32, rate 1e-3; `groups`: model={"layers": 4}."""
    base: dict[str, dict[str, Any]] = {
        "model": {"layers": 2, "width": 16, "vocab_size": VOCAB},
        "attention": {"heads": 2, "impl": "xla"},
        "mlp": {"width": 24},
        "residual": {"kind": kind},
        "data": {"sequence_length": LENGTH},
        "schedule": {"kind": "constant"},
        "train": {"steps": 20, "batch_size": 8},
        "monitor": {"probe_every": 0},
    }
    for group, fields in groups.items():
        base[group] = {**base.get(group, {}), **fields}
    return resolve(from_config_dict(base), VOCAB)


# Models that between them have every parameter that a decoder can have.
ZOO: dict[str, dict[str, dict[str, Any]]] = {
    "latent experts": {
        "attention": {"kind": "mla", "kv_rank": 8, "q_rank": 6},
        "moe": {"experts": 4, "shared": 1, "dense_layers": 1},
        "norm": {"kind": "layernorm", "placement": "sandwich", "embedding": True},
    },
    "learned positions, biases": {
        "positions": {"kind": "learned"},
        "attention": {"bias": True, "qk_norm": True, "kv_heads": 1},
        "mlp": {"kind": "geglu", "bias": True},
        "norm": {"final": False},
        "head": {"tied": True},
    },
    "relative bias, experts": {
        "positions": {"kind": "relative_bias"},
        "attention": {"window": 4, "global_every": 2, "kind": "mla", "kv_rank": 8},
        "moe": {"experts": 4, "balance": "auxiliary"},
        "mlp": {"kind": "relu"},
        "norm": {"placement": "post"},
    },
}


def with_fields(config: Config, **groups: dict[str, Any]) -> Config:
    """Return the config with other fields: with_fields(config, model={"remat": "full"})."""
    changed = {name: dataclasses.replace(getattr(config, name), **fields) for name, fields in groups.items()}
    return dataclasses.replace(config, **changed)


def packed(rows: int, seed: int = 0, *, padding: bool = False, documents: bool = True) -> dict[str, Any]:
    """Return a batch of tokens, rows cut at random into documents; with `padding` rows end early, the first at once."""
    rng = np.random.default_rng(seed)
    shape = (rows, LENGTH)
    tokens = rng.integers(0, VOCAB, (rows, LENGTH + 1)).astype(np.int32)
    starts = rng.random(shape) < (0.2 if documents else 0.0)
    starts[:, 0] = True
    segments = np.cumsum(starts, axis=1).astype(np.int32)
    place = np.arange(LENGTH, dtype=np.int32)
    positions = place - np.maximum.accumulate(np.where(starts, place, 0), axis=1)
    if padding:
        ends = np.concatenate([[0], rng.integers(1, LENGTH, rows - 1)])
        segments[place >= ends[:, None]] = 0
        positions[place >= ends[:, None]] = 0
    ends_document = np.concatenate([starts[:, 1:], np.zeros((rows, 1), bool)], axis=1)
    weights = ((segments > 0) & ~ends_document).astype(np.float32)
    return {
        "tokens": np.where(segments > 0, tokens[:, :-1], 0).astype(np.int32),
        "targets": np.where(weights > 0, tokens[:, 1:], 0).astype(np.int32),
        "segment_ids": segments,
        "positions": positions.astype(np.int32),
        "weights": weights,
        "target_bytes": weights.astype(np.int32),
    }


@functools.cache
def trainer(config: Config, devices: int = 1) -> Trainer:
    """Return the Trainer of a config over the first devices; it is shared, so that its programs are compiled once."""
    return Trainer(config, make_mesh(config.mesh, jax.devices()[:devices]))


@functools.cache
def definition(config: Config) -> DecoderDefinition:
    """Return the decoder without parameters; it is shared, since it is traced when it is made."""
    return DecoderDefinition(config)


def initial(config: Config, seed: int = 0) -> Params:
    """Return initial parameters; they are not compiled, which for such small models takes longer than running."""
    return definition(config).init(jax.random.key(seed))


def random_params(config: Config, seed: int = 1, std: float = 0.3) -> Params:
    """Return parameters that are nowhere special: normal around 1 for norms, around 0 for the rest."""
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        mean = 1.0 if "norm/scale" in path_of(path) else 0.0
        return jnp.asarray(mean + std * rng.standard_normal(leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, definition(config).abstract())


def by_path(tree: Any) -> dict[str, np.ndarray]:
    """Return {a/b/c: array} of a tree."""
    return {path_of(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def assert_identical(one: Any, other: Any, what: str = "") -> None:
    """Check that two trees are the same bit for bit."""
    a, b = by_path(one), by_path(other)
    assert a.keys() == b.keys(), what
    differing = [path for path in a if a[path].dtype != b[path].dtype or a[path].tobytes() != b[path].tobytes()]
    assert not differing, f"{what}: {differing}"


def distance(one: Any, other: Any) -> float:
    """Return the norm of the difference of two trees over the norm of the second, in float64."""
    a, b = by_path(one), by_path(other)
    assert a.keys() == b.keys()
    square = sum(float(np.sum((a[path].astype(np.float64) - b[path]) ** 2)) for path in a)
    norm = sum(float(np.sum(b[path].astype(np.float64) ** 2)) for path in a)
    return (square / norm) ** 0.5


def relative_error(one: Any, other: Any) -> float:
    """Return the largest difference of two arrays over the largest magnitude of the second."""
    a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
    assert a.shape == b.shape
    return float(np.max(np.abs(a - b)) / np.max(np.abs(b)))
