"""Translate rotary positions of a config.json into our group, and back, for all families that rotate."""

from __future__ import annotations

import math
from typing import Any

from mhc.config import Config
from mhc.interop.options import REFUSED, Options


def mscale(factor: float, by: float) -> float:
    """Return YaRN's factor of attention for a context that is ``factor`` times as long (arXiv:2309.00071)."""
    return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0


def read_rope(o: Options, *, theta: float, longest: int) -> tuple[dict[str, Any], float]:
    """Return (positions group, factor of attention's logits) for the rotary options of a config.json.

    They are ``rope_parameters``, or ``rope_theta`` and ``rope_scaling``.

    Args:
      theta: the meaning of an absent ``rope_theta``. Inside the mappings null mostly means the same as absence.
      longest: tokens of the longest context.
    """
    old, new = o.mapping("rope_scaling"), o.mapping("rope_parameters")
    given = {**old, **new}
    under = "rope_parameters." if new else "rope_scaling."
    r = Options(given, o.family, under)
    base = o.number("rope_theta", default=theta, null=given.get("rope_theta") or REFUSED)
    kind = r.take("rope_type", "type", default="default")
    r.only("partial_rotary_factor", 1.0, "the whole head is rotated", null=True)
    groups: dict[str, Any] = {"kind": "rope", "theta": r.number("rope_theta", default=base)}
    factor, logits = 1.0, 1.0
    if kind not in ("default", "linear", "dynamic", "yarn", "llama3"):
        r.refuse("rope_type", kind, "default, linear, dynamic, yarn or llama3")
    if kind != "default":
        original = r.count("original_max_position_embeddings", default=None if kind == "llama3" else longest)
        ratio = longest / original if kind == "yarn" else None
        factor = r.number("factor", default=ratio, null=ratio or REFUSED)
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
        groups["beta_fast"] = r.number("beta_fast", default=32.0, null=32.0)
        groups["beta_slow"] = r.number("beta_slow", default=1.0, null=1.0)
        r.only("truncate", True, "the ramp's ends are whole pairs")
        over, under_ = r.take("mscale"), r.take("mscale_all_dim")
        attention = r.take("attention_factor")
        if attention is None and over and under_:
            attention = mscale(factor, r.number("mscale")) / mscale(factor, r.number("mscale_all_dim"))
        groups["attention_factor"] = attention
    if o.family == "deepseek_v3" and kind != "default" and r.take("mscale_all_dim"):
        logits = mscale(factor, r.number("mscale_all_dim")) ** 2
    r.take("finetuned")
    r.finish()
    return groups, logits


def write_rope(config: Config) -> dict[str, Any]:
    """Return the options of a config.json for a config's positions."""
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
