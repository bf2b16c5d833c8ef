"""Test golden values of the kinds of other forms: six sublayers between a topology's own connections.

Every reading and state on the way, the result, and all gradients, as ``tests/golden/README.md`` says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mhc import residual
from mhc.model import depth
from mhc.rng import PathKey
from tests.residual.test_golden import Case, assert_close, dtype_of, load, precision, tolerance
from tests.residual.test_golden_reads import FORWARD, GRADIENT

__all__ = ["precision"]  # the fixture
SUBLAYERS, WIDTH = 6, 8

Arrays = dict[str, jax.Array]


class Stack(NamedTuple):
    """Says how the arrays of a kind's files are its parameters."""

    options: Callable[[Case], dict[str, Any]]
    """Its options, from a case."""
    sublayer: Callable[[Arrays, int], Arrays]
    """(parameters, k) -> those of connection k."""
    topology: Callable[[Arrays], Arrays]
    """Parameters -> those of the topology, by path."""


def rows(*names: str, **renamed: str) -> Callable[[Arrays, int], Arrays]:
    """Take row k of each array, under the module's name."""
    pairs = {name: name for name in names} | {theirs: ours for ours, theirs in renamed.items()}
    return lambda params, k: {ours: params[theirs][k] for theirs, ours in pairs.items() if theirs in params}


def gated(params: Arrays, k: int) -> Arrays:
    n, rank = 4, params["w_down"].shape[-1]
    shapes = {"w_norm": (n, WIDTH), "w_down": (n, WIDTH, rank), "w_up": (rank, n, WIDTH), "w_inject": (n, WIDTH, n)}
    return {
        name: params[name][k].reshape(shape)
        for name, shape in shapes.items()
        if name in params and k < params[name].shape[0]
    }


STACKS: dict[str, Stack] = {
    "frac": Stack(
        lambda case: {"n": case["param_b_pre"].shape[-1]},
        rows("w_post", "w_res", "b_post", "b_res", "alpha", w_read="w_pre", b_read="b_pre"),
        lambda params: {},
    ),
    "gated_residual": Stack(
        lambda case: {"n": 4, "rank": case["param_w_down"].shape[-1]},
        gated,
        lambda params: {f"end/{name}": leaf for name, leaf in gated(params, SUBLAYERS).items()},
    ),
    "attn_res": Stack(
        lambda case: {"block": int(case["option_block"])},
        rows("query", "scale"),
        lambda params: {f"end/{name}": params[name][SUBLAYERS] for name in ("query", "scale")},
    ),
    "denseformer": Stack(
        lambda case: {"dilation": int(case["option_dilation"])},
        lambda params, k: {},
        lambda params: {"weights": params["a"]},
    ),
    "laurel": Stack(
        lambda case: {"variant": "rw_lr", "rank": case["param_A"].shape[-1]},
        rows("w", "A", "B"),
        lambda params: {},
    ),
}
CASES = [(kind, case) for kind in STACKS for case in load(f"stack_{kind}")]


class Carry(NamedTuple):
    """Holds what flows from block to block."""

    state: Any


def with_params(module: nnx.Module, params: Arrays) -> Any:
    """Return the module with these parameters, by path."""
    graph, state = nnx.split(module)
    tree: dict[str, Any] = {}
    for path, leaf in params.items():
        *way, name = path.split("/")
        at = tree
        for step in way:
            at = at.setdefault(step, {})
        at[name] = leaf
    assert str(jax.tree.structure(tree)) == str(jax.tree.structure(nnx.to_pure_dict(state)))
    nnx.replace_by_pure_dict(state, tree)
    return nnx.merge(graph, state)


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_a_stack(kind: str, case: str, precision: bool) -> None:
    golden, stack, dtype = load(f"stack_{kind}")[case], STACKS[kind], dtype_of(precision)
    key = PathKey(jax.random.key(0))
    made = residual.build(kind, WIDTH, rngs=key, sublayers=SUBLAYERS, **stack.options(golden))
    blank = made.connection(0, rngs=key / "c")

    def run(h: jax.Array, params: Arrays) -> tuple[jax.Array, Any]:
        topology = with_params(made, stack.topology(params))
        reads: list[jax.Array] = []
        measures: list[Arrays] = []

        def sublayers(carry: Carry, first: int) -> Carry:
            state = carry.state
            for k in (first, first + 1):
                connection = with_params(blank, stack.sublayer(params, k))
                u, context = connection.read(state)
                reads.append(u)
                measures.append(connection.measures(context))
                y = params["f_scale"][k][None] * jnp.tanh(u + params["f_shift"][k][None])
                state = connection.write(state, y, context)
            return Carry(state)

        # As a decoder runs blocks, but not scanned: ``depth.through`` hands what a period leaves to the next.
        def block(carry: Carry, first: jax.Array) -> tuple[Carry, None]:
            return sublayers(carry, numbers.pop(0)), None

        numbers = list(range(0, SUBLAYERS, 2))
        begin = Carry(topology.expand(h))
        end, _ = depth.through(topology, depth.unrolled, block, begin, jnp.arange(3), first=0, scan=False)
        out = topology.collapse(topology.settle(end.state))
        return out, (jnp.stack([*reads, out]), [*measures, topology.end_measures(end.state)])

    h = jnp.asarray(golden["h"], dtype)
    names = [key.removeprefix("param_") for key in golden if key.startswith("param_")]
    params = {name: jnp.asarray(golden[f"param_{name}"], dtype) for name in names}
    weight = jnp.asarray(golden["w_out"], dtype)

    def objective(h: jax.Array, params: Arrays) -> tuple[jax.Array, Any]:
        out, seen = run(h, params)
        return jnp.sum(out * weight), (out, *seen)

    (_, (out, reads, measures)), grads = jax.jit(jax.value_and_grad(objective, argnums=(0, 1), has_aux=True))(h, params)
    assert out.dtype == dtype
    assert_close(out, golden["out"], tolerance(precision, FORWARD), f"{kind} {case} out")
    if "u" in golden:
        assert_close(reads, golden["u"], tolerance(precision, FORWARD), f"{kind} {case} u")
        for k, measured in enumerate(measures):
            expected = golden[f"weights{k}"]
            weights = jnp.moveaxis(measured["depth_weights"], -1, 0)
            assert_close(weights[: len(expected)], expected, tolerance(precision, FORWARD), f"{case} weights {k}")
            assert not weights[len(expected) :].any()
            assert_close(measured["newest_weight"], expected[-1], tolerance(precision, FORWARD), f"{case} newest {k}")
    for name, grad in {"h": grads[0], **grads[1]}.items():
        assert_close(grad, golden[f"d_{name}"], tolerance(precision, GRADIENT), f"{kind} {case} d_{name}")
