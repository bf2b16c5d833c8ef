"""Test the decoder: equal to plain at init, causal, blind to other documents, the same however it is compiled."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhc.config import Config
from mhc.errors import UserError
from mhc.model.decoder import DecoderDefinition
from mhc.train.step import loss_parts
from tests.small import (
    LENGTH,
    VOCAB,
    assert_identical,
    by_path,
    distance,
    initial,
    packed,
    random_params,
    relative_error,
    small,
    with_fields,
)


@functools.cache
def forward(config: Config) -> Any:
    definition = DecoderDefinition(config)
    return jax.jit(
        lambda params, batch: definition.bind(params)(batch["tokens"], batch["segment_ids"], batch["positions"])
    )


@functools.cache
def gradient(config: Config) -> Any:
    definition = DecoderDefinition(config)

    def loss(params: Any, batch: Any) -> jax.Array:
        parts = loss_parts(definition, params, batch)
        return parts.sums.nll / parts.weight

    return jax.jit(jax.value_and_grad(loss))


# equal to plain at init -----------------------------------------------------------------------------------------------

FOUR_BLOCKS: dict[str, Any] = {"layers": 4}


@pytest.fixture(scope="module")
def plain_logits() -> np.ndarray:
    config = small("plain", model=FOUR_BLOCKS)
    return np.asarray(forward(config)(initial(config), packed(4)))


@pytest.mark.long
def test_hc_with_mean_collapse_starts_as_plain(plain_logits):
    config = small("hc", model=FOUR_BLOCKS, residual={"collapse": "mean"})
    assert relative_error(forward(config)(initial(config), packed(4)), plain_logits) <= 2e-5


def test_hc_with_sum_collapse_starts_as_plain_once_eps_is_scaled(plain_logits):
    """N equal streams sum to N times plain's, so the mean square is N² times as large, and so must eps be."""
    config = small("hc", model=FOUR_BLOCKS, residual={"n": 4, "collapse": "sum"})
    definition = DecoderDefinition(config)

    def logits(params: Any, batch: Any) -> jax.Array:
        decoder = definition.bind(params)
        decoder.final_norm.eps = config.norm.eps * 4**2
        return decoder(batch["tokens"], batch["segment_ids"], batch["positions"])

    assert relative_error(jax.jit(logits)(initial(config), packed(4)), plain_logits) <= 2e-5


@pytest.mark.parametrize("preset", ["paper", "deepseek"])
def test_mhc_with_init_equivalent_starts_as_plain(preset, plain_logits):
    config = small("mhc", model=FOUR_BLOCKS, residual={"init": "equivalent", "sinkhorn": preset})
    params = initial(config)
    assert relative_error(forward(config)(params, packed(4)), plain_logits) <= (1e-4 if preset == "deepseek" else 2e-5)


@pytest.mark.parametrize("kind", ["hc", "mhc"])
def test_other_maps_give_other_logits(kind, plain_logits):
    """Other maps change the logits, so equality at init comes from the parameters and not from unused maps."""
    config = small(kind, model=FOUR_BLOCKS, residual={"collapse": "mean", "init": {"mhc": "equivalent"}.get(kind)})
    params = initial(config)
    for name in ("attention_residual", "mlp_residual"):
        bias = {"hc": "b_res", "mhc": "bias"}[kind]
        leaf = params["blocks"][name][bias]
        params["blocks"][name][bias] = leaf + np.random.default_rng(0).standard_normal(leaf.shape).astype(np.float32)
    assert relative_error(forward(config)(params, packed(4)), plain_logits) > 1e-2


# initial weights ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["hc", "mhc"])
def test_kinds_share_every_weight_but_the_maps(kind):
    """A parameter's key comes from its path, so that other parameters do not change its value."""
    plain = by_path(initial(small("plain", model=FOUR_BLOCKS)))
    other = by_path(initial(small(kind, model=FOUR_BLOCKS, residual={"collapse": "mean"} if kind == "hc" else {})))
    added = set(other) - set(plain)
    assert set(plain) <= set(other) and added and all("residual/" in path for path in added)
    assert_identical({path: other[path] for path in plain}, plain)


def test_seeds_give_other_weights_and_layers_differ():
    config = small("plain", model=FOUR_BLOCKS)
    zero, one = by_path(initial(config, 0)), by_path(initial(config, 1))
    for path, leaf in zero.items():
        if "norm" in path:
            assert np.all(leaf == 1.0)
            continue
        assert not np.any(leaf == one[path]), path
        if path.startswith("blocks/"):
            assert not np.any(leaf[0] == leaf[1]), path


@pytest.mark.parametrize("kind", ["normal", "fan_in"])
def test_standard_deviations(kind):
    config = small("plain", model={"width": 64}, mlp={"width": 96}, init={"kind": kind, "std": 0.05})
    d, f, residual_scale = 64, 96, (2 * config.model.layers) ** -0.5
    expected = {
        "embed/table": d**-0.5,
        "head/kernel": d**-0.5,
        "blocks/attention/core/query": d**-0.5,
        "blocks/attention/core/out": d**-0.5 * residual_scale,
        "blocks/mlp/core/gate": d**-0.5,
        "blocks/mlp/core/down": f**-0.5 * residual_scale,
    }
    if kind == "normal":
        expected = {path: 0.05 * (residual_scale if std != d**-0.5 else 1.0) for path, std in expected.items()}
    params = by_path(initial(config))
    for path, std in expected.items():
        count = params[path].size
        assert abs(params[path].std() / std - 1.0) < 4 / (2 * count) ** 0.5, path  # four standard errors
        assert abs(params[path].mean()) < 4 * std / count**0.5, path


# causality and documents ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "impl"), [("plain", "xla"), ("plain", "sdpa"), ("mhc", "xla")])
def test_a_token_sees_no_later_one_and_no_other_document(kind, impl):
    """Changing one token changes logits at its own and later places of its document, and not one bit elsewhere."""
    config = small(kind, attention={"impl": impl})
    run, params, batch = forward(config), random_params(config), packed(1, seed=5)
    segments = batch["segment_ids"][0]
    assert segments[-1] >= 3
    # Row r has token r replaced; the last row is left as it is.
    rows = {name: np.repeat(array, LENGTH + 1, axis=0) for name, array in batch.items()}
    rows["tokens"][np.arange(LENGTH), np.arange(LENGTH)] = (batch["tokens"][0] + 7) % VOCAB
    logits = np.asarray(run(params, rows))
    changed = np.any(logits[:-1] != logits[-1], axis=-1)  # [perturbed, place]
    place = np.arange(LENGTH)
    expected = (place[None, :] >= place[:, None]) & (segments[None, :] == segments[:, None])
    np.testing.assert_array_equal(changed, expected)


def test_a_packed_document_has_the_logits_it_has_alone():
    config = small("mhc")
    run, params, batch = forward(config), random_params(config), packed(1, seed=5)
    segments = batch["segment_ids"][0]
    together = np.asarray(run(params, batch))[0]
    alone = {name: np.zeros((int(segments[-1]), LENGTH), np.int32) for name in ("tokens", "segment_ids", "positions")}
    for document in range(int(segments[-1])):
        here = segments == document + 1
        count = int(here.sum())
        alone["tokens"][document, :count] = batch["tokens"][0, here]
        alone["segment_ids"][document, :count] = 1
        alone["positions"][document, :count] = np.arange(count)
    apart = np.asarray(run(params, alone))
    for document in range(int(segments[-1])):
        here = segments == document + 1
        assert relative_error(apart[document, : int(here.sum())], together[here]) <= 1e-5


def test_positions_default_to_one_document_from_zero():
    config = small("plain")
    definition, params, batch = DecoderDefinition(config), random_params(config), packed(2, documents=False)
    given = forward(config)(params, batch)
    default = jax.jit(lambda params, tokens: definition.bind(params)(tokens))(params, batch["tokens"])
    np.testing.assert_array_equal(given, default)
    stretched = forward(config)(params, {**batch, "positions": 2 * batch["positions"]})
    assert relative_error(stretched, given) > 1e-3  # where they are given, they count


# the same, however it is compiled -------------------------------------------------------------------------------------


def checkpoints_in(config: Config) -> tuple[int, set[str]]:
    """Return (number of checkpoint regions, their policies) in the jaxpr of the gradient."""
    jaxpr = jax.make_jaxpr(gradient(config))(DecoderDefinition(config).abstract(), packed(4))
    found: list[str] = []

    def walk(one: Any) -> None:
        for equation in one.eqns:
            if "policy" in equation.params and "prevent_cse" in equation.params:
                found.append(str(equation.params["policy"]))
            for value in equation.params.values():
                for inner in value if isinstance(value, (tuple, list)) else (value,):
                    inner = getattr(inner, "jaxpr", inner)
                    if hasattr(inner, "eqns"):
                        walk(inner)

    walk(jaxpr.jaxpr)
    return len(found), set(found)


def wide_products(jaxpr: Any) -> int:
    """Count the products whose result is as wide as a feed-forward of 40; a loop's body counts once."""
    count = 0
    for eqn in jaxpr.eqns:
        count += eqn.primitive.name == "dot_general" and eqn.outvars[0].aval.shape == (4, 16, 40)
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    count += wide_products(inner)
    return count


@pytest.fixture(scope="module")
def reference_gradient() -> tuple[Any, Any, Any]:
    """Return (parameters, loss, gradient) of a small mhc model whose blocks are scanned and not recomputed."""
    config = small("mhc")
    params = random_params(config)
    loss, grads = gradient(config)(params, packed(4))
    return params, loss, grads


@pytest.mark.long  # the contract holds it over sublayers
def test_unrolled_blocks_equal_scanned_ones(reference_gradient):
    params, loss, grads = reference_gradient
    unrolled_loss, unrolled = gradient(small("mhc", model={"scan": False}))(params, packed(4))
    assert abs(float(unrolled_loss) - float(loss)) <= 1e-6 * float(loss)
    assert distance(unrolled, grads) <= 1e-6


def test_scan_is_on():
    def loops(scan: bool) -> int:
        config = small("plain", model={"scan": scan})
        return str(jax.make_jaxpr(forward(config))(DecoderDefinition(config).abstract(), packed(4))).count("scan[")

    assert (loops(True), loops(False)) == (1, 0)


@pytest.mark.parametrize("remat", [pytest.param(name, marks=pytest.mark.product) for name in ("full", "dots")])
def test_recomputation_changes_no_gradient(remat, reference_gradient):
    params, loss, grads = reference_gradient
    config = small("mhc", model={"remat": remat})
    again_loss, again = gradient(config)(params, packed(4))
    assert abs(float(again_loss) - float(loss)) <= 1e-6 * float(loss)
    assert distance(again, grads) <= 1e-6


@pytest.mark.long
@pytest.mark.parametrize("kind", ["plain", "mhc"])
def test_recomputing_the_connections_changes_no_gradient(kind):
    """Five blocks run in groups of two, the last alone; windows differ within groups and between them."""
    attention = {"window": 3, "global_every": 3}
    config = small(kind, model={"layers": 5}, attention=attention)
    params, batch = random_params(config), packed(4)
    loss, grads = gradient(config)(params, batch)
    again = small(kind, model={"layers": 5, "remat": "streams", "remat_blocks": 2}, attention=attention)
    again_loss, recomputed = gradient(again)(params, batch)
    assert abs(float(again_loss) - float(loss)) <= 1e-6 * float(loss)
    assert distance(recomputed, grads) <= 5e-6  # ten sublayers of random maps


@pytest.mark.long
def test_recomputing_the_connections_keeps_less():
    """Eight mhc blocks keep under six tenths of the temporaries, and the products of F are not recomputed."""
    kept, products = {}, {}
    for remat in ("none", "streams", "full"):
        config = small("mhc", model={"layers": 8, "remat": remat}, mlp={"width": 40})
        abstract, loss = DecoderDefinition(config).abstract(), gradient(config)
        products[remat] = wide_products(jax.make_jaxpr(loss)(abstract, packed(4)).jaxpr)
        if remat != "full":
            kept[remat] = loss.lower(abstract, packed(4)).compile().memory_analysis().temp_size_in_bytes
    assert kept["streams"] < 0.6 * kept["none"], kept
    assert products["streams"] == products["none"] < products["full"]


def test_the_groups_follow_the_papers_formula():
    """The formula L_r = sqrt(N S / (N + 2)) gives 6.3 for 60 sublayers and 4 streams, so three blocks."""
    assert small("mhc", model={"layers": 30, "remat": "streams"}).remat_blocks == 3
    assert small("plain", model={"layers": 2, "remat": "streams"}).remat_blocks == 1
    with pytest.raises(UserError, match=r"model\.remat_blocks: given 2, allowed: None with model\.remat=full"):
        small(model={"remat": "full", "remat_blocks": 2})


def test_recomputation_is_on():
    names = ("none", "full", "dots", "streams")
    regions = {remat: checkpoints_in(small("plain", model={"remat": remat})) for remat in names}
    assert regions["streams"][0] > 0 and "None" not in regions["streams"][1]
    assert regions["none"][0] == 0
    assert regions["full"][0] > 0 and regions["full"][1] == {"None"}
    assert regions["dots"][0] > 0 and "None" not in regions["dots"][1]


# dtypes and the head --------------------------------------------------------------------------------------------------


def test_bfloat16_computes_close_to_float32_while_parameters_and_maps_stay_float32():
    config = small("mhc", model={"dtype": "bfloat16"})
    definition = DecoderDefinition(config)
    params, batch = random_params(config, std=0.1), packed(4)
    seen: dict[str, Any] = {}

    def logits(params: Any, batch: Any) -> jax.Array:
        def observe(view: Any) -> Any:
            seen.update(maps=view.connection.maps(view.context), u=view.u, y=view.y, state=view.state)
            return {}

        decoder = definition.bind(params)
        return decoder.logits(decoder.hidden(batch["tokens"], batch["segment_ids"], batch["positions"], observe)[0])

    low = jax.jit(logits)(params, batch)
    assert low.dtype == jnp.float32
    assert {seen[name].dtype for name in ("u", "y", "state")} == {jnp.dtype(jnp.bfloat16)}
    assert {one.dtype for one in seen["maps"]} == {jnp.dtype(jnp.float32)}
    high = forward(small("mhc"))(params, batch)
    assert (
        1e-4 < relative_error(low, high) <= 3e-2
    )  # 8 bits of mantissa; equal numbers would mean that nothing was cast
    grads = jax.eval_shape(gradient(config), params, batch)[1]
    assert {leaf.dtype for leaf in jax.tree.leaves((definition.abstract(), grads))} == {jnp.dtype(jnp.float32)}


def test_a_tied_head_is_the_embedding_and_no_leaf_of_its_own():
    config = small("plain", head={"tied": True})
    definition = DecoderDefinition(config)
    assert not [path for path in by_path(random_params(config)) if path.startswith("head")]
    params, batch = random_params(config), packed(2)
    decoder = definition.bind(params)
    h = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 16)), jnp.float32)
    expected = np.asarray(h, np.float64) @ np.asarray(params["embed"]["table"], np.float64).T
    assert relative_error(decoder.logits(h), expected) <= 1e-6
    # Its gradient is that of both uses: rows of tokens that never occur get the head's part.
    tokens = np.zeros_like(batch["tokens"])
    changed = {**batch, "tokens": tokens}
    grads = jax.jit(jax.grad(lambda params: loss_parts(definition, params, changed).sums.nll))(params)
    assert np.all(np.abs(np.asarray(grads["embed"]["table"])).max(axis=1) > 0)


def test_an_observer_sees_every_sublayer_in_depth_order():
    """Each sublayer's u equals that of a model whose later blocks are cut off."""
    config = small("plain", model={"layers": 3})
    params, batch = random_params(config), packed(2)

    def observed(layers: int) -> tuple[np.ndarray, np.ndarray]:
        cut = with_fields(config, model={"layers": layers})
        some = {**params, "blocks": jax.tree.map(lambda leaf: leaf[:layers], params["blocks"])}
        definition = DecoderDefinition(cut)

        def run(params: Any, batch: Any) -> Any:
            decoder = definition.bind(params)
            return decoder.hidden(
                batch["tokens"],
                batch["segment_ids"],
                batch["positions"],
                lambda view: {"u": view.u, "state": view.state},
            )[1]

        seen = jax.jit(run)(some, batch)
        return np.asarray(seen["u"]), np.asarray(seen["state"])

    u, state = observed(3)
    assert u.shape == (6, 2, LENGTH, 16)
    np.testing.assert_array_equal(u[0], np.asarray(params["embed"]["table"])[batch["tokens"]])
    np.testing.assert_array_equal(u[1:], state[:-1])  # plain: what a sublayer reads is what the one before left
    fewer_u, _ = observed(1)
    assert relative_error(u[:2], fewer_u) <= 1e-6
