"""Test finding the first NaN of a traced function and of a train step: which operation, source line and pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mhc import kinds
from mhc.config import Config
from mhc.monitor import nan
from mhc.sharding import put_batch
from mhc.train.diagnose import first_nan
from mhc.train.optimizer import map_paths
from tests.small import initial, packed, small, trainer


def first(function: Callable[..., Any], *arguments: Any) -> nan.Origin | None:
    return nan.origin(jax.jit(nan.checked(function))(*arguments))


def line_of(function: Callable[..., Any], text: str) -> int:
    """Return the line in this file of the only line of a function that has ``text``."""
    lines, start = inspect.getsourcelines(function)
    (place,) = [number for number, line in enumerate(lines) if text in line]
    return start + place


def direct(x: jax.Array) -> jax.Array:
    y = jnp.log(x)  # of a negative number
    return jnp.sqrt(y) + y


def in_a_loop(x: jax.Array) -> jax.Array:
    def body(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.sqrt(carry) + x, None  # of 1, 0, and of -1 in the third round

    return jax.lax.scan(body, x + 2.0, None, length=5)[0]


def rematerialised(x: jax.Array) -> jax.Array:
    return jax.checkpoint(lambda x: jnp.sin(jnp.sqrt(x)))(x)


@jax.custom_vjp
def written(x: jax.Array) -> jax.Array:
    return x


def written_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, x


def written_backward(x: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    return (g * jnp.sqrt(x),)  # the gradient alone


written.defvjp(written_forward, written_backward)


def with_written_gradient(x: jax.Array) -> jax.Array:
    return 2.0 * written(x)


@pytest.mark.parametrize(
    ("function", "source", "primitive", "line"),
    [
        (direct, direct, "log", "jnp.log"),
        (in_a_loop, in_a_loop, "sqrt", "jnp.sqrt"),
        (rematerialised, rematerialised, "sqrt", "jnp.sqrt"),
        (jax.grad(rematerialised), rematerialised, "sqrt", "jnp.sqrt"),
        (jax.grad(with_written_gradient), with_written_gradient, "sqrt", "written(x)"),
    ],
    ids=["direct", "loop", "rematerialised", "its gradient", "written gradient"],
)
def test_the_first_operation_and_its_line(function, source, primitive, line):
    found = first(function, -1.0)
    assert found is not None and found.primitive == primitive
    here = found.frames[-1]
    assert here.filename == __file__ and here.lineno == line_of(source, line)
    head, text, *above = found.render()
    assert head.startswith(f"{primitive} at ") and f"test_nan.py:{here.lineno} in " in head
    assert line in text and all(" called at " in one for one in above)
    assert first(function, 7.0) is None


def test_infinities_are_not_nan():
    assert first(lambda x: jnp.exp(x) * 2.0, 1e4) is None
    assert first(lambda x: jnp.exp(x) * 0.0, 1e4) is not None


def of_step(config: Config, devices: int = 1, huge: tuple[str, ...] = ()) -> tuple[str, nan.Origin] | None:
    """Return `first_nan` at initial weights, with those of the second block replaced whose paths end in ``huge``."""
    made = trainer(config, devices)

    def overflowing(path: str, leaf: jax.Array) -> jax.Array:
        return leaf.at[1].set(1e38) if path.endswith(huge) else leaf

    params = jax.tree.map(jax.device_put, map_paths(overflowing, initial(config)), made.layout.params)
    return first_nan(made, params, put_batch(packed(8, padding=True), made.mesh), 0)


@pytest.mark.product
@pytest.mark.parametrize(
    ("kind", "groups"),
    [
        *[(kind, {}) for kind in kinds.known()],
        ("mhc", {"train": {"batch_size": 8, "accumulation": 2}, "model": {"remat": "full"}}),
        ("plain", {"moe": {"experts": 4, "shared": 1}}),
        ("mhc", {"moe": {"experts": 4}, "mesh": {"data": 1, "fsdp": 2, "tensor": 2, "expert": 2}}),
    ],
)
def test_a_step_without_nan_has_none_on_its_way(kind, groups):
    """It has no NaN that a mask throws away either: rows end early, and one is empty."""
    assert of_step(small(kind, **groups), 8 if "mesh" in groups else 1) is None


@pytest.mark.parametrize(
    ("kind", "groups", "devices"),
    [
        ("mhc", {}, 1),
        pytest.param("hc", {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}}, 8, marks=pytest.mark.product),
        pytest.param(
            "plain",
            {"moe": {"experts": 4}, "mesh": {"data": 1, "fsdp": 2, "tensor": 2, "expert": 2}},
            8,
            marks=pytest.mark.product,
        ),
    ],
)
def test_a_weight_that_overflows(kind, groups, devices):
    found = of_step(small(kind, **groups), devices, huge=("query", "key"))
    assert found is not None
    name, origin = found
    assert name == "forward" and "mhc/model/" in origin.frames[-1].filename
