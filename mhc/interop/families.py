"""List the families of models that are read and written, and find the one that expresses a Config.

A family expresses a model if the model's config, written as config.json and read back, describes the same model.
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
from mhc.interop import config_json
from mhc.interop.config_json import Groups
from mhc.interop.options import Options


@dataclasses.dataclass(frozen=True)
class Family:
    """Describes a ``model_type``."""

    name: str
    architecture: str
    prefix: str  # of every tensor's name but the head's; a bare model has no prefix
    embedding: str  # name of the embedding, without the prefix
    read: Callable[[Options], Groups]
    write: Callable[[Config], dict[str, Any]]
    harmless: str = ""  # further options without a meaning for the logits


FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family(
            "gpt2",
            "GPT2LMHeadModel",
            "transformer.",
            "wte.weight",
            config_json.read_gpt2,
            config_json.write_gpt2,
            "attn_pdrop embd_pdrop resid_pdrop summary_activation summary_first_dropout summary_proj_to_labels"
            " summary_type summary_use_proj reorder_and_upcast_attn",
        ),
        Family(
            "llama",
            "LlamaForCausalLM",
            "model.",
            "embed_tokens.weight",
            config_json.read_llama,
            config_json.write_llama,
        ),
        Family(
            "mistral",
            "MistralForCausalLM",
            "model.",
            "embed_tokens.weight",
            config_json.read_mistral,
            config_json.write_mistral,
        ),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            "model.",
            "embed_tokens.weight",
            config_json.read_qwen3,
            config_json.write_qwen3,
        ),
        Family(
            "bloom",
            "BloomForCausalLM",
            "transformer.",
            "word_embeddings.weight",
            config_json.read_bloom,
            config_json.write_bloom,
            "attention_softmax_in_fp32 bias_dropout_fusion masked_softmax_fusion offset_alibi skip_bias_add"
            " skip_bias_add_qkv slow_but_exact",
        ),
        Family(
            "mixtral",
            "MixtralForCausalLM",
            "model.",
            "embed_tokens.weight",
            config_json.read_mixtral,
            config_json.write_mixtral,
        ),
        Family(
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            "model.",
            "embed_tokens.weight",
            config_json.read_deepseek,
            config_json.write_deepseek,
            "aux_loss_alpha ep_size seq_aux",
        ),
    )
}


def family_of(raw: Mapping[str, Any]) -> Family:
    """Return the family of a config.json. Raises UserError for an unknown one."""
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        hint = did_you_mean(name, FAMILIES) if isinstance(name, str) else ""
        raise UserError(f"config.json: model_type: given {name!r}, allowed: {', '.join(FAMILIES)}{hint}")
    return FAMILIES[name]


def read(raw: Mapping[str, Any]) -> tuple[Family, Groups]:
    """Return (family, groups of our config) for a config.json.

    Raises:
      UserError: an unknown family, an option that the decoder lacks or does not know, or a value that is missing or of
        another kind.
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
    "update": None,
    "moe": ("experts", "top_k", "width", "shared", "dense_layers", "score", "normalize", "scale", "balance"),
    "norm": ("kind", "placement", "final", "embedding", "eps", "bias"),
    "head": ("tied", "softcap", "classes"),
}


def function(config: Config) -> dict[str, Any]:
    """Return {dotted field: value} of everything that decides the function of a model, but for its residual.

    Fields that cannot change it under the values of the others are left out.
    """
    assert config.model.vocab_size is not None
    tree = configs.to_dict(configs.resolve(config, config.model.vocab_size))
    out = {
        f"{group}.{name}": tree[group][name] for group, names in _FUNCTION.items() for name in (names or tree[group])
    }
    del out["attention.impl"], out["positions.noise"]
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


def differences(first: Config, second: Config) -> dict[str, tuple[Any, Any]]:
    """Return {field: (first value, second value)} where the functions of two configs differ, floats by over 1e-9."""
    a, b = function(first), function(second)

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
    """Return (family, config.json) of the first family that a plain model belongs to.

    Raises:
      UserError: there is none. The line names the nearest family and what it lacks.
    """
    if config.residual.value_residual:
        raise UserError(
            "residual.value_residual: no family of Hugging Face has it; python -m mhc.interop.export writes it in our "
            "names"
        )
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
