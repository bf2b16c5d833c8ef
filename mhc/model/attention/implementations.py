"""Compute attention over given queries, keys and values: three implementations, and the choice among them.

``xla`` is the reference. ``sdpa`` is JAX's own function, which is cuDNN's flash attention on a GPU. ``flash`` is JAX's
splash attention, a kernel for TPUs.
"""

from __future__ import annotations

import functools
import logging
import math
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mhc import attention_impls, sharding
from mhc.config import Config

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

log = logging.getLogger(__name__)

LANES = 128  # of the TPU's vector registers: flash attention's blocks are multiples of it


def attend_xla(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B U G K"],
    v: Float[Array, "B U G J"],
    mask: Bool[Array, "m T U"],
    *,
    scale: float | None = None,
    bias: Float[Array, "b H T U"] | None = None,
    softcap: float | None = None,
) -> Float[Array, "B T H J"]:
    """Return the heads' results in plain XLA, the reference: logits and softmax are float32.

    Query head h reads key-value head h // (H / G).

    Args:
      scale: factor of the logits; 1 / sqrt(K) by default.
      bias: added to the logits after the cap.
      softcap: c of c tanh(logits / c).
    """
    b, t, h, size = q.shape
    u, g = k.shape[1:3]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    # The heads of a group are more rows of one matrix, so logits and values are plain batched matmuls over (B, G).
    rows = q.reshape(b, t, g, h // g, size).transpose(0, 2, 3, 1, 4).reshape(b, g, -1, size)
    scores = jnp.einsum("bgrk,bugk->bgru", rows, k, preferred_element_type=wide)
    scores = scores * (1.0 / math.sqrt(size) if scale is None else scale)
    scores = masked(scores.reshape(b, g, h // g, t, u), mask[:, None, None], bias, softcap)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype).reshape(b, g, -1, u)
    values = jnp.einsum("bgru,bugk->bgrk", weights, v)
    return values.reshape(b, g, h // g, t, -1).transpose(0, 3, 1, 2, 4).reshape(b, t, h, -1)


def masked(scores: jax.Array, mask: jax.Array, bias: jax.Array | None, softcap: float | None) -> jax.Array:
    """Return logits [B, G, H/G, T, U] with cap and bias, the dtype's lowest value where ``mask`` is False."""
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.reshape(bias.shape[0], *scores.shape[1:3], *bias.shape[2:])
    return jnp.where(mask, scores, jnp.finfo(scores.dtype).min)


def attend_sdpa(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    *,
    scale: float | None = None,
    bias: jax.Array | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Return the heads' results by ``jax.nn.dot_product_attention``; shapes as ``attend_xla``.

    On a GPU it is cuDNN's flash attention where dtype and head size allow it, else XLA.

    Raises:
      ValueError: a softcap is given, which it does not have.
    """
    if softcap is not None:
        raise ValueError("sdpa has no softcap")
    fits = q.dtype in (jnp.bfloat16, jnp.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 128
    cudnn: Literal["cudnn"] | None = "cudnn" if jax.default_backend() == "gpu" and fits else None
    bias = None if bias is None else bias.astype(q.dtype)
    return jax.nn.dot_product_attention(q, k, v, bias, mask[:, None], scale=scale, implementation=cudnn)


def attend_flash(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G J"],
    segment_ids: Int[Array, "B T"] | None,
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Float[Array, "B T H J"]:
    """Return the heads' results by JAX's splash attention, a kernel for TPUs that never holds the scores.

    It is causal, within the window if there is one, and within each segment. On another platform it is interpreted,
    which is slow. Under a mesh each device computes its own rows and heads.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    t, size = q.shape[1], q.shape[-1]
    padded = -(-t // LANES) * LANES
    block = max(b for b in (512, 256, 128) if padded % b == 0)
    interpret = jax.default_backend() != "tpu" and not sharding.compiles_for_tpu()
    causal = masks.CausalMask((padded, padded))
    mask = causal if window is None else masks.LocalMask((padded, padded), (window - 1, 0), 0)
    if segment_ids is None:
        segment_ids = jnp.ones(q.shape[:2], jnp.int32)

    def one_device(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        def arranged(x: jax.Array) -> jax.Array:  # [B, H, padded, K]
            return jnp.pad(jnp.moveaxis(x, 2, 1), ((0, 0), (0, 0), (0, padded - t), (0, 0)))

        attend = splash.make_splash_mha(
            masks.MultiHeadMask([mask] * q.shape[2]),
            block_sizes=splash.BlockSizes(
                block_q=block,
                block_kv=block,
                block_kv_compute=block,
                block_q_dkv=block,
                block_kv_dkv=block,
                block_kv_dkv_compute=block,
                block_q_dq=block,
                block_kv_dq=block,
            ),
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=softcap,
            interpret=interpret,
        )
        # Padding is a segment of its own, so that every row of the softmax has a key.
        segments = jnp.pad(segments, ((0, 0), (0, padded - t)), constant_values=-1)
        scaled = q * (1.0 / math.sqrt(size) if scale is None else scale)
        out = jax.vmap(attend)(arranged(scaled), arranged(k), arranged(v), splash.SegmentIds(segments, segments))
        return jnp.moveaxis(out[:, :, :t], 1, 2).astype(q.dtype)

    mesh = sharding.current_mesh()
    if mesh is None or mesh.size == 1:
        return one_device(q, k, v, segment_ids)
    heads = "tensor" if q.shape[2] % mesh.shape["tensor"] == 0 else None
    if heads and k.shape[2] % mesh.shape["tensor"]:  # each device needs whole groups
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    spec, rows = PartitionSpec(sharding.BATCH_AXES, None, heads, None), PartitionSpec(sharding.BATCH_AXES, None)
    return jax.shard_map(one_device, mesh=mesh, in_specs=(spec, spec, spec, rows), out_specs=spec, check_vma=False)(
        q, k, v, segment_ids
    )


@functools.cache
def _choose(impl: str, platform: str, dtype: str, lacks: tuple[tuple[str, str | None], ...]) -> str:
    """Return the implementation, given what each one lacks; the cache makes each choice be logged once."""
    reason, chosen, lacking = "", impl, dict(lacks)
    if impl == "auto":
        wanted = {"gpu": "sdpa", "tpu": "flash"}.get(platform, "xla")
        chosen = "xla" if lacking.get(wanted) else wanted
        if chosen != wanted:
            reason = f": {wanted} has no {lacking[wanted]}"
    log.info("attention: %s (asked for %s, platform %s, %s%s)", chosen, impl, platform, dtype, reason)
    if chosen == "flash" and platform != "tpu":
        log.warning("attention: flash is a TPU kernel; on %s it is interpreted, which is slow", platform)
    return chosen


def choose_implementation(config: Config) -> str:
    """Return the implementation that ``attention.impl`` stands for.

    ``auto`` goes by the platform, and avoids one that lacks what the mask, the bias, the cap or the widths need. The
    choice is logged once.
    """
    platform = "tpu" if sharding.compiles_for_tpu() else jax.default_backend()
    lacks = tuple((impl, attention_impls.lacks(impl, config.attention_needs)) for impl in ("sdpa", "flash"))
    return _choose(config.attention.impl, platform, config.model.dtype, lacks)
