"""Cached decoding equals the full forward, token by token, however a row's tokens are spread over calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhc.config import Config
from mhc.model.decoder import DecoderDefinition
from tests.covering import pairwise
from tests.small import VOCAB, random_params, small

FACTORS: dict[str, tuple[str, ...]] = {
    "position": ("rope", "learned", "sinusoidal", "relative_bias", "alibi", "none"),
    "attention": ("heads", "grouped", "mqa", "mla"),
    "mask": ("causal", "window", "mixed", "prefix"),
    "norm": ("rmsnorm", "layernorm"),
    "placement": ("pre", "post", "sandwich"),
    "impl": ("xla", "sdpa"),  # of the full forward
    "residual": ("plain", "hc", "mhc"),
}
CALLS = ("chunks", "steps")
TOLERANCE = 2e-5  # of the largest logit
ROWS, LENGTH, CHUNK = 4, 16, 4


def config_of(case: Mapping[str, str], **groups: dict[str, Any]) -> Config:
    """Two blocks of width 16, four heads, two streams; a window of 3, a prefix of 3."""
    heads: dict[str, dict[str, Any]] = {
        "heads": {},
        "grouped": {"kv_heads": 2},
        "mqa": {"kv_heads": 1},
        "mla": {"kind": "mla", "kv_rank": 6},
    }
    masks: dict[str, dict[str, Any]] = {
        "causal": {},
        "window": {"window": 3},
        "mixed": {"window": 3, "global_every": 2},
        "prefix": {"prefix": 3},
    }
    attention = {"heads": 4, "impl": case["impl"], **heads[case["attention"]], **masks[case["mask"]]}
    positions: dict[str, Any] = {"kind": case["position"]}
    if case["position"] == "relative_bias":
        positions |= {"buckets": 4, "max_distance": 8}
    if case["attention"] == "mla" and case["impl"] == "sdpa":  # which wants values as wide as the keys
        attention["value_dim"] = 4 + (2 if case["position"] == "rope" else 0)
    return small(
        case["residual"],
        attention=attention,
        positions=positions,
        norm={"kind": case["norm"], "placement": case["placement"]},
        residual={"kind": case["residual"], "n": 1 if case["residual"] == "plain" else 2},
        **groups,
    )


# Rows of different lengths, their tokens spread over calls of CHUNK columns: all at once, behind padding, before
# padding, and with holes. A row's first call with a token is not the same one everywhere.
_SPREAD = """
    xxxx xxxx x... x... x... xx..
    ..xx xxxx x... x... ...x ....
    xx.. .... x... xx.. x... x...
    .... x..x .xx. x.x. ..x. xxxx
"""
VALID = np.array([[[c == "x" for c in call] for call in row.split()] for row in _SPREAD.split("\n")[1:-1]])


@functools.cache
def programs(config: Config, calls: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(cached: params, tokens [B, calls, T], valid -> logits [B, calls T, V]; full: params, tokens, segments, prefix)."""
    definition = DecoderDefinition(config)

    @jax.jit
    def cached(params: Any, tokens: jax.Array, valid: jax.Array) -> jax.Array:
        decoder = definition.bind(params)

        def call(cache: Any, one: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
            logits, cache = decoder.extend(one[0], cache, one[1])
            return cache, logits

        start = decoder.empty_cache(tokens.shape[0], LENGTH)
        _, logits = jax.lax.scan(call, start, (jnp.moveaxis(tokens, 1, 0), jnp.moveaxis(valid, 1, 0)))
        return jnp.moveaxis(logits, 0, 1).reshape(tokens.shape[0], -1, VOCAB)

    @jax.jit
    def full(params: Any, tokens: jax.Array, segment_ids: jax.Array, prefix: jax.Array) -> jax.Array:
        return definition.bind(params)(tokens, segment_ids, prefix=prefix)

    return cached, full


def check(config: Config, calls: str) -> None:
    """Cached logits of every token are those of the full forward of its row; padding and the future change none."""
    cached, full = programs(config, calls)
    params = random_params(config)
    rng = np.random.default_rng(0)
    valid = VALID if calls == "chunks" else VALID.reshape(ROWS, -1, 1)
    flat = valid.reshape(ROWS, -1)
    tokens = rng.integers(0, VOCAB, valid.shape).astype(np.int32)
    out = np.asarray(cached(params, tokens, valid))
    assert np.isfinite(out).all()

    # The same rows without what is not valid.
    lengths, place = flat.sum(axis=1), np.cumsum(flat, axis=1) - 1
    rows = np.zeros((ROWS, LENGTH), np.int32)
    rows[np.nonzero(flat)[0], place[flat]] = tokens.reshape(ROWS, -1)[flat]
    first_call = np.array([next(call.sum() for call in row if call.any()) for row in valid])
    prefix = np.minimum(config.attention.prefix, first_call).astype(np.int32)
    segments = (np.arange(LENGTH) < lengths[:, None]).astype(np.int32)
    expected = np.asarray(full(params, rows, segments, prefix))
    largest = np.abs(expected[segments > 0]).max()
    worst = np.abs(out[flat] - expected[np.nonzero(flat)[0], place[flat]]).max()
    assert worst <= TOLERANCE * largest, f"{worst / largest:.2e} of the largest logit"

    padded = np.where(valid, tokens, (tokens + 5) % VOCAB)
    np.testing.assert_array_equal(np.asarray(cached(params, padded, valid))[flat], out[flat])
    assert config.attention.prefix < LENGTH - 5
    changed = tokens.copy().reshape(ROWS, -1)
    future = flat & (place >= lengths[:, None] - 3)  # the last three tokens of each row
    changed[future] = (changed[future] + 5) % VOCAB
    again = np.asarray(cached(params, changed.reshape(tokens.shape), valid))
    np.testing.assert_array_equal(again[flat & ~future], out[flat & ~future])
    assert (again[future] != out[future]).any(axis=-1).all()

    # Two documents of seven tokens in each row, and padding: neither sees the other's change.
    two = np.where(np.arange(LENGTH) < 7, 1, np.where(np.arange(LENGTH) < 14, 2, 0))[None].repeat(ROWS, 0)
    none = np.full(ROWS, config.attention.prefix, np.int32)
    before = np.asarray(full(params, rows, two.astype(np.int32), none))
    for document in (1, 2):
        other = np.where(two == document, (rows + 5) % VOCAB, rows)
        after = np.asarray(full(params, other, two.astype(np.int32), none))
        kept = (two > 0) & (two != document)
        np.testing.assert_array_equal(after[kept], before[kept])
        assert (after[two == document] != before[two == document]).any(axis=-1).all()


def ident(case: Mapping[str, str]) -> str:
    return "-".join(case.values())


# The positions that have an arm of their own in a test below need none here.
FAST = pairwise(FACTORS | {"position": FACTORS["position"][:-1], "calls": CALLS})


@pytest.mark.parametrize("case", FAST, ids=ident)
def test_pairwise(case: dict[str, str]) -> None:
    check(config_of(case), case["calls"])
