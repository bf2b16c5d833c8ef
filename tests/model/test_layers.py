"""Test norms and feed-forward against their formulas in float64, parameters and FLOPs against counts by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mhc.model.decoder import DecoderDefinition
from mhc.model.flops import count_parameters, flops_per_token, leaf_sizes
from mhc.model.layers import Mlp, Sublayer
from mhc.model.norms import LayerNorm, RMSNorm
from mhc.rng import PathKey
from tests.small import relative_error, small

KEY = PathKey(jax.random.key(0))


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_rms_norm():
    norm, x = RMSNorm(16, 1e-2), normal(2, 3, 16)
    norm.scale[...] = jnp.asarray(normal(16, seed=1))
    wide = x.astype(np.float64)
    expected = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-2) * normal(16, seed=1)
    assert relative_error(norm(jnp.asarray(x)), expected) <= 1e-6
    assert norm(jnp.asarray(x, jnp.bfloat16)).dtype == jnp.bfloat16


def test_a_sublayer_normalises_its_input_and_adds_nothing():
    sublayer = Sublayer(small(), Mlp(small(), key=KEY))
    x = jnp.asarray(normal(2, 3, 16))
    np.testing.assert_array_equal(sublayer(x), sublayer.core(sublayer.norm(x)))
    assert relative_error(sublayer(1000 * x), sublayer(x)) <= 1e-5


def test_derived_widths():
    assert small(mlp={"kind": "gelu", "width": None}).mlp.width == 64
    assert small(mlp={"kind": "swiglu", "width": None}).mlp.width == 48  # 8/3 * 16 = 42.7, up to a multiple of 8


# Hand-made: L = 2, D = 16, H = 2, G = 1, K = 8, F = 24, V = 32, T = 16.
GROUPED = {"heads": 2, "kv_heads": 1}
ATTENTION = 16 * 16 + 2 * 16 * 8 + 16 * 16
FEED_FORWARD = 3 * 16 * 24
NORMS = 2 * 16
HC = 4 + 4 + 16 + 16 + 16 + 64 + 3


@pytest.mark.parametrize(
    ("kind", "maps"), [("plain", 0), ("hc", 4 + 4 + 16 + 16 + 16 + 64 + 3), ("mhc", 64 * 24 + 3 + 24)]
)
def test_parameter_counts(kind, maps):
    definition = DecoderDefinition(small(kind, attention=GROUPED))
    assert count_parameters(definition) == {
        "total": 2 * (ATTENTION + FEED_FORWARD + NORMS + 2 * maps) + 16 + 2 * 32 * 16,
        "active": 2 * (ATTENTION + FEED_FORWARD + NORMS + 2 * maps) + 16 + 32 * 16,
        "vocabulary": 2 * 32 * 16,
        "maps": 2 * 2 * maps,
    }
    assert sum(leaf_sizes(definition).values()) == sum(leaf.size for leaf in jax.tree.leaves(definition.abstract()))


def test_parameter_counts_of_a_tied_head():
    counts = count_parameters(DecoderDefinition(small(head={"tied": True}, attention=GROUPED)))
    assert counts["vocabulary"] == 32 * 16
    assert counts["active"] == counts["total"] == 2 * (ATTENTION + FEED_FORWARD + NORMS) + 16 + 32 * 16


@pytest.mark.parametrize(
    ("kind", "topology"),  # multiply-adds of one connection: map projections, then read, write and mixing
    [("plain", 0), ("hc", 4 * 16 * 6 + (2 * 4 + 16) * 16), ("mhc", 64 * 24 + (2 * 4 + 16) * 16)],
)
def test_flops(kind, topology):
    attended = 2 * 2 * 8 * 16 // 2  # scores and values, H K T each, over half the sequence
    forward = 2 * (ATTENTION + FEED_FORWARD + attended + 2 * topology) + 16 * 32
    assert flops_per_token(small(kind, attention=GROUPED)) == 3 * 2 * forward


def test_layernorm_by_its_definition():
    norm, x = LayerNorm(16, 1e-2, gamma=1.5), jnp.asarray(normal(2, 3, 16))
    norm.bias[...] = jnp.asarray(normal(16, seed=1))
    wide = np.asarray(x, np.float64)
    centred = wide - wide.mean(axis=-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-2) * 1.5 + np.asarray(norm.bias[...])
    assert relative_error(norm(x), expected) <= 1e-6
    assert norm(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich"])
def test_norms_stand_inside_the_sublayer(placement):
    """pre is F(norm u), post norm F(u), sandwich norm F(norm u); scales of input and output tell them apart."""
    config = small(norm={"placement": placement})
    sublayer, u = Sublayer(config, Mlp(config, key=KEY)), jnp.asarray(normal(2, 3, 16))
    core = sublayer.core
    expected = {
        "pre": lambda: core(sublayer.norm(u)),
        "post": lambda: sublayer.post_norm(core(u)),
        "sandwich": lambda: sublayer.post_norm(core(sublayer.norm(u))),
    }[placement]()
    np.testing.assert_array_equal(sublayer(u), expected)
    assert hasattr(sublayer, "norm") == (placement != "post") and hasattr(sublayer, "post_norm") == (placement != "pre")


@pytest.mark.parametrize("kind", ["relu", "gelu", "silu", "glu", "geglu", "swiglu"])
def test_feed_forward_kinds_by_their_definitions(kind):
    """Each kind equals its formula in float64, with biases, and with the gate's input clipped where there is a gate."""
    gated = kind.endswith("glu")
    config = small(mlp={"kind": kind, "bias": True, **({"clamp": 0.5} if gated else {})})
    mlp, x = Mlp(config, key=KEY), jnp.asarray(normal(2, 3, 16))
    for name in ("up_bias", "down_bias", *(["gate_bias"] if gated else [])):
        getattr(mlp, name)[...] = jnp.asarray(normal(*getattr(mlp, name)[...].shape, seed=len(name)))
    w = {name: np.asarray(leaf[...], np.float64) for name, leaf in vars(mlp).items() if isinstance(leaf, nnx.Param)}
    act = {
        "relu": lambda z: np.maximum(z, 0),
        "gelu": lambda z: 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))),
        "silu": lambda z: z / (1 + np.exp(-z)),
        "glu": lambda z: 1 / (1 + np.exp(-z)),
    }
    act |= {"geglu": act["gelu"], "swiglu": act["silu"]}
    wide = np.asarray(x, np.float64)
    up = wide @ w["up"] + w["up_bias"]
    hidden = act[kind](np.clip(wide @ w["gate"] + w["gate_bias"], -0.5, 0.5)) * up if gated else act[kind](up)
    assert relative_error(mlp(x), hidden @ w["down"] + w["down_bias"]) <= 2e-6
