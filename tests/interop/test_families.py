"""Test random models of every family: there and back, in every layout, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flax import nnx

from mhc import interop
from mhc.config import Config, from_config_dict, resolve
from mhc.errors import UserError
from mhc.interop import families, hf, tensors
from mhc.interop.families import FAMILIES
from mhc.interop.tensors import Layout
from mhc.model.decoder import DecoderDefinition
from mhc.sharding import make_mesh
from tests.interop.models import (
    FAMILY_NAMES,
    Weights,
    golden,
    random_config,
    random_layout,
    random_weights,
)
from tests.small import assert_identical, relative_error, small


def params(decoder: Any) -> Any:
    return nnx.to_pure_dict(nnx.state(decoder))


def random_model(family: str, seed: int) -> tuple[dict[str, Any], Weights]:
    raw = random_config(family, seed)
    return raw, random_weights(raw, random_layout(raw, seed), seed)


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.product) for seed in range(1, 6))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_random_model_there_and_back(family: str, seed: int) -> None:
    raw, weights = random_model(family, seed)
    decoder = interop.from_hf(raw, weights)
    written, back = interop.to_hf(decoder)
    assert written == raw
    assert back.keys() == weights.keys()
    for name, weight in weights.items():
        np.testing.assert_array_equal(back[name], weight, strict=True)
    # The same model of ours, which came from nowhere, is written as published, and read again.
    again = interop.from_hf(*interop.to_hf(DecoderDefinition(decoder.config).bind(params(decoder))))
    assert not families.differences(again.config, decoder.config)
    assert_identical(params(again), params(decoder))


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_number_of_a_tensor_has_one_place(family: str) -> None:
    """Each parameter is covered exactly once, so that none is left uninitialised and none written twice."""
    raw = random_config(family, 5)
    config = hf.merged(raw, {"residual": {"kind": "plain"}})
    for layout in (Layout(family, head=False), Layout(family, fused="experts" in str(raw), interleaved=False)):
        seen = {
            path: np.zeros(leaf.shape, np.float32)
            for path, leaf in hf.by_path(DecoderDefinition(config).abstract()).items()
        }
        for tensor in tensors.plan(config, layout).values():
            if tensor.name != "lm_head.weight" or not config.head.tied:
                for part in tensor.parts:
                    one = np.zeros(seen[part.path].shape, np.float32)
                    tensors.fill(one, (0,) * one.ndim, part, np.ones(tensor.shape, np.float32))
                    seen[part.path] += one
        assert all((count == 1).all() for count in seen.values()), layout


def test_the_two_rotary_layouts_and_namings_are_one_function() -> None:
    config, weights, tokens, logits = golden("deepseek_v3")
    decoder = interop.from_hf(config, weights)
    leaf = hf.leaf_reader(params(decoder))
    plan = tensors.plan(decoder.config, Layout("deepseek_v3", interleaved=False))
    halves = {name: tensors.compose(tensor, leaf) for name, tensor in plan.items()}
    assert not np.array_equal(
        halves["model.layers.0.self_attn.q_proj.weight"],
        weights["model.layers.0.self_attn.q_proj.weight"].astype(np.float32),
    )
    assert "model.layers.1.mlp.experts.0.gate_proj.weight" in halves
    other = interop.from_hf({**config, "rope_interleave": False}, halves)
    assert_identical(params(other), params(decoder))
    assert relative_error(other(tokens), logits) < 1e-4


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("deepseek_v3", {"data": 2, "expert": 2, "tensor": 2}),
        pytest.param("bloom_alibi", {"fsdp": 4, "tensor": 2}, marks=pytest.mark.product),
    ],
    ids=str,
)
def test_read_into_the_shards_of_a_mesh(name: str, mesh: dict[str, int]) -> None:
    config, weights, _, _ = golden(name)
    whole = interop.from_hf(config, weights)
    devices = make_mesh(from_config_dict({"mesh": {"data": 1, **mesh}, "moe": {"experts": 4}}).mesh)
    source = {name: weight.astype(np.float32) for name, weight in weights.items()}
    sharded = hf.read(config, source, hf.merged(config, {"residual": {"kind": "plain"}}), devices)
    table = sharded.embed.table[...]
    assert len(table.sharding.device_set) == 8
    assert_identical(params(sharded), params(whole))


# What is refused ------------------------------------------------------------------------------------------------------


def simple(family: str) -> dict[str, Any]:
    """Return a config without scalings and windows."""
    raw = random_config(family, 0)
    for name in ("rope_parameters", "rope_scaling", "sliding_window", "use_sliding_window", "layer_types"):
        raw.pop(name, None)
    return raw


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("gpt2", {"model_type": "gpt3"}, "model_type: given 'gpt3'.*did you mean gpt2"),
        ("llama", {"model_type": None}, "model_type: given None, allowed: gpt2, llama"),
        ("llama", {"model_type": ["llama"]}, "model_type: given"),
        ("gpt2", {"activation_function": "gelu"}, "activation_function: given 'gelu'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("gpt2", {"n_embd": None}, "n_embd: given null"),
        ("gpt2", {"n_head": "4"}, "n_head: given '4'"),
        ("gpt2", {"n_layer": 0}, "n_layer: given 0"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        ("bloom", {"n_inner": 7}, "n_inner: given 7"),
        ("llama", {"hidden_act": "relu2"}, "hidden_act: given 'relu2'"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: given 0.5"),
        ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type: given 'longrope'"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "truncate": False}}, "rope_scaling.truncate: given False"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mscale": 3}}, "mscale: given 3"),
        ("llama", {"rope_scaling": "linear"}, "rope_scaling: given 'linear'"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: given 50.0"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"sliding_window": 4}, "sliding_window: given 4"),
        ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings: given 'no'"),
        ("llama", {"num_key_value_heads": 5}, "attention.kv_heads: given 5"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps: given nan"),
        ("mistral", {"sliding_window": 2.5}, "sliding_window: given 2.5"),
        ("qwen3", {"layer_types": ["linear_attention"]}, "layer_types"),
        ("mixtral", {"num_experts_per_tok": 9}, "moe.top_k: given 9"),
        ("deepseek_v3", {"n_group": 4, "topk_group": 2}, "n_group: given 4"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias: given True"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func: given 'softmax'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq: given 2"),
        ("deepseek_v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps: given 1e-05"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_an_option_that_the_decoder_lacks_is_named(family: str, change: dict[str, Any], words: str) -> None:
    raw = simple(family)
    weights = random_weights(raw, Layout(family), 0)  # and the config without the change is fine
    with pytest.raises(UserError, match=words) as raised:
        interop.from_hf({**raw, **change}, weights)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}], ids=repr)
def test_an_unknown_option_that_is_off_passes(value: object) -> None:
    raw = simple("llama")
    assert families.read({**raw, "some_new_thing": value}) == families.read(raw)


def test_sliding_layers_of_qwen3_that_have_no_period_are_refused() -> None:
    raw = simple("qwen3") | {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 4}
    for kinds, window, every in (
        ("sss", 4, 0),
        ("sfs", 4, 2),
        ("ssf", 4, 3),
        ("fff", None, 0),
        ("fss", 0, 0),
        ("ffs", 0, 0),
    ):
        raw["layer_types"] = [{"s": "sliding_attention", "f": "full_attention"}[kind] for kind in kinds]
        if window == 0:
            with pytest.raises(UserError, match=r"layer_types.*n-th"):
                families.read(raw)
            continue
        attention = families.read(raw)[1]["attention"]
        assert (attention.get("window"), attention.get("global_every", 0)) == (window, every)


def test_tensors_that_do_not_fit_are_listed_by_name() -> None:
    raw = simple("llama")
    weights = random_weights(raw, Layout("llama"), 0)
    del weights["model.norm.weight"]
    weights["model.layers.0.mlp.extra.weight"] = np.zeros(3, np.float32)
    name = "model.layers.0.input_layernorm.weight"
    weights[name] = weights[name][:-1]
    with pytest.raises(UserError, match=r"1 missing: model\.norm\.weight") as raised:
        interop.from_hf(raw, weights)
    assert "1 not of this model: model.layers.0.mlp.extra.weight" in str(raised.value)
    assert f"1 of another shape: {name} [{len(weights[name])}] instead of [{len(weights[name]) + 1}]" in str(
        raised.value
    )


@pytest.mark.parametrize("dtype", [np.int32, np.complex64, np.bool_])
def test_a_tensor_that_is_no_float_is_refused(dtype: type) -> None:
    raw = simple("llama")
    weights = random_weights(raw, Layout("llama"), 0)
    weights["model.norm.weight"] = weights["model.norm.weight"].astype(dtype)
    with pytest.raises(UserError, match=r"model\.norm\.weight is"):
        interop.from_hf(raw, weights)


def test_a_tied_head_that_is_not_the_embedding_is_refused() -> None:
    config, weights, _, _ = golden("gpt2")
    with pytest.raises(UserError, match=r"lm_head\.weight is not transformer\.wte\.weight"):
        interop.from_hf(config, {**weights, "lm_head.weight": weights["lm_head.weight"] + 1e-3})


def test_buffers_and_layers_for_further_tokens_are_left_out() -> None:
    config, weights, _, _ = golden("gpt2")
    old = {name.removeprefix("transformer."): weight for name, weight in weights.items() if name != "lm_head.weight"}
    buffers = {f"h.{layer}.attn.bias": np.ones((1, 1, 64, 64), np.float32) for layer in range(2)}
    assert interop.to_hf(interop.from_hf(config, old | buffers))[1].keys() == old.keys()
    config, weights, _, _ = golden("deepseek_v3")
    further = {"model.layers.3.eh_proj.weight": np.ones((32, 64)), "model.layers.3.mlp.gate.weight": np.ones((8, 32))}
    assert interop.to_hf(interop.from_hf(config, weights | further))[1].keys() == weights.keys()
    with pytest.raises(UserError, match=r"model\.layers\.4\.eh_proj\.weight"):
        interop.from_hf(config, weights | {"model.layers.4.eh_proj.weight": np.ones((32, 64))})


@pytest.mark.parametrize(
    ("residual", "words"),
    [
        ({"kind": "mhc", "init": "home"}, "residual.init: given 'home', allowed: 'equivalent'"),
        ({"kind": "identity", "init": "fanin"}, "residual.init: given 'fanin'"),
        ({"kind": "kromhc", "alpha": 0.01}, "residual.alpha: given 0.01, allowed: 0.0"),
        ({"kind": "mhc", "collapse": "sum"}, "residual.collapse: given 'sum', allowed: 'mean'"),
        ({"kind": "hc", "collapse": "head"}, "residual.collapse: given 'head', allowed: 'mean'"),
        ({"kind": "plain", "scale": 0.5}, "residual.scale: given 0.5"),
        ({"kind": "mch"}, "residual.kind: given 'mch'.*did you mean mhc"),
        ({"kid": "mhc"}, "kid"),
    ],
    ids=str,
)
def test_a_residual_that_cannot_compute_the_source_is_refused(residual: dict[str, Any], words: str) -> None:
    config, weights, _, _ = golden("llama")
    with pytest.raises(UserError, match=words):
        interop.from_hf(config, weights, **residual)


# Which family a model of ours is ------------------------------------------------------------------------------------


def ours(groups: dict[str, Any]) -> Config:
    return small("plain", **groups)


@pytest.mark.parametrize(
    ("groups", "family"),
    [
        ({}, "llama"),
        ({"attention": {"window": 4}}, "mistral"),
        ({"attention": {"qk_norm": True}}, "qwen3"),
        ({"attention": {"qk_norm": True, "window": 4, "global_every": 2}}, "qwen3"),
        ({"moe": {"experts": 4, "balance": "auxiliary"}}, "mixtral"),
        (
            {
                "attention": {"kind": "mla", "kv_rank": 8},
                "moe": {"experts": 4, "score": "sigmoid", "shared": 1, "dense_layers": 1},
            },
            "deepseek_v3",
        ),
    ],
    ids=str,
)
def test_a_model_of_ours_is_written_in_the_names_of_its_family(groups: dict[str, Any], family: str) -> None:
    assert families.express(ours(groups))[0].name == family


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({"residual": {"kind": "mhc"}}, "residual.kind=mhc"),
        ({"residual": {"kind": "plain", "scale": 0.9}}, "residual.scale"),
        ({"norm": {"placement": "sandwich"}}, "norm.placement is 'sandwich', llama has 'pre'"),
        ({"attention": {"softcap": 5.0}}, "attention.softcap is 5.0, llama has None"),
        ({"positions": {"scaling": "ntk", "factor": 2.0}}, "positions.scaling is 'ntk'"),
        ({"attention": {"prefix": 3}}, "attention.prefix is 3"),
        ({"moe": {"experts": 4}}, "moe.balance is 'loss_free', mixtral has 'none'"),
    ],
    ids=str,
)
def test_what_no_family_has_is_named(groups: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        families.express(ours(groups))


def test_fields_that_change_nothing_make_no_difference() -> None:
    one, other = (
        resolve(from_config_dict({"data": {"sequence_length": length}, "train": {"steps": length}}), 300)
        for length in (16, 32)
    )
    assert not families.differences(one, other)
    learned = {"positions": {"kind": "learned"}}
    one, other = (
        resolve(from_config_dict(learned | {"data": {"sequence_length": length}}), 300) for length in (16, 32)
    )
    assert families.differences(one, other) == {"positions.max_length": (16, 32)}


def test_the_layouts_of_all_families_are_covered() -> None:
    assert set(FAMILIES) == set(FAMILY_NAMES) and len(FAMILIES) == 7
