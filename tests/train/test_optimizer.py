"""Test parameter groups by path, weight decay, and the optimisers: what each does to which leaf."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mhc import kinds
from mhc.config import Config
from mhc.model.decoder import DecoderDefinition
from mhc.model.parameters import GROUPS, TABLE, matches, parameter
from mhc.train.optimizer import decay_mask, make_optimizer
from tests.small import ZOO, by_path, distance, random_params, small, with_fields

MATRICES = {
    "embed/table",
    "head/kernel",
    "blocks/attention/core/query",
    "blocks/attention/core/key",
    "blocks/attention/core/value",
    "blocks/attention/core/out",
    "blocks/mlp/core/gate",
    "blocks/mlp/core/up",
    "blocks/mlp/core/down",
}
NORMS = {"blocks/attention/norm/scale", "blocks/mlp/norm/scale", "final_norm/scale"}
CONNECTIONS = ("blocks/attention_residual", "blocks/mlp_residual")
MAPS = {
    "plain": (),
    "hc": ("w_pre", "w_post", "w_res", "alpha", "b_pre", "b_post", "b_res"),
    **dict.fromkeys(("mhc", "mhc_lite", "kromhc", "identity"), ("phi", "alpha", "bias")),
    **dict.fromkeys(("go_mhc", "iso", "ortho", "circulant"), ("phi", "alpha", "bias")),
    "tbp_mhc": ("phi", "alpha", "bias", "delta"),
    "shc": ("phi", "alpha", "bias", "gamma"),
}
MAPS |= {
    "frac": ("w_read", "w_post", "w_res", "alpha", "b_read", "b_post", "b_res"),
    "gated_residual": ("w_norm", "w_down", "w_up", "w_inject"),
    "attn_res": ("query", "scale"),
    "denseformer": (),
    "laurel": ("w", "A", "B"),
}
TOPOLOGY = {
    "gated_residual": {"residual/end/w_norm", "residual/end/w_down", "residual/end/w_up"},
    "attn_res": {"residual/end/query", "residual/end/scale"},
    "denseformer": {"residual/weights"},
}
DYNAMIC = ("w_pre", "w_post", "w_res")


def paths(config: Config) -> set[str]:
    return set(by_path(jax.tree.map(lambda leaf: np.zeros(()), DecoderDefinition(config).abstract())))


def mask_of(config: Config) -> set[str]:
    return {
        path for path, decays in by_path(decay_mask(config, DecoderDefinition(config).abstract())).items() if decays
    }


def maps_of(kind: str) -> set[str]:
    return {f"{connection}/{name}" for connection in CONNECTIONS for name in MAPS[kind]} | TOPOLOGY.get(kind, set())


def norms_of(kind: str) -> set[str]:
    return set() if kinds.known()[kind].own_norms else NORMS


# Rules ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", kinds.names())
def test_every_parameter_of_every_kind_has_its_group(kind):
    config = small(kind)
    assert paths(config) == MATRICES | norms_of(kind) | maps_of(kind)
    groups = {path: parameter(path).group for path in paths(config)}
    assert {path for path, name in groups.items() if name == "maps"} == maps_of(kind)
    assert {path for path, name in groups.items() if name == "norms"} == norms_of(kind)
    assert {path for path, name in groups.items() if name == "embedding"} == {"embed/table"}
    assert {path for path, name in groups.items() if name == "head"} == {"head/kernel"}
    assert {path for path, name in groups.items() if name == "attention"} == {p for p in MATRICES if "attention" in p}
    assert {path for path, name in groups.items() if name == "feed_forward"} == {p for p in MATRICES if "mlp" in p}
    assert set(groups.values()) <= set(GROUPS)


@pytest.mark.parametrize("name", ZOO)
def test_every_parameter_of_the_model_zoo_has_its_group(name):
    """Matrices decay, and Muon gets the ones of the blocks; biases, scales and tables of positions do neither."""
    config = small("plain", **ZOO[name])
    decayed = mask_of(config)
    for path in paths(config):
        vector = path.endswith(("_bias", "norm/scale", "norm/bias", "positions/bias", "positions/table"))
        assert (path in decayed) != vector, path
        orthogonal = path.startswith(("blocks/", "leading_blocks/")) and not vector and not path.endswith("/router")
        assert (parameter(path).muon is not None) == orthogonal, path


def test_no_rule_shadows_another():
    """Each path that the rules are for is matched by one of them: their order decides nothing."""
    cases = [("hc", {"residual": {"collapse": "head"}}), ("mhc", {"mlp": {"kind": "gelu"}})]
    for kind, others in [*cases, *(("plain", groups) for groups in ZOO.values())]:
        for path in paths(small(kind, **others)):
            rows = [pattern for pattern, _ in TABLE if matches(pattern, path)]
            assert len(rows) + (kinds.parameter(path) is not None) == 1, path


@pytest.mark.parametrize(
    "path", ["blocks/attention/core/bias", "blocks/mlp/core/query", "blocks/attention_residual/gain", "table", ""]
)
def test_an_unknown_path_is_an_error(path):
    with pytest.raises(ValueError, match=path or "covers"):
        parameter(path)


def test_a_head_of_the_residual_is_no_output_head():
    config = small("mhc", residual={"collapse": "head"})
    extra = paths(config) - paths(small("mhc"))
    assert extra == {"residual/head/fn", "residual/head/base", "residual/head/scale"}
    assert {parameter(path).group for path in extra} == {"maps"}
    assert not mask_of(config) & extra


@pytest.mark.parametrize("kind", kinds.names())
def test_decay_is_for_matrices_alone(kind):
    assert mask_of(small(kind)) == MATRICES


def test_decay_dynamic_adds_the_dynamic_weights_of_hc():
    dynamic = {f"{connection}/{name}" for connection in CONNECTIONS for name in DYNAMIC}
    assert mask_of(small("hc", residual={"decay_dynamic": True})) == MATRICES | dynamic


# Updates --------------------------------------------------------------------------------------------------------------

OPTIMISERS = ("adamw", "sgd", "muon")


@functools.cache
def compiled(config: Config) -> Any:
    optimizer = make_optimizer(config, DecoderDefinition(config).abstract())

    def update(params: Any, grads: Any) -> Any:
        return optax.apply_updates(params, optimizer.update(grads, optimizer.init(params), params)[0])

    return jax.jit(update)


@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.parametrize(("kind", "dynamic"), [("mhc", False), ("hc", True)])
def test_zero_gradients_and_decay_shrink_matrices_and_leave_the_rest(name, kind, dynamic):
    decayed = {"decay_dynamic": True} if dynamic else {}
    config = small(kind, optimizer={"name": name, "weight_decay": 0.25}, residual=decayed)
    params = random_params(config)
    after = by_path(compiled(config)(params, jax.tree.map(jnp.zeros_like, params)))
    before, shrunk = by_path(params), mask_of(config)
    assert shrunk >= MATRICES and (len(shrunk) > len(MATRICES)) == dynamic
    for path, leaf in before.items():
        if path in shrunk:
            np.testing.assert_allclose(after[path], 0.75 * leaf, rtol=1e-6, err_msg=path)
        else:
            np.testing.assert_array_equal(after[path], leaf, err_msg=path)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_every_parameter_moves_with_its_gradient(name):
    config = small("mhc", optimizer={"name": name, "weight_decay": 0.0})
    params, grads = random_params(config), random_params(config, seed=2)
    after, slope = by_path(compiled(config)(params, grads)), by_path(grads)
    for path, leaf in by_path(params).items():
        assert np.sum((after[path] - leaf) * slope[path]) < 0, path


def test_sgd_steps_along_the_gradient():
    config = small("plain", optimizer={"name": "sgd", "weight_decay": 0.0, "momentum": 0.0})
    params, grads = random_params(config), random_params(config, seed=2)
    expected = jax.tree.map(lambda p, g: p - g, params, grads)
    assert distance(compiled(config)(params, grads), expected) <= 1e-7


def test_muon_takes_matrices_and_phi_and_leaves_the_rest_to_adam():
    """Muon's update has singular values near 0.2 √max(m, n); Adam's first one has one size for any gradient."""
    config = small("mhc", optimizer={"name": "muon", "weight_decay": 0.0})
    params, grads = random_params(config), random_params(config, seed=2)
    before, after = by_path(params), by_path(compiled(config)(params, grads))
    matrix = {  # (rows, columns) of one layer
        "blocks/attention/core/query": (16, 16),
        "blocks/attention/core/key": (16, 16),
        "blocks/attention/core/value": (16, 16),
        "blocks/attention/core/out": (16, 16),
        "blocks/mlp/core/gate": (16, 24),
        "blocks/mlp/core/up": (16, 24),
        "blocks/mlp/core/down": (24, 16),
        "blocks/attention_residual/phi": (64, 24),
        "blocks/mlp_residual/phi": (64, 24),
    }
    for path, leaf in before.items():
        update = after[path] - leaf
        if path in matrix:
            for layer in update:
                values = np.linalg.svd(layer.reshape(matrix[path]), compute_uv=False)
                size = values / (0.2 * max(matrix[path]) ** 0.5)
                assert np.all(size > 0.5) and np.all(size < 1.3), (path, size)
        else:
            nesterov = 0.9 * 0.1 / (1 - 0.9**2) + 1.0
            np.testing.assert_allclose(np.abs(update), nesterov, rtol=1e-3, err_msg=path)


def test_muon_treats_each_layer_s_matrix_alone():
    """The update of a stacked leaf is the stack of the layers' updates.

    This holds also where one layer's gradient is a thousand times larger: one norm over both would stop the smaller.
    """
    config = small("mhc", optimizer={"name": "muon", "weight_decay": 0.0})
    alone = with_fields(config, model={"layers": 1})
    params, grads = random_params(config), random_params(config, seed=2)

    def scaled(leaf: jax.Array) -> jax.Array:
        return leaf * jnp.asarray([1.0, 1000.0]).reshape(2, *(1,) * (leaf.ndim - 1))

    grads["blocks"] = jax.tree.map(scaled, grads["blocks"])
    together = compiled(config)(params, grads)
    for layer in range(2):

        def cut(tree: Any, layer: int = layer) -> Any:
            return {**tree, "blocks": jax.tree.map(lambda leaf: leaf[layer : layer + 1], tree["blocks"])}

        # Newton and Schulz's polynomial, five times over, amplifies rounding about tenfold.
        assert distance(cut(together), compiled(alone)(cut(params), cut(grads))) <= 1e-5
