"""Test the chunked cross-entropy: equal to the whole one, with z-loss and softcap, on one device and over a mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhc.config import Config
from mhc.model.decoder import DecoderDefinition
from mhc.sharding import make_mesh, tracing_for
from mhc.train.loss import HELD_LOGITS, LossSums, chunk_length, cross_entropy
from tests.small import distance, small

ROWS, LENGTH, V = 8, 16, 33  # 33 is divided by no mesh axis

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied, softcap, z-loss": {"tied": True, "softcap": 3.0, "z_loss": 0.1},
}


def config_of(head: dict[str, Any], **groups: Any) -> Config:
    return small(head=head, model={"layers": 1, "width": 16, "vocab_size": V}, **groups)


SOURCES = np.eye(3, dtype=np.float32)[np.arange(ROWS) % 3]  # of each row


def inputs() -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    h = jnp.asarray(rng.standard_normal((ROWS, LENGTH, 16)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, V, (ROWS, LENGTH)), jnp.int32)
    weights = jnp.asarray(rng.random((ROWS, LENGTH)) < 0.7, jnp.float32)
    return h, targets, weights


def sums_and_gradients(config: Config, mesh: Any = None) -> tuple[LossSums, Any]:
    definition, (h, targets, weights) = DecoderDefinition(config), inputs()
    params = definition.init(jax.random.key(0))
    params = jax.tree.map(lambda leaf: 10.0 * leaf, {n: params[n] for n in ("embed", "head") if n in params}) | {
        name: leaf for name, leaf in params.items() if name not in ("embed", "head")
    }

    def objective(h: jax.Array, params: Any) -> tuple[jax.Array, LossSums]:
        with tracing_for(mesh):
            sums = cross_entropy(definition.bind(params), h, targets, weights, jnp.asarray(SOURCES))
        return sums.objective / jnp.sum(weights), sums

    (_, sums), grads = jax.jit(jax.value_and_grad(objective, argnums=(0, 1), has_aux=True))(h, params)
    return sums, (grads[0], {name: grads[1][name] for name in ("embed", "head") if name in params})


def assert_equal(one: tuple[LossSums, Any], other: tuple[LossSums, Any]) -> None:
    for name, a, b in zip(LossSums._fields, one[0], other[0], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, err_msg=name)
    assert distance(one[1], other[1]) <= 1e-6


@pytest.mark.parametrize("head", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("chunk", [1, 4])
def test_chunks_change_nothing(head, chunk):
    """Values and gradients, by h and by the head, agree to 1e-6 of the largest."""
    assert_equal(sums_and_gradients(config_of({**head, "chunk": chunk})), sums_and_gradients(config_of(head)))


@pytest.mark.parametrize("head", OPTIONS.values(), ids=OPTIONS)
def test_a_mesh_changes_nothing(head):
    """Rows are split over data and fsdp, and tensor does not divide the vocabulary."""
    config = config_of({**head, "chunk": 4}, mesh={"fsdp": 2, "tensor": 2})
    mesh = make_mesh(config.mesh, jax.devices()[:8])
    assert_equal(sums_and_gradients(config, mesh), sums_and_gradients(config_of(head)))


def test_the_whole_loss_by_its_definition():
    """In float64 it equals the sums of log_z - logit, of log_z and of its square over the weighted targets."""
    config = config_of({"z_loss": 0.5})
    h, targets, weights = inputs()
    params = DecoderDefinition(config).init(jax.random.key(0))
    logits = np.asarray(h, np.float64) @ np.asarray(10.0 * params["head"]["kernel"], np.float64)
    log_z = np.log(np.exp(logits).sum(axis=-1))
    w = np.asarray(weights, np.float64)
    nll = np.sum((log_z - np.take_along_axis(logits, np.asarray(targets)[..., None], -1)[..., 0]) * w)
    sums, _ = sums_and_gradients(config)
    assert float(sums.nll) == pytest.approx(nll, rel=1e-6)
    assert float(sums.objective) == pytest.approx(nll + 0.5 * np.sum(log_z**2 * w), rel=1e-6)
    assert float(sums.logit_max) == pytest.approx(logits[w > 0].max(), rel=1e-6)
    each = (log_z - np.take_along_axis(logits, np.asarray(targets)[..., None], -1)[..., 0]) * w
    np.testing.assert_allclose(sums.by_source, each.sum(axis=1) @ np.asarray(SOURCES), rtol=1e-6)


def test_the_chunk_keeps_to_what_a_device_may_hold():
    config = config_of({}, data={"sequence_length": 4096})
    for rows in (1, 64, 10**6):
        chunk = chunk_length(config, rows, 4096)
        assert 4096 % chunk == 0 and (chunk == 1 or rows * chunk * V <= HELD_LOGITS)
    assert chunk_length(config, 1, 4096) == 4096
    assert chunk_length(config_of({"chunk": 100}), 1, 4096) == 64  # the divisor below


def test_the_logits_of_a_batch_are_never_held():
    """The temporaries of the compiled gradient are under a tenth of the full logits' bytes."""
    config = small(
        head={"chunk": 8}, model={"layers": 1, "width": 16, "vocab_size": 8192}, data={"sequence_length": 256}
    )
    definition = DecoderDefinition(config)
    abstract = definition.abstract()

    def objective(h: jax.Array, params: Any, targets: jax.Array, weights: jax.Array) -> jax.Array:
        return cross_entropy(definition.bind(params), h, targets, weights).objective

    shapes = [jax.ShapeDtypeStruct((8, 256, *more), dtype) for more, dtype in (((16,), "float32"), ((), "int32"))]
    weights = jax.ShapeDtypeStruct((8, 256), "float32")
    compiled = jax.jit(jax.grad(objective, argnums=(0, 1))).lower(shapes[0], abstract, shapes[1], weights).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 8 * 256 * 8192 * 4 / 10
