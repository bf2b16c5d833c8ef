"""Test the state rule, and what a decoder does with a state: layout, patches, depth and the cache."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mhc import residual
from mhc.config import Config
from mhc.model.block import build_topology, laid_out
from mhc.model.decoder import SublayerView
from mhc.model.edits import Edits
from mhc.model.flops import flops_per_token
from mhc.monitor import probes
from mhc.residual import ResidualTopology
from mhc.residual.protocol import State
from mhc.residual.single_pass import SinglePassHyperConnections
from mhc.rng import PathKey
from tests.contracts.cases import specs
from tests.small import VOCAB, definition, initial, packed, relative_error, small

TOKENS, WIDTH, SUBLAYERS = (3, 7), 10, 6  # no two sizes alike, nor any that a kind has
every_kind = pytest.mark.parametrize("kind", [*specs()])


def fast_for(*fast: str) -> Any:
    """Parametrise by every kind: the named ones, which ask most of the protocol, are fast, the others are not."""
    return pytest.mark.parametrize(
        "kind", [pytest.param(kind, marks=() if kind in fast else pytest.mark.product) for kind in specs()]
    )


def settled(kind: str) -> tuple[ResidualTopology, State]:
    """Return a topology and the shapes of its state after a write, settled."""
    key = PathKey(jax.random.key(0))

    def run(h: jax.Array) -> State:
        topology = residual.build(kind, WIDTH, rngs=key, sublayers=SUBLAYERS)
        connection = topology.connection(1, rngs=key / "c")
        state = topology.expand(h)
        u, context = connection.read(state)
        return topology.settle(connection.write(state, u, context))

    return residual.build(kind, WIDTH, rngs=key, sublayers=SUBLAYERS), jax.eval_shape(run, jnp.zeros((*TOKENS, WIDTH)))


def described(state: State) -> list[tuple[Any, ...]]:
    """Return path, shape and dtype of every leaf."""
    return [(path, leaf.shape, leaf.dtype) for path, leaf in jax.tree.leaves_with_path(state)]


def leaves_of_tokens(topology: ResidualTopology, state: State) -> list[tuple[int, ...]]:
    """Return the shapes of the leaves that ``each`` shows, tokens first."""
    shapes: list[tuple[int, ...]] = []

    def look(leaf: jax.Array) -> jax.Array:
        shapes.append(leaf.shape)
        return leaf

    jax.eval_shape(lambda state: topology.each(state, look), state)
    return shapes


@every_kind
def test_the_first_axes_of_every_leaf_are_the_tokens(kind: str) -> None:
    """``each`` shows every leaf except scalars once, tokens first, and gives them back as they were."""
    topology, state = settled(kind)
    shapes = leaves_of_tokens(topology, state)
    assert shapes and all(shape[:2] == TOKENS for shape in shapes), shapes
    assert len(shapes) == len([leaf for leaf in jax.tree.leaves(state) if leaf.ndim])
    assert described(jax.eval_shape(lambda state: topology.each(state, lambda leaf: -leaf), state)) == described(state)


@every_kind
def test_settling_and_handing_on_keep_the_structure(kind: str) -> None:
    topology, state = settled(kind)
    for function in (
        topology.settle,
        topology.hand_on,
        lambda state: topology.joined(*topology.held(state)),
        lambda state: topology.settle(topology.settle(state)),
    ):
        assert described(jax.eval_shape(function, state)) == described(state)


class StreamsFirst(SinglePassHyperConnections):
    """Breaks the state rule: its read weights are [N, ...]."""

    def expand(self, h: jax.Array) -> Any:
        x, pre = super().expand(h)
        return x, jnp.moveaxis(pre, -1, 0)


def test_a_leaf_that_breaks_the_rule_is_seen() -> None:
    topology = StreamsFirst(WIDTH, n=2, rngs=nnx.Rngs(0))
    state = jax.eval_shape(topology.expand, jnp.zeros((*TOKENS, WIDTH)))
    assert any(shape[:2] != TOKENS for shape in leaves_of_tokens(topology, state))
    with pytest.raises(ValueError, match=r"StreamsFirst: a leaf of its state has shape \(2, 3, 7\)"):
        jax.eval_shape(lambda state: laid_out(topology, state, (*TOKENS, WIDTH)), state)


# In a decoder ---------------------------------------------------------------------------------------------------------


def config_of(kind: str, **groups: dict[str, Any]) -> Config:
    """Return a config of three blocks: a period of two ends once and is begun once more."""
    every = {name: value for name, value in {"every": 2, "block": 4}.items() if name in specs()[kind].options}
    base: dict[str, dict[str, Any]] = {"model": {"layers": 3}, "residual": {"kind": kind, **every}}
    return small(kind, **{name: {**base.get(name, {}), **groups.get(name, {})} for name in {**base, **groups}})


def near_start(config: Config) -> Any:
    """Return initial parameters moved a little, so that no map is special and no stream vanishes."""
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda leaf: leaf + jnp.asarray(0.1 * rng.standard_normal(leaf.shape), leaf.dtype), initial(config)
    )


def forward(config: Config, params: Any, edits: Edits | None = None) -> np.ndarray:
    batch = packed(3)

    def run(params: Any) -> jax.Array:
        decoder = definition(config).bind(params)
        return decoder.forward(batch["tokens"], batch["segment_ids"], batch["positions"], edits=edits).h

    return np.asarray(jax.jit(run)(params))


@fast_for("mhc", "deferred", "sources")
def test_a_patch_of_the_state_reaches_all_of_it(kind: str) -> None:
    """Rows that take the whole state of row 0 at block 1, and attend within themselves, end as row 0 does."""
    config = config_of(kind, attention={"window": 1})
    params = near_start(config)
    layers = config.model.layers
    where = np.zeros((layers, *packed(3)["tokens"].shape), bool)
    where[1] = True
    h = forward(config, params, Edits(state_patch=jnp.asarray(where)))
    np.testing.assert_allclose(h[1:], np.broadcast_to(h[:1], h[1:].shape), rtol=0, atol=2e-5 * np.abs(h).max())
    untouched = forward(config, params)
    np.testing.assert_allclose(h[0], untouched[0], rtol=0, atol=2e-5 * np.abs(untouched).max())
    assert np.abs(h[1] - untouched[1]).max() > 1e-3


@fast_for("deferred", "single_pass", "sources", "normed", "attn_res", "denseformer", "gated_residual")
def test_a_cache_gives_what_whole_rows_give(kind: str) -> None:
    config = config_of(kind)
    params, tokens = near_start(config), jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (2, 9)))

    def both(params: Any) -> tuple[jax.Array, jax.Array]:
        decoder = definition(config).bind(params)
        cache, parts = decoder.empty_cache(2, 9), []
        for begin, end in ((0, 4), (4, 5), (5, 9)):
            logits, cache = decoder.extend(tokens[:, begin:end], cache)
            parts.append(logits)
        return decoder(tokens), jnp.concatenate(parts, axis=1)

    whole, pieces = jax.jit(both)(params)
    assert relative_error(pieces, whole) <= 1e-5


@fast_for()
def test_depth_is_the_same_however_it_is_run(kind: str) -> None:
    """Scanned, unrolled, and recomputed by blocks or groups, the model has one function and one gradient."""
    compare_depths(kind, {}, {"remat": "full"}, {"remat": "streams", "remat_blocks": 2})


def test_periods_are_the_same_scanned_and_recomputed_as_unrolled() -> None:
    compare_depths("sources", {"remat": "full"})


@pytest.mark.parametrize("block", [2, *(pytest.param(block, marks=pytest.mark.product) for block in (0, 3))])
def test_residual_blocks_of_any_size_are_the_same_however_they_are_run(block: int) -> None:
    """A period has one block of the network, or three with two residual blocks in it."""
    compare_depths("attn_res", {"remat": "full"}, residual={"kind": "attn_res", "block": block})


def compare_depths(kind: str, *models: dict[str, Any], **groups: dict[str, Any]) -> None:
    """Compare loss and gradient under each way to compute the model with unrolled blocks that keep everything."""
    batch = packed(2)

    def values(model: dict[str, Any]) -> tuple[jax.Array, Any]:
        config = config_of(kind, model=model, **groups)

        def loss(params: Any) -> jax.Array:
            h = definition(config).bind(params).forward(batch["tokens"], batch["segment_ids"], batch["positions"]).h
            return jnp.mean(jnp.square(h - 1.0))

        return jax.jit(jax.value_and_grad(loss))(near_start(config))

    expected, slope = values({"scan": False})
    for model in models:
        got, grads = values(model)
        assert relative_error(got, expected) <= 1e-5, model
        for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(slope), strict=True):
            assert np.max(np.abs(a - b)) <= 1e-4 * np.max(np.abs(b)) + 1e-7, model


@fast_for("single_pass", "sources", "normed", "attn_res", "denseformer", "gated_residual")
def test_a_probe_measures_what_a_kind_has(kind: str) -> None:
    """Gains exist exactly where there are maps; a kind's own measures are taken by sublayer; states are settled."""
    config = config_of(kind)
    batch = {name: jnp.asarray(packed(2, padding=True)[name]) for name in probes.BATCH_FIELDS}
    measured = probes.compile_probe(definition(config))(near_start(config), batch)
    topology = build_topology(config, PathKey(jax.random.key(0)))
    has_maps = any(name.startswith("gain/") for name in measured)
    assert has_maps == any(name.startswith("maps/") for name in measured) == ("ds_error/rows" in measured)
    own = {name for name in measured if name.startswith(probes.OWN)}
    assert has_maps or own
    constants = topology.constants()
    for name in own:
        if name.removeprefix(probes.OWN) not in constants:
            ends = topology.owns_norm or kind == "attn_res"  # the last read may have a row too
            assert measured[name].shape[0] in {2 * config.model.layers, 2 * config.model.layers + ends}
            assert measured[name].ndim <= 2
        assert np.isfinite(measured[name]).all()
    if kind == "sources":  # of the first read the embedding is all that there is
        assert float(measured[f"{probes.OWN}embedding_weight"][0]) == pytest.approx(1.0)
        assert (np.asarray(measured[f"{probes.OWN}embedding_weight"])[1:] < 1.0).all()
    assert measured["stream/rms"].shape == (2 * config.model.layers, topology.n)
    assert flops_per_token(config) > 0


def test_a_pending_write_is_settled_wherever_a_state_is_shown() -> None:
    """Seen from outside, the deferred topology is mhc: an observer gets nothing that is pending."""
    mhc, deferred = config_of("mhc", residual={"n": 2}), config_of("deferred")
    batch = packed(2)

    def observe(view: SublayerView) -> dict[str, jax.Array]:
        return {"streams": view.topology.streams(view.state)}

    def streams(config: Config) -> np.ndarray:
        def run(params: Any) -> jax.Array:
            decoder = definition(config).bind(params)
            return decoder.hidden(batch["tokens"], batch["segment_ids"], batch["positions"], observe)[1]["streams"]

        return np.asarray(jax.jit(run)(near_start(config)))

    assert relative_error(streams(deferred), streams(mhc)) <= 1e-5
