"""Test attention: who sees whom, implementations that agree, grouped and latent heads, and the choice among them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mhc.errors import UserError
from mhc.model.attention import (
    HeadAttention,
    LatentAttention,
    attend_flash,
    attend_sdpa,
    attend_xla,
    attention_context,
    choose_implementation,
    implementations,
    positions_of,
    visible,
)
from mhc.rng import PathKey
from tests.small import distance, packed, relative_error, small

KEY = PathKey(jax.random.key(0))


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def documents_mask(segments: Any) -> jax.Array:
    return attention_context(small(), np.shape(segments), jnp.asarray(segments)).mask


def test_causal_mask():
    np.testing.assert_array_equal(attention_context(small(), (1, 3)).mask[0], [[1, 0, 0], [1, 1, 0], [1, 1, 1]])
    expected = [[[1, 0, 0], [1, 1, 0], [0, 0, 1]], [[1, 0, 0], [0, 1, 0], [0, 1, 1]]]
    np.testing.assert_array_equal(documents_mask([[1, 1, 2], [1, 2, 2]]), expected)


@jax.jit
def _visible(window: Any, prefix: Any) -> jax.Array:
    places = jnp.arange(12)[None]
    return visible(places, places, window=window, prefix=prefix)


@given(st.integers(1, 14), st.integers(0, 14))
def test_what_is_visible_by_its_definition(window, prefix):
    mask = np.asarray(_visible(window, prefix)[0])
    for q in range(12):
        for k in range(12):
            assert mask[q, k] == (k <= q < k + window or (q < prefix and k < prefix))


def test_positions_restart_with_each_document_and_after_padding():
    segments = jnp.asarray([[0, 0, 1, 1, 1, 2, 2, 0], [3, 3, 3, 3, 4, 4, 4, 4]])
    np.testing.assert_array_equal(positions_of(segments), [[0, 1, 0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 1, 2, 3]])


def test_local_and_global_layers_see_their_masks():
    """Three layers with every second one global are windowed, full, windowed; traced flags choose as constants do."""
    config = small(attention={"window": 3, "global_every": 2}, model={"layers": 3})
    assert config.local_layers == (True, False, True)
    context = attention_context(config, (1, 8))
    for local, reach in ((True, 3), (False, 8)):
        for flag in (local, jnp.asarray(local)):
            assert int(jnp.sum(context.at(flag).mask[0, -1])) == reach


# Each as (q, k, v, mask, segments): the mask is that of the segments.
IMPLEMENTATIONS = {
    "xla": lambda q, k, v, mask, segments: attend_xla(q, k, v, mask),
    "sdpa": lambda q, k, v, mask, segments: attend_sdpa(q, k, v, mask),
    "flash": lambda q, k, v, mask, segments: attend_flash(q, k, v, jnp.asarray(segments)),
}


@pytest.mark.parametrize("kv_heads", [4, pytest.param(2, marks=pytest.mark.product), 1])
def test_implementations_agree(kv_heads):
    """Values and gradients equal softmax(q k / sqrt K + mask) v, written out head by head in float64."""
    q, k, v = (normal(2, 16, heads, 6, seed=seed) for seed, heads in enumerate((4, kv_heads, kv_heads)))
    weight = normal(2, 16, 4, 6, seed=9)
    segments = packed(2, seed=5)["segment_ids"]
    mask = documents_mask(segments)

    expected = np.zeros(q.shape)
    for head in range(4):
        source = head // (4 // kv_heads)
        scores = np.einsum("btk,buk->btu", *(np.asarray(x, np.float64) for x in (q[:, :, head], k[:, :, source])))
        raised = np.where(mask, np.exp(scores / np.sqrt(6)), 0.0)
        weights = raised / raised.sum(axis=-1, keepdims=True)
        expected[:, :, head] = weights @ np.asarray(v[:, :, source], np.float64)

    grads = {}
    for name, attend in IMPLEMENTATIONS.items():

        def objective(qkv: Any, attend: Any = attend) -> tuple[jax.Array, jax.Array]:
            out = attend(*qkv, mask, segments)
            return jnp.sum(out * weight), out

        (_, out), grads[name] = jax.jit(jax.value_and_grad(objective, has_aux=True))((q, k, v))
        assert relative_error(out, expected) <= 2e-6, name
    assert distance(grads["sdpa"], grads["xla"]) <= 1e-5
    assert distance(grads["flash"], grads["xla"]) <= 1e-5


@pytest.mark.parametrize("options", [{"window": 5}, {"softcap": 2.0}, {"scale": 0.2}, {"values": 10}], ids=str)
def test_flash_honours_what_the_reference_does(options):
    """Flash honours windows, caps, scales, values wider than keys, and lengths that are no multiple of its blocks."""
    length, values = 130, options.get("values", 8)
    q, k, v = normal(1, length, 2, 8), normal(1, length, 2, 8, seed=1), normal(1, length, 2, values, seed=2)
    segments = jnp.asarray([[1] * 60 + [2] * 63 + [0] * 7])
    index = jnp.arange(length)[None]
    mask = visible(index, index, window=options.get("window")) & (segments[:, :, None] == segments[:, None, :])
    shared: dict[str, Any] = {name: options[name] for name in ("softcap", "scale") if name in options}
    expected = jax.jit(lambda q, k, v: attend_xla(q, k, v, mask, **shared))(q, k, v)
    flash = jax.jit(lambda q, k, v: attend_flash(q, k, v, segments, window=options.get("window"), **shared))(q, k, v)
    assert relative_error(flash, expected) <= 2e-6


def test_bias_and_cap_by_their_definition():
    """The weights equal softmax(c tanh(s / c) + bias) in float64; sdpa takes the bias too."""
    q, k, v, bias = (
        normal(1, 6, 2, 4),
        normal(1, 6, 1, 4, seed=1),
        normal(1, 6, 1, 4, seed=2),
        normal(1, 2, 6, 6, seed=3),
    )
    mask = attention_context(small(), (1, 6)).mask

    def expected(cap: float | None) -> np.ndarray:
        scores = np.einsum("bthk,buk->bhtu", np.asarray(q, np.float64), np.asarray(k[:, :, 0], np.float64)) / 2
        scores = scores if cap is None else cap * np.tanh(scores / cap)
        raised = np.where(mask[:, None], np.exp(scores + np.asarray(bias, np.float64)), 0.0)
        weights = raised / raised.sum(axis=-1, keepdims=True)
        return np.einsum("bhtu,buk->bthk", weights, np.asarray(v[:, :, 0], np.float64))

    assert relative_error(attend_xla(q, k, v, mask, bias=bias, softcap=1.5), expected(1.5)) <= 2e-6
    assert relative_error(attend_xla(q, k, v, mask, bias=bias), expected(None)) <= 2e-6
    assert relative_error(attend_sdpa(q, k, v, mask, bias=bias), expected(None)) <= 2e-6


def test_grouped_heads_equal_multi_head_attention_with_repeated_keys_and_values():
    grouped = HeadAttention(small(attention={"heads": 4, "kv_heads": 2}), key=KEY)
    full = HeadAttention(small(attention={"heads": 4, "kv_heads": 4}), key=PathKey(jax.random.key(1)))
    assert grouped.key[...].shape == (16, 2, 4) and full.key[...].shape == (16, 4, 4)
    for name in ("query", "out"):
        getattr(full, name)[...] = getattr(grouped, name)[...]
    for name in ("key", "value"):
        getattr(full, name)[...] = jnp.repeat(getattr(grouped, name)[...], 2, axis=1)
    x, batch = normal(2, 16, 16), packed(2)
    context = attention_context(small(attention={"heads": 4}), (2, 16), jnp.asarray(batch["segment_ids"]))
    one, other = (jax.jit(lambda x, layer=layer: layer(x, context))(x) for layer in (grouped, full))
    assert relative_error(one, other) <= 1e-6


def test_latent_heads_equal_full_heads_with_the_products_of_their_projections():
    """Without a rotary part and with the latent's norm undone, MLA is multi-head attention of low-rank weights."""
    config = small(attention={"kind": "mla", "kv_rank": 6}, positions={"kind": "none"})
    latent, full = LatentAttention(config, key=KEY), HeadAttention(small(positions={"kind": "none"}), key=KEY)
    x, context = normal(2, 16, 16), attention_context(config, (2, 16))
    down = jnp.einsum("btd,dc->btc", x, latent.kv_down[...])
    normed = latent.kv_norm(down)
    full.query[...], full.out[...] = latent.query[...], latent.out[...]
    # The norm divides each token's latent by a number: give it back by scaling the token's keys and values.
    q, _, _ = full.project(x, context.positions, None)
    keys = jnp.einsum("btc,chk->bthk", normed, latent.key_up[...])
    values = jnp.einsum("btc,chk->bthk", normed, latent.value_up[...])
    expected = full.join(attend_xla(q, keys, values, context.mask))
    assert relative_error(latent(x, context), expected) <= 1e-6


def test_a_row_that_sees_one_key_returns_its_value():
    """Masked keys leave no trace, not even by rounding."""
    q, v = normal(1, 4, 2, 6), normal(1, 4, 2, 6, seed=1)
    mask = jnp.eye(4, dtype=bool)[None]
    for attend in IMPLEMENTATIONS.values():
        alone = jax.jit(lambda *qkv, attend=attend: attend(*qkv, mask, jnp.arange(4)[None]))
        assert relative_error(alone(100 * q, 100 * q, v), v) <= 1e-6


def test_bfloat16_scores_are_taken_in_float32():
    """Only inputs and outputs are rounded; scores rounded to bfloat16, by up to 0.5, would put exp off by half."""
    q, k, v = (normal(1, 16, 2, 64, seed=seed).astype(jnp.bfloat16) for seed in range(3))
    q = q * 12  # scores of up to some 40
    mask = attention_context(small(), (1, 16)).mask
    attend = jax.jit(attend_xla)
    narrow, wide = (attend(*(x.astype(dtype) for x in (q, k, v)), mask) for dtype in (jnp.bfloat16, jnp.float32))
    assert narrow.dtype == jnp.bfloat16
    assert relative_error(narrow, wide) <= 0.02


def test_auto_is_the_reference_on_cpu_and_says_so(caplog):
    implementations._choose.cache_clear()
    with caplog.at_level("INFO", logger="mhc.model.attention"):
        assert choose_implementation(small(attention={"impl": "auto"})) == "xla"
        assert choose_implementation(small(attention={"impl": "auto"})) == "xla"
        assert choose_implementation(small(attention={"impl": "sdpa"})) == "sdpa"
    assert caplog.text.count("attention: xla (asked for auto, platform cpu, float32)") == 1


@pytest.mark.parametrize(
    ("platform", "groups", "chosen"),
    [
        ("gpu", {}, "sdpa"),
        ("tpu", {}, "flash"),
        ("gpu", {"attention": {"window": 4}}, "sdpa"),
        ("tpu", {"attention": {"window": 4}}, "flash"),
        ("gpu", {"attention": {"softcap": 5.0}}, "xla"),
        ("tpu", {"attention": {"softcap": 5.0}}, "flash"),
        ("gpu", {"attention": {"kind": "mla", "kv_rank": 4}}, "xla"),
        ("tpu", {"attention": {"kind": "mla", "kv_rank": 4}}, "flash"),
        ("tpu", {"attention": {"prefix": 3}}, "xla"),
        ("gpu", {"positions": {"kind": "alibi"}}, "sdpa"),
        ("tpu", {"positions": {"kind": "alibi"}}, "xla"),
        ("tpu", {"positions": {"kind": "relative_bias"}}, "xla"),
    ],
    ids=str,
)
def test_auto_never_chooses_what_cannot_honour_the_model(platform, groups, chosen, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    groups = {**groups, "attention": {"impl": "auto", **groups.get("attention", {})}}
    assert choose_implementation(small(**groups)) == chosen
    if chosen == "xla":  # and what auto avoids is refused when asked for
        wanted = {"gpu": "sdpa", "tpu": "flash"}[platform]
        with pytest.raises(UserError, match=rf"attention.impl: given '{wanted}'.*has no"):
            small(**{**groups, "attention": {**groups["attention"], "impl": wanted}})


@pytest.mark.parametrize(
    "groups", [pytest.param({"model": {"dtype": "bfloat16"}}, marks=pytest.mark.product), {}], ids=str
)
def test_a_model_computes_the_same_under_every_implementation(groups):
    """The layers mix windows and full sight and are scanned; flash takes a branch where the others choose a mask."""
    from mhc.model.decoder import DecoderDefinition

    logits, prefixed = {}, {}
    for impl in ("xla", "sdpa", "flash"):
        config = small(attention={"impl": impl, "window": 5, "global_every": 2}, **groups)
        definition, batch = DecoderDefinition(config), packed(2, seed=3)
        run = jax.jit(lambda p, b, d=definition: d.bind(p)(b["tokens"], b["segment_ids"], b["positions"]))
        logits[impl] = run(definition.init(jax.random.key(0)), batch)
        given = jax.jit(lambda p, b, d=definition: d.bind(p)(b["tokens"], b["segment_ids"], prefix=4))
        prefixed[impl] = given(definition.init(jax.random.key(0)), batch)
    tolerance = 2e-2 if groups else 2e-5
    assert (
        relative_error(prefixed["flash"], prefixed["xla"]) <= tolerance < relative_error(prefixed["xla"], logits["xla"])
    )
    assert relative_error(logits["sdpa"], logits["xla"]) <= tolerance
    assert relative_error(logits["flash"], logits["xla"]) <= tolerance
