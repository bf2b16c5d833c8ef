"""Test probes: gains and marginal errors against numpy products of the maps, over the tokens that are not padding."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhc.config import Config
from mhc.model.decoder import DecoderDefinition
from mhc.monitor import probes
from mhc.monitor.probes import BATCH_FIELDS, compile_probe
from mhc.sharding import make_mesh, put_batch
from mhc.train.step import Trainer
from tests.small import VOCAB, initial, packed, random_params, relative_error, small

SUBLAYERS = 4


def batch(seed: int = 0) -> dict[str, np.ndarray]:
    made = packed(4, seed, padding=True)
    return {name: made[name] for name in BATCH_FIELDS}


@functools.cache
def probe(config: Config) -> Any:
    return compile_probe(DecoderDefinition(config))


@functools.cache
def mixing(config: Config) -> Any:
    """Return H_res of every sublayer and token [S, B, T, N, N] for (params, batch)."""
    definition = DecoderDefinition(config)

    def run(params: Any, batch: Any) -> jax.Array:
        def observe(view: Any) -> dict[str, jax.Array]:
            return {"res": view.connection.maps(view.context).res}

        decoder = definition.bind(params)
        return decoder.hidden(batch["tokens"], batch["segment_ids"], batch["positions"], observe)[1]["res"]

    return jax.jit(run)


def gains_of(res: np.ndarray) -> dict[str, np.ndarray]:
    """Return {forward, backward}_{single, composite} [S, tokens] of maps [S, tokens, N, N], float64, by definition."""

    def forward(h: np.ndarray) -> np.ndarray:
        return np.abs(h.sum(axis=-1)).max(axis=-1)

    def backward(h: np.ndarray) -> np.ndarray:
        return np.abs(h.sum(axis=-2)).max(axis=-1)

    sublayers = len(res)
    up_to = [functools.reduce(np.matmul, res[k::-1]) for k in range(sublayers)]  # H_k ... H_0
    after = [functools.reduce(np.matmul, res[: k - 1 if k else None : -1]) for k in range(sublayers)]  # H_{S-1} ... H_k
    return {
        "forward_single": forward(res),
        "backward_single": backward(res),
        "forward_composite": np.stack([forward(h) for h in up_to]),
        "backward_composite": np.stack([backward(h) for h in after]),
    }


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_plain_has_the_gains_of_its_scale(scale):
    config = small("plain", residual={"scale": scale})
    measured = probe(config)(initial(config), batch())
    for direction in ("forward", "backward"):
        for over in ("mean", "max"):
            np.testing.assert_allclose(measured[f"gain/{direction}_single_{over}"], scale, rtol=1e-6)
            powers = scale ** np.arange(1, SUBLAYERS + 1)
            composite = measured[f"gain/{direction}_composite_{over}"]
            np.testing.assert_allclose(composite, powers if direction == "forward" else powers[::-1], rtol=1e-6)
    if scale == 1.0:
        assert all(np.all(np.asarray(measured[key]) == 1.0) for key in measured if key.startswith("gain/"))
        assert all(np.all(np.asarray(measured[key]) == 0.0) for key in measured if key.startswith("ds_error/"))


@pytest.fixture(scope="module")
def measured() -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return (probe of an hc model whose maps are far from the identity, its maps [S, valid tokens, N, N])."""
    config = small("hc")
    params, seen = random_params(config), batch()
    values = {name: np.asarray(value) for name, value in probe(config)(params, seen).items()}
    res = np.asarray(mixing(config)(params, seen), np.float64)
    return values, res[:, seen["segment_ids"] > 0]


def test_gains_are_those_of_the_products_of_the_maps(measured):
    values, res = measured
    for name, expected in gains_of(res).items():
        assert np.ptp(expected) > 0.1
        assert relative_error(values[f"gain/{name}_mean"], expected.mean(axis=1)) <= 1e-5, name
        assert relative_error(values[f"gain/{name}_max"], expected.max(axis=1)) <= 1e-5, name


def test_marginal_errors(measured):
    values, res = measured
    for name, axis in (("rows", -1), ("columns", -2)):
        expected = np.abs(res.sum(axis=axis) - 1).max(axis=(1, 2))
        assert relative_error(values[f"ds_error/{name}"], expected) <= 1e-5, name


def test_every_measure_is_finite_and_has_a_value_a_sublayer_or_block(measured):
    values, _ = measured
    for name, value in values.items():
        assert np.all(np.isfinite(value)), name
        assert value.dtype == np.float32, name
        if name.startswith(("gain/", "ds_error/")):
            assert value.shape == (SUBLAYERS,), name
        assert value.shape[0] in (SUBLAYERS, SUBLAYERS // 2), name


def test_padding_counts_nowhere():
    """Other tokens in the padding change no measure."""
    config = small("hc")
    params, seen = random_params(config), batch()
    padding = seen["segment_ids"] == 0
    assert padding.any()
    other = {
        **seen,
        "tokens": np.where(padding, 5, seen["tokens"]),
        "positions": np.where(padding, 3, seen["positions"]),
    }
    one, two = probe(config)(params, seen), probe(config)(params, other)
    for name in one:
        np.testing.assert_allclose(one[name], two[name], rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("preset", ["paper", "deepseek"])
def test_sinkhorn_leaves_its_error_in_the_columns(preset):
    """`paper` normalises rows last; `deepseek` columns, and transposes. Either way the forward gain is 1."""
    config = small("mhc", residual={"sinkhorn": preset})
    res = np.asarray(mixing(config)(random_params(config, std=1.0), batch()))
    rows, columns = (np.abs(res.sum(axis=axis) - 1).max() for axis in (-1, -2))
    assert rows <= 1e-5 and columns > 1e-3


@pytest.mark.long
def test_a_probe_takes_no_more_than_three_steps():
    """Medians, taken by turns, are compared at width 256 and depth 12.

    The step has no more rows than the probe. By default it has eight times as many, and takes longer still.
    """
    fields: dict[str, dict[str, Any]] = {
        "model": {"layers": 12, "width": 256},
        "attention": {"heads": 4},
        "mlp": {"width": None},
    }
    batches: dict[str, dict[str, Any]] = {
        "data": {"sequence_length": 256},
        "train": {"batch_size": 4},
        "monitor": {"probe_every": 100},
    }
    config = small("mhc", **fields, **batches)
    assert Config().monitor.probe_sequences == 4 <= Config().train.batch_size
    made = Trainer(config, make_mesh(config.mesh, jax.devices()[:1]))
    rng = np.random.default_rng(0)
    rows = {name: np.ones((4, 256), np.int32) for name in ("segment_ids", "target_bytes")}
    rows |= {name: rng.integers(0, VOCAB, (4, 256)).astype(np.int32) for name in ("tokens", "targets")}
    rows |= {"positions": np.tile(np.arange(256, dtype=np.int32), (4, 1)), "weights": np.ones((4, 256), np.float32)}
    probed, run = compile_probe(made.definition, made.mesh), {name: rows[name] for name in BATCH_FIELDS}
    state = made.init(0)
    seconds: dict[str, list[float]] = {"step": [], "probe": []}
    for _ in range(6):
        began = time.perf_counter()
        state, metrics = made.step(state, put_batch(rows, made.mesh))
        jax.block_until_ready((state, metrics))
        between = time.perf_counter()
        jax.device_get(probed(state.params, run))
        for name, took in (("step", between - began), ("probe", time.perf_counter() - between)):
            seconds[name].append(took)
    step, probe_ = (float(np.median(seconds[name][1:])) for name in ("step", "probe"))  # the first ones compile
    assert probe_ <= 3 * step, f"{probe_:.3f} s against {step:.3f} s"


@pytest.mark.parametrize("kind", ["iso", "shc", "circulant"])
def test_singular_values_and_signs_are_those_of_the_golden_products(kind: str) -> None:
    """A stack has golden maps and singular values; an isometry keeps the largest and the smallest at 1."""
    with np.load(Path(__file__).parents[1] / "golden" / f"stack_{kind}.npz") as golden:
        res, singular = golden["n4/res"][:, :, None], golden["n4/composite_singular"]
    counted = probes._Tokens(jnp.ones(res.shape[1:3], jnp.int32))
    out = jax.jit(lambda res: probes.map_measures(res, counted))(jnp.asarray(res, jnp.float32))
    for name, expected in {
        "gain/composite_norm_mean": singular[..., 0].mean(-1),
        "gain/composite_norm_max": singular[..., 0].max(-1),
        "gain/composite_smallest_mean": singular[..., -1].mean(-1),
        "gain/composite_smallest_min": singular[..., -1].min(-1),
        "mix/negative": (np.maximum(-res, 0).sum((-2, -1)) / np.abs(res).sum((-2, -1))).mean((1, 2)),
    }.items():
        np.testing.assert_allclose(out[name], expected, rtol=0, atol=2e-5, err_msg=name)
    if kind == "iso":
        assert np.abs(np.asarray(out["gain/composite_smallest_min"]) - 1).max() <= 1e-4
    assert (np.asarray(out["mix/negative"]) > 0).all() == (kind != "circulant")
