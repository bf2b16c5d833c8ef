"""Keep one hc and one mhc connection as an einsum would write them, with the backward pass that jax derives.

This file is a yardstick, and frozen: a faster connection is measured against it, so it must not get faster itself.
Streams are [B, T, N, D], maps have the tokens first, all is in the dtype of the streams. The parameters are those of
``mhc.residual.functional.hc_maps`` and ``mhc_maps``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

Params = Mapping[str, jax.Array]
Sublayer = Callable[[jax.Array], jax.Array]


def hc(x: jax.Array, params: Params, sublayer: Sublayer, *, eps: float = 1e-6) -> jax.Array:
    """Return the streams after a sublayer with a connection of hc (arXiv:2409.19606), its tanh on."""
    m = x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    pre = params["alpha"][0] * jnp.tanh(jnp.einsum("btnd,d->btn", m, params["w_pre"])) + params["b_pre"][None, None]
    post = params["alpha"][1] * jnp.tanh(jnp.einsum("btnd,d->btn", m, params["w_post"])) + params["b_post"][None, None]
    res = params["alpha"][2] * jnp.tanh(jnp.einsum("btjd,di->btij", m, params["w_res"])) + params["b_res"][None, None]
    return _connected(x, pre, post, res, sublayer)


def mhc(x: jax.Array, params: Params, sublayer: Sublayer, *, iters: int = 20, eps: float = 1e-6) -> jax.Array:
    """Return the streams after a sublayer with a connection of mhc (arXiv:2512.24880).

    Sinkhorn is ``iters`` rounds of divisions by column and row sums.
    """
    b, t, n, d = x.shape
    flat = x.reshape(b, t, n * d)
    m = flat / jnp.sqrt(jnp.mean(flat * flat, axis=-1, keepdims=True) + eps)
    gates = jnp.repeat(params["alpha"], jnp.array([n, n, n * n]), total_repeat_length=2 * n + n * n)
    logits = jnp.einsum("btf,fr->btr", m, params["phi"]) * gates[None, None] + params["bias"][None, None]
    pre = jax.nn.sigmoid(logits[..., :n])
    post = 2.0 * jax.nn.sigmoid(logits[..., n : 2 * n])
    res = logits[..., 2 * n :].reshape(b, t, n, n)
    res = jnp.exp(res - jnp.max(res, axis=(-2, -1), keepdims=True))
    for _ in range(iters):
        res = res / jnp.sum(res, axis=-2, keepdims=True)
        res = res / jnp.sum(res, axis=-1, keepdims=True)
    return _connected(x, pre, post, res, sublayer)


def _connected(x: jax.Array, pre: jax.Array, post: jax.Array, res: jax.Array, sublayer: Sublayer) -> jax.Array:
    y = sublayer(jnp.einsum("btn,btnd->btd", pre, x))
    return jnp.einsum("btij,btjd->btid", res, x) + jnp.einsum("bti,btd->btid", post, y)


CONNECTIONS = {"hc": hc, "mhc": mhc}
