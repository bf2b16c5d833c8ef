"""Make random models of the seven families, as small as their configs allow."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

from mhc.interop import hf, safetensors, tensors
from mhc.interop.families import FAMILIES
from mhc.interop.tensors import Layout

GOLDEN = Path(__file__).parents[1] / "golden"
Weights = dict[str, np.ndarray]


@functools.cache
def golden(name: str) -> tuple[dict[str, Any], Weights, Any, np.ndarray]:
    """Return (config.json, weights float64, tokens, logits) of an in-memory model."""
    with np.load(GOLDEN / f"hf_{name}.npz") as file:
        weights = {key[2:]: file[key] for key in file.files if key.startswith("w/")}
        return json.loads(str(file["config"])), weights, file["tokens"], file["logits"]


def random_config(family: str, seed: int) -> dict[str, Any]:
    """Return a config.json with sizes and options drawn at random."""
    rng = np.random.default_rng([seed, *family.encode()])

    def one(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    heads, size, layers = one(2, 4, 6), one(2, 4, 6), one(1, 2, 3)
    raw: dict[str, Any] = {"model_type": family, "vocab_size": one(11, 16, 19), "tie_word_embeddings": one(True, False)}
    if family == "gpt2":
        return raw | {
            "n_embd": heads * size,
            "n_head": heads,
            "n_layer": layers,
            "n_positions": one(12, 17),
            "n_inner": one(None, 20),
            "activation_function": one("gelu_new", "relu", "gelu_pytorch_tanh"),
            "layer_norm_epsilon": one(1e-5, 1e-6),
            "scale_attn_weights": one(True, False),
        }
    if family == "bloom":
        return raw | {"hidden_size": heads * size, "n_head": heads, "n_layer": layers, "layer_norm_epsilon": 1e-5}
    groups = one(*[g for g in (1, 2, 3) if heads % g == 0])
    raw |= {
        "hidden_size": one(8, 10, heads * size),
        "intermediate_size": one(5, 12),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": size,
        "hidden_act": one("silu", "gelu_pytorch_tanh"),
        "max_position_embeddings": one(16, 24),
        "rms_norm_eps": one(1e-5, 1e-6),
    }
    scaling = one(
        None,
        {"rope_type": "linear", "factor": 2.0},
        {"type": "dynamic", "factor": 3.0},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8, "beta_fast": 16},
        {
            "rope_type": "llama3",
            "factor": 2.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 3.0,
            "original_max_position_embeddings": 8,
        },
    )
    theta = one(1e4, 5e5)
    if one(True, False):
        raw |= {"rope_theta": theta, "rope_scaling": scaling}
    else:
        raw["rope_parameters"] = {**(scaling or {"rope_type": "default"}), "rope_theta": theta}
    if family == "llama":
        raw |= {"attention_bias": one(True, False), "mlp_bias": one(True, False)}
    if family in ("mistral", "mixtral"):
        raw["sliding_window"] = one(None, 3)
    if family == "mixtral":
        raw |= {"num_local_experts": one(2, 3), "num_experts_per_tok": one(1, 2)}
    if family == "qwen3" and one(True, False):
        kinds = ["full_attention" if (layer + 1) % 2 == 0 else "sliding_attention" for layer in range(layers)]
        raw |= {"use_sliding_window": True, "sliding_window": 3, "layer_types": kinds}
    if family == "deepseek_v3":
        del raw["head_dim"]
        raw |= {
            "num_key_value_heads": heads,
            "rms_norm_eps": 1e-6,
            "qk_nope_head_dim": size,
            "qk_rope_head_dim": one(4, 6),
            "v_head_dim": one(3, 5),
            "kv_lora_rank": one(4, 7),
            "q_lora_rank": one(None, 5),
            "moe_intermediate_size": 6,
            "n_routed_experts": one(2, 4),
            "n_shared_experts": one(1, 2),
            "num_experts_per_tok": 2,
            "first_k_dense_replace": one(0, 1),
            "n_group": 1,
            "topk_group": 1,
            "rope_interleave": one(True, False),
            "norm_topk_prob": one(True, False),
            "routed_scaling_factor": one(1.0, 2.5),
        }
    return raw


def random_layout(raw: dict[str, Any], seed: int) -> Layout:
    """Return a naming in which such a model may come."""
    bare, fused, head = np.random.default_rng(seed).integers(2, size=3).astype(bool)
    experts = raw["model_type"] in ("mixtral", "deepseek_v3")
    return Layout(
        raw["model_type"],
        bare=bool(bare),
        fused=bool(fused) and experts and raw.get("first_k_dense_replace", 0) < raw.get("num_hidden_layers", 1),
        interleaved=raw.get("rope_interleave", True),
        head=bool(head) or not raw["tie_word_embeddings"],
    )


def random_weights(raw: dict[str, Any], layout: Layout, seed: int) -> Weights:
    """Return weights of a model, float32; norms are around one."""
    rng = np.random.default_rng(seed)
    plan = tensors.plan(hf.merged(raw, {"residual": {"kind": "plain"}}), layout)
    weights = {
        name: (("norm" in name or "ln_" in name) + 0.4 * rng.standard_normal(tensor.shape)).astype(np.float32)
        for name, tensor in plan.items()
    }
    if raw["tie_word_embeddings"] and layout.head:
        weights["lm_head.weight"] = weights[next(iter(plan))]
    return weights


def write_folder(folder: Path, raw: dict[str, Any], weights: Weights, shards: int = 1) -> Path:
    """Write a folder as Hugging Face has it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    names = sorted(weights)
    where: dict[str, str] = {}
    for number in range(shards):
        part = names[number::shards]
        file = "model.safetensors" if shards == 1 else f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        safetensors.write(folder / file, {name: weights[name].shape for name in part}, weights.__getitem__)
        where |= dict.fromkeys(part, file)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


FAMILY_NAMES = tuple(FAMILIES)
