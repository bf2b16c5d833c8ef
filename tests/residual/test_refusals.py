"""Test refusals in one line that says what was given and what was expected: arguments of functions and kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhc import kernels
from mhc.residual import functional as F

B, N, D, S = 5, 4, 6, 7
R = F.residual_logits("mhc", N)
EPS = {"preset": "paper", "iters": 20, "map_eps": 1e-6, "sinkhorn_eps": 1e-6}
HC = {"w_pre": (D,), "w_post": (D,), "w_res": (D, N), "b_pre": (N,), "b_post": (N,), "b_res": (N, N), "alpha": (3,)}
# Function -> (call on arrays by name, shapes by name, names of parameters that are given as one mapping).
FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, tuple[int, ...]]]] = {
    "sinkhorn": (F.sinkhorn, {"logits": (B, N, N)}),
    "hc_maps": (lambda x, **params: F.hc_maps(x, params), {"x": (B, N, D), **HC}),
    "static hc_maps": (
        lambda x, **params: F.hc_maps(x, params, dynamic=False),
        {"x": (B, N, D), **{name: shape for name, shape in HC.items() if name.startswith("b_")}},
    ),
    "mhc_maps": (
        lambda x, **params: F.mhc_maps(x, params),
        {"x": (B, N, D), "phi": (N * D, 2 * N + R), "alpha": (3,), "bias": (2 * N + R,)},
    ),
    "mhc_logits": (
        lambda raw, alpha, bias: F.mhc_logits(raw, alpha, bias, N),
        {"raw": (B, 2 * N + R), "alpha": (3,), "bias": (2 * N + R,)},
    ),
    "maps_from_logits": (
        lambda logits: F.maps_from_logits(logits, kind="mhc", **EPS),  # type: ignore[arg-type]
        {"logits": (B, 2 * N + R)},
    ),
    "read": (F.read, {"x": (B, N, D), "pre": (B, N)}),
    "write": (F.write, {"x": (B, N, D), "y": (B, D), "post": (B, N), "res": (B, N, N)}),
    "collapse_head": (F.collapse_head, {"x": (B, N, D), "fn": (N * D, N), "base": (N,), "scale": (1,)}),
    "single_gains": (F.single_gains, {"res": (S, N, N)}),
    "composite_gains": (F.composite_gains, {"res": (S, B, N, N)}),
    "composite_maps": (F.composite_maps, {"res": (S, B, N, N)}),
}
every_function = pytest.mark.parametrize("function", FUNCTIONS)


def arrays(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def refusal(call: Callable[..., Any], given: dict[str, Any], kind: Any = ValueError) -> str:
    """Return the message of what ``call`` raises, which is one line and not jax's."""
    with pytest.raises(kind) as caught:
        jax.eval_shape(lambda: call(**given))
    message = str(caught.value.args[0])
    assert "\n" not in message and "einsum" not in message and "Size of label" not in message, message
    return message


@every_function
def test_every_array_of_another_size_is_refused_by_name(function: str) -> None:
    """An axis is longer, shortened to one, or missing: whatever cannot be read as broadcasting over leading axes."""
    call, shapes = FUNCTIONS[function]
    jax.eval_shape(lambda: call(**arrays(shapes)))  # as it is, it is taken
    given = arrays(shapes)
    for name, array in given.items():
        axis = -2 if name == "x" and function in ("read", "static hc_maps") else -1  # D is free there
        wrong = [np.concatenate([array, array.take([0], axis)], axis), array.take([0, 0], axis)]
        if name != "scale":
            wrong.append(array.reshape(-1)[0])  # no axis at all
        for other in wrong:
            message = refusal(call, {**given, name: other})
            # The streams say what N and D are: where they are wrong, it is another array that does not fit them.
            assert name in message or name in ("x", "raw"), message
            assert "got shape" in message or "no N gives" in message or "do not broadcast" in message, message


@every_function
def test_complex_numbers_keys_and_words_are_refused(function: str) -> None:
    call, shapes = FUNCTIONS[function]
    given = arrays(shapes)
    for name, array in given.items():
        for other in (array.astype(np.complex64), jax.random.key(0), jnp.zeros(array.shape, jnp.float8_e4m3fn), "x"):
            message = refusal(call, {**given, name: other}, TypeError)
            assert message.startswith(f"{name} must be an array of real numbers"), message


def test_whole_numbers_are_computed_in_float32() -> None:
    x = np.arange(B * N * D).reshape(B, N, D)
    for dtype in (np.int32, np.uint8, bool):
        u = F.read(x.astype(dtype), np.full((B, N), 0.5, np.float32))
        assert u.dtype == jnp.float32
        np.testing.assert_allclose(u, 0.5 * x.astype(dtype).astype(np.float64).sum(1), rtol=1e-6)


def test_leading_axes_broadcast_or_are_named() -> None:
    x = np.ones((3, B, N, D), np.float32)
    assert F.read(x, np.ones(N)).shape == (3, B, D)
    assert F.read(x, np.ones((B, N))).shape == (3, B, D)
    message = refusal(F.read, {"x": x, "pre": np.ones((3, N))})
    assert message == "the leading axes do not broadcast: x (3, 5), pre (3,)"


@pytest.mark.parametrize("function", ["hc_maps", "static hc_maps", "mhc_maps"])
def test_a_missing_parameter_is_named(function: str) -> None:
    call, shapes = FUNCTIONS[function]
    given = arrays(shapes)
    for name in shapes:
        if name != "x":
            rest = {other: array for other, array in given.items() if other != name}
            assert f"; {name} is missing" in refusal(call, rest)
            near = refusal(call, {**rest, f"{name}s": given[name]})
            assert near.endswith(f"{name} is missing (did you mean {name}s?)"), near


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"preset": "papre"}, "unknown Sinkhorn preset 'papre'; allowed: paper, deepseek (did you mean paper?)"),
        ({"preset": None}, "unknown Sinkhorn preset None; allowed: paper, deepseek"),
        ({"iters": 0}, "iters must be at least 1 and a whole number, got 0"),
        ({"iters": 2.5}, "iters must be at least 1 and a whole number, got 2.5"),
        ({"iters": True}, "iters must be at least 1 and a whole number, got True"),
        ({"eps": -1e-6}, "eps must be a finite number of at least 0, got -1e-06"),
        ({"eps": float("nan")}, "eps must be a finite number of at least 0, got nan"),
    ],
)
def test_sinkhorn_is_asked_for_in_one_way_everywhere(options: dict[str, Any], words: str) -> None:
    """The function, the kernel and the maps say the same."""
    full = {"preset": "paper", "iters": 20, "eps": 1e-6, **options}
    of_maps = {"preset": full["preset"], "iters": full["iters"], "sinkhorn_eps": full["eps"]}
    for call in (
        lambda: F.sinkhorn(jnp.zeros((N, N)), **full),
        lambda: kernels.sinkhorn(jnp.zeros((N, N, B)), full["iters"], full["preset"], full["eps"]),
        lambda: F.maps_from_logits(jnp.zeros((B, 2 * N + R)), kind="mhc", map_eps=1e-6, **of_maps),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        assert str(caught.value).partition("\n")[0] == words


@pytest.mark.parametrize("n", [0, -1, 2.0, True, "4", None])
def test_a_number_of_streams_that_is_none_is_refused(n: Any) -> None:
    with pytest.raises(ValueError, match="n must be at least 1 and a whole number, got"):
        F.residual_logits("mhc", n)
