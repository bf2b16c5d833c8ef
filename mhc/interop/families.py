"""The families of models that are read and written, and what their config.json means as a Config of ours.

A family reads its config into groups of ours and writes one of ours. Which family can express a Config of ours is not
stated a second time: it is one whose config, written and read back, describes the same model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from mhc import config as configs
from mhc import kinds
from mhc.config import Config
from mhc.errors import UserError, did_you_mean
from mhc.interop.options import Options

Groups = dict[str, dict[str, Any]]

LONGEST = 2048  # tokens of a training sequence where the config names a longer context

# Activations by their names there. ``gelu`` with the error function is not among ours.
_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
PLAIN_ACTIVATIONS = dict.fromkeys(_GELU, "gelu") | {"relu": "relu", "silu": "silu", "swish": "silu"}
GATED_ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "sigmoid": "glu"} | dict.fromkeys(_GELU[1:], "geglu")
_NAMES = {"gelu": "gelu_new", "relu": "relu", "silu": "silu", "swiglu": "silu", "glu": "sigmoid"}
_NAMES["geglu"] = "gelu_pytorch_tanh"


@dataclasses.dataclass(frozen=True)
class Family:
    """A ``model_type``."""

    name: str
    architecture: str
    prefix: str  # of every tensor's name but the head's; a bare model has none
    embedding: str  # name of the embedding, without the prefix
    read: Callable[[Options], Groups]
    write: Callable[[Config], dict[str, Any]]
    harmless: str = ""  # further options without a meaning for the logits


def _length(positions: int) -> dict[str, Any]:
    return {"sequence_length": min(positions, LONGEST)}


# Rotary positions -----------------------------------------------------------------------------------------------------


def _mscale(factor: float, by: float) -> float:
    return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0


def _read_rope(o: Options, *, theta: float, longest: int) -> tuple[dict[str, Any], float]:
    """(positions group, factor of attention's logits), from ``rope_parameters`` or ``rope_theta`` and
    ``rope_scaling``."""
    old, new = o.mapping("rope_scaling"), o.mapping("rope_parameters")
    given = {**old, **new}
    under = "rope_parameters." if new else "rope_scaling."
    base = o.number("rope_theta", default=theta)
    r = Options(given, o.family, under)
    kind = r.take("rope_type", "type", default="default")
    r.only("partial_rotary_factor", 1.0, "the whole head is rotated")
    groups: dict[str, Any] = {"kind": "rope", "theta": r.number("rope_theta", default=base)}
    factor, logits = 1.0, 1.0
    if kind not in ("default", "linear", "dynamic", "yarn", "llama3"):
        r.refuse("rope_type", kind, "default, linear, dynamic, yarn or llama3")
    if kind != "default":
        original = r.count("original_max_position_embeddings", default=None if kind == "llama3" else longest)
        ratio = longest / original if kind == "yarn" else None
        factor = r.number("factor", default=ratio)
        groups |= {"scaling": kind, "factor": factor}
        if kind in ("yarn", "llama3"):
            groups["original_length"] = original
        if kind == "dynamic":
            if original != longest:
                r.refuse("original_max_position_embeddings", original, f"max_position_embeddings={longest} or none")
            groups["original_length"] = longest
    if kind == "llama3":
        groups["low_frequency"], groups["high_frequency"] = r.number("low_freq_factor"), r.number("high_freq_factor")
    if kind == "yarn":
        groups["beta_fast"] = r.number("beta_fast", default=32.0)
        groups["beta_slow"] = r.number("beta_slow", default=1.0)
        r.only("truncate", True, "the ramp's ends are whole pairs")
        over, under_ = r.take("mscale"), r.take("mscale_all_dim")
        attention = r.take("attention_factor")
        if attention is None and over and under_:
            attention = _mscale(factor, r.number("mscale")) / _mscale(factor, r.number("mscale_all_dim"))
        groups["attention_factor"] = attention
    if o.family == "deepseek_v3" and kind != "default" and r.take("mscale_all_dim"):
        logits = _mscale(factor, r.number("mscale_all_dim")) ** 2
    r.take("finetuned")
    r.finish()
    return groups, logits


def _write_rope(config: Config) -> dict[str, Any]:
    p = config.positions
    scaling: dict[str, Any] | None = None
    longest = config.data.sequence_length
    if p.scaling != "none":
        scaling = {"rope_type": p.scaling, "factor": p.factor}
    if p.scaling == "dynamic":
        longest = config.original_length
    if p.scaling in ("yarn", "llama3"):
        assert scaling is not None
        scaling["original_max_position_embeddings"] = config.original_length
        longest = round(p.factor * config.original_length)
    if p.scaling == "yarn" and scaling is not None:
        scaling |= {"beta_fast": p.beta_fast, "beta_slow": p.beta_slow}
        if p.attention_factor is not None:
            scaling["attention_factor"] = p.attention_factor
        if config.attention.kind == "mla" and config.attention.scale and p.factor > 1:
            grown = config.attention.scale * math.sqrt(config.head_dim + config.rope_dim)
            scaling["mscale_all_dim"] = (math.sqrt(grown) - 1.0) / (0.1 * math.log(p.factor))
    if p.scaling == "llama3" and scaling is not None:
        scaling |= {"low_freq_factor": p.low_frequency, "high_freq_factor": p.high_frequency}
    return {"max_position_embeddings": longest, "rope_theta": p.theta, "rope_scaling": scaling}


# gpt2 and bloom -------------------------------------------------------------------------------------------------------


def _read_gpt2(o: Options) -> Groups:
    width, positions = o.count("n_embd", "hidden_size"), o.count("n_positions", "max_position_embeddings", "n_ctx")
    o.take("n_ctx")
    o.only("scale_attn_by_inverse_layer_idx", False, "every layer's logits have one scale")
    o.only("add_cross_attention", False, "a decoder alone")
    return {
        "model": {
            "layers": o.count("n_layer", "num_hidden_layers"),
            "width": width,
            "vocab_size": o.count("vocab_size"),
        },
        "attention": {
            "heads": o.count("n_head", "num_attention_heads"),
            "bias": True,
            "scale": None if o.flag("scale_attn_weights", True) else 1.0,
        },
        "positions": {"kind": "learned", "max_length": positions},
        "mlp": {
            "kind": o.choice("activation_function", PLAIN_ACTIVATIONS, "gelu_new"),
            "width": o.count("n_inner", default=4 * width),
            "bias": True,
        },
        "norm": {"kind": "layernorm", "eps": o.number("layer_norm_epsilon", default=1e-5)},
        "head": {"tied": o.flag("tie_word_embeddings", True)},
        "data": _length(positions),
    }


def _write_gpt2(config: Config) -> dict[str, Any]:
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
        # These would be its dropout; ours has none.
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


def _read_bloom(o: Options) -> Groups:
    width = o.count("hidden_size", "n_embed")
    o.take("n_embed")
    o.only("apply_residual_connection_post_layernorm", False, "the residual comes before the norm")
    o.only("n_inner", 4 * width, "four times the width")
    return {
        "model": {
            "layers": o.count("n_layer", "num_hidden_layers"),
            "width": width,
            "vocab_size": o.count("vocab_size"),
        },
        "attention": {"heads": o.count("n_head", "num_attention_heads"), "bias": True},
        "positions": {"kind": "alibi"},
        "mlp": {"kind": "gelu", "width": 4 * width, "bias": True},
        "norm": {"kind": "layernorm", "embedding": True, "eps": o.number("layer_norm_epsilon", default=1e-5)},
        "head": {"tied": o.flag("tie_word_embeddings", True)},
        "data": _length(o.count("seq_length", default=LONGEST)),
    }


def _write_bloom(config: Config) -> dict[str, Any]:
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
    o: Options, *, theta: float = 1e4, eps: float = 1e-6, kv_heads: int | None = None, head_dim: int | None = None
) -> Groups:
    """What the families share; the arguments are what an absent option means."""
    heads, width, longest = (
        o.count("num_attention_heads"),
        o.count("hidden_size"),
        o.count("max_position_embeddings", default=LONGEST),
    )
    positions, _ = _read_rope(o, theta=theta, longest=longest)
    o.only("partial_rotary_factor", 1.0, "the whole head is rotated")
    return {
        "model": {"layers": o.count("num_hidden_layers"), "width": width, "vocab_size": o.count("vocab_size")},
        "attention": {
            "heads": heads,
            "kv_heads": o.count("num_key_value_heads", default=kv_heads or heads),
            "head_dim": o.count("head_dim", default=head_dim or max(width // heads, 1)),
        },
        "positions": positions,
        "mlp": {
            "kind": o.choice("hidden_act", GATED_ACTIVATIONS, "silu"),
            "width": o.count("intermediate_size"),
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
        **_write_rope(config),
    }


def _read_llama(o: Options) -> Groups:
    groups = _llama_like(o)
    groups["attention"]["bias"], groups["mlp"]["bias"] = o.flag("attention_bias", False), o.flag("mlp_bias", False)
    return groups


def _write_llama(config: Config) -> dict[str, Any]:
    return _write_llama_like(config) | {"attention_bias": config.attention.bias, "mlp_bias": config.mlp.bias}


def _window(o: Options) -> int | None:
    return None if o.take("sliding_window") is None else o.count("sliding_window")


def _read_mistral(o: Options) -> Groups:
    groups = _llama_like(o, kv_heads=8)
    groups["attention"]["window"] = _window(o)
    return groups


def _write_mistral(config: Config) -> dict[str, Any]:
    return _write_llama_like(config) | {"sliding_window": config.attention.window}


def _read_qwen3(o: Options) -> Groups:
    groups = _llama_like(o, kv_heads=32, head_dim=128)
    attention, layers = groups["attention"], groups["model"]["layers"]
    attention |= {"qk_norm": True, "bias": o.flag("attention_bias", False)}
    window = _window(o) if o.flag("use_sliding_window", False) else None
    o.take("sliding_window")
    first = o.count("max_window_layers", default=layers, low=0)
    kinds = ["sliding_attention" if window and layer >= first else "full_attention" for layer in range(layers)]
    kinds = o.take("layer_types", default=kinds)
    attention |= _windows(o, kinds, window, layers)
    return groups


def _windows(o: Options, kinds: Any, window: int | None, layers: int) -> dict[str, Any]:
    """Window and period of the layers that see everything, from the kind of every layer."""
    known = isinstance(kinds, list) and len(kinds) == layers
    if not known or not set(kinds) <= {"sliding_attention", "full_attention"}:
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


def _write_qwen3(config: Config) -> dict[str, Any]:
    local = config.local_layers
    return _write_llama_like(config) | {
        "attention_bias": config.attention.bias,
        "use_sliding_window": any(local),
        "sliding_window": config.attention.window,
        "max_window_layers": 0 if any(local) else config.model.layers,
        "layer_types": ["sliding_attention" if one else "full_attention" for one in local],
    }


def _read_mixtral(o: Options) -> Groups:
    groups = _llama_like(o, theta=1e6, eps=1e-5, kv_heads=8)
    groups["attention"]["window"] = _window(o)
    width = groups["mlp"].pop("width")
    balance = o.number("router_aux_loss_coef", default=0.001)
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


def _write_mixtral(config: Config) -> dict[str, Any]:
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


def _read_deepseek(o: Options) -> Groups:
    heads, longest = o.count("num_attention_heads"), o.count("max_position_embeddings", default=4096)
    size, rotary = o.count("qk_nope_head_dim", default=128), o.count("qk_rope_head_dim", default=64)
    positions, logits = _read_rope(o, theta=1e4, longest=longest)
    layers, dense = o.count("num_hidden_layers"), o.count("first_k_dense_replace", default=3, low=0)
    groups_, chosen = o.count("n_group", default=8), o.count("topk_group", default=4)
    if groups_ != chosen:
        o.refuse(
            "n_group", groups_, f"topk_group={chosen}: experts are chosen among all, not among those of some groups"
        )
    o.only("num_key_value_heads", heads, "every head has its own keys")
    o.only("attention_bias", False, "latent attention has no biases")
    o.only("rms_norm_eps", 1e-6, "the norms of the latents have it, and this decoder has one eps")
    o.only("scoring_func", "sigmoid", "what the family computes")
    o.only("topk_method", "noaux_tc", "what the family computes")
    o.only("moe_layer_freq", 1, "every layer from first_k_dense_replace on has experts")
    o.only("head_dim", rotary, "qk_rope_head_dim")
    o.only("qk_head_dim", size + rotary, "qk_nope_head_dim + qk_rope_head_dim")
    o.only("partial_rotary_factor", 1.0, "the whole rotary part is rotated")
    o.flag("rope_interleave", True)
    o.take("num_nextn_predict_layers")  # layers for training and speculation behind those of the model
    rank = o.take("q_lora_rank")
    groups: Groups = {
        "model": {"layers": layers, "width": o.count("hidden_size"), "vocab_size": o.count("vocab_size")},
        "attention": {
            "kind": "mla",
            "heads": heads,
            "head_dim": size,
            "value_dim": o.count("v_head_dim", default=128),
            "rope_dim": rotary,
            "kv_rank": o.count("kv_lora_rank", default=512),
            "q_rank": None if rank is None else o.count("q_lora_rank"),
            "scale": None if logits == 1.0 else logits / math.sqrt(size + rotary),
        },
        "positions": positions,
        "mlp": {
            "kind": o.choice("hidden_act", GATED_ACTIVATIONS, "silu"),
            "width": o.count("intermediate_size"),
        },
        "norm": {"kind": "rmsnorm", "eps": 1e-6},
        "head": {"tied": o.flag("tie_word_embeddings", False)},
        "data": _length(longest),
    }
    moe = {
        "experts": o.count("n_routed_experts", default=256),
        "top_k": o.count("num_experts_per_tok", default=8),
        "width": o.count("moe_intermediate_size", default=2048),
        "shared": o.count("n_shared_experts", default=1, low=0),
        "dense_layers": dense,
        "score": "sigmoid",
        "normalize": o.flag("norm_topk_prob", True),
        "scale": o.number("routed_scaling_factor", default=2.5),
        "balance": "loss_free",
    }
    if dense < layers:
        groups["moe"] = moe
    return groups


def _write_deepseek(config: Config) -> dict[str, Any]:
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
        **_write_rope(config),
    }


FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family(
            "gpt2",
            "GPT2LMHeadModel",
            "transformer.",
            "wte.weight",
            _read_gpt2,
            _write_gpt2,
            "attn_pdrop embd_pdrop resid_pdrop summary_activation summary_first_dropout summary_proj_to_labels"
            " summary_type summary_use_proj reorder_and_upcast_attn",
        ),
        Family("llama", "LlamaForCausalLM", "model.", "embed_tokens.weight", _read_llama, _write_llama),
        Family("mistral", "MistralForCausalLM", "model.", "embed_tokens.weight", _read_mistral, _write_mistral),
        Family("qwen3", "Qwen3ForCausalLM", "model.", "embed_tokens.weight", _read_qwen3, _write_qwen3),
        Family(
            "bloom",
            "BloomForCausalLM",
            "transformer.",
            "word_embeddings.weight",
            _read_bloom,
            _write_bloom,
            "attention_softmax_in_fp32 bias_dropout_fusion masked_softmax_fusion offset_alibi skip_bias_add"
            " skip_bias_add_qkv slow_but_exact",
        ),
        Family("mixtral", "MixtralForCausalLM", "model.", "embed_tokens.weight", _read_mixtral, _write_mixtral),
        Family(
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            "model.",
            "embed_tokens.weight",
            _read_deepseek,
            _write_deepseek,
            "aux_loss_alpha ep_size seq_aux",
        ),
    )
}


def family_of(raw: Mapping[str, Any]) -> Family:
    """The family of a config.json. Raises UserError where it is not one of ours."""
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        hint = did_you_mean(name, FAMILIES) if isinstance(name, str) else ""
        raise UserError(f"config.json: model_type: given {name!r}, allowed: {', '.join(FAMILIES)}{hint}")
    return FAMILIES[name]


def read(raw: Mapping[str, Any]) -> tuple[Family, Groups]:
    """(family, groups of our config) of a config.json.

    Raises: UserError, of one line, for an unknown family, an option that our decoder lacks or does not know, or a value
    that is missing or of another kind.
    """
    family = family_of(raw)
    options = Options(raw, family.name, harmless=family.harmless)
    groups = family.read(options)
    options.finish()
    return family, groups


# Which of our models is which of theirs -------------------------------------------------------------------------------

# Fields that decide the function from tokens to logits, given the parameters.
_FUNCTION = {
    "model": ("layers", "width", "vocab_size", "embed_scale"),
    "attention": None,
    "positions": None,
    "mlp": None,
    "moe": ("experts", "top_k", "width", "shared", "dense_layers", "score", "normalize", "scale", "balance"),
    "norm": ("kind", "placement", "final", "embedding", "eps"),
    "head": ("tied", "softcap"),
}


def function(config: Config) -> dict[str, Any]:
    """{dotted field: value} of all that decides the function of a model but its residual; what a field cannot change
    under the others is left out."""
    assert config.model.vocab_size is not None
    tree = configs.to_dict(configs.resolve(config, config.model.vocab_size))
    out = {
        f"{group}.{name}": tree[group][name] for group, names in _FUNCTION.items() for name in (names or tree[group])
    }
    del out["attention.impl"]
    p, moe = config.positions, config.moe
    idle = {"positions.original_length": p.scaling in ("dynamic", "yarn", "llama3")}
    idle["positions.max_length"] = p.kind == "learned"
    idle |= {f"positions.{name}": p.kind == "relative_bias" for name in ("buckets", "max_distance")}
    idle["positions.theta"] = p.kind == "rope"
    idle["attention.kv_rank"] = config.attention.kind == "mla"
    idle["mlp.width"] = not moe.experts or moe.dense_layers > 0
    idle |= {name: moe.experts > 0 for name in out if name.startswith("moe.")}
    if moe.experts:
        out["moe.balance"] = "loss_free" if moe.balance == "loss_free" else "none"  # only the former has parameters
    return {name: value for name, value in out.items() if idle.get(name, True)}


def differences(one: Config, other: Config) -> dict[str, tuple[Any, Any]]:
    """{field: (value of one, value of other)} where the functions of two configs differ; floats to 1e-9."""
    a, b = function(one), function(other)

    def same(x: Any, y: Any) -> bool:
        if isinstance(x, float) and isinstance(y, float):
            return math.isclose(x, y, rel_tol=1e-9)
        return bool(x == y)

    return {
        name: (a.get(name), b.get(name))
        for name in {**a, **b}
        if name not in a or name not in b or not same(a[name], b[name])
    }


def express(config: Config) -> tuple[Family, dict[str, Any]]:
    """(family, config.json) of the first family that a plain model of ours belongs to.

    Raises: UserError where there is none: the nearest one, and what it lacks.
    """
    if not config.residual.is_plain:
        apart = config.residual.apart_from_plain if config.residual.spec.is_plain else {}
        given = f"residual.{next(iter(apart))}" if apart else f"residual.kind={config.residual.kind}"
        raise UserError(
            f"{given}: no family of Hugging Face has it; python -m mhc.interop.export writes it in our names"
        )
    nearest: tuple[int, str] | None = None
    for family in FAMILIES.values():
        written = {
            "architectures": [family.architecture],
            "model_type": family.name,
            "vocab_size": config.vocab_size,
            **family.write(config),
            "dtype": "float32",
        }
        try:
            _, groups = read(written)
            apart = differences(config, configs.from_config_dict(groups | {"residual": {"kind": kinds.PLAIN.name}}))
        except UserError:
            continue
        if not apart:
            return family, written
        if nearest is None or len(apart) < nearest[0]:
            lacks = "; ".join(
                f"{name} is {ours!r}, {family.name} has {theirs!r}" for name, (ours, theirs) in apart.items()
            )
            nearest = len(apart), lacks
    reason = nearest[1] if nearest else "its sizes fit none"
    raise UserError(f"no family of Hugging Face expresses this model: {reason}")
