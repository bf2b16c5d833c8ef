"""Test that an option that is absent and one that is null are two things, in every option of every family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mhc import interop
from mhc.errors import UserError
from mhc.interop import families, tensors
from mhc.interop.families import FAMILIES
from mhc.interop.options import HARMLESS, REFUSED, Options
from mhc.interop.tensors import Layout
from tests.interop.models import random_config, random_weights

_LAYERS = ["full_attention"] * 28 + ["sliding_attention"] * 2

# {option: (what absence means, what null means)}: the defaults and the null handling of the families' own classes. What
# they stop at, or compute nonsense with, is refused.
_ROPE = {"rope_scaling": ({}, {}), "rope_parameters": ({}, {}), "partial_rotary_factor": (1.0, 1.0)}
_LLAMA: dict[str, tuple[Any, Any]] = {
    "vocab_size": (32000, REFUSED),
    "hidden_size": (4096, REFUSED),
    "intermediate_size": (14336, REFUSED),
    "num_hidden_layers": (32, REFUSED),
    "num_attention_heads": (32, REFUSED),
    "num_key_value_heads": (8, 4),
    "head_dim": (6, 6),
    "hidden_act": ("silu", REFUSED),
    "max_position_embeddings": (131072, REFUSED),
    "rms_norm_eps": (1e-6, REFUSED),
    "tie_word_embeddings": (False, False),
    "rope_theta": (10000.0, REFUSED),
    **_ROPE,
}
_GPT2 = {
    "vocab_size": (50257, REFUSED),
    "n_embd": (768, REFUSED),
    "n_layer": (12, REFUSED),
    "n_head": (12, REFUSED),
    "n_positions": (1024, REFUSED),
    "n_inner": (96, 96),
    "activation_function": ("gelu_new", REFUSED),
    "layer_norm_epsilon": (1e-5, REFUSED),
    "scale_attn_weights": (True, False),
    "scale_attn_by_inverse_layer_idx": (False, False),
    "add_cross_attention": (False, False),
    "tie_word_embeddings": (True, False),
}
_BLOOM = {
    "vocab_size": (250880, REFUSED),
    "hidden_size": (64, REFUSED),
    "n_layer": (2, REFUSED),
    "n_head": (8, REFUSED),
    "n_inner": (96, 96),
    "layer_norm_epsilon": (1e-5, REFUSED),
    "apply_residual_connection_post_layernorm": (False, False),
    "tie_word_embeddings": (True, False),
    "seq_length": (2048, 2048),
}
_DEEPSEEK = {
    "vocab_size": (129280, REFUSED),
    "hidden_size": (7168, REFUSED),
    "intermediate_size": (18432, REFUSED),
    "moe_intermediate_size": (2048, REFUSED),
    "num_hidden_layers": (61, REFUSED),
    "num_attention_heads": (128, REFUSED),
    "num_key_value_heads": (4, 4),
    "n_shared_experts": (1, 0),
    "n_routed_experts": (256, REFUSED),
    "routed_scaling_factor": (2.5, REFUSED),
    "kv_lora_rank": (512, REFUSED),
    "q_lora_rank": (1536, None),
    "qk_rope_head_dim": (64, REFUSED),
    "qk_nope_head_dim": (128, REFUSED),
    "v_head_dim": (128, REFUSED),
    "head_dim": (4, 4),
    "qk_head_dim": (12, 12),
    "n_group": (8, REFUSED),
    "topk_group": (4, REFUSED),
    "num_experts_per_tok": (8, REFUSED),
    "first_k_dense_replace": (3, REFUSED),
    "norm_topk_prob": (True, False),
    "hidden_act": ("silu", REFUSED),
    "max_position_embeddings": (4096, REFUSED),
    "rms_norm_eps": (1e-6, REFUSED),
    "tie_word_embeddings": (False, False),
    "rope_theta": (10000.0, REFUSED),
    "rope_interleave": (True, False),
    "attention_bias": (False, False),
    "scoring_func": ("sigmoid", "sigmoid"),
    "topk_method": ("noaux_tc", "noaux_tc"),
    "moe_layer_freq": (1, 1),
    "num_nextn_predict_layers": (0, 0),
    **_ROPE,
}
MEANINGS: dict[str, dict[str, tuple[Any, Any]]] = {
    "gpt2": _GPT2,
    "bloom": _BLOOM,
    "llama": _LLAMA
    | {
        "intermediate_size": (11008, REFUSED),
        "num_key_value_heads": (4, 4),
        "max_position_embeddings": (2048, REFUSED),
        "attention_bias": (False, False),
        "mlp_bias": (False, False),
    },
    "mistral": _LLAMA | {"sliding_window": (4096, None)},
    "qwen3": _LLAMA
    | {
        "vocab_size": (151936, REFUSED),
        "intermediate_size": (22016, REFUSED),
        "num_key_value_heads": (32, 4),
        "head_dim": (128, 6),
        "max_position_embeddings": (32768, REFUSED),
        "attention_bias": (False, False),
        "use_sliding_window": (False, False),
        "sliding_window": (4096, None),
        "max_window_layers": (28, REFUSED),
        "layer_types": (
            ["full_attention"] * 28 + ["sliding_attention"] * 2,
            ["full_attention"] * 28 + ["sliding_attention"] * 2,
        ),
    },
    "mixtral": _LLAMA
    | {
        "rms_norm_eps": (1e-5, REFUSED),
        "rope_theta": (1e6, REFUSED),
        "sliding_window": (None, None),
        "num_local_experts": (8, REFUSED),
        "num_experts_per_tok": (2, REFUSED),
        "router_aux_loss_coef": (0.001, 0.0),
        "router_jitter_noise": (0.0, 0.0),
    },
    "deepseek_v3": _DEEPSEEK,
}
# Names of what another option says, and what nothing reads.
ALIASES = {
    "gpt2": {"hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "n_ctx"},
    "bloom": {"n_embed", "num_hidden_layers", "num_attention_heads"},
    "mixtral": {"num_experts"},
}
# A small config in which every option says something else than its default.
_SMALL: dict[str, Any] = {
    "vocab_size": 19,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-4,
    "tie_word_embeddings": True,
    "rope_theta": 5e5,
}
BASE: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": 19,
        "n_embd": 24,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 16,
        "n_inner": 20,
        "activation_function": "relu",
        "layer_norm_epsilon": 1e-4,
    },
    "bloom": {
        "vocab_size": 19,
        "hidden_size": 24,
        "n_layer": 3,
        "n_head": 4,
        "layer_norm_epsilon": 1e-4,
        "seq_length": 9,
    },
    "llama": _SMALL | {"attention_bias": True, "mlp_bias": True},
    "mistral": _SMALL | {"sliding_window": 7},
    "qwen3": _SMALL
    | {
        "num_hidden_layers": 30,
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 40,
        "attention_bias": True,
    },
    "mixtral": _SMALL
    | {"sliding_window": 7, "num_local_experts": 4, "num_experts_per_tok": 1, "router_aux_loss_coef": 0.5},
    "deepseek_v3": {
        **{name: value for name, value in _SMALL.items() if name not in ("head_dim", "num_key_value_heads")},
        "rms_norm_eps": 1e-6,
        "moe_intermediate_size": 6,
        "n_shared_experts": 2,
        "n_routed_experts": 4,
        "routed_scaling_factor": 1.5,
        "kv_lora_rank": 7,
        "q_lora_rank": 5,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 3,
        "n_group": 2,
        "topk_group": 2,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "norm_topk_prob": False,
        "rope_interleave": False,
    },
}


def groups(family: str, raw: dict[str, Any]) -> tuple[Any, bool]:
    """Return what a config says, the order of the rotary pairs included."""
    raw = {"model_type": family, **raw}
    return families.read(raw)[1], tensors.layout(FAMILIES[family], raw, []).interleaved


def without(raw: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key != name}


CASES = [(family, name) for family, options in MEANINGS.items() for name in options]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_absent_and_null_mean_what_the_family_means(family: str, name: str) -> None:
    base, (absent, null) = dict(BASE[family]), MEANINGS[family][name]
    if family == "qwen3" and "sliding_window" in name:
        base["max_window_layers"] = 0  # where windows are used
    if family == "qwen3" and name in ("max_window_layers", "layer_types"):
        # The kinds of layers that follow have no period, and are refused by what they are.
        base["max_window_layers"] = 28
        for raw in (without(base, name), base | {name: absent}):
            with pytest.raises(UserError, match=r"layer_types: given \['full_attention', .*'sliding_attention'\]"):
                groups(family, raw)
        if null is REFUSED:
            with pytest.raises(UserError, match=f"{name}: given null"):
                groups(family, base | {name: None})
        return
    if name in ("n_group", "topk_group"):  # which go together
        with pytest.raises(
            UserError, match=f"n_group: given {absent if name == 'n_group' else 2}, allowed: topk_group="
        ):
            groups(family, without(base, name))
    else:
        assert groups(family, without(base, name)) == groups(family, base | {name: absent})
    if null is REFUSED:
        with pytest.raises(UserError, match=rf"^config\.json of {family}: {name}: given null, allowed: ") as raised:
            groups(family, base | {name: None})
        assert "\n" not in str(raised.value)
    else:
        assert groups(family, base | {name: None}) == groups(family, base | {name: null})


@pytest.mark.parametrize("family", FAMILIES)
def test_no_option_is_read_that_the_table_lacks(family: str) -> None:
    options = Options({"model_type": family, **BASE[family]}, family)
    FAMILIES[family].read(options)
    assert options._asked - HARMLESS == set(MEANINGS[family]) | ALIASES.get(family, set())


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("gpt2", "bloom")])
@pytest.mark.parametrize(
    ("kind", "name", "absent", "null"),
    [
        ("yarn", "beta_fast", 32.0, 32.0),
        ("yarn", "beta_slow", 1.0, 1.0),
        ("yarn", "factor", 8.0, 8.0),
        ("yarn", "truncate", True, REFUSED),
        ("yarn", "original_max_position_embeddings", 64, REFUSED),
        ("yarn", "attention_factor", None, None),
        ("yarn", "mscale", None, None),
        ("yarn", "mscale_all_dim", None, None),
        ("linear", "factor", REFUSED, REFUSED),
        ("dynamic", "original_max_position_embeddings", 64, REFUSED),
        ("llama3", "low_freq_factor", REFUSED, REFUSED),
        ("llama3", "original_max_position_embeddings", REFUSED, REFUSED),
        ("yarn", "rope_theta", 5e5, REFUSED),
    ],
)
def test_absent_and_null_within_the_scaling(family: str, kind: str, name: str, absent: Any, null: Any) -> None:
    scaling: dict[str, Any] = {"rope_type": kind, "factor": 3.0, "original_max_position_embeddings": 8}
    scaling |= {"beta_fast": 9.0, "beta_slow": 2.0} if kind == "yarn" else {}
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 3.0} if kind == "llama3" else {}
    if kind == "dynamic":
        scaling["original_max_position_embeddings"] = 64

    def with_(given: dict[str, Any]) -> tuple[Any, bool]:
        return groups(family, BASE[family] | {"rope_parameters": given})

    for given, meaning in ((without(scaling, name), absent), (scaling | {name: None}, null)):
        if meaning is REFUSED:
            with pytest.raises(UserError, match=f"{name}(: given null| is missing)"):
                with_(given)
        else:
            assert with_(given) == with_(scaling | {name: meaning})


def test_two_names_of_one_thing_agree() -> None:
    base = BASE["gpt2"]
    assert groups("gpt2", base | {"hidden_size": 24, "n_ctx": 99}) == groups("gpt2", base)
    assert groups("gpt2", without(base, "n_embd") | {"hidden_size": 24}) == groups("gpt2", base)
    assert groups("gpt2", base | {"n_embd": None, "hidden_size": 24}) == groups("gpt2", base)
    with pytest.raises(UserError, match="hidden_size: given 32, allowed: 24, as n_embd has it"):
        groups("gpt2", base | {"hidden_size": 32})


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 10**40, [1], {}, "3", True], ids=str)
def test_a_size_that_is_no_number_is_refused_in_a_line(value: object) -> None:
    for name in ("hidden_size", "num_hidden_layers", "rms_norm_eps", "hidden_act"):
        if name == "rms_norm_eps" and value == 10**40:
            value = 10**400
        with pytest.raises(UserError, match=f"{name}: given"):
            groups("llama", BASE["llama"] | {name: value})


def test_a_window_that_goes_without_saying_is_applied() -> None:
    """Mistral without ``sliding_window`` has a window of 4,096: past it the first token is no longer seen."""
    raw = random_config("mistral", 0) | {"max_position_embeddings": 8192, "rope_parameters": {}, "num_hidden_layers": 1}
    raw = {name: value for name, value in raw.items() if name not in ("sliding_window", "rope_scaling")}
    weights = random_weights(raw, Layout("mistral", head=not raw["tie_word_embeddings"]), 0)
    tokens = np.full((2, 4100), 3, np.int32)
    tokens[1, 0] = 4

    def differ(raw: dict[str, Any]) -> float:
        logits = np.asarray(interop.from_hf(raw, weights)(jnp.asarray(tokens))[:, -1])
        return float(np.abs(logits[0] - logits[1]).max())

    assert differ(raw) == 0.0
    assert differ(raw | {"sliding_window": None}) > 0.0


def test_a_head_of_null_ties_nothing(tmp_path: Path) -> None:
    raw = random_config("gpt2", 1) | {"tie_word_embeddings": False}
    weights = random_weights(raw, Layout("gpt2"), 0)
    read = json.loads(json.dumps(raw | {"tie_word_embeddings": None}))
    assert interop.from_hf(read, weights).config.head.tied is False
