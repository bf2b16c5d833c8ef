"""Define weights, embeddings, the feed-forward, and the wrapper that makes a sublayer F of a core.

Einsum letters, here and everywhere: B batch, T tokens (U the attended ones), N streams, D width, H query heads, G
key-value heads, K head size, J value size, C latent width, Q the queries' latent width, R rotary part, E experts, F
feed-forward width, V vocabulary, L blocks, S sublayers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from mhc import sharding
from mhc.config import GATED, Config
from mhc.model.norms import make_norm
from mhc.rng import PathKey

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


def kernel(config: Config, key: PathKey, shape: tuple[int, ...], fan_in: int, *, residual: bool = False) -> nnx.Param:
    """Return a float32 weight drawn by the config's initialiser.

    Args:
      fan_in: the inputs of the projection, whose root divides the standard deviation unless ``init.kind`` is normal.
      residual: whether the projection writes to the stream, which ``init.scale_residual`` and ``init.scale_streams``
        ask for.
    """
    std = config.init.std if config.init.kind == "normal" else 1.0 / math.sqrt(fan_in)
    if residual and config.init.scale_residual:
        std /= math.sqrt(2 * config.model.layers)
    if residual and config.init.scale_streams:
        std *= math.sqrt(config.streams)
    return nnx.Param(std * jax.random.normal(key.key, shape, jnp.float32))


def kept(x: jax.Array) -> jax.Array:
    """Return ``x``, the result of a sublayer's product or of the sublayer, marked so that remat=streams keeps it."""
    return checkpoint_name(x, KEPT)


KEPT = "sublayer"


def zeros(*shape: int) -> nnx.Param:
    """Return a bias of zeros, float32."""
    return nnx.Param(jnp.zeros(shape, jnp.float32))


class Embedding(nnx.Module):
    """Looks tokens up in a table [V, D], which is also the weight of the output logits when tied."""

    def __init__(self, config: Config, *, key: PathKey):
        d = config.model.width
        self.factor = math.sqrt(d) if config.model.embed_scale else 1.0
        self.table = kernel(config, key / "table", (config.vocab_size, d), d)

    def __call__(self, tokens: Int[Array, "B T"], dtype: jnp.dtype) -> Float[Array, "B T D"]:
        x = sharding.whole_rows(self.table[...].astype(dtype), "vocab")[tokens]
        return x if self.factor == 1.0 else x * jnp.asarray(self.factor, dtype)


class Head(nnx.Module):
    """Holds the output projection of an untied head: [D, V], or [D, C] with head.classes."""

    def __init__(self, config: Config, *, key: PathKey):
        d = config.model.width
        self.kernel = kernel(config, key / "kernel", (d, config.outputs), d)


def output_logits(
    h: Float[Array, "B T D"], weight: jax.Array, *, tied: bool, softcap: float | None
) -> Float[Array, "B T V"]:
    """Return float32 logits of hidden states before the head: cap * tanh(h W / cap), or h W without a cap.

    Args:
      weight: the head's [D, V], or with ``tied`` the embedding's [V, D]. It is multiplied in the dtype of ``h``.
    """
    with jax.named_scope("logits"):
        equation = "btd,vd->btv" if tied else "btd,dv->btv"
        logits = jnp.einsum(equation, h, weight.astype(h.dtype), preferred_element_type=jnp.float32)
        return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
    "glu": jax.nn.sigmoid,
    "geglu": lambda x: jax.nn.gelu(x, approximate=True),
    "swiglu": jax.nn.silu,
}


def activate(config: Config, up: jax.Array, gate: jax.Array | None) -> jax.Array:
    """Return the hidden values of a feed-forward: act(up), or act(gate) * up.

    The gate is clipped to ±``mlp.clamp`` before its activation, if that is set.
    """
    act = ACTIVATIONS[config.mlp.kind]
    if gate is None:
        return act(up)
    if config.mlp.clamp is not None:
        gate = jnp.clip(gate, -config.mlp.clamp, config.mlp.clamp)
    return act(gate) * up


class Mlp(nnx.Module):
    """Runs the feed-forward act(x W_up) W_down, or with a gate (act(x W_gate) * x W_up) W_down (arXiv:2002.05202).

    Parameters: up and gate [D, F], down [F, D]. With ``mlp.bias`` also up_bias and gate_bias [F] and down_bias [D].
    ``gelu`` is the tanh approximation.
    """

    def __init__(self, config: Config, *, key: PathKey, width: int | None = None):
        d, f = config.model.width, width or config.mlp_width
        self.config = config
        if config.mlp.kind in GATED:
            self.gate = kernel(config, key / "gate", (d, f), d)
        self.up = kernel(config, key / "up", (d, f), d)
        self.down = kernel(config, key / "down", (f, d), f, residual=True)
        if config.mlp.bias:
            if config.mlp.kind in GATED:
                self.gate_bias = zeros(f)
            self.up_bias, self.down_bias = zeros(f), zeros(d)

    def _project(self, x: jax.Array, name: str) -> jax.Array:
        y = jnp.einsum("btd,df->btf", x, getattr(self, name)[...].astype(x.dtype))
        return kept(y + getattr(self, f"{name}_bias")[None, None].astype(x.dtype) if self.config.mlp.bias else y)

    def activations(self, x: Float[Array, "B T D"]) -> Float[Array, "B T F"]:
        """Return the hidden values, which ``down`` multiplies."""
        gate = self._project(x, "gate") if self.config.mlp.kind in GATED else None
        return activate(self.config, self._project(x, "up"), gate)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self._project(self.activations(x), "down")


class Sublayer(nnx.Module):
    """Runs F of a residual topology: a core between its own norms. The streams themselves are never normalised.

    By ``norm.placement``, F(u) is core(norm(u)) for pre, post_norm(core(u)) for post, and post_norm(core(norm(u))) for
    sandwich. With ``normed`` the topology has normalised u, and there is no norm before the core. Over a mesh with
    tensor > 1 the norms see u and y split by width, as the streams are; the core gets the whole width, and each device
    returns a part of a sum.

    With ``update`` F's output is multiplied by the parameter update [], whose first value that is (group ``update``).
    """

    def __init__(
        self,
        config: Config,
        core: nnx.Module,
        *,
        gamma: float | jax.Array = 1.0,
        update: float | jax.Array | None = None,
        normed: bool = False,
    ):
        placement, width = config.norm.placement, config.model.width
        self.placement, self.norms_input = placement, placement != "post" and not normed
        if self.norms_input:
            self.norm = make_norm(config.norm, width, gamma)
        if placement != "pre":
            self.post_norm = make_norm(config.norm, width, gamma)
        self.scaled = update is not None
        if update is not None:
            self.update = nnx.Param(jnp.full((), update, jnp.float32))
        self.core = core

    def before(self, u: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Return the core's input from u."""
        return sharding.gather_width(self.norm(u) if self.norms_input else u)

    def after(self, y: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Return F's output from the core's."""
        y = sharding.split_width(y)
        y = y if self.placement == "pre" else self.post_norm(y)
        if self.scaled:
            y = (y * self.update[...][None, None, None].astype(jnp.float32)).astype(y.dtype)
        return y

    def __call__(self, u: Float[Array, "B T D"], *args: object) -> Float[Array, "B T D"]:
        core: Callable[..., Any] = self.core
        return self.after(core(self.before(u), *args))
