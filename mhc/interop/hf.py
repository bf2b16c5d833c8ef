"""Make decoders of models of Hugging Face, and write decoders as such models."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from mhc import config as configs
from mhc import kinds, sharding
from mhc.config import Config
from mhc.errors import UserError
from mhc.interop import families, tensors
from mhc.interop.families import FAMILIES
from mhc.interop.folder import HfFolder
from mhc.interop.tensors import Layout, Part, Tensor
from mhc.model.decoder import Decoder, DecoderDefinition, Params
from mhc.train import start

log = logging.getLogger(__name__)

_FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclasses.dataclass(frozen=True)
class ImportedFrom:
    """Holds what ``to_hf`` needs to write a decoder as it was read."""

    layout: Layout
    config: str  # the text of config.json


def residual_fields(residual: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of config.residual under which the model computes the source's function, with those given.

    Raises:
      UserError: a field is unknown, or rules that out.
    """
    configs.load_kinds({"residual": residual})
    fields = {"kind": kinds.PLAIN.name, **residual}
    spec = kinds.known().get(str(fields["kind"]))
    fixed = {"collapse"} if spec is not None and fields.get(spec.fixes_collapse) else set()
    for name, value in start.preserving(str(fields["kind"])).items():
        if fields.get(name) is None and name not in fixed:
            fields[name] = value
    start.check_preserving(configs.from_config_dict({"residual": fields}).residual)
    return fields


def from_hf(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], **residual: Any) -> Decoder:
    """Return a decoder that computes what a model of Hugging Face does.

    Args:
      config: the model's config.json: gpt2, llama, mistral, qwen3, bloom, mixtral or deepseek_v3, as published or as
        transformers 5 has it in memory.
      tensors: the model's weights by name, floats, as published or in memory; an ``HfFolder`` reads them one at a time.
      residual: fields of config.residual, by default kind="plain". Another kind starts as the plain residual if it can:
        init="equivalent", collapse="mean".

    Returns:
      The decoder, float32: ``decoder(tokens [B, T]) -> logits [B, T, V]``.

    Raises:
      UserError: an unknown family, an option that this decoder lacks, tensors that do not fit the config (listed by
        name), or a residual that cannot compute the source's function.
    """
    return read(config, tensors, merged(config, {"residual": residual_fields(residual)}))


def read(
    raw: Mapping[str, Any],
    source: Mapping[str, np.ndarray],
    config: Config,
    mesh: Mesh | None = None,
) -> Decoder:
    """Do what ``from_hf`` does, with a config from ``merged`` and the parameters in the shards of a mesh."""
    layout = tensors.layout(families.family_of(raw), raw, source)
    wanted = check_source(config, raw, source, layout)
    _check_tied(config, source, layout)
    definition = DecoderDefinition(config)
    decoder = definition.bind(_parameters(definition, source, wanted, mesh))
    decoder.origin = ImportedFrom(layout, json.dumps(dict(raw)))  # type: ignore[attr-defined]
    return decoder


def merged(raw: Mapping[str, Any], groups: Mapping[str, Mapping[str, Any]]) -> Config:
    """Return the resolved config for a config.json, with further fields.

    Raises:
      UserError: a field changes what the model computes.
    """
    family, theirs = families.read(raw)
    both = {name: {**theirs.get(name, {}), **groups.get(name, {})} for name in {**theirs, **groups}}
    vocab = theirs["model"]["vocab_size"]
    try:
        plain = configs.resolve(configs.from_config_dict(theirs | {"residual": {"kind": kinds.PLAIN.name}}), vocab)
    except UserError as error:
        raise UserError(f"config.json of {family.name}: {error}") from None
    config = configs.resolve(configs.from_config_dict(both), vocab)
    changed = families.differences(config, plain)
    if changed:
        name, (given, source) = next(iter(changed.items()))
        raise UserError(f"{name}: given {given!r}, allowed: {source!r}, as the config.json of {family.name} has it")
    return config


def check_source(
    config: Config, raw: Mapping[str, Any], source: Mapping[str, np.ndarray], layout: Layout
) -> dict[str, Tensor]:
    """Return the plan of a source, checked against names, shapes and dtypes of its tensors. Nothing is read.

    What is left out, or is not of this model at all, may have any dtype.
    """
    wanted = tensors.plan(config, layout)
    where = str(source.path) if isinstance(source, HfFolder) else layout.family
    shapes: dict[str, tuple[int, ...]] = {}
    left_out: list[str] = []
    for name in source:
        if name not in wanted and tensors.ignored(name, config, raw):
            left_out.append(name)
            continue
        if isinstance(source, HfFolder):
            shapes[name] = source.shape(name)
        else:
            shapes[name] = tuple(source[name].shape)
        if name in wanted:
            _check_dtype(source, name, where)
    tensors.check(wanted, shapes, where)
    if left_out:
        log.warning("%s: left out, no part of the function: %s", where, tensors.listed(left_out))
    return wanted


def _check_dtype(source: Mapping[str, np.ndarray], name: str, where: str) -> None:
    if isinstance(source, HfFolder):
        source.check_dtype(name)
    elif str(source[name].dtype).removeprefix("torch.") not in _FLOATS:
        raise UserError(f"{where}: {name} is {source[name].dtype}, allowed: {', '.join(_FLOATS)}")


def _check_tied(config: Config, source: Mapping[str, np.ndarray], layout: Layout) -> None:
    if not (config.head.tied and layout.head):
        return
    embedding = next(name for name in tensors.plan(config, layout))
    if not np.array_equal(source["lm_head.weight"], source[embedding], equal_nan=True):
        raise UserError(f"{layout.family}: tie_word_embeddings is true, but lm_head.weight is not {embedding}")


def _parameters(
    definition: DecoderDefinition, source: Mapping[str, np.ndarray], wanted: Mapping[str, Tensor], mesh: Mesh | None
) -> Params:
    """Return the parameters, made leaf by leaf and shard by shard, with one tensor of the source held at a time."""
    abstract = definition.abstract()
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    layout = jax.tree.map(lambda leaf: device, abstract) if mesh is None else sharding.shardings(abstract, mesh)
    places: dict[str, list[tuple[str, Part]]] = {}
    for tensor in wanted.values():
        for part in tensor.parts:
            if tensor.name != "lm_head.weight" or part.path != "embed/table":
                places.setdefault(part.path, []).append((tensor.name, part))
    fresh = start.fresh(definition, definition.config.seed.init, layout, lambda path: path not in places)

    def leaf(key_path: Any, shape: jax.ShapeDtypeStruct, layout: Any) -> jax.Array:
        path = sharding.path_of(key_path)
        return fresh[path] if path in fresh else _leaf(shape.shape, layout, places[path], source)

    return jax.tree_util.tree_map_with_path(leaf, abstract, layout)


def _leaf(
    shape: tuple[int, ...],
    layout: NamedSharding | jax.sharding.SingleDeviceSharding,
    places: list[tuple[str, Part]],
    source: Mapping[str, np.ndarray],
) -> jax.Array:
    boxes: dict[tuple[tuple[int, int], ...], np.ndarray] = {}  # by their ends along each axis

    def box(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        ends = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        if ends not in boxes:  # copies of a shard share its memory where the device can
            corner, size = tuple(low for low, _ in ends), tuple(high - low for low, high in ends)
            target = aligned(size)
            for name, part in places:
                if tensors.touches(part, corner, size):
                    tensors.fill(target, corner, part, np.asarray(source[name]))
            boxes[ends] = target
        return boxes[ends]

    return jax.make_array_from_callback(shape, layout, box)


def aligned(shape: tuple[int, ...]) -> np.ndarray:
    """Return an uninitialised float32 array that a CPU device can take without a copy."""
    size = 4 * math.prod(shape)
    raw = np.empty(size + 64, np.uint8)
    begin = -raw.ctypes.data % 64
    return raw[begin : begin + size].view(np.float32).reshape(shape)


def load_hf(folder: str | Path, mesh: Mesh | None = None, **residual: Any) -> Decoder:
    """Return the decoder of a folder, read tensor by tensor into the shards of ``mesh`` (None: one device).

    Raises:
      UserError: as ``HfFolder`` and ``from_hf``.
    """
    source = HfFolder(folder)
    return read(source.config, source, merged(source.config, {"residual": residual_fields(residual)}), mesh)


def to_hf(decoder: Decoder) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return (config.json, float32 tensors by name) of a plain decoder, in the layout that it was read in.

    A decoder that was not read has the layout that is published.

    Raises:
      UserError: no family expresses the model; ``mhc.interop.export`` can write it.
    """
    config, _, wanted = describe(decoder)
    params = nnx.to_pure_dict(nnx.state(decoder))
    leaf = leaf_reader(params)
    return config, {name: tensors.compose(tensor, leaf) for name, tensor in wanted.items()}


def describe(decoder: Decoder) -> tuple[dict[str, Any], Layout, dict[str, Tensor]]:
    """Return (config.json, layout, plan) of what ``to_hf`` writes. Raises UserError as it does."""
    family, raw = families.express(decoder.config)
    origin = getattr(decoder, "origin", None)
    if origin is None:
        layout = Layout(family.name, head=not decoder.config.head.tied)
    else:
        layout, raw = origin.layout, json.loads(origin.config)
    return raw, layout, tensors.plan(decoder.config, layout)


def by_path(tree: Any) -> dict[str, Any]:
    """Return {a/b/c: leaf} for a tree of parameters."""
    return {sharding.path_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def leaf_reader(params: Params) -> Any:
    """Return a function that gives the parameter at a path as a numpy array.

    The last array is kept, since a plan asks for each many times in a row.
    """
    leaves = by_path(params)
    held: dict[str, np.ndarray] = {}

    def leaf(path: str) -> np.ndarray:
        if path not in held:
            if jax.default_backend() != "cpu":
                held.clear()
            held[path] = np.asarray(leaves[path])
        return held[path]

    return leaf


__all__ = ["FAMILIES", "ImportedFrom", "from_hf", "load_hf", "to_hf"]
