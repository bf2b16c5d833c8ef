"""Test public models: their logits, and their tensors back bit for bit."""

from __future__ import annotations

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mhc import interop, kinds
from mhc.errors import UserError
from mhc.interop import HfFolder
from tests.interop.models import GOLDEN, golden
from tests.small import relative_error

IN_MEMORY = sorted(path.stem.removeprefix("hf_") for path in GOLDEN.glob("hf_*.npz"))
PUBLISHED = sorted(path.name for path in (GOLDEN / "hf_published").iterdir())


def test_all_golden_models_are_here() -> None:
    assert (len(IN_MEMORY), len(PUBLISHED)) == (12, 6)


@pytest.mark.parametrize("name", IN_MEMORY)
def test_a_model_in_memory(name: str) -> None:
    config, weights, tokens, logits = golden(name)
    decoder = interop.from_hf(config, weights)
    assert relative_error(decoder(tokens), logits) < 1e-4
    written, tensors = interop.to_hf(decoder)
    assert written == config
    assert tensors.keys() == weights.keys()
    for tensor, weight in weights.items():
        np.testing.assert_array_equal(tensors[tensor], weight.astype(np.float32), strict=True)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_folder(name: str) -> None:
    folder = GOLDEN / "hf_published" / name
    decoder = interop.load_hf(folder)
    with np.load(folder / "expected.npz") as expected:
        assert relative_error(decoder(jnp.asarray(expected["tokens"])), expected["logits"]) < 1e-4
    source = HfFolder(folder)
    written, tensors = interop.to_hf(decoder)
    assert written == json.loads((folder / "config.json").read_text())
    assert tensors.keys() == source.keys()
    for tensor, weight in source.items():
        np.testing.assert_array_equal(tensors[tensor], weight, strict=True)


RESIDUALS: list[dict[str, Any]] = [
    {"kind": "mhc", "sinkhorn": "deepseek", "n": 2},
    {"kind": "mhc", "n": 1},
    {"kind": "mhc_lite", "n": 3},
    {"kind": "kromhc"},
    {"kind": "identity"},
    {"kind": "go_mhc"},
    {"kind": "tbp_mhc"},
    {"kind": "shc"},
    {"kind": "iso"},
    {"kind": "ortho"},
    {"kind": "circulant"},
    {"kind": "hc", "dynamic": False, "n": 2},
    {"kind": "frac", "n": 4},
    {"kind": "attn_res", "block": 2},
    {"kind": "denseformer"},
    {"kind": "laurel"},
]
FEW: list[dict[str, Any]] = [{"kind": "mhc", "iters": 2}, {"kind": "hc"}]


@pytest.mark.parametrize(
    "residual",
    [*FEW, *(pytest.param(residual, marks=pytest.mark.product) for residual in RESIDUALS)],
    ids=lambda residual: "-".join(map(str, residual.values())),
)
def test_under_another_residual_it_is_the_same_function(residual: dict[str, Any]) -> None:
    config, weights, tokens, logits = golden("llama_tied_mqa")
    decoder = interop.from_hf(config, weights, **residual)
    assert decoder.config.residual.kind == residual["kind"]
    assert relative_error(decoder(tokens[:, :12]), logits[:, :12]) < 1e-4


def test_every_residual_of_this_project_was_tried() -> None:
    refused = {name for name, kind in kinds.known().items() if kind.own_norms}
    assert {"plain", *(residual["kind"] for residual in FEW + RESIDUALS)} == set(kinds.names()) - refused
    config, weights, _, _ = golden("llama_tied_mqa")
    for kind in refused:
        with pytest.raises(UserError, match=rf"residual\.kind: given '{kind}', allowed: .*: it has norms of its own"):
            interop.from_hf(config, weights, kind=kind)
