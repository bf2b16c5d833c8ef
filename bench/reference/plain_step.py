"""Keep the training step of a plain transformer, as short as it can be written: the yardstick of a step's speed.

This file is frozen, as ``bench.reference.einsum`` is. The architecture: learned positions, LayerNorm without bias
before attention, before the feed-forward and before the head, multi-head causal attention, a GELU feed-forward of 4 D,
no biases, a head that is the embedding; blocks one after another without a scan. The step: mean cross-entropy of all
targets, gradients clipped to a global norm of 1, AdamW under a cosine schedule. Nothing is measured but the loss, no
documents are packed, and nothing is checked.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Holds the sizes: D, L, H, T and V."""

    width: int
    blocks: int
    heads: int
    length: int
    vocabulary: int


def initial(sizes: Sizes, key: jax.Array) -> Params:
    """Return initial parameters, float32."""
    d, h = sizes.width, sizes.heads
    keys = iter(jax.random.split(key, 2 + 6 * sizes.blocks))

    def normal(*shape: int, fan_in: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / math.sqrt(fan_in)

    def block() -> Params:
        return {
            "attention_norm": jnp.ones(d),
            **{name: normal(d, h, d // h, fan_in=d) for name in ("query", "key", "value")},
            "out": normal(h, d // h, d, fan_in=d),
            "mlp_norm": jnp.ones(d),
            "up": normal(d, 4 * d, fan_in=d),
            "down": normal(4 * d, d, fan_in=4 * d),
        }

    return {
        "embed": normal(sizes.vocabulary, d, fan_in=d),
        "positions": normal(sizes.length, d, fan_in=d),
        "blocks": [block() for _ in range(sizes.blocks)],
        "final_norm": jnp.ones(d),
    }


def logits(params: Params, tokens: jax.Array) -> jax.Array:
    """Return the logits [B, T, V] of tokens [B, T]."""
    length = tokens.shape[1]
    causal = jnp.tril(jnp.ones((length, length), bool))
    x = params["embed"][tokens] + params["positions"][None, :length]
    for p in params["blocks"]:
        z = _layer_norm(x, p["attention_norm"])
        query, key, value = (jnp.einsum("btd,dhk->bthk", z, p[name]) for name in ("query", "key", "value"))
        scores = jnp.einsum("bthk,buhk->bhtu", query / math.sqrt(query.shape[-1]), key)
        weights = jax.nn.softmax(jnp.where(causal[None, None], scores, jnp.finfo(scores.dtype).min), axis=-1)
        x = x + jnp.einsum("bhtu,buhk,hkd->btd", weights, value, p["out"])
        z = _layer_norm(x, p["mlp_norm"])
        x = x + jax.nn.gelu(z @ p["up"]) @ p["down"]
    return _layer_norm(x, params["final_norm"]) @ params["embed"].T


def _layer_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(x * x, axis=-1, keepdims=True) - mean * mean
    return (x - mean) * (jax.lax.rsqrt(variance + 1e-6) * scale[None, None])


def optimizer(steps: int) -> optax.GradientTransformation:
    """Return AdamW with clipping, whose rate falls by a cosine over so many steps."""
    rate = optax.cosine_decay_schedule(1e-3, steps, 0.1)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.1))


def make_step(tx: optax.GradientTransformation) -> Any:
    """Return the compiled ``step((params, state), tokens, targets) -> ((params, state), loss)``; it donates."""

    def loss_of(params: Params, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits(params, tokens), targets))

    def step(carry: tuple[Params, Any], tokens: jax.Array, targets: jax.Array) -> tuple[tuple[Params, Any], jax.Array]:
        params, state = carry
        loss, grads = jax.value_and_grad(loss_of)(params, tokens, targets)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    return jax.jit(step, donate_argnums=0)
