"""Translate each family's config.json into groups of our config, and a Config into such a file.

An option that config.json lacks has the default of the family's own class.
"""

from __future__ import annotations

import math
from typing import Any

from mhc.config import Config
from mhc.interop.options import REFUSED, Options
from mhc.interop.rope import read_rope, write_rope

Groups = dict[str, dict[str, Any]]

LONGEST = 2048  # tokens of a training sequence where the config names a longer context

# Activations by their names in the files. ``gelu`` with the error function is not among ours.
_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
PLAIN_ACTIVATIONS = dict.fromkeys(_GELU, "gelu") | {"relu": "relu", "silu": "silu", "swish": "silu"}
GATED_ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "sigmoid": "glu"} | dict.fromkeys(_GELU[1:], "geglu")
_NAMES = {"gelu": "gelu_new", "relu": "relu", "silu": "silu", "swiglu": "silu", "glu": "sigmoid"}
_NAMES["geglu"] = "gelu_pytorch_tanh"


def _length(positions: int) -> dict[str, Any]:
    return {"sequence_length": min(positions, LONGEST)}


# gpt2 and bloom -------------------------------------------------------------------------------------------------------


def read_gpt2(o: Options) -> Groups:
    width = o.count("n_embd", "hidden_size", default=768)
    positions = o.count("n_positions", "max_position_embeddings", default=1024)
    o.take("n_ctx")  # another name of n_positions, which nothing reads
    o.only("scale_attn_by_inverse_layer_idx", False, "every layer's logits have one scale")
    o.only("add_cross_attention", False, "a decoder alone")
    return {
        "model": {
            "layers": o.count("n_layer", "num_hidden_layers", default=12),
            "width": width,
            "vocab_size": o.count("vocab_size", default=50257),
        },
        "attention": {
            "heads": o.count("n_head", "num_attention_heads", default=12),
            "bias": True,
            "scale": None if o.flag("scale_attn_weights", True) else 1.0,
        },
        "positions": {"kind": "learned", "max_length": positions},
        "mlp": {
            "kind": o.choice("activation_function", PLAIN_ACTIVATIONS, "gelu_new"),
            "width": o.count("n_inner", default=4 * width, null=4 * width),
            "bias": True,
        },
        "norm": {"kind": "layernorm", "eps": o.number("layer_norm_epsilon", default=1e-5)},
        "head": {"tied": o.flag("tie_word_embeddings", True)},
        "data": _length(positions),
    }


def write_gpt2(config: Config) -> dict[str, Any]:
    return {
        "n_embd": config.model.width,
        "n_layer": config.model.layers,
        "n_head": config.attention.heads,
        "n_inner": config.mlp_width,
        "n_positions": config.max_length,
        "activation_function": _NAMES[config.mlp.kind],
        "layer_norm_epsilon": config.norm.eps,
        "scale_attn_weights": config.attention.scale is None,
        "tie_word_embeddings": config.head.tied,
        # Absent, these would mean dropout, which our decoder does not have.
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


def read_bloom(o: Options) -> Groups:
    width = o.count("hidden_size", "n_embed", default=64)
    o.only("apply_residual_connection_post_layernorm", False, "the residual comes before the norm")
    o.only("n_inner", 4 * width, "four times the width", null=True)
    return {
        "model": {
            "layers": o.count("n_layer", "num_hidden_layers", default=2),
            "width": width,
            "vocab_size": o.count("vocab_size", default=250880),
        },
        "attention": {"heads": o.count("n_head", "num_attention_heads", default=8), "bias": True},
        "positions": {"kind": "alibi"},
        "mlp": {"kind": "gelu", "width": 4 * width, "bias": True},
        "norm": {"kind": "layernorm", "embedding": True, "eps": o.number("layer_norm_epsilon", default=1e-5)},
        "head": {"tied": o.flag("tie_word_embeddings", True)},
        "data": _length(o.count("seq_length", default=LONGEST, null=LONGEST)),
    }


def write_bloom(config: Config) -> dict[str, Any]:
    return {
        "hidden_size": config.model.width,
        "n_layer": config.model.layers,
        "n_head": config.attention.heads,
        "layer_norm_epsilon": config.norm.eps,
        "seq_length": config.data.sequence_length,
        "tie_word_embeddings": config.head.tied,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


# llama and what followed it -------------------------------------------------------------------------------------------


def _llama_like(
    o: Options,
    *,
    vocab: int = 32000,
    inner: int = 14336,
    kv_heads: int = 8,
    head_dim: int | None = None,
    longest: int = 131072,
    theta: float = 1e4,
    eps: float = 1e-6,
) -> Groups:
    """Return the groups that the families share; the arguments are what an absent option means.

    A null of ``num_key_value_heads`` and ``head_dim`` means what follows from the heads and the width, in every family.
    """
    heads, width = o.count("num_attention_heads", default=32), o.count("hidden_size", default=4096)
    longest = o.count("max_position_embeddings", default=longest)
    positions, _ = read_rope(o, theta=theta, longest=longest)
    o.only("partial_rotary_factor", 1.0, "the whole head is rotated", null=True)
    share = max(width // heads, 1)
    return {
        "model": {
            "layers": o.count("num_hidden_layers", default=32),
            "width": width,
            "vocab_size": o.count("vocab_size", default=vocab),
        },
        "attention": {
            "heads": heads,
            "kv_heads": o.count("num_key_value_heads", default=kv_heads or heads, null=heads),
            "head_dim": o.count("head_dim", default=head_dim or share, null=share),
        },
        "positions": positions,
        "mlp": {
            "kind": o.choice("hidden_act", GATED_ACTIVATIONS, "silu"),
            "width": o.count("intermediate_size", default=inner),
        },
        "norm": {"kind": "rmsnorm", "eps": o.number("rms_norm_eps", default=eps)},
        "head": {"tied": o.flag("tie_word_embeddings", False)},
        "data": _length(longest),
    }


def _write_llama_like(config: Config) -> dict[str, Any]:
    return {
        "hidden_size": config.model.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.model.layers,
        "num_attention_heads": config.attention.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": _NAMES[config.mlp.kind],
        "rms_norm_eps": config.norm.eps,
        "tie_word_embeddings": config.head.tied,
        "attention_dropout": 0.0,
        **write_rope(config),
    }


def read_llama(o: Options) -> Groups:
    groups = _llama_like(o, inner=11008, kv_heads=0, longest=2048)
    groups["attention"]["bias"], groups["mlp"]["bias"] = o.flag("attention_bias", False), o.flag("mlp_bias", False)
    return groups


def write_llama(config: Config) -> dict[str, Any]:
    return _write_llama_like(config) | {"attention_bias": config.attention.bias, "mlp_bias": config.mlp.bias}


def _window(o: Options, default: int | None) -> int | None:
    """Return the tokens of the window: None for null, ``default`` if the option is absent."""
    return None if o.take("sliding_window", default=default) is None else o.count("sliding_window", default=default)


def read_mistral(o: Options) -> Groups:
    groups = _llama_like(o)
    groups["attention"]["window"] = _window(o, 4096)
    return groups


def write_mistral(config: Config) -> dict[str, Any]:
    return _write_llama_like(config) | {"sliding_window": config.attention.window}


def read_qwen3(o: Options) -> Groups:
    groups = _llama_like(o, vocab=151936, inner=22016, kv_heads=32, head_dim=128, longest=32768)
    attention, layers = groups["attention"], groups["model"]["layers"]
    attention |= {"qk_norm": True, "bias": o.flag("attention_bias", False)}
    window = _window(o, 4096) if o.flag("use_sliding_window", False) else None
    o.take("sliding_window")
    first = o.count("max_window_layers", default=28, null=REFUSED if window else 0, low=0)
    kinds = ["sliding_attention" if window and layer >= first else "full_attention" for layer in range(layers)]
    kinds = o.take("layer_types", default=kinds, null=kinds)
    attention |= _windows(o, kinds, window, layers)
    return groups


def _windows(o: Options, kinds: Any, window: int | None, layers: int) -> dict[str, Any]:
    """Return the window, and the period of the layers that see everything, from the kind of every layer."""
    known = isinstance(kinds, list) and len(kinds) == layers
    if not known or not all(kind in ("sliding_attention", "full_attention") for kind in kinds):
        o.refuse("layer_types", kinds, f"{layers} of full_attention and sliding_attention")
    full = [number for number, kind in enumerate(kinds, 1) if kind == "full_attention"]
    if len(full) == layers:
        return {}
    if window is None:
        o.refuse("layer_types", kinds, "full_attention everywhere without use_sliding_window and sliding_window")
    every = full[0] if full else 0
    if full != (list(range(every, layers + 1, every)) if every else []) or every == 1:
        o.refuse("layer_types", kinds, "full_attention in each n-th layer, or in none")
    return {"window": window, "global_every": every}


def write_qwen3(config: Config) -> dict[str, Any]:
    local = config.local_layers
    return _write_llama_like(config) | {
        "attention_bias": config.attention.bias,
        "use_sliding_window": any(local),
        "sliding_window": config.attention.window,
        "max_window_layers": 0 if any(local) else config.model.layers,
        "layer_types": ["sliding_attention" if is_local else "full_attention" for is_local in local],
    }


def read_mixtral(o: Options) -> Groups:
    groups = _llama_like(o, theta=1e6, eps=1e-5)
    groups["attention"]["window"] = _window(o, None)
    width = groups["mlp"].pop("width")
    balance = o.number("router_aux_loss_coef", default=0.001, null=0.0)
    o.take("router_jitter_noise")  # noise in training
    groups["moe"] = {
        "experts": o.count("num_local_experts", "num_experts", default=8),
        "top_k": o.count("num_experts_per_tok", default=2),
        "width": width,
        "score": "softmax",
        "normalize": True,
        "balance": "auxiliary" if balance else "none",
    }
    if balance:
        groups["moe"]["balance_loss"] = balance
    return groups


def write_mixtral(config: Config) -> dict[str, Any]:
    moe = config.moe
    return _write_llama_like(config) | {
        "intermediate_size": config.expert_width,
        "sliding_window": config.attention.window,
        "num_local_experts": max(moe.experts, 1),
        "num_experts_per_tok": moe.top_k,
        "router_aux_loss_coef": moe.balance_loss if moe.balance == "auxiliary" else 0.0,
        "router_jitter_noise": 0.0,
        "output_router_logits": False,
    }


def read_deepseek(o: Options) -> Groups:
    heads, longest = o.count("num_attention_heads", default=128), o.count("max_position_embeddings", default=4096)
    size, rotary = o.count("qk_nope_head_dim", default=128), o.count("qk_rope_head_dim", default=64)
    positions, logits = read_rope(o, theta=1e4, longest=longest)
    layers, dense = o.count("num_hidden_layers", default=61), o.count("first_k_dense_replace", default=3, low=0)
    groups_, chosen = o.count("n_group", default=8), o.count("topk_group", default=4)
    if groups_ != chosen:
        o.refuse(
            "n_group", groups_, f"topk_group={chosen}: experts are chosen among all, not among those of some groups"
        )
    o.only("num_key_value_heads", heads, "every head has its own keys", null=True)
    o.only("attention_bias", False, "latent attention has no biases")
    o.only("rms_norm_eps", 1e-6, "the norms of the latents have it, and this decoder has one eps")
    o.only("scoring_func", "sigmoid", "what the family computes", null=True)
    o.only("topk_method", "noaux_tc", "what the family computes", null=True)
    o.only("moe_layer_freq", 1, "every layer from first_k_dense_replace on has experts", null=True)
    o.only("head_dim", rotary, "qk_rope_head_dim", null=True)
    o.only("qk_head_dim", size + rotary, "qk_nope_head_dim + qk_rope_head_dim", null=True)
    o.only("partial_rotary_factor", 1.0, "the whole rotary part is rotated", null=True)
    o.flag("rope_interleave", True)
    o.take("num_nextn_predict_layers")  # layers for training and speculation behind those of the model
    rank = o.take("q_lora_rank", default=1536)  # null: queries without a latent
    groups: Groups = {
        "model": {
            "layers": layers,
            "width": o.count("hidden_size", default=7168),
            "vocab_size": o.count("vocab_size", default=129280),
        },
        "attention": {
            "kind": "mla",
            "heads": heads,
            "head_dim": size,
            "value_dim": o.count("v_head_dim", default=128),
            "rope_dim": rotary,
            "kv_rank": o.count("kv_lora_rank", default=512),
            "q_rank": None if rank is None else o.count("q_lora_rank", default=rank),
            "scale": None if logits == 1.0 else logits / math.sqrt(size + rotary),
        },
        "positions": positions,
        "mlp": {
            "kind": o.choice("hidden_act", GATED_ACTIVATIONS, "silu"),
            "width": o.count("intermediate_size", default=18432),
        },
        "norm": {"kind": "rmsnorm", "eps": 1e-6},
        "head": {"tied": o.flag("tie_word_embeddings", False)},
        "data": _length(longest),
    }
    moe = {
        "experts": o.count("n_routed_experts", default=256),
        "top_k": o.count("num_experts_per_tok", default=8),
        "width": o.count("moe_intermediate_size", default=2048),
        "shared": o.count("n_shared_experts", default=1, null=0, low=0),
        "dense_layers": dense,
        "score": "sigmoid",
        "normalize": o.flag("norm_topk_prob", True),
        "scale": o.number("routed_scaling_factor", default=2.5),
        "balance": "loss_free",
    }
    if dense < layers:
        groups["moe"] = moe
    return groups


def write_deepseek(config: Config) -> dict[str, Any]:
    a, moe = config.attention, config.moe
    return {
        "hidden_size": config.model.width,
        "intermediate_size": config.mlp_width,
        "moe_intermediate_size": config.expert_width,
        "num_hidden_layers": config.model.layers,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.heads,
        "kv_lora_rank": a.kv_rank,
        "q_lora_rank": a.q_rank,
        "qk_nope_head_dim": config.head_dim,
        "qk_rope_head_dim": config.rope_dim,
        "qk_head_dim": config.head_dim + config.rope_dim,
        "head_dim": config.rope_dim,
        "v_head_dim": config.value_dim,
        "n_routed_experts": max(moe.experts, 1),
        "n_shared_experts": moe.shared,
        "num_experts_per_tok": moe.top_k,
        "first_k_dense_replace": moe.dense_layers if moe.experts else config.model.layers,
        "norm_topk_prob": moe.normalize,
        "routed_scaling_factor": moe.scale,
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "hidden_act": _NAMES[config.mlp.kind],
        "rms_norm_eps": config.norm.eps,
        "rope_interleave": True,
        "num_nextn_predict_layers": 0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.head.tied,
        **write_rope(config),
    }
