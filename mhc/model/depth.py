"""Run blocks one after another: scanned or unrolled, recomputed in groups, in a topology's periods if it has any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mhc.config import Config
from mhc.model import kept_once
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
        if whole and size == 1 and topology.period is not None:
            # Within another scan the layers must come as they are: of a group that is cut out of them anew, the
            # backward pass would keep a copy of the parameters.
            single = jax.checkpoint(step, policy=policy, prevent_cse=False)
            return jax.lax.scan(single, carry, layers)
        if whole:
            groups = jax.tree.map(lambda leaf: leaf[:whole].reshape(-1, size, *leaf.shape[1:]), layers)
            carry, out = jax.lax.scan(group, carry, groups)
            parts.append(jax.tree.map(lambda leaf: leaf.reshape(whole, *leaf.shape[2:]), out))
        for first in range(whole, count, size):
            carry, out = group(carry, jax.tree.map(lambda leaf, i=first: leaf[i : i + size], layers))
            parts.append(out)
        return carry, _concatenated(parts)

    return run


def keeps_once(config: Config, topology: ResidualTopology) -> bool:
    """Return whether what the topology holds is kept once for the backward pass, and not once a period."""
    return config.model.remat == "full" and topology.period is not None and topology.gains_rows


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
    once: bool = False,
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
      once: whether the backward pass computes each layer again from what is held after the last of these layers, as
        ``keeps_once`` tells. Then ``run`` is not used. Not with ``whole_state``.

    Raises:
      ValueError: the period is less than one block.
    """
    period, count = topology.period, _length(layers)
    if period is None:
        return run(step, carry, layers)
    if period < 1:
        raise ValueError(f"{type(topology).__name__}: period is {period}, and must be at least one block")

    def one_period(carried: Any, layers: Any, ends: bool = True) -> tuple[Any, Any]:
        carry, path = carried
        held, moving = ((), carry.state) if whole_state else topology.held(carry.state)

        def entire(moving: Any) -> Any:
            return moving if whole_state else topology.joined(held, moving)

        def moved(held: Any, carry: Any, layer: Any) -> tuple[Any, Any]:
            state = carry.state if whole_state else topology.joined(held, carry.state)
            carry, out = step(carry._replace(state=state), layer)
            return carry if whole_state else carry._replace(state=topology.held(carry.state)[1]), out

        def handed_on(held: Any, moving: Any) -> Any:
            return topology.hand_on(topology.settle(topology.joined(held, moving)))

        carry = carry._replace(state=moving)
        if path is None:
            carry, out = run(lambda carry, layer: moved(held, carry, layer), carry, layers)
            state = topology.settle(entire(carry.state))
            return (carry._replace(state=topology.hand_on(state) if ends else state), None), out

        def again(carried: Any, layer: Any) -> tuple[Any, Any]:
            (carry, out), path = kept_once.recomputed(moved, held, carried[1], carried[0], layer, prevent_cse=not scan)
            return (carry, path), out

        (carry, path), out = (scanned if scan else unrolled)(again, (carry, path), layers)
        if not ends:
            return (carry._replace(state=topology.settle(entire(carry.state))), path), out
        state, path = kept_once.recomputed(handed_on, held, path, carry.state, prevent_cse=not scan)
        return (carry._replace(state=state), path), out

    def part(begin: int, end: int) -> Any:
        return jax.tree.map(lambda leaf: leaf[begin:end], layers)

    parts = []
    carried = (carry, kept_once.path_for(topology.held(carry.state)[0]) if once else None)
    begun = min(-first % period, count)  # what is left of the period that another stack began
    if begun:
        carried, out = one_period(carried, part(0, begun), ends=(first + begun) % period == 0)
        parts.append(out)
    whole = begun + (count - begun) // period * period
    if whole > begun and scan:
        grouped = jax.tree.map(lambda leaf: leaf.reshape(-1, period, *leaf.shape[1:]), part(begun, whole))
        carried, out = jax.lax.scan(one_period, carried, grouped)
        parts.append(jax.tree.map(lambda leaf: leaf.reshape(whole - begun, *leaf.shape[2:]), out))
    elif whole > begun:
        for at in range(begun, whole, period):
            carried, out = one_period(carried, part(at, at + period))
            parts.append(out)
    if whole < count:
        carried, out = one_period(carried, part(whole, count), ends=False)
        parts.append(out)
    carry, path = carried
    if path is not None:
        ended = kept_once.turned(*topology.held(carry.state), path)
        carry = carry._replace(state=topology.joined(*ended))
    return carry, _concatenated(parts)
