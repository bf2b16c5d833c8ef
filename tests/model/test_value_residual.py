"""Test the value residual: its values by hand, decoding, devices, resuming, exports, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mhc.config import Config, from_config_dict
from mhc.errors import UserError
from mhc.interop import families
from mhc.model.decoder import Decoder
from mhc.model.parameters import Parameter, parameter
from mhc.monitor import probes
from mhc.train import start
from mhc.train.step import Trainer, TrainState
from tests.interop.test_export import exported, loaded
from tests.small import (
    VOCAB,
    assert_identical,
    by_path,
    definition,
    initial,
    packed,
    random_params,
    relative_error,
    small,
    trainer,
)

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (3, 9)))
LAM = "blocks/attention/core/links/first_values/lam"


def with_values(kind: str = "plain", **groups: dict[str, Any]) -> Config:
    residual = {"kind": kind, "value_residual": True, **groups.pop("residual", {})}
    return small(kind, **{"model": {"layers": 3}, "residual": residual, **groups})


def by_hand(decoder: Decoder) -> jax.Array:
    """Return the hidden states of a plain model without positions, block by block, as the paper writes them."""
    state: Any = decoder.embed_tokens(TOKENS, jnp.broadcast_to(jnp.arange(9), TOKENS.shape))
    first, mask = None, jnp.tril(jnp.ones((9, 9), bool))[None, None]
    graph, stacked = nnx.split(decoder.blocks)
    for layer in range(decoder.config.model.layers):
        block = nnx.merge(graph, jax.tree.map(lambda leaf, layer=layer: leaf[layer], stacked))
        core: Any = block.heads
        q, k, v = core.project(block.attention.before(state), jnp.broadcast_to(jnp.arange(9), TOKENS.shape), None)
        lam = core.links["first_values"].lam[...]
        first = v if first is None else first
        v = v if layer == 0 else lam[0] * v + lam[1] * first
        scores = jnp.einsum("bthk,buhk->bhtu", q, k) * core.scale
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
        state = state + core.join(jnp.einsum("bhtu,buhk->bthk", weights, v))
        state = state + block.mlp(state)
    return decoder.final_norm(state)


def test_values_are_mixed_as_the_paper_says() -> None:
    config = with_values(positions={"kind": "none"})
    decoder = definition(config).bind(random_params(config))
    assert relative_error(decoder.forward(TOKENS).h, by_hand(decoder)) <= 1e-5


@pytest.mark.parametrize("kind", ["plain", pytest.param("mhc", marks=pytest.mark.product)])
def test_equivalent_starts_as_the_model_without_it(kind: str) -> None:
    """The network is bit for bit the same function but for rounding; ``home`` is not."""
    preset = {} if kind == "plain" else {"init": "equivalent"}
    without = small(kind, model={"layers": 3}, residual={"kind": kind, **preset})
    h = {
        name: definition(config).bind(initial(config)).forward(TOKENS).h
        for name, config in {
            "without": without,
            "equivalent": with_values(kind, residual={**preset, "value_init": "equivalent"}),
            "home": with_values(kind, residual={**preset, "value_init": "home"}),
        }.items()
    }
    assert relative_error(h["equivalent"], h["without"]) <= 2e-5
    assert relative_error(h["home"], h["without"]) > 1e-3
    assert with_values("mhc", residual={"init": "equivalent"}).residual.starts_values == "equivalent"
    assert with_values("mhc").residual.starts_values == with_values().residual.starts_values == "home"


@pytest.mark.parametrize(
    ("kind", "groups"),
    [
        ("plain", {"attention": {"heads": 4, "kv_heads": 2, "window": 4, "global_every": 2}}),
        ("attn_res", {"residual": {"block": 2}}),
        pytest.param("mhc", {}, marks=pytest.mark.product),
        pytest.param("gated_residual", {}, marks=pytest.mark.product),
        pytest.param("plain", {"moe": {"experts": 4, "dense_layers": 1}}, marks=pytest.mark.product),
    ],
)
def test_a_cache_gives_what_whole_rows_give(kind: str, groups: dict[str, dict[str, Any]]) -> None:
    """Rows of several lengths, padded in every call; the cache holds the mixed values."""
    config = with_values(kind, **groups)
    params, lengths = random_params(config), np.array([9, 4, 6])
    valid = np.arange(9)[None] < lengths[:, None]

    def both(params: Any) -> tuple[jax.Array, jax.Array]:
        decoder = definition(config).bind(params)
        cache, parts = decoder.empty_cache(3, 9), []
        for begin, end in ((0, 4), (4, 5), (5, 9)):
            logits, cache = decoder.extend(TOKENS[:, begin:end], cache, jnp.asarray(valid[:, begin:end]))
            parts.append(logits)
        return decoder(TOKENS), jnp.concatenate(parts, axis=1)

    whole, pieces = (np.asarray(leaf) for leaf in jax.jit(both)(params))
    assert relative_error(pieces[valid], whole[valid]) <= 1e-5


def state_of(made: Trainer) -> TrainState:
    """Return a fresh state in its layout."""
    return made.begin(jax.tree.map(jnp.array, initial(made.config)))


@pytest.mark.product
@pytest.mark.parametrize("kind", ["plain", "attn_res"])
def test_eight_devices_give_what_one_gives(kind: str) -> None:
    sgd = {"optimizer": {"name": "sgd", "lr": 0.1, "clip_norm": None, "weight_decay": 0.0}}
    batch = packed(8, padding=True)
    one, many = (
        trainer(with_values(kind, **sgd, mesh=mesh), devices)
        for mesh, devices in (({}, 1), ({"data": 2, "fsdp": 2, "tensor": 2}, 8))
    )
    (a, seen), (b, other) = (made.step(state_of(made), batch) for made in (one, many))
    assert relative_error(other["loss"], seen["loss"]) <= 1e-5
    before, expected = by_path(initial(one.config)), by_path(a.params)
    for path, leaf in by_path(b.params).items():
        moved = np.max(np.abs(expected[path] - before[path]))
        assert np.max(np.abs(leaf - expected[path])) <= 1e-4 * moved + 2e-6 * np.max(np.abs(before[path])) + 1e-9, path


def test_its_parameter_learns_in_every_block_but_the_first_and_is_probed() -> None:
    config = with_values()
    params = initial(config)
    batch = packed(2)

    def loss(params: Any) -> jax.Array:
        h = definition(config).bind(params).forward(batch["tokens"], batch["segment_ids"], batch["positions"]).h
        return jnp.mean(jnp.square(h - 1.0))

    lam = by_path(jax.jit(jax.grad(loss))(params))[LAM]
    assert not lam[0].any() and (lam[1:] != 0).all()
    assert parameter(LAM) == Parameter(("norm",), "attention", False, None)
    measured = probes.compile_probe(definition(config))(params, {name: batch[name] for name in probes.BATCH_FIELDS})
    np.testing.assert_array_equal(measured["attention/first_values_lam"], np.full((3, 2), 0.5))


def test_an_export_computes_the_same(tmp_path: Path) -> None:
    config = with_values("hc", attention={"heads": 4, "kv_heads": 2})
    params = random_params(config)
    logits = definition(config).bind(params)(TOKENS)
    assert relative_error(loaded(exported(config, params, tmp_path))(np.asarray(TOKENS)), logits) < 1e-5


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({"attention": {"kind": "mla", "kv_rank": 8}}, "False with attention.kind=mla: its cache holds latents"),
        ({"attention": {"kind": "tokenwise"}}, "False with attention.kind=tokenwise"),
        ({"residual": {"value_residual": 1}}, "given 1, allowed: True or False"),
        ({"residual": {"value_residual": False, "value_init": "home"}}, r"residual\.value_init: given 'home'"),
        ({"residual": {"value_init": "half"}}, r"residual\.value_init: given 'half', allowed: .*equivalent"),
    ],
)
def test_what_it_cannot_go_with_is_refused(groups: dict[str, dict[str, Any]], words: str) -> None:
    residual = {"kind": "mhc", "value_residual": True, **groups.get("residual", {})}
    with pytest.raises(UserError, match=words) as caught:
        from_config_dict({**groups, "residual": residual})
    assert "residual.value_" in str(caught.value)


def test_a_plain_model_can_go_on_with_it_where_it_mixes_nothing_in() -> None:
    start.check_preserving(with_values(residual={"value_init": "equivalent"}).residual)
    with pytest.raises(UserError, match=r"residual\.value_init: given 'home', allowed: 'equivalent'"):
        start.check_preserving(with_values().residual)
    assert not with_values().residual.is_plain
    with pytest.raises(UserError, match=r"residual\.value_residual: no family of Hugging Face has it"):
        families.express(with_values())


def test_a_stored_config_says_nothing_of_it_unless_it_is_set() -> None:
    assert "value_residual" not in small("mhc").residual.flat()
    assert with_values().residual.flat()["value_residual"] is True


@pytest.mark.parametrize("kind", ["attn_res", pytest.param("denseformer", marks=pytest.mark.product)])
def test_a_run_that_is_resumed_is_the_same_bit_for_bit(kind: str, tmp_path: Path) -> None:
    """Two steps, a checkpoint and two more in a new state equal four steps."""
    from mhc.train.checkpoint import Checkpoints
    from mhc.train.standing import Standing

    made, batches = trainer(with_values(kind)), [packed(8, seed) for seed in range(4)]
    state, whole = state_of(made), None
    for step, batch in enumerate(batches):
        state, _ = made.step(state, batch)
        if step == 1:
            checkpoints = Checkpoints(tmp_path, made.config.checkpoint)
            checkpoints.save(state, Standing(step=2, tokens=5, data={"position": 3}), made.config)
            checkpoints.wait()
    whole, (state, _) = state, checkpoints.restore(2, made.abstract, made.layout)
    for batch in batches[2:]:
        state, _ = made.step(state, batch)
    checkpoints.close()
    assert_identical(state, whole, kind)
