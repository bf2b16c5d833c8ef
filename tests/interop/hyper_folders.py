"""Write small folders of hyper-connection tensors, and compute their maps in float64 by numpy alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

LAYOUTS = {
    "hf": ("model.layers.{}.{}_hc.{}", "model.hc_head.hc_{}", "model.layers.{}.self_attn.q_proj.weight"),
    "published": ("layers.{}.hc_{}_{}", "hc_head_{}", "layers.{}.attn.wq.weight"),
    "bare": ("layers.{}.{}_hc.{}", "hc_head.hc_{}", "layers.{}.self_attn.q_proj.weight"),
    "mixed": ("model.layers.{}.hc_{}_{}", "model.hc_head_{}", "model.layers.{}.attn.wq.weight"),
}


class Stored(NamedTuple):
    """Holds a tensor as a file has it."""

    dtype: str
    shape: tuple[int, ...]
    raw: bytes


def stored(array: np.ndarray, dtype: str = "F32") -> Stored:
    """Return an array in a dtype of safetensors; BF16 by cutting off the lower half."""
    if dtype == "BF16":
        raw = (np.asarray(array, "<f4").view("<u4") >> 16).astype("<u2")
    else:
        raw = np.asarray(array, {"F32": "<f4", "F16": "<f2", "F64": "<f8"}[dtype])
    return Stored(dtype, array.shape, raw.tobytes())


def value(tensor: Stored) -> np.ndarray:
    """Return a stored tensor in float64."""
    if tensor.dtype == "BF16":
        upper = np.frombuffer(tensor.raw, "<u2").astype("<u4") << 16
        return upper.view("<f4").astype(np.float64).reshape(tensor.shape)
    flat = np.frombuffer(tensor.raw, {"F32": "<f4", "F16": "<f2", "F64": "<f8"}[tensor.dtype])
    return flat.astype(np.float64).reshape(tensor.shape)


def random_tensors(
    seed: int, layout: str, *, layers: int, n: int, width: int, dtype: str = "F32", head: bool = True
) -> dict[str, Stored]:
    """Return random hyper-connection tensors of a model by name, with an 8-bit weight beside them in every layer."""
    rng = np.random.default_rng(seed)
    rows, (in_layer, at_end, other) = 2 * n + n * n, LAYOUTS[layout]
    shapes = {"fn": (rows, n * width), "base": (rows,), "scale": (3,)}
    tensors = {}
    for layer in range(layers):
        tensors[other.format(layer)] = Stored("F8_E4M3", (3, 5), bytes(range(15)))
        for sublayer in ("attn", "ffn"):
            for name, shape in shapes.items():
                size = (n * width) ** -0.5 if name == "fn" else 1.5
                tensors[in_layer.format(layer, sublayer, name)] = stored(size * rng.standard_normal(shape), dtype)
    if head:
        for name, shape in {"fn": (n, n * width), "base": (n,), "scale": (1,)}.items():
            tensors[at_end.format(name)] = stored(0.5 * rng.standard_normal(shape), dtype)
    return tensors


def config(layers: int, n: int, width: int, **fields: Any) -> dict[str, Any]:
    """Return a config.json."""
    return {
        "model_type": "deepseek_v4",
        "num_hidden_layers": layers,
        "hidden_size": width,
        "hc_mult": n,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        **fields,
    }


def write_file(path: Path, tensors: Mapping[str, Stored]) -> None:
    """Write a file of tensors."""
    header, at = {}, 0
    for name, tensor in tensors.items():
        end = at + len(tensor.raw)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.raw)


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Stored], shards: int = 1) -> Path:
    """Write config.json, and one file without an index, or tensors dealt in turn to shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    if shards == 1:
        write_file(folder / "model.safetensors", tensors)
        return folder
    files = [f"model-{number:05d}-of-{shards:05d}.safetensors" for number in range(1, shards + 1)]
    where = {name: files[number % shards] for number, name in enumerate(tensors)}
    for file in files:
        write_file(folder / file, {name: tensor for name, tensor in tensors.items() if where[name] == file})
    write_index(folder, where)
    return folder


def write_index(folder: Path, where: Mapping[str, str]) -> None:
    """Write the index of a folder of shards."""
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": dict(where)}))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def _normed(x: np.ndarray, eps: float) -> np.ndarray:
    flat = x.reshape(*x.shape[:-2], -1)
    return flat / np.sqrt(np.mean(flat**2, axis=-1, keepdims=True) + eps)


def maps_of(
    x: np.ndarray | None, weights: Sequence[np.ndarray], *, iters: int = 20, eps: float = 1e-6, rms_eps: float = 1e-6
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (pre, post, H_res) of streams x [..., N, D] and (fn, base, scale); x None: of base alone."""
    fn, base, scale = weights
    n = round(np.sqrt(len(base) + 1)) - 1
    raw = np.zeros(len(base)) if x is None else _normed(x, rms_eps) @ fn.T
    logits = raw * np.concatenate([np.full(n, scale[0]), np.full(n, scale[1]), np.full(n * n, scale[2])]) + base
    c = logits[..., 2 * n :].reshape(*logits.shape[:-1], n, n)
    c = np.exp(c - c.max(axis=-1, keepdims=True))
    c = c / c.sum(axis=-1, keepdims=True) + eps
    c = c / (c.sum(axis=-2, keepdims=True) + eps)
    for _ in range(iters - 1):
        c = c / (c.sum(axis=-1, keepdims=True) + eps)
        c = c / (c.sum(axis=-2, keepdims=True) + eps)
    return _sigmoid(logits[..., :n]) + eps, 2 * _sigmoid(logits[..., n : 2 * n]), np.swapaxes(c, -1, -2)


def collapsed(x: np.ndarray, weights: Sequence[np.ndarray], *, eps: float = 1e-6, rms_eps: float = 1e-6) -> np.ndarray:
    """Return the learned collapse [..., D] of streams x [..., N, D] under (fn, base, scale)."""
    fn, base, scale = weights
    read = _sigmoid(scale[0] * (_normed(x, rms_eps) @ fn.T) + base) + eps
    return np.einsum("...n,...nd->...d", read, x)
