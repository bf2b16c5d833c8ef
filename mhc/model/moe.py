"""Run a mixture of experts: a router, dispatch that drops no token, shared experts, and load balancing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from mhc import sharding
from mhc.config import GATED, Config
from mhc.model.layers import Mlp, activate, kept, kernel, zeros
from mhc.rng import PathKey

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


def route(
    config: Config, logits: Float[Array, "B T E"], bias: Float[Array, " E"] | None
) -> tuple[Int[Array, "B T k"], Float[Array, "B T k"], Float[Array, "B T E"]]:
    """Return (chosen experts, their weights, every expert's score); weights and scores are float32.

    Args:
      bias: added to the scores for the choice alone; it has no gradient and no part in the weights (arXiv:2408.15664).
    """
    moe = config.moe
    scores = jax.nn.softmax(logits, axis=-1) if moe.score == "softmax" else jax.nn.sigmoid(logits)
    order = scores if bias is None else scores + bias[None, None]
    chosen = sharding.by_rows(lambda order: jax.lax.top_k(order, moe.top_k)[1], jax.lax.stop_gradient(order))
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if moe.normalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return chosen, weights * moe.scale, scores


class Experts(nnx.Module):
    """Runs the routed experts. Parameters: up and gate [E, D, F], down [E, F, D]."""

    def __init__(self, config: Config, *, key: PathKey):
        e, d, f = config.moe.experts, config.model.width, config.expert_width
        self.config = config
        if config.mlp.kind in GATED:
            self.gate = kernel(config, key / "gate", (e, d, f), d)
        self.up = kernel(config, key / "up", (e, d, f), d)
        self.down = kernel(config, key / "down", (e, f, d), f, residual=True)

    def __call__(
        self, x: Float[Array, "B T D"], chosen: Int[Array, "B T k"], weights: Float[Array, "B T k"]
    ) -> Float[Array, "B T D"]:
        """Return the sum over the chosen experts of weight * expert(x); an uneven choice drops no token."""
        matrices: dict[str, jax.Array] = {
            name: getattr(self, name)[...].astype(x.dtype) for name in ("gate", "up", "down") if name in vars(self)
        }
        mesh = sharding.current_mesh()
        if mesh is None or mesh.size == 1:
            return _dispatch(self.config, x, chosen, weights, matrices)
        return _sharded(self.config, mesh)(x, chosen, weights, matrices)


def _dispatch(
    config: Config,
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    matrices: dict[str, jax.Array],
    first: int | jax.Array = 0,
) -> jax.Array:
    """Return the part of the sum that the E' experts of ``matrices`` [E', ...], from number ``first`` on, add."""
    count, k = matrices["down"].shape[0], chosen.shape[-1]
    tokens = x.reshape(-1, x.shape[-1])
    expert = chosen.reshape(-1) - first  # [M k], M tokens
    expert = jnp.where((expert >= 0) & (expert < count), expert, count)  # other devices' experts: last, in no group
    order = jnp.argsort(expert, stable=True)
    rows, sizes = tokens[order // k], jnp.bincount(expert, length=count).astype(jnp.int32)
    gate = kept(jax.lax.ragged_dot(rows, matrices["gate"], sizes)) if "gate" in matrices else None
    hidden = activate(config, kept(jax.lax.ragged_dot(rows, matrices["up"], sizes)), gate)
    out = jax.lax.ragged_dot(hidden, matrices["down"], sizes)
    # Rows behind the last group are not defined on every platform.
    out = jnp.where((expert[order] < count)[:, None], out, 0) * weights.reshape(-1)[order][:, None].astype(x.dtype)
    back = jnp.argsort(order)
    return jnp.sum(out[back].reshape(-1, k, x.shape[-1]), axis=1).reshape(x.shape)


def _sharded(config: Config, mesh: Mesh) -> Callable[..., jax.Array]:
    """Return ``_dispatch`` with experts split over the mesh's expert axis and their width over its tensor axis.

    Each device of an expert group sees all of the group's tokens. Together they add up what their experts give, and
    each keeps its own rows and its part of the model's width. No token is dropped, and no shape depends on the routing.
    """
    rows = PartitionSpec(sharding.BATCH_AXES, None, None)
    tensor = mesh.shape["tensor"]
    width = "tensor" if config.expert_width % tensor == 0 else None
    # The sum over tensor is left in parts, as the streams are: its transpose is a gather, that of a whole sum is a sum.
    part = width if config.model.width % tensor == 0 else None
    # Weights come as they lie, D over fsdp, and are gathered inside: their gradients are added up and scattered in one.
    fsdp = "fsdp" if config.model.width % mesh.shape["fsdp"] == 0 else None
    layout = {"up": PartitionSpec("expert", fsdp, width), "down": PartitionSpec("expert", width, fsdp)}
    if config.mlp.kind in GATED:
        layout["gate"] = layout["up"]

    to = PartitionSpec(sharding.BATCH_AXES, None, part)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(rows, rows, rows, layout), out_specs=to, check_vma=False)
    def run(x: jax.Array, chosen: jax.Array, weights: jax.Array, matrices: dict[str, jax.Array]) -> jax.Array:
        split = mesh.shape["expert"] > 1
        if split:
            x, chosen, weights = (jax.lax.all_gather(a, "expert", axis=0, tiled=True) for a in (x, chosen, weights))
        if fsdp is not None and mesh.shape["fsdp"] > 1:
            matrices = {
                name: jax.lax.all_gather(w, "fsdp", axis=layout[name].index("fsdp"), tiled=True)
                for name, w in matrices.items()
            }
        first = jax.lax.axis_index("expert") * matrices["down"].shape[0]
        y = _dispatch(config, x, chosen, weights, matrices, first)
        if part is not None and tensor > 1:
            y = jax.lax.psum_scatter(y, "tensor", scatter_dimension=2, tiled=True)
        elif width is not None and tensor > 1:
            y = jax.lax.psum(y, "tensor")
        return jax.lax.psum_scatter(y, "expert", scatter_dimension=0, tiled=True) if split else y

    return run


class Moe(nnx.Module):
    """Runs a feed-forward of routed and shared experts.

    Parameters: router [D, E] and experts/{gate,up,down}. With ``moe.shared`` also shared/{gate,up,down} of width
    shared * F. Under loss-free balancing also router_bias [E], which the train step moves and no gradient does.
    """

    def __init__(self, config: Config, *, key: PathKey):
        d, e = config.model.width, config.moe.experts
        self.config = config
        self.router = kernel(config, key / "router", (d, e), d)
        if config.moe.balance == "loss_free":
            self.router_bias = zeros(e)
        self.experts = Experts(config, key=key / "experts")
        if config.moe.shared:
            self.shared = Mlp(config, key=key / "shared", width=config.moe.shared * config.expert_width)

    def with_statistics(
        self, x: Float[Array, "B T D"], valid: Bool[Array, "B T"] | None = None
    ) -> tuple[Float[Array, "B T D"], dict[str, jax.Array]]:
        """Return (y, {load [E], balance, z}); the statistics are float32, over the ``valid`` tokens (None: all).

        ``load`` counts the tokens of each expert. ``balance`` is E sum_e f_e p_e with f the share of assignments and p
        the mean normalised score: 1 when even (arXiv:2101.03961). ``z`` is the mean squared log-sum-exp of the router's
        logits.
        """
        moe = self.config.moe
        wide = jnp.promote_types(x.dtype, jnp.float32)
        logits = jnp.einsum("btd,de->bte", x.astype(wide), self.router[...].astype(wide))
        bias = self.router_bias[...] if moe.balance == "loss_free" else None
        chosen, weights, scores = route(self.config, logits, bias)
        y = kept(self.experts(x, chosen, weights))
        if moe.shared:
            y = y + self.shared(x)
        counted = jnp.ones(x.shape[:2]) if valid is None else valid.astype(jnp.float32)
        total = jnp.maximum(jnp.sum(counted), 1.0)
        picks = jnp.sum(jax.nn.one_hot(chosen, moe.experts, dtype=jnp.float32), axis=2)  # [B, T, E]
        load = jnp.einsum("bte,bt->e", picks, counted)
        share = scores / jnp.sum(scores, axis=-1, keepdims=True)
        mean = jnp.einsum("bte,bt->e", share, counted) / total
        return y, {
            "load": load,
            "balance": moe.experts * jnp.sum(load / (moe.top_k * total) * mean),
            "z": jnp.sum(jnp.square(jax.nn.logsumexp(logits, axis=-1)) * counted) / total,
        }

    def activations(self, x: Float[Array, "B T D"]) -> Float[Array, "B T A"]:
        """Return the hidden values of each token's experts times their weights, then those of the shared experts.

        All experts are computed, which is for a few tokens at a time; A = top_k F and the width of the shared ones.
        """
        wide = jnp.promote_types(x.dtype, jnp.float32)
        logits = jnp.einsum("btd,de->bte", x.astype(wide), self.router[...].astype(wide))
        bias = self.router_bias[...] if self.config.moe.balance == "loss_free" else None
        chosen, weights, _ = route(self.config, logits, bias)

        def of_all(name: str) -> jax.Array:
            return jnp.einsum("btd,edf->btef", x, getattr(self.experts, name)[...].astype(x.dtype))

        gate = of_all("gate") if self.config.mlp.kind in GATED else None
        every = activate(self.config, of_all("up"), gate)
        picked = jnp.take_along_axis(every, chosen[..., None], axis=2) * weights[..., None].astype(x.dtype)
        hidden = picked.reshape(*x.shape[:2], -1)
        return jnp.concatenate([hidden, self.shared.activations(x)], -1) if self.config.moe.shared else hidden

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.with_statistics(x)[0]
