"""Test probes and geometry of models, of every residual kind and attention, over any mesh, by direct computations."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhc import kinds
from mhc.config import Config, MeshConfig
from mhc.data.windtunnel import Bijection, HiddenMarkov, Task
from mhc.eval.common.checkpoints import Checkpoint
from mhc.eval.common.program import Program
from mhc.eval.windtunnel import depth, geometry
from mhc.files import jsonable
from mhc.model.attention import Attention
from mhc.model.decoder import Decoder, SublayerView
from mhc.sharding import make_mesh, shardings
from tests.small import VOCAB, ZOO, random_params, small

BIJECTION, HMM = Bijection(5), HiddenMarkov(observations=3, states=2, symbols=2)
SEQUENCES = 30
ATTENTION: dict[str, dict[str, Any]] = {
    "grouped": {"attention": {"heads": 4, "kv_heads": 2}, "model": {"dtype": "bfloat16"}},
    "tokenwise": {"attention": {"kind": "tokenwise"}},
    **ZOO,
}


def checkpoint(task: Task, kind: str = "plain", devices: int = 1, **groups: dict[str, Any]) -> Checkpoint:
    """Return a model with random parameters."""
    groups["model"] = {**groups.get("model", {}), "vocab_size": max(VOCAB, task.vocabulary)}
    config: Config = small(kind, **groups, data={"sequence_length": task.length})
    mesh = make_mesh(MeshConfig(data=1, fsdp=devices), jax.devices()[:devices])
    params = random_params(config)
    return Checkpoint(kind, config, (0,), jax.device_put(params, shardings(params, mesh)), mesh)


def check(model: Checkpoint, task: Task) -> None:
    """Check what must hold of any model: shapes, and that a token by itself tells nothing of a bijection's values."""
    found = depth.probe(model, task, SEQUENCES)
    collapsed, streams = found.within["collapsed"].value, found.within["streams"].value
    sublayers = 2 * model.config.model.layers
    assert collapsed.shape == (sublayers + 1, 1, 2) and streams.shape[0] == sublayers + 1
    assert np.isfinite(streams[..., 1]).all() and (streams[..., 1] <= 1).all()
    if task is BIJECTION:
        assert (streams[0, :, 1] <= 0.02).all() and (collapsed[0, :, 1] <= 0.02).all()
    if model.config.residual.kind == "plain":
        np.testing.assert_array_equal(collapsed, streams)
    result = depth.measure(model, task, SEQUENCES)
    assert 0 < len(result.scalars) <= 6 and all(np.isfinite(value) for value in result.scalars.values())
    shape = geometry.look(model, task, SEQUENCES)
    assert len(shape.outputs) == model.config.model.layers
    if model.config.attention.kind == "tokenwise":
        assert shape.keys is None and shape.contrast is None
    else:
        assert shape.keys is not None and shape.contrast is not None
        assert all((cosines >= 0).all() and (cosines <= 1 + 1e-6).all() for cosines in shape.keys.values())
        assert shape.contrast.shape == (model.config.model.layers, model.config.attention.heads)
        assert np.isfinite(shape.contrast).all()


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in ("plain", "mhc") else pytest.mark.product) for kind in kinds.names()],
)
def test_every_residual_kind(kind: str) -> None:
    check(checkpoint(BIJECTION, kind), BIJECTION)


@pytest.mark.product
@pytest.mark.parametrize("name", list(ATTENTION))
def test_every_attention(name: str) -> None:
    check(checkpoint(HMM, "mhc", **ATTENTION[name]), HMM)


def test_a_control_without_context_has_no_belief() -> None:
    """No sublayer knows which values were seen; a leak would show here."""
    model = checkpoint(BIJECTION, "mhc", **ATTENTION["tokenwise"])
    found = depth.probe(model, BIJECTION, 60)
    for view in found.within.values():
        assert (view.value[..., 1] <= 0.02).all()
    result = geometry.measure(model, BIJECTION, SEQUENCES)
    assert result.json["keys"] is None and result.json["alignment"] is None
    assert "has no keys" in result.json["note"]
    assert not [name for name in result.scalars if "key" in name or "alignment" in name]


def test_the_probed_state_is_what_the_head_reads() -> None:
    """It is the last collapsed state, normed, at the supervised places; each place has its own token's embedding."""
    model = checkpoint(HMM, "mhc")
    drawn = HMM.make(0, "validation", range(3))
    places = np.tile(HMM.places.astype(np.int32), (3, 1))
    views = Program(model, depth._views)({"tokens": jnp.asarray(drawn.tokens), "places": jnp.asarray(places)})
    decoder = model.definition.bind(model.params)
    h = decoder.forward(jnp.asarray(drawn.tokens)).h[:, HMM.places]
    np.testing.assert_allclose(decoder.final_norm(views["collapsed"][:, -1, :, 0]), h, rtol=1e-4, atol=1e-5)
    embedded = decoder.residual.expand(decoder.embed(jnp.asarray(drawn.tokens), jnp.float32))[:, HMM.places]
    np.testing.assert_allclose(views["streams"][:, 0], decoder.residual.streams(embedded), rtol=1e-6)
    assert views["streams"].shape == (3, 5, len(HMM.places), decoder.residual.n, 16)


def whole(decoder: Decoder, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return queries and keys as attention has them, keys without positions, and attention's outputs, batch first."""

    def observe(view: SublayerView) -> dict[str, jax.Array]:
        core = view.sublayer.core
        if not isinstance(core, Attention):
            return {}
        x, (context,) = view.sublayer.before(view.u), view.args
        q, k, _ = core.project(x, context.positions, context.frequencies)
        return {"q": q, "k": k, "bare": core.project(x, context.positions, None)[1], "y": view.y}

    found = decoder.forward(batch["tokens"], observe=observe).observed
    return {name: jnp.moveaxis(values, 0, 1) for name, values in found.items()}


@pytest.mark.parametrize("task", [BIJECTION, HMM], ids=["bijection", "hmm"])
def test_the_geometry_against_loops(task: Task) -> None:
    model = checkpoint(task, "plain", attention={"heads": 4, "kv_heads": 2})
    found = geometry.look(model, task, 7)
    drawn = task.make(0, "validation", range(7))
    seen = {
        k: np.asarray(v, np.float64) for k, v in Program(model, whole)({"tokens": jnp.asarray(drawn.tokens)}).items()
    }
    evidence = task.evidence(drawn.tokens)
    assert found.matching is not None and found.others is not None and found.keys is not None
    for layer, head in np.ndindex(2, 4):
        for number, place in enumerate(task.places):
            cosines: dict[bool, list[float]] = {True: [], False: []}
            for row, at in np.ndindex(7, int(place)):
                q, k = seen["q"][row, layer, place, head], seen["k"][row, layer, at, head // 2]
                cosines[bool(evidence[row, number, at])].append(q @ k / np.linalg.norm(q) / np.linalg.norm(k))
            for sort, values in ((True, found.matching), (False, found.others)):
                value = values[layer, head, number]
                if cosines[sort]:
                    assert value == pytest.approx(np.mean(cosines[sort]), abs=1e-5)
                else:
                    assert np.isnan(value)
    for group, ids in task.symbol_ids.items():
        for layer, head in np.ndindex(2, 2):
            keys = [seen["bare"][:, layer, :, head][drawn.tokens == id_].mean(axis=0) for id_ in ids]
            assert found.keys[group][layer, head] == pytest.approx(geometry.off_diagonal(np.array(keys)), abs=1e-5)
    for layer, outputs in enumerate(found.outputs):
        flat = seen["y"][:, layer, task.places].reshape(-1, 16)
        variance = np.linalg.svd(flat - flat.mean(axis=0))[1] ** 2
        assert outputs.first == pytest.approx(variance[0] / variance.sum(), rel=1e-4)


@pytest.mark.product
def test_a_mesh_changes_nothing() -> None:
    """With thirty sequences over four devices, rows of filling do not count."""
    one, four = (checkpoint(BIJECTION, "mhc", devices) for devices in (1, 4))
    for measure in (depth.measure, geometry.measure):
        here, there = (measure(model, BIJECTION, SEQUENCES).scalars for model in (one, four))
        assert here == pytest.approx(there, rel=1e-3, abs=1e-4)


def test_memory_limits_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    model = checkpoint(BIJECTION)
    expected = [measure(model, BIJECTION, 10).scalars for measure in (depth.measure, geometry.measure)]
    for module in (depth, geometry):
        monkeypatch.setattr(module, "_BYTES", 200_000)
    for measure, whole_ in zip((depth.measure, geometry.measure), expected, strict=True):
        assert measure(model, BIJECTION, 10).scalars == pytest.approx(whole_, rel=1e-4, abs=1e-5)


def test_a_model_that_diverged_has_no_scalars() -> None:
    model = checkpoint(BIJECTION)
    model = model._replace(params=jax.tree.map(lambda leaf: leaf * jnp.nan, model.params))
    for measure in (depth.measure, geometry.measure):
        result = measure(model, BIJECTION, 10)
        assert not result.scalars
        json.dumps(jsonable(result.json), allow_nan=False)
