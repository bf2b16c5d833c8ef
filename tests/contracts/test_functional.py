"""Test the contract without a decoder: kind × init preset × N, each over a tower of eight small sublayers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mhc import kinds, residual
from mhc.kinds import Parameter
from mhc.rng import PathKey
from tests.contracts.cases import SLOTS, WITHOUT_MAPS, Case, Group, every_group, groups
from tests.contracts.towers import DEEP, SHALLOW, STEPS, TOKENS, WIDTH, Tower, inputs, tower


def separation(streams: jax.Array) -> tuple[float, float]:
    """Return the (smallest, largest) relative difference of two streams of [..., N, D]."""
    x = np.asarray(streams, np.float64)
    n = x.shape[-2]
    pairs = [(i, j) for i in range(n) for j in range(i)]
    differences = [np.linalg.norm(x[..., i, :] - x[..., j, :]) / np.linalg.norm(x[..., i, :]) for i, j in pairs]
    return float(min(differences)), float(max(differences))


def entries(group: Group, grads: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the gradients [S, entries] of all that must learn; leaves with several maps' parameters are cut."""
    n = group.n
    cut: dict[str, np.ndarray] = {}
    of_maps: dict[str, Any] = {"pre": slice(0, n), "post": slice(n, 2 * n), "res": slice(2 * n, None)}
    inside: dict[str, dict[str, Any]] = {
        "alpha": {"pre": 0, "post": 1, "res": slice(2, None)},
        "phi": of_maps,
        "bias": of_maps,
    }
    for name, leaf in grads.items():
        for part, index in inside.get(name, {"": slice(None)}).items():
            cut[f"{name} {part}".strip()] = np.asarray(leaf)[..., index].reshape(leaf.shape[0], -1)
    if not group.residual_logits:  # H_res = I has neither logits nor, with them, a gate
        cut = {name: leaf for name, leaf in cut.items() if not name.endswith(" res")}
    return cut


@every_group
def test_initial_parameters(group: Group) -> None:
    """Initial parameters are as declared, stacked over sublayers and float32, whatever the preset."""
    maps, declared = tower(group).initial["maps"], group.spec.parameters
    of_topology = ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(tower(group).topology))]
    assert set(maps) | set(of_topology) == set(declared)
    for name, leaf in maps.items():
        assert leaf.dtype == jnp.float32
        assert leaf.shape[:2] == (len(group.inits), DEEP)
        assert leaf.ndim == 2 + len(declared[name].axes)
        assert np.isfinite(leaf).all()


def test_initial_parameters_stay_float32_when_float64_is_on() -> None:
    with jax.enable_x64(True):
        for kind in kinds.names():
            maps = Tower(Group(kind, kinds.known()[kind].default_streams)).maps(None)
            assert {leaf.dtype for leaf in jax.tree.leaves(maps)} <= {jnp.dtype("float32")}


@every_group
def test_shapes_dtypes_and_finite_values(group: Group) -> None:
    presets, lead = len(group.inits), (len(group.inits), DEEP, *TOKENS)
    for run, dtype in zip(tower(group).forward, (jnp.float32, jnp.bfloat16), strict=True):
        assert run.out.shape == (*lead, WIDTH)
        assert run.streams.shape == (presets, *TOKENS, group.n, WIDTH // (group.n if group.kind in SLOTS else 1))
        assert run.out.dtype == run.streams.dtype == dtype
        assert (run.maps is not None) == group.has_maps
        if run.maps is not None:
            assert run.maps.pre.shape == run.maps.post.shape == (*lead, group.n)
            assert run.maps.res.shape == (*lead, group.n, group.n)
            assert {leaf.dtype for leaf in run.maps} == {jnp.dtype("float32")}
        assert run.maps is not None or run.measures or tower(group).topology.constants()
        assert {leaf.shape[: len(lead)] for leaf in run.measures.values()} <= {lead}
        assert all(leaf.ndim <= len(lead) + 1 for leaf in run.measures.values())
        for leaf in (run.out, run.streams, *jax.tree.leaves((run.maps, run.measures))):
            assert np.isfinite(np.asarray(leaf, np.float32)).all()


@every_group
def test_a_scan_over_sublayers_equals_calling_them(group: Group) -> None:
    unrolled = jax.jit(lambda params: jax.lax.map(tower(group).unrolled, params))(tower(group).initial)
    np.testing.assert_allclose(tower(group).forward[0].out[:, :2], unrolled, rtol=1e-5, atol=1e-6)


@every_group
def test_maps_are_where_they_must_be(group: Group) -> None:
    """Constrained maps have H_res as exact as the kind says, 0 < pre <= 1 and 0 < post < 2, along the whole tower."""
    if not group.exact:
        assert group.kind in ("plain", "hc", "frac", *WITHOUT_MAPS)
        return
    maps = tower(group).forward[0].maps
    assert maps is not None
    pre, post, res = (np.asarray(leaf, np.float64) for leaf in maps)
    exact = 1e-5 if group.sinkhorn == "deepseek" or "signs" not in group.exact else 1e-6
    if "signs" in group.exact:
        assert (res >= 0).all()
        assert np.abs(res.sum(-2) - 1).max() <= 0.2
    if "rows" in group.exact:
        assert np.abs(res.sum(-1) - 1).max() <= exact  # of mhc the marginal normalised last, under both presets
    if "columns" in group.exact:
        assert np.abs(res.sum(-2) - 1).max() <= exact
    if "isometry" in group.exact:
        assert np.abs(np.swapaxes(res, -1, -2) @ res - np.eye(group.n)).max() <= exact
    if group.kind == "single_pass":  # its first sublayer reads stream 0
        assert np.array_equal(pre[:, 0], np.broadcast_to(np.eye(group.n)[0], pre[:, 0].shape))
        pre = pre[:, 1:]
    assert (pre > 0).all()
    assert (pre <= 1 + 1e-6).all()
    assert (post > 0).all()
    assert (post < 2).all()
    if group.n == 1:
        assert np.abs(res - 1).max() <= (1e-5 if group.sinkhorn == "deepseek" else 0)


@every_group
def test_what_equals_the_plain_residual_at_init_does(group: Group) -> None:
    plain = np.asarray(tower(Group("plain", 1)).forward[0].out[0, :SHALLOW])
    scale: Any = group.n if group.spec.collapses[:1] == ("sum",) else 1
    tolerance = group.tolerance
    if group.kind == "attn_res":  # it reads the mean of J sources, and the eps of each norm counts J^2 times
        scale, tolerance = 1.0 / np.arange(2, SHALLOW + 2).reshape(-1, 1, 1, 1), 2e-4
    if tower(group).topology.owns_norm:
        plain = plain / np.sqrt(np.mean(plain * plain, axis=-1, keepdims=True) + 1e-6)
    for p, init in enumerate(group.inits):
        out = np.asarray(tower(group).forward[0].out[p, :SHALLOW])
        error = np.max(np.abs(out / scale - plain)) / np.max(np.abs(plain))
        if Case(group, init).starts_plain:
            assert error <= tolerance, init
        elif group.n > 1:
            assert error > 1e-4, f"{init} is not meant to be the plain residual"


@every_group
def test_gradients_are_finite_and_everything_learns(group: Group) -> None:
    """After step 1 no map parameter's gradient is identically zero over the depth-stacked leaf."""
    history = tower(group).history
    for leaf in jax.tree.leaves(history.grads):
        assert np.isfinite(leaf).all()
    if group.n == 1 and group.kind not in WITHOUT_MAPS:
        return
    for p, init in enumerate(group.inits):
        # Where streams begin equal and alpha is 0, nothing but rounding moves H_res in the first step: its alpha begins
        # to move in the second, and its phi, which alpha multiplies, has a gradient in the third.
        second, third = (
            entries(group, jax.tree.map(lambda leaf, p=p, step=step: leaf[p, step], history.grads["maps"]))
            for step in (1, 2)
        )
        shared = [jax.tree.map(lambda leaf, p=p, s=s: leaf[p, s], history.grads["topology"]) for s in (1, 2)]
        assert all(np.any(a != 0) or np.any(b != 0) for a, b in zip(*map(jax.tree.leaves, shared), strict=True)), init
        for name, leaf in second.items():
            assert leaf.size, name
            if group.kind == "shc" and group.n == 2 and name == "gamma":
                continue  # it bounds the angles of U and V, which are 1 × 1 for two streams and have none
            assert np.any(leaf != 0) or np.any(third[name] != 0), f"{init}: the gradient of {name} is zero"


@every_group
def test_the_residual_map_of_sublayer_0_is_inert(group: Group) -> None:
    """Sublayer 0 sees identical streams and its rows sum to one, so the gradient of its H_res is rounding noise.

    Adam moves it all the same, and it is left in the update: a random walk of a map that changes no number downstream
    costs nothing, and an optimiser that knows about sublayer 0 would. Reports mark sublayer 0.
    """
    if group.n == 1 or "rows" not in group.exact or not group.residual_logits:
        return
    for p, init in enumerate(group.inits):
        grads = np.asarray(tower(group).history.grads["maps"]["bias"][p, 0])
        noise, signal = np.max(np.abs(grads[0, 2 * group.n :])), np.max(np.abs(grads))
        assert noise <= 1e-4 * signal, f"{init}: {noise:.2e} against {signal:.2e}"


@every_group
def test_streams_separate(group: Group) -> None:
    if group.n == 1 or group.kind in SLOTS:
        return
    for p, init in enumerate(group.inits):
        streams = tower(group).history.streams[p]
        before = separation(streams[0])[1]
        if Case(group, init).starts_plain:
            assert before < 1e-6, f"{init}: streams differ by {before:.2e} at init"
        # A gate of 0.01 that ten steps at 1e-3 carry down stands at zero after the tenth, and hides the difference.
        after = max(separation(streams[step])[0] for step in (STEPS - 2, STEPS))
        assert after > 1e-4, f"{init}: two streams differ by {after:.2e} only after training"


@every_group
def test_the_input_dependent_part_acts(group: Group) -> None:
    """After training, perturbing phi (or what another kind has in its place) changes the loss."""
    trained = jax.tree.map(lambda leaf: leaf[:, STEPS], tower(group).history.params)
    names = ("phi", "w_pre", "w_post", "w_res", "w_read", "w_down", "w_up", "w_inject", "query", "B")
    dynamic = [name for name in names if name in trained["maps"]]
    if (group.n == 1 and group.kind not in WITHOUT_MAPS) or not dynamic:
        return
    rng = np.random.default_rng(3)
    base = np.asarray(tower(group).history.loss[:, STEPS])
    for name in dynamic:
        leaf = trained["maps"][name]
        noise = jnp.asarray(rng.normal(size=leaf.shape), jnp.float32)
        moved = tower(group).train({**trained, "maps": {**trained["maps"], name: leaf + noise}}).loss[:, 0]
        for p, init in enumerate(group.inits):
            assert abs(moved[p] - base[p]) > 1e-6 * base[p], f"{init}: {name} does nothing"


@every_group
def test_training_lowers_the_loss(group: Group) -> None:
    loss = np.asarray(tower(group).history.loss)
    assert (loss[:, STEPS] < loss[:, 0]).all()


@every_group
def test_bfloat16_streams_stay_near_float32(group: Group) -> None:
    """Twelve blocks store streams in bfloat16; maps and accumulation stay float32."""
    wide, narrow = tower(group).forward
    for p, init in enumerate(group.inits):
        error = deviation(narrow.out[p], wide.out[p])
        bound = np.full(DEEP, 2e-2)
        # A rotation that does not keep the mean takes any difference of the streams into what is read, and alpha = 1
        # feeds it back through the maps: it grows from sublayer to sublayer, in float32 too. What bfloat16 may add is
        # then measured by a float32 run whose input alone was rounded.
        if init == "v4" and "isometry" in group.exact and "rows" not in group.exact:
            params = jax.tree.map(lambda leaf, p=p: leaf[p], tower(group).initial)
            rounded = inputs().astype(jnp.bfloat16).astype(jnp.float32)
            strayed = jax.jit(lambda params, h: tower(group).run(params, h).out)(params, rounded)
            bound = np.maximum(bound, 4 * deviation(strayed, wide.out[p]))
        assert (error <= bound).all(), f"{init}: {error} against {bound}"


def deviation(out: jax.Array, reference: jax.Array) -> np.ndarray:
    """Return [S]: the norm of [S, *TOKENS, D] less the reference, over the norm of the reference, of each sublayer."""
    a, b = (np.asarray(x, np.float64).reshape(DEEP, -1) for x in (out, reference))
    return np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1)


@pytest.mark.parametrize("kind", [name for name, kind in kinds.known().items() if "head" in kind.collapses])
def test_collapses(kind: str) -> None:
    """Every collapse of a kind is applied to the same streams."""
    x = jnp.asarray(np.random.default_rng(4).normal(size=(3, 4, WIDTH)), jnp.float32)
    key = PathKey(jax.random.key(0))
    out = {
        mode: residual.build(kind, WIDTH, rngs=key, sublayers=DEEP, n=4, collapse=mode).collapse(x)
        for mode in ("sum", "mean", "head")
    }
    np.testing.assert_allclose(out["sum"], np.sum(x, axis=-2), rtol=1e-6)
    np.testing.assert_allclose(out["mean"], np.mean(x, axis=-2), rtol=1e-6, atol=1e-7)
    head = vars(residual.build(kind, WIDTH, rngs=key, sublayers=DEEP, n=4, collapse="head"))["head"]
    assert head.fn.shape == (4, WIDTH, 4)
    assert 0.01 < np.std(head.fn) < 0.03
    weights = residual.functional.collapse_head(x, head.fn[...].reshape(-1, 4), head.base[...], head.scale[...])
    np.testing.assert_allclose(out["head"], weights, rtol=1e-6)


def test_the_deferred_write_is_mhc() -> None:
    """The deferred topology has a state of another shape and computes the same function."""
    mhc, deferred = tower(Group("mhc", 2)), tower(Group("deferred", 2))
    assert mhc.group.inits[:2] == deferred.group.inits
    for a, b in zip(jax.tree.leaves(mhc.forward), jax.tree.leaves(deferred.forward), strict=True):
        wide = a.dtype == jnp.float32
        np.testing.assert_allclose(
            np.asarray(a[:2], np.float32), np.asarray(b, np.float32), rtol=0, atol=1e-4 if wide else 5e-2
        )


def test_every_kind_is_here() -> None:
    assert {group.kind for group in groups()} == set(kinds.names()) == set(residual.kinds())
    for group in groups():
        assert all(isinstance(parameter, Parameter) for parameter in group.spec.parameters.values())
