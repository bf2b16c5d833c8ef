"""Measure the maps of a published model: static maps of its hyper-connections, and what depends on the token."""

from __future__ import annotations

from typing import Any

import numpy as np

from mhc.eval.mappings.maps import Dynamic, Mappings, with_products


def measure_published(folder: str) -> Mappings:
    """Return the static maps of a deepseek_v4 folder, with the size of what depends on the token.

    The tensors are read one sublayer at a time.

    Raises:
      UserError: as ``mhc.interop.connections.ConnectionsFolder``.
    """
    from mhc.interop.connections import ConnectionsFolder
    from mhc.monitor import probes

    source = ConnectionsFolder(folder)
    rows = np.array([source.n, source.n, source.n**2])
    bases, scales, norms = [], [], []
    for k in range(len(source)):
        weights = source.weights(k)
        bases.append(weights.base)
        scales.append(weights.scale)
        squares = np.sum(np.square(weights.fn, dtype=np.float64), axis=1)
        norms.append(np.sqrt([part.sum() for part in np.split(squares, np.cumsum(rows)[:-1])]))
    scale, norm = np.array(scales, np.float64), np.array(norms)
    static = source.static_maps(np.array(bases))
    maps = {**with_products(static.res), "pre": static.pre, "post": static.post}
    arrays: dict[str, Any] = {name: np.asarray(value, np.float64) for name, value in maps.items()}
    return Mappings(
        str(folder).rstrip("/") or "/",
        "mhc",
        **arrays,
        probe={name: np.asarray(value) for name, value in probes.static_measures(static.res).items()},
        dynamic=Dynamic(scale, norm, np.abs(scale) * norm / np.sqrt(rows)),
    )


def streams_used(maps: Mappings) -> dict[str, np.ndarray]:
    """Return how many streams, from 1 to N, each sublayer uses, [S] each.

    - read, written: the participation ratio (Σ w)² / Σ w² of the weights H_pre, and of H_post.
    - told_apart, left_at_end: that of the squared singular values of the product H_k ... H_0, and of H_{S-1} ... H_k:
      into how many independent directions it takes N independent streams.
    """

    def ratio(weights: np.ndarray) -> np.ndarray:
        return np.square(weights.sum(axis=-1)) / np.maximum(np.square(weights).sum(axis=-1), 1e-300)

    def directions(products: np.ndarray) -> np.ndarray:
        return ratio(np.square(np.linalg.svd(products, compute_uv=False)))

    return {
        "read": ratio(maps.pre),
        "written": ratio(maps.post),
        "told_apart": directions(maps.from_start),
        "left_at_end": directions(maps.to_end),
    }
