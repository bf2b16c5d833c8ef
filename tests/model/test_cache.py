"""Test that cached decoding equals the full forward, however a row's tokens are spread over calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhc.config import Config
from mhc.errors import UserError
from mhc.model.cache import layer_runs, slot_positions
from mhc.model.decoder import Params
from mhc.sharding import path_of
from tests.covering import pairs, pairwise, product
from tests.small import VOCAB, ZOO, definition, random_params, relative_error, small, with_fields

FACTORS: dict[str, tuple[str, ...]] = {
    "position": ("rope", "learned", "sinusoidal", "relative_bias", "alibi", "none"),
    "attention": ("heads", "grouped", "mqa", "mla"),
    "mask": ("causal", "window", "mixed", "prefix"),
    "norm": ("rmsnorm", "layernorm"),
    "placement": ("pre", "post", "sandwich"),
    "impl": ("xla", "sdpa", "flash"),  # of the full forward
    "residual": ("plain", "hc", "mhc"),
}
FLASH_LACKS = {"position": ("relative_bias", "alibi"), "mask": ("prefix",)}
CALLS = ("chunks", "steps")
TOLERANCE = 2e-5  # of the largest logit
ROWS, LENGTH, CHUNK = 4, 16, 4


def config_of(case: Mapping[str, str], **groups: dict[str, Any]) -> Config:
    """Return a config of two blocks of width 16 with four heads, two streams, a window of 3 and a prefix of 3."""
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
    if case["attention"] == "mla" and case["impl"] != "xla":  # sdpa wants values as wide as the keys
        attention["value_dim"] = 4 + (2 if case["position"] == "rope" else 0)
    return small(
        case["residual"],
        attention=attention,
        positions=positions,
        norm={"kind": case["norm"], "placement": case["placement"]},
        residual={"kind": case["residual"], "n": 1 if case["residual"] == "plain" else 2},
        **groups,
    )


@functools.cache
def params_of(config: Config) -> Params:
    """Return random parameters; those of hc's maps are small changes of maps that read, write and keep every stream.

    With fully random maps the streams cancel, and the norms that follow show float32's rounding and not the cache.
    """
    around: dict[str, Any] = {"b_res": np.eye(config.streams, dtype=np.float32), "b_post": 1.0, "b_pre": 0.5}

    def adapt(path: Any, leaf: jax.Array) -> jax.Array:
        name = path_of(path)
        if config.residual.kind != "hc" or "_residual/" not in name:
            return leaf
        value = np.float32(0.3) * np.asarray(leaf) + around.get(name.rpartition("/")[2], 0.0)
        return jnp.asarray(value, jnp.float32)

    return jax.tree_util.tree_map_with_path(adapt, random_params(config))


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
def cached_program(config: Config) -> Callable[..., Any]:
    """Return a compiled function (params, tokens [B, calls, T], valid) -> logits [B, calls T, V]."""

    @jax.jit
    def cached(params: Any, tokens: jax.Array, valid: jax.Array) -> jax.Array:
        decoder = definition(config).bind(params)

        def call(cache: Any, one: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
            logits, cache = decoder.extend(one[0], cache, one[1])
            return cache, logits

        start = decoder.empty_cache(tokens.shape[0], LENGTH)
        _, logits = jax.lax.scan(call, start, (jnp.moveaxis(tokens, 1, 0), jnp.moveaxis(valid, 1, 0)))
        return jnp.moveaxis(logits, 0, 1).reshape(tokens.shape[0], -1, VOCAB)

    return cached


@functools.cache
def full_program(config: Config) -> Callable[..., Any]:
    """Return a compiled function (params, tokens [B, T], segment ids, prefix [B]) -> logits of the full forward."""
    return jax.jit(
        lambda params, tokens, segments, prefix: definition(config).bind(params)(tokens, segments, prefix=prefix)
    )


def check(config: Config, calls: str) -> None:
    """Check that each token's cached logits are those of its row's full forward, whatever padding and future hold."""
    # A cache has one implementation: cases that differ in that of the full forward share a program.
    shared = with_fields(config, attention={"impl": "xla"})
    cached, full, params = cached_program(shared), full_program(config), params_of(shared)
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


def possible(case: Mapping[str, str]) -> bool:
    """Return whether an implementation can do what the other values ask for; a config that it cannot do is refused."""
    return case.get("impl") != "flash" or not any(case.get(name) in values for name, values in FLASH_LACKS.items())


def ident(case: Mapping[str, str]) -> str:
    return "-".join(case.values())


# Left to the whole product: `none`, which is alibi without its bias, and `heads`, which are groups of one; the tests
# below that the product does not hold have those.
FAST = pairwise(
    FACTORS | {"position": FACTORS["position"][:-1], "attention": FACTORS["attention"][1:], "calls": CALLS}, possible
)


# Every fifth one is enough for each day.
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.product if number % 5 else ()) for number, case in enumerate(FAST)],
    ids=map(ident, FAST),
)
def test_pairwise(case: dict[str, str]) -> None:
    check(config_of(case), case["calls"])


def test_the_covering_array_holds_every_pair() -> None:
    factors = {"a": (1, 2, 3), "b": (1, 2), "c": (1, 2, 3, 4), "d": (True, False)}
    cases = pairwise(factors)
    assert set().union(*map(pairs, cases)) == set().union(*map(pairs, product(factors)))
    assert 12 <= len(cases) <= 14 < len(product(factors)) == 48
    assert cases == pairwise(factors) and all(list(case) == list(factors) for case in cases)
    never = {("a", 2), ("c", 3)}
    some = pairwise(factors, lambda case: not never <= set(case.items()))
    assert set().union(*map(pairs, some)) == set().union(*map(pairs, cases)) - {tuple(sorted(never))}


# The whole product: a group of cases for each of these.
GROUPS = product({name: FACTORS[name] for name in ("position", "attention", "mask")})
REST = product({name: FACTORS[name] for name in ("norm", "placement", "residual", "impl")})


@pytest.fixture
def _thousands_of_programs() -> Iterator[None]:
    """Keep compiled programs neither on disk nor, after a group, in memory."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, 1e9)
    yield
    jax.config.update(name, before)
    for program in (cached_program, full_program, params_of, definition):
        program.cache_clear()
    jax.clear_caches()


@pytest.mark.product
@pytest.mark.usefixtures("_thousands_of_programs")
@pytest.mark.parametrize("group", GROUPS, ids=ident)
def test_whole_product(group: dict[str, str], record_property: Callable[[str, object], None]) -> None:
    cases = [group | rest for rest in REST]
    for number, case in enumerate(cases):
        # Values as wide as every implementation allows, so that what is cached is the same for all.
        config = config_of(case | {"impl": "sdpa"})
        if possible(case):
            check(with_fields(config, attention={"impl": case["impl"]}), CALLS[number // len(FACTORS["impl"]) % 2])
        else:
            with pytest.raises(UserError, match=r"attention.impl: given 'flash', allowed: auto or xla"):
                with_fields(config, attention={"impl": case["impl"]})
    compared = sum(map(possible, cases))
    record_property(f"cases of cached decoding ({' × '.join(FACTORS)})", compared)
    record_property("cases of cached decoding that the config refuses", len(cases) - compared)


# What the product leaves out ------------------------------------------------------------------------------------------

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "ntk": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_length": 8},
    "llama3": {"factor": 4.0, "original_length": 8},
    "dynamic": {"factor": 4.0, "original_length": LENGTH},
}


@pytest.mark.parametrize(
    "zoo",
    [
        pytest.param(name, marks=pytest.mark.product) if name in ("relative bias, experts", "latent experts") else name
        for name in ZOO
    ],
)
def test_every_part_of_a_decoder(zoo: str) -> None:
    """Chunks and steps agree under experts behind a dense block, biases, norms of heads and latents, tied heads."""
    attention = {"heads": 4, "softcap": 5.0, **ZOO[zoo]["attention"]}
    check(small("plain", **{**ZOO[zoo], "attention": attention}), CALLS[zoo == "latent experts"])


@pytest.mark.parametrize(
    "scaling",
    [pytest.param(name, marks=[] if name in ("yarn", "dynamic") else pytest.mark.product) for name in SCALINGS],
)
def test_rotary_scalings(scaling: str) -> None:
    """Dynamic is tested within the original length, where it scales nothing and keys are kept."""
    config = small(positions={"scaling": scaling, **SCALINGS[scaling]})
    assert definition(config).bind(random_params(config)).empty_cache(1, LENGTH).tokens is None
    check(config, CALLS[scaling in ("ntk", "yarn")])


def test_dynamic_scaling_equals_a_full_forward_of_every_prefix() -> None:
    """Past the original length the base grows with the row; each call gives the last token as a new row would."""
    config = small("hc", positions={"scaling": "dynamic", "factor": 4.0, "original_length": 4})
    cached, full = cached_program(config), full_program(config)
    params, rng = params_of(config), np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, VALID.shape).astype(np.int32)
    out = np.asarray(cached(params, tokens, VALID)).reshape(*VALID.shape, VOCAB)
    lengths, checked = set(), 0
    for call in range(VALID.shape[1]):
        rows = np.zeros((ROWS, LENGTH), np.int32)
        flat = VALID[:, : call + 1].reshape(ROWS, -1)
        place = np.cumsum(flat, axis=1) - 1
        rows[np.nonzero(flat)[0], place[flat]] = tokens[:, : call + 1].reshape(ROWS, -1)[flat]
        segments = (np.arange(LENGTH) < flat.sum(axis=1)[:, None]).astype(np.int32)
        expected = np.asarray(full(params, rows, segments, np.zeros(ROWS, np.int32)))
        for row in np.nonzero(VALID[:, call].any(axis=1))[0]:
            last = np.nonzero(VALID[row, call])[0][-1]
            assert relative_error(out[row, call, last], expected[row, segments[row].sum() - 1]) <= TOLERANCE
            lengths.add(int(segments[row].sum()))
            checked += 1
    assert checked > 15 and min(lengths) <= 4 < 12 <= max(lengths)


def test_going_on_from_a_cached_prefix_equals_starting_over() -> None:
    """A kept cache can be continued more than once, and one long call gives what several short ones give."""
    config = small(attention={"window": 3, "global_every": 2})
    params = random_params(config)
    extend = jax.jit(lambda tokens, cache: definition(config).bind(params).extend(tokens, cache))
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 12)).astype(np.int32)
    other = (tokens + 3) % VOCAB
    _, prefix = extend(tokens[:, :6], definition(config).bind(params).empty_cache(2, 12))
    whole, end = extend(tokens, definition(config).bind(params).empty_cache(2, 12))
    for rest in (other, tokens):
        out, after = extend(rest[:, 6:], prefix)
    assert relative_error(out, whole[:, 6:]) <= TOLERANCE
    np.testing.assert_array_equal(after.lengths, end.lengths)
    for one, same in zip(jax.tree.leaves(after.layers), jax.tree.leaves(end.layers), strict=True):
        assert relative_error(one, same) <= TOLERANCE


def test_a_prefix_given_by_row_holds_within_its_first_call() -> None:
    config = small()
    params = random_params(config)
    prefix = jnp.asarray([0, 2, 5])
    tokens = np.random.default_rng(0).integers(0, VOCAB, (3, 8)).astype(np.int32)
    full = jax.jit(lambda tokens, prefix: definition(config).bind(params)(tokens, prefix=prefix))
    extend = jax.jit(lambda tokens, cache: definition(config).bind(params).extend(tokens, cache, prefix=prefix))
    expected = full(tokens, jnp.minimum(prefix, 4))
    cache, parts = definition(config).bind(params).empty_cache(3, 8), []
    for start in (0, 4):
        part, cache = extend(tokens[:, start : start + 4], cache)
        parts.append(part)
    assert relative_error(jnp.concatenate(parts, axis=1), expected) <= TOLERANCE
    np.testing.assert_array_equal(cache.prefix, [0, 2, 4])


# The cache itself -----------------------------------------------------------------------------------------------------


def test_a_windowed_layer_keeps_its_window_alone() -> None:
    config = small(model={"layers": 5}, attention={"window": 3, "global_every": 2, "kv_heads": 1})
    cache = definition(config).bind(random_params(config)).empty_cache(2, 100)
    assert [leaf["key"].shape for leaf in cache.layers] == [(1, 2, slots, 1, 8) for slots in (3, 100, 3, 100, 3)]
    runs = list(layer_runs((True, True, False, True)))
    assert runs == [(0, 2, True), (2, 1, False), (3, 1, True)]


def test_latent_attention_keeps_its_latent_alone() -> None:
    config = small(attention={"kind": "mla", "heads": 4, "kv_rank": 6})
    (cache,) = definition(config).bind(random_params(config)).empty_cache(2, 100).layers
    assert {name: leaf.shape for name, leaf in cache.items()} == {"latent": (2, 2, 100, 6), "rotary": (2, 2, 100, 1, 2)}


def test_a_slot_holds_the_newest_position_that_falls_to_it() -> None:
    np.testing.assert_array_equal(
        slot_positions(jnp.asarray([0, 2, 3, 7, 9]), 3), [[-1, -1, -1], [0, 1, -1], [0, 1, 2], [6, 4, 5], [6, 7, 8]]
    )


def test_bfloat16_keys_are_kept_in_bfloat16() -> None:
    config = small(model={"dtype": "bfloat16"})
    decoder = definition(config).bind(random_params(config))
    logits, cache = jax.eval_shape(
        lambda tokens: decoder.extend(tokens, decoder.empty_cache(1, 4)), jnp.zeros((1, 2), jnp.int32)
    )
    assert {leaf.dtype.name for leaf in jax.tree.leaves(cache.layers)} == {"bfloat16"} and logits.dtype == jnp.float32


def test_what_cannot_fit_is_refused() -> None:
    decoder = definition(config := small(positions={"kind": "learned"})).bind(random_params(config))
    with pytest.raises(
        ValueError, match="max_length: given 17, allowed: at most 16, the rows of the learned positions"
    ):
        decoder.empty_cache(1, 17)
    with pytest.raises(ValueError, match="max_length: given 0, allowed: 1 or more"):
        decoder.empty_cache(1, 0)
    with pytest.raises(ValueError, match="given 5 a row, allowed: the cache's 4"):
        decoder.extend(jnp.zeros((1, 5), jnp.int32), decoder.empty_cache(1, 4))


@pytest.mark.parametrize("calls", ["chunks", pytest.param("steps", marks=pytest.mark.long)])
def test_cached_decoding_with_biases_and_factors(calls: str) -> None:
    """A bias of RMSNorm and a factor of the feed-forward's output are in the one pass and in the other."""
    scaled = small("mhc", norm={"bias": True}, update={"scale": 0.5, "trained": True}, positions={"noise": 0.5})
    check(scaled, calls)
