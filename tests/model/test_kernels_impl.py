"""Test ``kernels.impl`` in a decoder: the kernels for TPU compute what XLA's do, and are refused over a mesh."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from mhc.config import Config, MeshConfig
from mhc.errors import UserError
from mhc.model.decoder import Params
from mhc.sharding import make_mesh, tracing_for
from mhc.train.step import loss_parts
from tests.small import definition, distance, packed, random_params, small


def value_and_gradients(config: Config, params: Params, batch: dict[str, Any]) -> tuple[jax.Array, Params]:
    """Return the summed cross-entropy of a batch, and its gradient."""
    return jax.jit(jax.value_and_grad(lambda params: loss_parts(definition(config), params, batch).sums.nll))(params)


@pytest.mark.long  # to trace and compile interpreted kernels
@pytest.mark.parametrize("kind", ["mhc", "hc"])
def test_a_decoder_with_kernels_for_tpu(kind: str) -> None:
    """Scanned and recomputed: the kernels' states, kept and computed again, are those of XLA's kernels."""
    given = {"model": {"layers": 2, "width": 16, "vocab_size": 32, "remat": "full"}}
    ours, usual = small(kind, **given, kernels={"impl": "pallas_tpu"}), small(kind, **given)
    params, batch = random_params(usual), packed(2, padding=True)
    value, gradient = value_and_gradients(ours, params, batch)
    expected, expected_gradient = value_and_gradients(usual, params, batch)
    assert abs(value - expected) <= 1e-5 * abs(expected)
    assert distance(gradient, expected_gradient) <= 1e-4


def test_kernels_for_one_device_are_refused_over_a_mesh() -> None:
    config = small("mhc", kernels={"impl": "pallas_tpu"}, mesh={"data": 2})
    mesh = make_mesh(MeshConfig(data=2), jax.devices()[:2])
    with (
        tracing_for(mesh),
        pytest.raises(UserError, match=r"kernels\.impl: given pallas_tpu on a mesh of 2 devices, allowed: auto, xla"),
    ):
        jax.eval_shape(lambda params: loss_parts(definition(config), params, packed(2)), definition(config).abstract())
