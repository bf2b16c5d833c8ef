"""Test what attention hands through depth, with a link of this file that is put into the table."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mhc import sharding
from mhc.config import Config
from mhc.model import memory
from mhc.model.decoder import Decoder, DecoderDefinition, SublayerView
from mhc.model.edits import Edits
from mhc.model.parameters import Parameter, parameter
from mhc.rng import PathKey
from tests.small import VOCAB, relative_error, small


class ValueMix(memory.Link):
    """Computes v <- lam[0] v + lam[1] v of block 0 (arXiv:2410.17897)."""

    def __init__(self, config: Config, key: PathKey):
        self.lam = nnx.Param(jnp.array([0.5, 0.5], jnp.float32))

    @staticmethod
    def begin(config: Config, batch: int, tokens: int, dtype: jnp.dtype) -> memory.Memory:
        shape = (batch, tokens, config.kv_heads, config.head_dim)
        return {"first_value": jnp.zeros(shape, dtype), "layer": jnp.zeros((), jnp.int32)}

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, memory: memory.Memory) -> Any:
        first = memory["layer"] == 0
        kept = jnp.where(first, v, memory["first_value"])
        mixed = jnp.where(first, v, (self.lam[0] * v + self.lam[1] * kept).astype(v.dtype))
        return q, k, mixed, {"first_value": kept, "layer": memory["layer"] + 1}


@pytest.fixture
def linked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the link into every model of a test."""
    monkeypatch.setitem(memory.LINKS, "value_mix", memory.Row(lambda config: True, ValueMix, ValueMix.begin))


TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (2, 9)))
CONFIGS = {
    "grouped heads": small("mhc", model={"layers": 3}, attention={"heads": 4, "kv_heads": 2}),
    "two stacks": small("hc", model={"layers": 3}, moe={"experts": 4, "dense_layers": 1}),
}
every_config = pytest.mark.parametrize("name", ["grouped heads", pytest.param("two stacks", marks=pytest.mark.product)])


def made(config: Config, lam: tuple[float, float] | None = None) -> tuple[DecoderDefinition, Any]:
    """Make a decoder with the link and its parameters, ``lam`` in every layer; the shared decoder has no link."""
    definition = DecoderDefinition(config)
    params = jax.jit(definition.init)(jax.random.key(0))
    if lam is not None:
        params = jax.tree_util.tree_map_with_path(
            lambda path, leaf: jnp.broadcast_to(jnp.array(lam), leaf.shape) if "lam" in str(path[-1]) else leaf, params
        )
    return definition, params


def logits(config: Config, params: Any, edits: Edits | None = None, observe: Any = None) -> Any:
    definition = DecoderDefinition(config)
    return jax.jit(lambda params, edits: definition.bind(params).forward(TOKENS, edits=edits, observe=observe))(
        params, edits
    )


def by_hand(decoder: Decoder) -> jax.Array:
    """Return the hidden states of a plain model, computed layer by layer with values mixed as in the paper."""
    state: Any = decoder.embed_tokens(TOKENS, jnp.broadcast_to(jnp.arange(9), TOKENS.shape))
    first, mask = None, jnp.tril(jnp.ones((9, 9), bool))
    graph, stacked = nnx.split(decoder.blocks)
    for layer in range(decoder.config.model.layers):
        block = nnx.merge(graph, jax.tree.map(lambda leaf, layer=layer: leaf[layer], stacked))
        core: Any = block.heads
        u = block.attention.before(state)
        q, k, v = core.project(u, jnp.broadcast_to(jnp.arange(9), TOKENS.shape), None)
        lam = core.links["value_mix"].lam[...]
        first = v if first is None else first
        v = v if layer == 0 else lam[0] * v + lam[1] * first
        scores = jnp.einsum("bthk,buhk->bhtu", q, k) * core.scale
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
        state = state + core.join(jnp.einsum("bhtu,buhk->bthk", weights, v))
        state = state + block.mlp(state)
    return decoder.final_norm(state)


def test_no_memory_is_carried_where_nobody_asks_for_it() -> None:
    assert memory.empty(small(), 2, 9) == {}


def test_what_a_layer_gets_is_what_the_first_left(linked: None) -> None:
    config = small("plain", model={"layers": 3}, positions={"kind": "none"})
    definition, params = made(config, (0.3, 0.9))
    decoder = definition.bind(params)
    assert relative_error(decoder.forward(TOKENS).h, by_hand(decoder)) <= 1e-5


@every_config
def test_a_link_that_mixes_nothing_in_changes_nothing(name: str, linked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS[name]
    _, params = made(config, (1.0, 0.0))
    with_link = logits(config, params).h
    moved = logits(config, made(config, (0.5, 0.5))[1]).h
    monkeypatch.delitem(memory.LINKS, "value_mix")
    definition, without = made(config)
    h = jax.jit(lambda params: definition.bind(params).forward(TOKENS).h)(without)
    np.testing.assert_allclose(with_link, h, rtol=0, atol=1e-6 * float(jnp.abs(h).max()))
    assert relative_error(moved, h) > 1e-3


@every_config
def test_depth_and_cache_hand_it_on_alike(name: str, linked: None) -> None:
    """Scanned, unrolled, recomputed and cached passes agree; the cache keeps the mixed values."""
    config = CONFIGS[name]
    definition, params = made(config, (0.3, 0.9))

    def cached(params: Any) -> jax.Array:
        decoder, parts = definition.bind(params), []
        cache = decoder.empty_cache(2, 9)
        for begin, end in ((0, 4), (4, 5), (5, 9)):
            part, cache = decoder.extend(TOKENS[:, begin:end], cache)
            parts.append(part)
        return jnp.concatenate(parts, axis=1)

    expected = jax.jit(lambda params: definition.bind(params)(TOKENS))(params)
    assert relative_error(jax.jit(cached)(params), expected) <= 1e-5
    for model in ({"scan": False}, {"remat": "full"}, {"remat": "streams", "remat_blocks": 2}):
        fields = {"model": {"layers": 3, **model}}
        other = DecoderDefinition(small(config.residual.kind, **{**GROUPS[name], **fields}))
        run = jax.jit(lambda params, other=other: other.bind(params)(TOKENS))
        assert relative_error(run(params), expected) <= 1e-5, model


GROUPS: dict[str, dict[str, dict[str, Any]]] = {
    "grouped heads": {"attention": {"heads": 4, "kv_heads": 2}},
    "two stacks": {"moe": {"experts": 4, "dense_layers": 1}},
}


@every_config
def test_an_observer_sees_it_and_a_patch_reaches_it(name: str, linked: None) -> None:
    config = CONFIGS[name]
    _, params = made(config, (0.3, 0.9))

    def observe(view: SublayerView) -> dict[str, jax.Array]:
        return {"layer": view.memory["layer"]}

    seen = logits(config, params, observe=observe).observed["layer"]
    np.testing.assert_array_equal(seen, [0, 1, 1, 2, 2, 3])
    where = np.zeros((config.model.layers, *TOKENS.shape), bool)
    where[2] = True
    patched = logits(config, params, Edits(state_patch=jnp.asarray(where))).h
    # At block 2 row 1 has taken the state and the memory of row 0, and its attention sees nothing else.
    np.testing.assert_allclose(patched[1], patched[0], rtol=0, atol=1e-5 * float(jnp.abs(patched).max()))


def test_the_parameters_of_a_link_are_laid_out_and_trained_by_rule(linked: None) -> None:
    _, params = made(CONFIGS["grouped heads"])
    (path,) = [sharding.path_of(p) for p, _ in jax.tree_util.tree_leaves_with_path(params) if "lam" in str(p[-1])]
    assert path == "blocks/attention/core/links/value_mix/lam"
    assert sharding.logical_axes(path, 2) == ("layers", "norm")
    assert parameter(path) == Parameter(("norm",), "attention", False, None)


def test_what_cannot_be_linked_is_refused(linked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="latent attention keeps no keys and values to hand on: value_mix"):
        DecoderDefinition(small(attention={"kind": "mla", "kv_rank": 8}))
    monkeypatch.setitem(memory.LINKS, "again", memory.LINKS["value_mix"])
    with pytest.raises(ValueError, match="link again: another link uses "):
        memory.empty(small(), 2, 9)
