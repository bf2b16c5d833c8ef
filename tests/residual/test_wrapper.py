"""Test what HyperConnection refuses, in one line that says where it was, what was given and what was expected."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mhc import kernels, kinds, residual
from mhc.residual import HyperConnection
from tests.contracts.topologies import BUILDERS, registry_restored

WIDTH, TOKENS = 6, (5, 7)
OURS, ELSEWHERE = residual.kinds(), tuple(BUILDERS)
every_kind = pytest.mark.parametrize("kind", [*OURS, *ELSEWHERE])
OTHER_STATES = ("frac", "attn_res", "denseformer", "laurel")  # kinds whose state is no N streams
FLOATS = ("float32", "bfloat16", "float16", "float64")
OTHERS = ("int8", "int32", "uint32", "bool", "complex64", "float8_e4m3fn")


@pytest.fixture(scope="module", autouse=True)
def kinds_from_elsewhere() -> Iterator[None]:
    """Register kinds whose states are pytrees, have tokens last, or grow with depth."""
    with registry_restored():
        for kind, builder in BUILDERS.values():
            residual.register(kind, builder)
        yield


def connection_of(kind: str, width: int = WIDTH, k: int = 0, **options: Any) -> HyperConnection:
    return HyperConnection(width, k, kind=kind, rngs=nnx.Rngs(0), sublayers=4, **options)


def zeros(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def refusal(error: type[Exception], function: Any, *arguments: Any) -> str:
    """Return the one line with which a function refuses abstract arguments."""
    with pytest.raises(error) as caught:
        jax.eval_shape(function, *arguments)
    message = str(caught.value.args[0])
    assert "\n" not in message and "einsum" not in message and "label" not in message, message
    return message


def state_of(connection: HyperConnection, *lead: int, dtype: str = "float32") -> Any:
    return jax.eval_shape(connection.expand, zeros(*lead, connection.width, dtype=dtype))


@every_kind
def test_what_is_right_is_taken(kind: str) -> None:
    """Any leading axes are accepted, none and empty ones too, and any floats: the state keeps its shape and dtype."""
    connection = connection_of(kind)
    for lead in ((), (3,), (0, 4), (2, 3, 4)):
        for dtype in FLOATS[:3]:
            state = state_of(connection, *lead, dtype=dtype)
            after = jax.eval_shape(lambda state: connection(state, lambda u: u * 2.0), state)
            assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), after) == jax.tree.map(
                lambda leaf: (leaf.shape, leaf.dtype), state
            )
            out = jax.eval_shape(connection.collapse, after)
            assert (out.shape, str(out.dtype)) == ((*lead, WIDTH), dtype)


@every_kind
def test_another_width_is_refused_wherever_it_comes(kind: str) -> None:
    connection, other = connection_of(kind), connection_of(kind, 2 * WIDTH)
    place = rf"HyperConnection(width={WIDTH}, kind={kind!r})"
    message = refusal(ValueError, connection.expand, zeros(*TOKENS, 2 * WIDTH))
    assert message == f"{place}.expand: h must be [..., D=6], got float32[5, 7, 12]"
    state = state_of(other, *TOKENS)
    for method in ("read", "collapse"):
        message = refusal(ValueError, getattr(connection, method), state)
        assert message.startswith(f"{place}.{method}: the state must be [..., ") and "=6]" in message, message
        assert "12]" in message, message
    message = refusal(
        ValueError,
        lambda s: connection.write(s, jnp.zeros((5, 7, 12)), connection.read(s)[1]),
        state_of(connection, 5, 7),
    )
    assert message == f"{place}.write: y must be [5, 7, D=6], got float32[5, 7, 12]"


@every_kind
def test_tokens_that_were_not_expanded_are_refused(kind: str) -> None:
    connection = connection_of(kind)
    if kind in ("plain", "frac", "laurel"):  # its state is h itself
        return
    for method in ("read", "collapse"):
        message = refusal(ValueError, getattr(connection, method), zeros(*TOKENS, WIDTH))
        assert "the state must be [..., " in message and "got float32[5, 7, 6]" in message, message
        assert message.endswith(": expand first, once for the whole model, with the same kind and n"), message


@pytest.mark.parametrize("kind", [kind for kind in OURS if kind not in ("plain", "identity", *OTHER_STATES)])
def test_another_number_of_streams_is_refused(kind: str) -> None:
    connection = connection_of(kind, n=4)
    message = refusal(ValueError, connection.read, state_of(connection_of(kind, n=2), *TOKENS))
    assert "the state must be [..., N=4, D=6], got float32[5, 7, 2, 6]" in message


@every_kind
def test_arrays_that_would_be_truncated_are_refused(kind: str) -> None:
    """As tokens, streams or output, integers, bools, complex numbers and floats without promotion are refused."""
    connection = connection_of(kind)
    state = state_of(connection, *TOKENS)
    for dtype in OTHERS:
        words = f"must be an array of float32, bfloat16, float16 or float64, got {dtype}"
        assert words in refusal(TypeError, connection.expand, zeros(*TOKENS, WIDTH, dtype=dtype))
        cast = jax.tree.map(lambda leaf, dtype=dtype: zeros(*leaf.shape, dtype=dtype) if leaf.ndim else leaf, state)
        for method in ("read", "collapse"):
            assert words in refusal(TypeError, getattr(connection, method), cast)
        assert words in refusal(TypeError, lambda s, dtype=dtype: connection(s, lambda u: u.astype(dtype)), state)


def test_what_is_no_array_is_refused() -> None:
    connection = connection_of("mhc")
    for nothing in ([[1.0] * WIDTH], 3.0, None, "h"):
        with pytest.raises(
            TypeError, match=r"expand: h must be an array of float32, .*, got (list|float|NoneType|str)$"
        ):
            connection.expand(nothing)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"read: the state must be \[\.\.\., N=4, D=6\], got "):
            connection.read(nothing)


def test_numpy_arrays_are_arrays() -> None:
    connection = connection_of("mhc")
    h = np.random.default_rng(0).normal(size=(3, WIDTH)).astype(np.float32)
    x: Any = np.asarray(connection.expand(h))  # type: ignore[arg-type]
    np.testing.assert_allclose(connection(x, jnp.tanh), connection(jnp.asarray(x), jnp.tanh), rtol=1e-6)


@every_kind
def test_the_streams_keep_their_dtype_whatever_a_sublayer_returns(kind: str) -> None:
    connection = connection_of(kind)
    state = state_of(connection, *TOKENS, dtype="bfloat16")
    after = jax.eval_shape(lambda state: connection(state, lambda u: u.astype(jnp.float32)), state)
    assert jax.tree.map(lambda leaf: leaf.dtype, after) == jax.tree.map(lambda leaf: leaf.dtype, state)


@pytest.mark.parametrize("kind", OURS)
def test_parameters_that_were_cast_still_give_maps_in_float32(kind: str) -> None:
    """Checkpoints store them in bfloat16, and users cast whole models."""
    random: dict[str, Any] = {"init": "v4"} if "v4" in kinds.known()[kind].inits else {}
    connection = connection_of(kind, **random)
    _, state = nnx.split(connection.connection)
    graph = nnx.graphdef(connection.connection)
    narrow = nnx.merge(graph, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state))
    rounded = nnx.merge(graph, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), state))
    x = connection.expand(jnp.asarray(np.random.default_rng(0).normal(size=(3, WIDTH)), jnp.bfloat16))
    reads = [module.read(x)[1] for module in (narrow, rounded)]
    found, expected = (module.maps(context) for module, context in zip((narrow, rounded), reads, strict=True))
    if found is None or expected is None:
        measures = [module.measures(context) for module, context in zip((narrow, rounded), reads, strict=True)]
        found, expected = (list(named.values()) for named in measures)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (("16", 0), {}, "width must be at least 1 and a whole number, got '16'"),
        ((16.0, 0), {}, "width must be at least 1 and a whole number, got 16.0"),
        ((0, 0), {}, "width must be at least 1 and a whole number, got 0"),
        ((True, 0), {}, "width must be at least 1 and a whole number, got True"),
        ((16, -1), {}, "k: given -1, allowed: the number of the sublayer in depth order"),
        ((16, 1.0), {}, "k: given 1.0, allowed: the number of the sublayer"),
        ((16, None), {}, "k: given None, allowed: the number of the sublayer"),
        ((16, jnp.zeros(2, jnp.int32)), {}, r"k: given int32\[2\], allowed: the number of the sublayer"),
        ((16, jnp.zeros(())), {}, r"k: given float32\[\], allowed: the number of the sublayer"),
        ((16, 4), {"sublayers": 4}, "k: given 4, allowed: from 0 to 3 with sublayers=4"),
        ((16, 0), {"sublayers": 0}, "sublayers: given 0, allowed: an int >= 1"),
        ((16, 0), {"sublayers": 2.0}, "sublayers: given 2.0, allowed: an int >= 1"),
        ((16, 0), {"kind": None}, "kind: given None, allowed: one of plain, hc, mhc"),
        ((16, 0), {"kind": "MHC"}, r"unknown residual kind 'MHC'; .*\(did you mean mhc\?\)"),
        ((16, 0), {"knd": "hc"}, r"kind 'mhc' has no option 'knd' \(did you mean kind\?\)"),
        ((16, 0), {"streams": 4}, "kind 'mhc' has no option 'streams'.*; allowed: n, init"),
        ((16, 0), {"n": "4"}, "n: given '4', allowed: from 1 to 8"),
    ],
)
def test_a_mistaken_argument_is_one_line(arguments: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        HyperConnection(*arguments, rngs=nnx.Rngs(0), **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rngs", [0, None, "0", jnp.zeros(3), nnx.Rngs])
def test_what_is_no_key_is_refused(rngs: Any) -> None:
    with pytest.raises(
        TypeError, match=r"^rngs: given .*, allowed: nnx\.Rngs\(0\), a key such as jax\.random\.key\(0\)"
    ):
        HyperConnection(16, 0, rngs=rngs)


def test_rngs_without_parameters_and_many_keys_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^rngs: given streams dropout, allowed: nnx\.Rngs\(0\)"):
        HyperConnection(16, 0, rngs=nnx.Rngs(dropout=0))
    with pytest.raises(ValueError, match=r"^rngs: given keys of shape \(2,\), allowed: one key"):
        HyperConnection(16, 0, rngs=jax.random.split(jax.random.key(0)))
    assert HyperConnection(16, 0, rngs=nnx.Rngs(0).params).width == 16


def test_kernels_do_not_truncate_either() -> None:
    x, y, pre, res = (jnp.ones(shape, jnp.int32) for shape in ((3, 2, 4), (3, 4), (2, 3), (2, 2, 3)))
    for call in (
        lambda: kernels.read(x, pre),
        lambda: kernels.write(x, y, pre, res),
        lambda: kernels.add(x, y, pre),
    ):
        with pytest.raises(TypeError, match=r"^x must be an array of float32, .*, got int32\[3, 2, 4\]"):
            call()
