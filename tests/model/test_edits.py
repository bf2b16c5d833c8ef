"""Test interventions: they equal other weights or other tokens, and a pass without them has no trace of them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhc.config import Config
from mhc.model.attention import Attention, attention_context, make_attention
from mhc.model.block import Carry, build_topology
from mhc.model.decoder import STACKS, SublayerView
from mhc.model.edits import Edits
from mhc.rng import path_key
from tests.small import (
    LENGTH,
    VOCAB,
    assert_identical,
    definition,
    packed,
    random_params,
    relative_error,
    small,
    with_fields,
)

# Pairwise: the kind of residual, of heads, of feed-forward, of norm; scanned, unrolled, in groups of remat.
CONFIGS = {
    "plain, heads": small("plain", model={"layers": 3}),
    "hc, latent heads, unrolled": small(
        "hc", model={"scan": False}, attention={"kind": "mla", "kv_rank": 8, "value_dim": 6}
    ),
    "plain, latent heads after a dense block, experts": small(
        "plain",
        model={"layers": 3},
        attention={"kind": "mla", "kv_rank": 8},
        moe={"experts": 4, "dense_layers": 1},
        norm={"placement": "sandwich"},
    ),
    "mhc, grouped heads, windows, groups of blocks": small(
        "mhc",
        model={"layers": 3, "remat": "streams", "remat_blocks": 2},
        attention={"heads": 4, "kv_heads": 2, "window": 5, "global_every": 2, "bias": True},
    ),
    "plain, heads, unrolled": small("plain", model={"scan": False}, norm={"placement": "post"}),
    "mhc, latent heads, experts": small(
        "mhc", attention={"kind": "mla", "kv_rank": 8}, moe={"experts": 4}, norm={"placement": "sandwich"}
    ),
}
FAST = ("plain, heads", "hc, latent heads, unrolled")
SOME = [pytest.param(name, marks=() if name in FAST else pytest.mark.product) for name in CONFIGS]
every_config = pytest.mark.parametrize("name", SOME)
ROWS = 2


def neutral(config: Config) -> dict[str, np.ndarray]:
    """Return edits of every sort that change nothing."""
    layers, heads = config.model.layers, config.attention.heads
    return {
        "head_scale": np.ones((layers, heads), np.float32),
        "head_shift": np.zeros((layers, heads, config.value_dim), np.float32),
        "head_patch": np.zeros((layers, ROWS, LENGTH, heads), bool),
        "output_scale": np.ones((layers, 2), np.float32),
        "output_shift": np.zeros((layers, 2, config.model.width), np.float32),
        "output_patch": np.zeros((layers, 2, ROWS, LENGTH), bool),
        "state_patch": np.zeros((layers, ROWS, LENGTH), bool),
    }


def made(leaves: dict[str, np.ndarray]) -> Edits:
    return Edits(**{name: jnp.asarray(leaf) for name, leaf in leaves.items()})


@functools.cache
def program(config: Config) -> Any:
    """Return a compiled function (params, batch, edits) -> logits."""
    made = definition(config)

    def run(params: Any, batch: Any, edits: Edits) -> jax.Array:
        decoder = made.bind(params)
        return decoder.logits(decoder.forward(batch["tokens"], batch["segment_ids"], batch["positions"], edits=edits).h)

    return jax.jit(run)


def logits(config: Config, params: Any, batch: Any, **changes: Any) -> np.ndarray:
    """Return logits under neutral edits but for ``changes``, {sort: (index, value)}; all come from one program."""
    edits = neutral(config)
    for sort, (index, value) in changes.items():
        edits[sort][index] = value
    return np.asarray(program(config)(params, batch, made(edits)))


def outputs(params: Any, config: Config, layer: int, change: Any) -> Any:
    """Return parameters with change(out [H, J, D]) as the output projection of a layer's heads."""
    leading = config.leading_layers
    stack = STACKS[0] if layer < leading else STACKS[1]
    index = layer if layer < leading else layer - leading
    attention = params[stack]["attention"]
    out = attention["core"]["out"]
    core = {**attention["core"], "out": out.at[index].set(change(out[index]))}
    return {**params, stack: {**params[stack], "attention": {**attention, "core": core}}}


@every_config
def test_scaling_a_head_is_scaling_its_output_projection(name):
    """They are equal bit for bit, also for a factor of zero, and one program serves every factor."""
    config = CONFIGS[name]
    params, batch = random_params(config), packed(ROWS)
    plain = logits(config, params, batch)
    programs = program(config)._cache_size()  # for other batches there may be others
    last = config.model.layers - 1
    for layer, head, factor in ((0, 1, 0.0), (last, 0, 0.0), (last, 1, -0.5)):
        found = logits(config, params, batch, head_scale=((layer, head), factor))
        scaled = outputs(params, config, layer, lambda out, h=head, f=factor: out.at[h].multiply(f))
        np.testing.assert_array_equal(found, logits(config, scaled, batch))
        assert relative_error(found, plain) > 1e-4
    assert program(config)._cache_size() == programs


def test_neutral_edits_change_nothing():
    """A program without edits differs in the last bits only."""
    config = CONFIGS["plain, heads"]
    params, batch = random_params(config), packed(ROWS)
    decoder = definition(config).bind(params)
    found = logits(config, params, batch)
    assert relative_error(found, jax.jit(decoder)(batch["tokens"], batch["segment_ids"], batch["positions"])) <= 1e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_neutral_edits_change_no_bit_and_layers_have_their_own(dtype):
    config = small()
    edits = made({name: leaf[0] for name, leaf in neutral(config).items() if "patch" not in name})
    rng = np.random.default_rng(0)
    y, heads = (jnp.asarray(rng.standard_normal((2, 3, *shape)), dtype) for shape in ((16,), (2, 8)))
    np.testing.assert_array_equal(edits.output(y, 1), y)
    np.testing.assert_array_equal(edits.heads(heads), heads)
    some = Edits(output_scale=jnp.arange(6.0).reshape(3, 2)).blocks(1, 2)
    np.testing.assert_array_equal(some.output_scale, [[2, 3], [4, 5]])
    assert some.head_scale is None
    none = Edits(state_patch=jnp.zeros((2, 3), bool))
    topology = build_topology(small(), path_key(jax.random.key(0)))
    carry = Carry({"streams": heads, "sublayer": jnp.int32(3)}, {"values": heads, "layer": jnp.int32(1)})
    assert_identical(none.begin(carry, topology), carry)


@pytest.mark.parametrize("name", [one for one in SOME if CONFIGS[str(one.values[0])].residual.kind == "plain"])
def test_a_plain_block_without_its_outputs_is_no_block(name):
    config = CONFIGS[name]
    params, batch = random_params(config), packed(ROWS)
    cut = with_fields(config, model={"layers": config.model.layers - 1})
    index = 1 - config.leading_layers
    fewer = {**params, "blocks": jax.tree.map(lambda leaf: jnp.delete(leaf, index, axis=0), params["blocks"])}
    found = logits(config, params, batch, output_scale=(1, 0.0))
    decoder = definition(cut).bind(fewer)
    assert relative_error(found, jax.jit(decoder)(batch["tokens"], batch["segment_ids"], batch["positions"])) <= 1e-6


def test_a_shift_is_what_a_constant_head_or_sublayer_would_give():
    """Where values and hidden values are biases alone, the mean is that constant and can take its place."""
    config = small("plain", attention={"bias": True}, mlp={"kind": "gelu", "bias": True})
    params, batch = random_params(config, std=0.1), packed(ROWS)
    attention, mlp = params["blocks"]["attention"]["core"], params["blocks"]["mlp"]["core"]
    attention["value"] = attention["value"].at[1, :, 0].set(0.0)
    mlp["down"] = mlp["down"].at[0].set(0.0)
    plain = logits(config, params, batch)
    for sort, index, constant in (
        ("head", (1, 0), attention["value_bias"][1, 0]),
        ("output", (0, 1), mlp["down_bias"][0]),
    ):
        without = {f"{sort}_scale": (index, 0.0)}
        found = logits(config, params, batch, **without, **{f"{sort}_shift": (index, constant)})
        assert (
            relative_error(found, plain)
            <= 1e-6
            < 1e-4
            < relative_error(logits(config, params, batch, **without), plain)
        )


@every_config
def test_what_is_patched_everywhere_is_the_donor(name):
    """The state of all positions is patched before any block; all heads of a layer are its attention."""
    config = CONFIGS[name]
    params = random_params(config)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
    batch = {"tokens": tokens, "segment_ids": None, "positions": None}
    donor, own = logits(config, params, batch)
    for layer in range(config.model.layers):
        found = logits(config, params, batch, state_patch=((layer, 1), True))
        assert relative_error(found[1], donor) <= 1e-6
        np.testing.assert_array_equal(found[0], donor)
    # One position alone leaves those before it.
    found = logits(config, params, batch, state_patch=((0, 1, 9), True))[1]
    np.testing.assert_array_equal(found[:9], own[:9])
    assert relative_error(found[9:], own[9:]) > 1e-3
    by_head, by_output = (
        logits(config, params, batch, head_patch=((1, 1), True))[1],
        logits(config, params, batch, output_patch=((1, 0, 1), True))[1],
    )
    assert relative_error(by_head, by_output) <= 1e-6 < 1e-3 < relative_error(by_head, own)


@every_config
def test_without_edits_a_program_has_no_trace_of_them(name):
    """The text of the lowered gradient is the same for no edits and for edits of no sort."""
    config = CONFIGS[name]
    made, batch = definition(config), packed(2)

    def text(edits: Edits | None) -> str:
        def loss(params: Any) -> jax.Array:
            decoder = made.bind(params)
            return jnp.sum(decoder.forward(batch["tokens"], batch["segment_ids"], edits=edits).h)

        return jax.jit(jax.grad(loss)).lower(made.abstract()).as_text()

    assert text(Edits()) == text(None)


@every_config
def test_patterns_and_values_are_the_heads_results(name):
    """Heads give softmax(scores) V whatever the mask, bias and grouping; joined, it is attention's output."""
    config = CONFIGS[name]
    params, batch = random_params(config), packed(2)
    made = definition(config)

    def observe(view: SublayerView) -> dict[str, jax.Array]:
        core = view.sublayer.core
        if not isinstance(core, Attention):
            assert view.heads is None
            return {}
        assert view.heads is not None
        (context,) = view.args
        x = view.sublayer.before(view.u)
        scores = core.scores(x, context)
        values = core.project(x, context.positions, context.frequencies)[2]
        values = jnp.repeat(values, config.attention.heads // values.shape[2], axis=2)
        expected = jnp.einsum("bhtu,buhj->bthj", jax.nn.softmax(scores), values)
        y = view.sublayer.after(core.join(view.heads))
        entropy = core.statistics(x, context)[1]
        weights = jax.nn.softmax(scores)
        by_hand = -jnp.sum(jax.scipy.special.xlogy(weights, weights), axis=-1)
        future = jnp.where((jnp.arange(LENGTH)[:, None] < jnp.arange(LENGTH)[None])[None, None], weights, 0.0)
        return {
            "heads": jnp.max(jnp.abs(view.heads - expected)) / jnp.max(jnp.abs(expected)),
            "output": jnp.max(jnp.abs(view.y - y)) / jnp.max(jnp.abs(y)),
            "entropy": jnp.max(jnp.abs(entropy - by_hand)),
            "sums": jnp.max(jnp.abs(jnp.sum(weights, axis=-1) - 1.0)),
            "future": jnp.max(future),
        }

    def run(params: Any, batch: Any) -> Any:
        decoder = made.bind(params)
        return decoder.forward(batch["tokens"], batch["segment_ids"], batch["positions"], observe).observed

    found = jax.jit(run)(params, batch)
    assert found["heads"].shape == (config.model.layers,)
    for name, bound in (("heads", 1e-5), ("output", 1e-6), ("entropy", 1e-5), ("sums", 1e-6), ("future", 0.0)):
        assert found[name].max() <= bound, name


@pytest.mark.parametrize("local", [False, True])
def test_scores_under_flash_have_its_mask(local):
    """Scores have the mask although flash makes its own and the context holds none."""
    batch = packed(2)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, LENGTH, 16)), jnp.float32)
    found = {}
    for impl in ("xla", "flash"):
        config = small(attention={"impl": impl, "window": 4, "global_every": 2})
        context = attention_context(config, (2, LENGTH), batch["segment_ids"], batch["positions"]).at(local)
        assert (context.full is None) == (impl == "flash")
        found[impl] = make_attention(config, key=path_key(jax.random.key(0))).scores(x, context)
    np.testing.assert_array_equal(found["flash"], found["xla"])
