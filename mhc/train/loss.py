"""Compute cross-entropy without ever holding the logits of a whole batch, forward or backward."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mhc import sharding
from mhc.config import Config
from mhc.model.decoder import Decoder
from mhc.model.layers import output_logits

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

# Logits that a device holds at once where head.chunk does not say: 128 MiB in float32.
HELD_LOGITS = 2**25


class LossSums(NamedTuple):
    """Holds sums over the valid targets of some tokens, and their largest logit; float32 scalars."""

    objective: jax.Array  # nll plus the head's z-loss
    nll: jax.Array  # nats
    log_z: jax.Array
    log_z_square: jax.Array
    logit_max: jax.Array
    by_source: jax.Array  # nats [K] of a mixture's sources; [0] without one

    def join(self, other: LossSums) -> LossSums:
        """Return the sums over the tokens of both."""
        added = jax.tree.map(jnp.add, self, other)
        return added._replace(logit_max=jnp.maximum(self.logit_max, other.logit_max))


class _Options(NamedTuple):
    """Holds the settings that the loss of a chunk depends on beside arrays."""

    tied: bool  # the weight is [V, D], not [D, V]
    softcap: float | None
    z_loss: float
    columns: int  # V padded to what the mesh divides
    split: bool = False  # the weight is a device's part of D over fsdp


def _sums(
    options: _Options, h: jax.Array, weight: jax.Array, targets: jax.Array, weights: jax.Array, member: jax.Array
) -> LossSums:
    """Return the sums over the given tokens, in one piece; ``member`` [B, K]: 1 where a row is of a source."""
    weight = weight.astype(h.dtype)
    axis = 0 if options.tied else 1
    vocabulary = weight.shape[axis]
    if options.columns > vocabulary:
        pad = [(0, 0), (0, 0)]
        pad[axis] = (0, options.columns - vocabulary)
        weight = jnp.pad(weight, pad)
    logits = output_logits(h, weight, tied=options.tied, softcap=options.softcap)
    if options.columns > vocabulary:
        logits = jnp.where(jnp.arange(options.columns) < vocabulary, logits, jnp.finfo(logits.dtype).min)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    if jnp.issubdtype(targets.dtype, jnp.integer):
        at_target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    else:  # a distribution over the classes
        at_target = jnp.sum(logits * targets, axis=-1)
    each = (log_z - at_target) * weights
    nll, square = jnp.sum(each), jnp.sum(jnp.square(log_z) * weights)
    return LossSums(
        objective=nll + options.z_loss * square if options.z_loss else nll,
        nll=nll,
        log_z=jnp.sum(log_z * weights),
        log_z_square=square,
        logit_max=jnp.max(jnp.where(weights[..., None] > 0, logits, -jnp.inf)),
        by_source=jnp.sum(jnp.sum(each, axis=1, keepdims=True) * member, axis=0),  # a product would be bfloat16 on TPU
    )


def _chunks(chunk: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Return arrays [B, T, ...] as [T / chunk, B, chunk, ...]."""
    return tuple(jnp.moveaxis(a.reshape(a.shape[0], a.shape[1] // chunk, chunk, *a.shape[2:]), 1, 0) for a in arrays)


def _whole(options: _Options, h: jax.Array, weight: jax.Array) -> jax.Array:
    """Return the weight that chunks multiply by, gathered whole: devices exchange it in the dtype of ``h``."""
    weight = weight.astype(h.dtype)
    return jax.lax.all_gather(weight, "fsdp", axis=int(options.tied), tiled=True) if options.split else weight


def _start(sources: int) -> LossSums:
    zero = jnp.zeros((), jnp.float32)
    return LossSums(zero, zero, zero, zero, jnp.full((), -jnp.inf), jnp.zeros(sources))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked(
    options: _Options,
    chunk: int,
    h: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    member: jax.Array,
) -> LossSums:
    """Compute ``_sums`` chunk by chunk. Only ``objective`` has a gradient."""
    weight = _whole(options, h, weight)

    def one(sums: LossSums, part: tuple[jax.Array, ...]) -> tuple[LossSums, None]:
        h, targets, weights = part
        return sums.join(_sums(options, h, weight, targets, weights, member)), None

    return jax.lax.scan(one, _start(member.shape[1]), _chunks(chunk, h, targets, weights))[0]


def _chunked_forward(
    options: _Options,
    chunk: int,
    h: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    member: jax.Array,
) -> tuple[LossSums, tuple[jax.Array, jax.Array]]:
    # The objective is a scalar, so its gradient is known up to a factor: each chunk's is taken while its logits are
    # there, and none are computed twice.
    def one(
        carry: tuple[LossSums, jax.Array], part: tuple[jax.Array, ...]
    ) -> tuple[tuple[LossSums, jax.Array], jax.Array]:
        sums, to_weight = carry
        h, targets, weights = part

        def objective(h: jax.Array, weight: jax.Array) -> tuple[jax.Array, LossSums]:
            part_sums = _sums(options, h, weight, targets, weights, member)
            return part_sums.objective, part_sums

        (_, part_sums), (to_h, more) = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)(h, whole)
        return (sums.join(part_sums), to_weight + more.astype(to_weight.dtype)), to_h

    whole = _whole(options, h, weight)
    start = (_start(member.shape[1]), jnp.zeros(whole.shape, weight.dtype))
    (sums, to_weight), to_h = jax.lax.scan(one, start, _chunks(chunk, h, targets, weights))
    if options.split:
        to_weight = jax.lax.psum_scatter(to_weight, "fsdp", scatter_dimension=int(options.tied), tiled=True)
    return sums, (jnp.moveaxis(to_h, 0, 1).reshape(h.shape), to_weight)


def _chunked_backward(
    options: _Options, chunk: int, saved: tuple[jax.Array, jax.Array], cotangent: LossSums
) -> tuple[jax.Array, jax.Array, None, None, None]:
    del options, chunk
    to_h, to_weight = saved
    factor = cotangent.objective
    return to_h * factor.astype(to_h.dtype), to_weight * factor, None, None, None


_chunked.defvjp(_chunked_forward, _chunked_backward)


def chunk_length(config: Config, rows: int, length: int) -> int:
    """Return how many tokens of each of ``rows`` rows have their logits held at once.

    That is head.chunk, or the largest divisor of the length that keeps to HELD_LOGITS.
    """
    most = config.head.chunk or max(HELD_LOGITS // (rows * config.outputs), 1)
    return max(d for d in range(1, length + 1) if length % d == 0 and d <= max(most, 1))


def cross_entropy(
    decoder: Decoder,
    h: Float[Array, "B T D"],
    targets: Int[Array, "B T"] | Float[Array, "B T C"],
    weights: Float[Array, "B T"],
    member: Float[Array, "B K"] | None = None,
) -> LossSums:
    """Return sums of the cross-entropy of hidden states before the head, with softcap and z-loss as configured.

    Targets are ids, or distributions [B, T, C] over the C outputs: the cross-entropy is log Z − Σ_c p_c logit_c.
    ``member``: 1 where a row is of a source, for the sums by source; None: there are none.

    Logits exist for ``chunk_length`` tokens a row at a time, and over a mesh each device adds up its own rows before
    anything is exchanged. Gradients flow through ``objective`` alone.
    """
    config, mesh = decoder.config, sharding.current_mesh()
    member = jnp.zeros((h.shape[0], 0)) if member is None else member
    weight = decoder.head_weight
    shards = math.prod(mesh.shape[axis] for axis in sharding.BATCH_AXES) if mesh is not None else 1
    split = mesh.shape["tensor"] if mesh is not None else 1
    columns = -(-config.outputs // split) * split
    options = _Options(config.head.tied, config.head.softcap, config.head.z_loss, columns)
    rows, length = h.shape[0] // shards, h.shape[1]
    chunk = chunk_length(config, max(rows, 1), length)
    if chunk == length:
        return _sums(options, h, weight, targets, weights, member)
    if mesh is None or mesh.size == 1:
        return _chunked(options, chunk, h, weight, targets, weights, member)

    batch, whole = PartitionSpec(sharding.BATCH_AXES), PartitionSpec()
    # The weight comes as it lies, D over fsdp: its gradient is then added up and scattered in one.
    part = whole
    if config.model.width % mesh.shape["fsdp"] == 0:
        options = options._replace(split=mesh.shape["fsdp"] > 1)
        part = PartitionSpec(None, "fsdp") if config.head.tied else PartitionSpec("fsdp")

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        axis_names=frozenset(sharding.BATCH_AXES),
        in_specs=(batch, part, batch, batch, batch),
        out_specs=whole,
        check_vma=False,
    )
    def own_rows(
        h: jax.Array, weight: jax.Array, targets: jax.Array, weights: jax.Array, member: jax.Array
    ) -> LossSums:
        sums = _chunked(options, chunk, h, weight, targets, weights, member)
        largest = jax.lax.pmax(jax.lax.stop_gradient(sums.logit_max), sharding.BATCH_AXES)
        return jax.tree.map(lambda x: jax.lax.psum(x, sharding.BATCH_AXES), sums)._replace(logit_max=largest)

    return own_rows(h, weight, targets, weights, member)
