"""Run blocks one after another: scanned or unrolled, recomputed in groups, in a topology's periods if it has any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mhc.config import Config
from mhc.model.block import Carry
from mhc.model.layers import KEPT
from mhc.residual.protocol import ResidualTopology

Step = Callable[[Any, Any], tuple[Any, Any]]
"""(carry, one layer's inputs) -> (carry, outputs to be stacked over depth)."""
Run = Callable[[Step, Any, Any], tuple[Any, Any]]
"""(step, carry, all layers' inputs with the layers first) -> (carry, outputs stacked over depth)."""

REMAT_POLICIES: dict[str, Any] = {
    "full": None,
    "streams": jax.checkpoint_policies.save_only_these_names(KEPT),
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def scanned(step: Step, carry: Any, layers: Any) -> tuple[Any, Any]:
    """Run a step over all layers as one compiled body."""
    return jax.lax.scan(step, carry, layers)


def unrolled(step: Step, carry: Any, layers: Any) -> tuple[Any, Any]:
    """Run a step over all layers, each compiled by itself; the numbers are those of ``scanned``."""
    outputs = []
    for number in range(_length(layers)):
        carry, out = step(carry, jax.tree.map(lambda leaf, i=number: leaf[i], layers))
        outputs.append(out)
    return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)


def _length(layers: Any) -> int:
    """Return the number of layers, which is the length of the inputs' first axis."""
    return int(jax.tree.leaves(layers)[0].shape[0])


def training_run(config: Config, topology: ResidualTopology) -> Run:
    """Return how blocks run in a pass over whole rows, by ``model.scan`` and ``model.remat``."""
    model = config.model
    plainly = scanned if model.scan else unrolled
    if model.remat == "none":
        return plainly
    # The backward pass starts again from the state before each group, and has what the policy keeps of the group.
    policy, size = REMAT_POLICIES[model.remat], config.remat_blocks if model.remat == "streams" else 1

    def run(step: Step, carry: Any, layers: Any) -> tuple[Any, Any]:
        inside = plainly if size > 1 else unrolled

        def settled_group(carry: Carry, layers: Any) -> tuple[Carry, Any]:
            carry, out = inside(step, carry, layers)
            if topology.period is not None:
                return carry, out  # only what moves is here: `through` settles the whole state at the period's end
            return carry._replace(state=topology.settle(carry.state)), out

        group = jax.checkpoint(settled_group, policy=policy, prevent_cse=not model.scan)
        count = _length(layers)
        whole = count // size * size if model.scan else 0
        parts = []
        if whole:
            groups = jax.tree.map(lambda leaf: leaf[:whole].reshape(-1, size, *leaf.shape[1:]), layers)
            carry, out = jax.lax.scan(group, carry, groups)
            parts.append(jax.tree.map(lambda leaf: leaf.reshape(whole, *leaf.shape[2:]), out))
        for first in range(whole, count, size):
            carry, out = group(carry, jax.tree.map(lambda leaf, i=first: leaf[i : i + size], layers))
            parts.append(out)
        return carry, _concatenated(parts)

    return run


def _concatenated(parts: list[Any]) -> Any:
    """Return the outputs of parts of the depth as one tree, joined along the layers."""
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


def through(
    topology: ResidualTopology,
    run: Run,
    step: Step,
    carry: Any,
    layers: Any,
    *,
    first: int,
    scan: bool,
    whole_state: bool = False,
) -> tuple[Any, Any]:
    """Run a step over layers, in the topology's periods if it has any.

    A period ends after every ``topology.period`` blocks of the network. Within a period the carry has only the part of
    the state that moves. At its end ``topology.hand_on`` gives the state that the next period starts from.

    Args:
      run: how the layers of one period run.
      step: takes a carry that is a NamedTuple with a field ``state``.
      first: number of the first of these blocks in the network.
      scan: whether whole periods are scanned too; else they are unrolled.
      whole_state: whether a block may change the part that the topology holds, as interventions do. Then all of the
        state is carried.

    Raises:
      ValueError: the period is less than one block.
    """
    period, count = topology.period, _length(layers)
    if period is None:
        return run(step, carry, layers)
    if period < 1:
        raise ValueError(f"{type(topology).__name__}: period is {period}, and must be at least one block")

    def one_period(carry: Any, layers: Any, ends: bool = True) -> tuple[Any, Any]:
        held, moving = ((), carry.state) if whole_state else topology.held(carry.state)

        def entire(moving: Any) -> Any:
            return moving if whole_state else topology.joined(held, moving)

        def moved(carry: Any, layer: Any) -> tuple[Any, Any]:
            carry, out = step(carry._replace(state=entire(carry.state)), layer)
            return carry if whole_state else carry._replace(state=topology.held(carry.state)[1]), out

        carry, out = run(moved, carry._replace(state=moving), layers)
        state = topology.settle(entire(carry.state))
        return carry._replace(state=topology.hand_on(state) if ends else state), out

    def part(begin: int, end: int) -> Any:
        return jax.tree.map(lambda leaf: leaf[begin:end], layers)

    parts = []
    begun = min(-first % period, count)  # what is left of the period that another stack began
    if begun:
        carry, out = one_period(carry, part(0, begun), ends=(first + begun) % period == 0)
        parts.append(out)
    whole = begun + (count - begun) // period * period
    if whole > begun and scan:
        grouped = jax.tree.map(lambda leaf: leaf.reshape(-1, period, *leaf.shape[1:]), part(begun, whole))
        carry, out = jax.lax.scan(one_period, carry, grouped)
        parts.append(jax.tree.map(lambda leaf: leaf.reshape(whole - begun, *leaf.shape[2:]), out))
    elif whole > begun:
        for at in range(begun, whole, period):
            carry, out = one_period(carry, part(at, at + period))
            parts.append(out)
    if whole < count:
        carry, out = one_period(carry, part(whole, count), ends=False)
        parts.append(out)
    return carry, _concatenated(parts)
