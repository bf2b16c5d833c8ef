"""Test options of the model: bad combinations are refused with a reason; ready configs have the published sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mhc import cli, kinds
from mhc.config import Config, from_config_dict, resolve
from mhc.errors import UserError
from mhc.model.decoder import DecoderDefinition
from mhc.model.flops import count_parameters

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            {"attention": {"kind": "mla", "kv_heads": 2}},
            "attention.kv_heads: given 2, allowed: None with attention.kind",
        ),
        (
            {"attention": {"kind": "mla", "bias": True}},
            "attention.bias: given True, allowed: False with attention.kind",
        ),
        ({"attention": {"kind": "mla", "qk_norm": True}}, "attention.qk_norm: given True, allowed: False"),
        ({"attention": {"kind": "mla", "rope_dim": 3}}, "attention.rope_dim: given 3, allowed: an even number from 2"),
        (
            {"attention": {"kind": "mla", "rope_dim": 4}, "positions": {"kind": "alibi"}},
            "attention.rope_dim: given 4, allowed: None or 0 unless positions.kind=rope",
        ),
        ({"attention": {"kv_rank": 64}}, "attention.kv_rank: given 64, allowed: 512 with attention.kind=heads"),
        ({"attention": {"q_rank": 64}}, "attention.q_rank: given 64, allowed: None with attention.kind=heads"),
        (
            {"attention": {"global_every": 6}},
            "attention.global_every: given 6, allowed: 0, or from 2 with attention.win",
        ),
        ({"attention": {"prefix": 256}}, "attention.prefix: given 256, allowed: below data.sequence_length=256"),
        ({"attention": {"impl": "sdpa", "softcap": 30.0}}, "attention.impl: given 'sdpa', allowed: auto or xla"),
        ({"attention": {"impl": "flash", "prefix": 4}}, "attention.impl: given 'flash', allowed: auto or xla"),
        (
            {"positions": {"kind": "alibi", "scaling": "linear"}},
            "positions.scaling: given 'linear', allowed: none unless",
        ),
        ({"positions": {"factor": 2.0}}, "positions.factor: given 2.0, allowed: 1.0 with positions.scaling=none"),
        (
            {"positions": {"beta_fast": 16.0}},
            "positions.beta_fast: given 16.0, allowed: 32.0 unless positions.scaling=yarn",
        ),
        (
            {"positions": {"scaling": "llama3", "low_frequency": 5.0}},
            "positions.low_frequency: given 5.0, allowed: below positions.high_frequency=4.0",
        ),
        ({"positions": {"kind": "learned", "max_length": 100}}, "positions.max_length: given 100, allowed: at least"),
        (
            {"positions": {"kind": "relative_bias", "max_distance": 16}},
            "positions.max_distance: given 16, allowed: above half of positions.buckets=32",
        ),
        ({"mlp": {"kind": "gelu", "clamp": 7.0}}, "mlp.clamp: given 7.0, allowed: None with mlp.kind=gelu"),
        ({"norm": {"gamma_frozen": True, "gamma_schedule": 0.1}}, "norm.gamma_frozen: given True, allowed: False with"),
        ({"norm": {"gamma_shape": "cosine"}}, "norm.gamma_shape: given 'cosine', allowed: linear without"),
        ({"norm": {"gamma_shape": "sqrt", "gamma_schedule": 0.1}}, "norm.gamma_shape: given 'sqrt', allowed: one of"),
        ({"norm": {"gamma_layers": [0]}}, "norm.gamma_layers: given (0,), allowed: () unless another gamma field"),
        (
            {"norm": {"gamma_layers": [2, 12], "gamma_frozen": True}},
            "norm.gamma_layers: given (2, 12), allowed: increasing layers from 0 to 11",
        ),
        (
            {"norm": {"gamma_layers": [2, 1], "gamma_frozen": True}},
            "norm.gamma_layers: given (2, 1), allowed: increasing layers from 0 to 11",
        ),
        ({"norm": {"kind": "layernorm", "bias": True}}, "norm.bias: given True, allowed: False with norm.kind=layer"),
        ({"norm": {"beta_frozen": True}}, "norm.beta_frozen: given True, allowed: False with norm.kind=rmsnorm"),
        (
            {"update": {"trained": True, "schedule": 0.5}},
            "update.trained: given True, allowed: False with update.schedule",
        ),
        ({"update": {"shape": "cosine"}}, "update.shape: given 'cosine', allowed: linear without update.schedule"),
        ({"update": {"layers": [1]}}, "update.layers: given (1,), allowed: () unless update.scale"),
        ({"update": {"scale": 0.5, "layers": [12]}}, "update.layers: given (12,), allowed: increasing layers from 0"),
        ({"update": {"scail": 0.5}}, "update.scail: unknown field (did you mean update.scale?)"),
        (
            {"positions": {"kind": "learned", "noise": 0.5}},
            "positions.noise: given 0.5, allowed: 0.0 with positions.kind=learned: it has rows for whole numbers alone",
        ),
        ({"positions": {"kind": "none", "noise": 0.5}}, "positions.noise: given 0.5, allowed: 0.0 with"),
        ({"monitor": {"gamma": True, "probe_every": 0}}, "monitor.gamma: given True, allowed: False with"),
        ({"positions": {"scaling": "yarm"}}, "positions.scaling: given 'yarm', allowed: one of none, linear"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(groups: dict[str, dict[str, Any]], message: str) -> None:
    with pytest.raises(UserError) as caught:
        from_config_dict(groups)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_resolve_fills_in_is_accepted_again() -> None:
    """A stored config, which is a resolved one, comes back as it was, for either kind of attention."""
    for groups in ({}, {"attention": {"kind": "mla"}}, {"attention": {"kind": "mla"}, "positions": {"kind": "none"}}):
        resolved = resolve(from_config_dict(groups), 258)
        assert resolve(resolved, 258) == resolved


def ready(name: str, kind: str = "mhc") -> Config:
    overrides = [f"--config.residual.kind={kind}"]
    config = cli.load_config(str(ROOT / "configs" / f"{name}.py"), overrides)
    return resolve(config, config.model.vocab_size or 258)


@pytest.mark.parametrize(
    ("name", "total", "active", "vocabulary"),
    [
        ("paper_3b", "2.97B", "612M", "331M"),
        ("paper_9b", "9.18B", "1.66B", "496M"),
        ("paper_27b", "27.0B", "4.14B", "662M"),
    ],
)
def test_the_papers_models_count_as_published(name: str, total: str, active: str, vocabulary: str) -> None:
    """The counts equal those of the paper's Table 5; nothing is allocated."""

    def rounded(count: int) -> str:
        return f"{count / 1e9:#.3g}B" if count >= 1e9 else f"{count / 1e6:.0f}M"

    counts = count_parameters(DecoderDefinition(ready(name)))
    assert [rounded(counts[part]) for part in ("total", "active", "vocabulary")] == [total, active, vocabulary]


@pytest.mark.parametrize(
    ("name", "millions", "active"),
    [
        ("dense_10m", 10.5, 10.4),
        ("dense_125m", 125, 125),
        ("dense_350m", 359, 359),
        ("dense_1b", 1082, 1082),
        ("moe_100m", 366, 98),
    ],
)
def test_the_small_models_have_the_size_of_their_names(name: str, millions: float, active: float) -> None:
    counts = count_parameters(DecoderDefinition(ready(name)))
    assert counts["total"] / 1e6 == pytest.approx(millions, rel=0.01)
    assert counts["active"] / 1e6 == pytest.approx(active, rel=0.01)


@pytest.mark.parametrize("kind", kinds.names())
def test_every_ready_config_takes_every_topology(kind: str) -> None:
    names = [path.stem for family in ("paper", "dense", "moe") for path in (ROOT / "configs").glob(f"{family}_*.py")]
    assert len(names) == 8
    for name in names:
        assert ready(name, kind).residual.kind == kind


def test_the_papers_residual_is_the_default_of_mhc() -> None:
    residual = ready("paper_27b").residual
    assert (residual.n, residual.init, residual.iters, residual.sinkhorn) == (4, "home", 20, "paper")
