"""Implement Attention Residuals (arXiv:2603.15031): each sublayer reads earlier outputs by attention over depth."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mhc.residual.arrays import promoted
from mhc.residual.protocol import Connection, ResidualTopology
from mhc.residual.reads import depth_read_parts
from mhc.residual.runner import Runner, softmax
from mhc.rng import PathKey

State = dict[str, jax.Array]
"""sources [J+1, ..., D]: the embedding, the sums of the residual blocks of the periods before, and zeros; complete: how
many of the sums there are; running [..., D]: the sum of the residual block that is under way; terms: the sublayers
of this period so far. Where a period has two residual blocks, also first [..., D]: the sum of the first."""


class Reading(NamedTuple):
    """Holds the weights of a read over all sources in depth order [J+1, ...], 0 where there is none yet."""

    weights: jax.Array
    newest: jax.Array  # the number of the last source that is there


class LastRead(nnx.Module):
    """Holds the parameters of the read that collapses: query [D], 0 at the start, and scale [D], 1 at the start."""

    def __init__(self, width: int):
        self.query = nnx.Param(jnp.zeros((width,), jnp.float32))
        self.scale = nnx.Param(jnp.ones((width,), jnp.float32))


def attend(state: State, query: jax.Array, scale: jax.Array, block: int, rms_eps: float) -> tuple[jax.Array, Reading]:
    """Compute ``functional.depth_read`` over the sources of a state.

    Args:
      query, scale: [D].
      block: sublayers of a residual block.

    Returns:
      (u [..., D] in the dtype of the state, what was read).
    """
    rows, complete, terms = state["sources"].shape[0], state["complete"], state["terms"]
    first, running = state.get("first"), state["running"]
    # Of a period with two residual blocks the first is complete after ``block`` terms, and the other has none then.
    past_first = terms >= block if first is not None else jnp.zeros((), bool)
    runs = (terms > 0) & (terms != block) if first is not None else terms > 0
    parts, there = [state["sources"]], [jnp.arange(rows) <= complete]
    for part, counts in ((first, past_first), (running, runs)):
        if part is not None:
            parts, there = [*parts, part[None]], [*there, counts[None]]

    # For the backward pass only the sources are kept, which others keep too: not each read's weights and unit sources.
    @jax.checkpoint
    def read(
        parts: list[jax.Array], there: list[jax.Array], query: jax.Array, scale: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        query, scale = promoted(query=query, scale=scale)
        return depth_read_parts(parts, there, query * scale, rms_eps)

    u, weights = read(parts, there, query, scale)
    ordered, place = weights[:rows], complete + 1
    places = (place, place + past_first.astype(jnp.int32)) if first is not None else (place,)
    for at, row in zip(places, weights[rows:], strict=True):
        spot = (jnp.arange(rows) == at).reshape(-1, *(1,) * row.ndim)
        ordered = ordered + jnp.where(spot, row[None], 0.0)
    newest = complete + past_first.astype(jnp.int32) + runs.astype(jnp.int32)
    return u.astype(running.dtype), Reading(ordered, newest)


def measured(reading: Reading) -> dict[str, jax.Array]:
    """Return the weights [..., J+1], their entropy in nats, and those of the embedding and of the newest source."""
    weights = reading.weights
    entropy = -jnp.sum(jnp.where(weights > 0, weights * jnp.log(jnp.where(weights > 0, weights, 1.0)), 0.0), axis=0)
    newest = jax.lax.dynamic_index_in_dim(weights, reading.newest, keepdims=False)
    return {
        "depth_weights": jnp.moveaxis(weights, 0, -1),
        "depth_entropy": entropy,
        "embedding_weight": weights[0],
        "newest_weight": newest,
    }


class AttentionResidualConnection(Connection):
    """Reads by attention over depth; adds the output to the sum that is under way, and to nothing else.

    Parameters, float32: query [D], 0 at the start, which weighs all sources alike; scale [D], 1 at the start.
    """

    def __init__(self, width: int, block: int, rms_eps: float):
        self.block, self.rms_eps = block, rms_eps
        self.query = nnx.Param(jnp.zeros((width,), jnp.float32))
        self.scale = nnx.Param(jnp.ones((width,), jnp.float32))

    def read(self, state: State) -> tuple[jax.Array, Reading]:
        return attend(state, self.query[...], self.scale[...], self.block, self.rms_eps)

    def write(self, state: State, y: jax.Array, context: Reading) -> State:
        running, terms = state["running"] + y.astype(state["running"].dtype), state["terms"] + 1
        if "first" not in state:
            return {**state, "running": running, "terms": terms}
        ends = terms == self.block
        first = jnp.where(ends, running, state["first"])
        return {**state, "first": first, "running": jnp.where(ends, jnp.zeros_like(running), running), "terms": terms}

    def maps(self, context: Reading) -> None:
        return None

    def measures(self, context: Reading) -> dict[str, jax.Array]:
        return measured(context)


class AttentionResidualRunner(Runner):
    """Runs Attention Residuals in numpy."""

    def expand(self, x):
        return [x]

    def attend(self, sources, name):
        s = np.stack(sources)
        unit = s / np.sqrt((s * s).mean(-1, keepdims=True) + self.r["rms_eps"])
        weights = softmax(unit @ (self.w(f"{name}.query") * self.w(f"{name}.scale")), axis=0)
        return (weights[..., None] * s).sum(0)

    def read(self, state, name, k):
        return self.attend(state, name), k

    def write(self, state, y, context):
        if context % (self.r["block"] or 1):
            return [*state[:-1], state[-1] + y]
        return [*state, y]

    def collapse(self, state):
        return self.attend(state, "residual.end")


class AttentionResiduals(ResidualTopology):
    """Builds the topology ``attn_res``. Its sources are the embedding and the outputs, or sums of them.

    A sum is over ``block`` consecutive sublayers, a residual block, which is a source once it has a term; block 0 is 1,
    every output a source of its own. Sublayer k reads u_k = sum_j a_j s_j; a last read, with parameters of its own
    under ``end``, collapses. J = ceil(S / block).

    Depth is a scan over periods of whole blocks of the network. A period has one residual block if ``block`` is even,
    and else two, so that it ends where a block of the network does. For the backward pass the sources are kept once
    under ``model.remat=full`` and else once a period, and the running sum once a layer.

    Args:
      width: D.
      rngs: unused, since nothing is drawn.
      sublayers: S, the depth of the network.
      n: 1.
      init: both presets are the plain residual but for the scale of what is read.
      block: sublayers of a residual block; 0: 1.
      rms_eps: inside the square root of the sources' norm.

    Raises:
      ValueError: no number of sublayers.
    """

    runner = AttentionResidualRunner
    gains_rows = True

    def __init__(
        self,
        width: int,
        *,
        rngs: nnx.Rngs | PathKey | None = None,
        sublayers: int | None = None,
        n: int | None = None,
        init: str | None = None,
        block: int = 0,
        rms_eps: float = 1e-6,
    ):
        if sublayers is None:
            raise ValueError("attn_res: sublayers: given None, allowed: the depth of the network")
        self.n, self.width, self.rms_eps, self.sublayers = 1, width, rms_eps, sublayers
        self.block = block or 1
        self.two = self.block % 2 == 1
        self.period = self.block if self.two else self.block // 2
        self.end = LastRead(width)

    def expand(self, h: jax.Array) -> State:
        rest = jnp.zeros((-(-self.sublayers // self.block), *h.shape), h.dtype)
        zero, nothing = jnp.zeros((), jnp.int32), jnp.zeros_like(h)
        state = {"sources": jnp.concatenate([h[None], rest]), "complete": zero, "running": nothing, "terms": zero}
        return state | ({"first": nothing} if self.two else {})

    def connection(self, k: int | jax.Array, *, rngs: nnx.Rngs | PathKey | None = None) -> AttentionResidualConnection:
        return AttentionResidualConnection(self.width, self.block, self.rms_eps)

    def _last(self, state: State) -> tuple[jax.Array, Reading]:
        return attend(state, self.end.query[...], self.end.scale[...], self.block, self.rms_eps)

    def collapse(self, state: State) -> jax.Array:
        return self._last(state)[0]

    def streams(self, state: State) -> jax.Array:
        """Return the result of a last read now, [..., 1, D], since there is no stream that all sublayers add to."""
        return self.collapse(state)[..., None, :]

    def each(self, state: State, f: Any) -> State:
        sources = jnp.moveaxis(f(jnp.moveaxis(state["sources"], 0, -2)), -2, 0)
        return {name: f(leaf) if name in ("running", "first") else leaf for name, leaf in state.items()} | {
            "sources": sources
        }

    def held(self, state: State) -> tuple[Any, State]:
        held = ("sources", "complete")
        return tuple(state[name] for name in held), {k: leaf for k, leaf in state.items() if k not in held}

    def joined(self, held: Any, moving: State) -> State:
        sources, complete = held
        return {**moving, "sources": sources, "complete": complete}

    def hand_on(self, state: State) -> State:
        """Return the state with the sums of the period among the sources."""
        sources, complete = state["sources"], state["complete"]
        for name in ("first", "running") if self.two else ("running",):
            complete = complete + 1
            sources = jax.lax.dynamic_update_index_in_dim(sources, state[name], complete, axis=0)
        nothing = jnp.zeros_like(state["running"])
        begun = {"running": nothing} | ({"first": nothing} if self.two else {})
        return {"sources": sources, "complete": complete, "terms": jnp.zeros((), jnp.int32), **begun}

    def end_measures(self, state: State) -> dict[str, jax.Array]:
        """Return the weights of the last read, as measures for the probes."""
        return measured(self._last(state)[1])

    def multiplies(self, k: int) -> int:
        return 3 * (1 + -(-k // self.block)) * self.width

    def end_multiplies(self) -> int:
        return self.multiplies(self.sublayers)
