"""Test what devices exchange, by their compiled programs: never the streams, all experts or all tokens.

Every property is shown to be able to fail: with a fault put in, the same reading finds what it forbids.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mhc import kernels, sharding
from mhc.config import Config
from mhc.model import moe
from mhc.model.decoder import DecoderDefinition
from mhc.residual import manifold
from mhc.sharding import make_mesh, tracing_for
from tests.small import small
from tpu import hlo

# Sizes that tell arrays apart: that of anything with tokens is a multiple of 11, that of weights is not.
ROWS, TOKENS, WIDTH, STREAMS = 8, 11, 48, 4
BATCH_AXES = sharding.BATCH_AXES


def config_of(kind: str, mesh: dict[str, int], **groups: dict[str, Any]) -> Config:
    base: dict[str, dict[str, Any]] = {
        "model": {"layers": 1, "width": WIDTH, "vocab_size": 32},
        "attention": {"heads": 8, "head_dim": 4, "impl": "xla"},
        "mlp": {"width": 40},
        # Few iterations, whose sums the backward pass keeps: so that streams are the largest arrays.
        "residual": {
            "kind": kind,
            **({} if kind == "plain" else {"n": STREAMS}),
            **({"iters": 5} if kind == "mhc" else {}),
        },
        "mesh": {"data": 1, **mesh},
    }
    return small(kind, **{**base, **groups})


@pytest.fixture
def _compiled_now() -> Iterator[None]:
    """Keep programs out of the cache, which has no warnings of the compiler and shall hold no faulty program."""
    name = "jax_enable_compilation_cache"
    before = getattr(jax.config, name)

    def use(cache: bool) -> None:
        jax.config.update(name, cache)
        compilation_cache.reset_cache()  # else what it decided at first holds
        jax.clear_caches()

    use(False)
    yield
    use(before)


def compiled(config: Config) -> str:
    """Return the program of hidden states and of the gradient of their square, by parameter, forward and backward."""
    mesh = make_mesh(config.mesh)
    definition = DecoderDefinition(config)

    def run(params: Any, tokens: jax.Array) -> Any:
        def square(params: Any) -> jax.Array:
            return jnp.sum(jnp.square(definition.bind(params).forward(tokens).h))

        with tracing_for(mesh):
            return jax.grad(square)(params)

    params = definition.abstract()
    layout = sharding.shardings(params, mesh)
    tokens = jax.ShapeDtypeStruct((ROWS, TOKENS), jnp.int32)
    program = sharding.jit(run, mesh, in_shardings=(layout, sharding.batch_sharding(mesh)), out_shardings=layout)
    text = program.lower(params, tokens).compile().as_text()
    assert text is not None
    return text


def gathered(text: str, config: Config) -> tuple[list[int], list[tuple[int, ...]]]:
    """Return (numbers gathered per token of a device, by all-gather; shapes of gathered weights)."""
    mesh = make_mesh(config.mesh)
    tokens = ROWS * TOKENS // math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    shapes = list(hlo.gathered_shapes(text))
    ours = [shape for shape in shapes if math.prod(shape) % TOKENS == 0]
    return sorted(math.prod(shape) // tokens for shape in ours), [shape for shape in shapes if shape not in ours]


def largest_held(text: str, config: Config) -> int:
    """Return how many numbers per token of a device the largest array of tokens in the program has."""
    mesh = make_mesh(config.mesh)
    tokens = ROWS * TOKENS // math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    sizes = (math.prod(map(int, found.split(","))) for found in re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", text))
    return max(size for size in sizes if size % TOKENS == 0) // tokens


TENSOR = {"1x2x4x1": {"fsdp": 2, "tensor": 4}, "1x1x8x1": {"tensor": 8}}
# Of a block: F's input and the gradient of its output, once per sublayer; outside, the hidden states at the end and the
# gradient of the embeddings.
PER_TOKEN = [WIDTH] * (2 * 2 + 2)


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("mhc", "1x2x4x1"),
        ("hc", "1x1x8x1"),
        *(
            pytest.param(kind, mesh, marks=pytest.mark.product)
            for kind, mesh in (
                ("mhc", "1x1x8x1"),
                ("hc", "1x2x4x1"),
                ("mhc_lite", "1x2x4x1"),
                ("kromhc", "1x2x4x1"),
                ("identity", "1x2x4x1"),
                ("plain", "1x2x4x1"),
            )
        ),
    ],
)
def test_streams_are_never_gathered(kind: str, mesh: str) -> None:
    """Under tensor parallelism devices gather a sublayer's input, of width D, and nothing of the N D of streams."""
    config = config_of(kind, TENSOR[mesh])
    text = compiled(config)
    tokens, weights = gathered(text, config)
    assert tokens == PER_TOKEN
    assert max(map(math.prod, weights), default=0) < ROWS * TOKENS * STREAMS * WIDTH
    # From the embeddings on, a device holds its part of the streams, no larger here than what sublayers are given.
    assert largest_held(text, config) == WIDTH


def flattened(x: jax.Array, phi: jax.Array, eps: float) -> jax.Array:
    """Compute ``kernels.project`` as one would write it with vec(x)."""
    m = x.reshape(*x.shape[:-2], -1)
    m = m * jax.lax.rsqrt(jnp.mean(m * m, axis=-1, keepdims=True) + eps)
    return jnp.moveaxis(m @ phi.reshape(-1, phi.shape[-1]), -1, 0)


def whole(x: jax.Array) -> jax.Array:
    return sharding.constrain_batch(split(x))


split = sharding.constrain_streams


@pytest.mark.long
@pytest.mark.usefixtures("_compiled_now")
@pytest.mark.parametrize(
    ("module", "name", "fault"),
    [
        pytest.param(sharding, "constrain_streams", whole, id="streams laid out whole"),
        pytest.param(kernels, "project", flattened, id="streams flattened"),
    ],
)
def test_gathered_streams_would_be_seen(
    module: Any, name: str, fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert manifold.kernels is kernels
    monkeypatch.setattr(module, name, fault)
    config = config_of("mhc", TENSOR["1x2x4x1"])
    text = compiled(config)
    assert max(gathered(text, config)[0]) >= STREAMS * WIDTH
    assert largest_held(text, config) >= STREAMS * WIDTH


EXPERTS: dict[str, dict[str, Any]] = {"moe": {"experts": 4, "top_k": 2, "width": 20}}
EXPERT_MESH = {"fsdp": 2, "expert": 4}


def largest_experts(weights: list[tuple[int, ...]]) -> int:
    """Return how many experts the largest gathered array of their weights [E', D, F] or [E', F, D] holds."""
    return max(math.prod(shape) // (WIDTH * 20) for shape in weights if set(shape[-2:]) == {WIDTH, 20})


@pytest.mark.long
def test_experts_stay_where_they_are() -> None:
    """Weights are gathered over fsdp, each device its own experts'; tokens go to the experts and come back."""
    config = config_of("mhc", EXPERT_MESH, **EXPERTS)
    tokens, weights = gathered(compiled(config), config)
    assert largest_experts(weights) == 1
    # The tokens of the four devices that share the experts, and what they chose with its weight; nobody's else.
    assert max(tokens) == 4 * WIDTH
    assert not [shape for shape in weights if shape[:2] == (ROWS, TOKENS)]


@pytest.mark.long
@pytest.mark.usefixtures("_compiled_now")
def test_gathered_experts_and_tokens_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("mhc", EXPERT_MESH, **EXPERTS)
    with monkeypatch.context() as patch:
        patch.setattr(sharding, "by_rows", lambda function, x: function(x))
        tokens, _ = gathered(compiled(config), config)
        assert config.moe.experts * 8 in tokens  # scores of every device's tokens
    jax.clear_caches()
    with monkeypatch.context() as patch:
        stay = moe._sharded

        def gather_first(config: Config, mesh: Mesh) -> Callable[..., jax.Array]:
            def run(x: jax.Array, chosen: jax.Array, weights: jax.Array, matrices: dict[str, jax.Array]) -> jax.Array:
                everywhere = NamedSharding(mesh, PartitionSpec())
                return stay(config, mesh)(x, chosen, weights, jax.lax.with_sharding_constraint(matrices, everywhere))

            return run

        patch.setattr(moe, "_sharded", gather_first)
        _, weights = gathered(compiled(config), config)
        assert largest_experts(weights) == 4


REMADE = "Involuntary full rematerialization"
# Every way to look a row up, and latent attention's narrow matrices.
OTHERS: dict[str, dict[str, Any]] = {
    "positions": {"kind": "learned"},
    "data": {"sequence_length": TOKENS},
    "attention": {"kind": "mla", "heads": 8, "head_dim": 4, "kv_rank": 16, "q_rank": 24, "impl": "xla"},
}


@pytest.mark.usefixtures("_compiled_now")
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param({"fsdp": 2, "tensor": 2, "expert": 2}, id="1x2x2x2"),
        *(
            pytest.param(mesh, id=name, marks=pytest.mark.product)
            for name, mesh in {
                "1x8x1x1": {"fsdp": 8},
                "2x2x2x1": {"data": 2, "fsdp": 2, "tensor": 2},
                "2x2x1x2": {"data": 2, "fsdp": 2, "expert": 2},
                "1x2x4x1": {"fsdp": 2, "tensor": 4},
            }.items()
        ),
    ],
)
def test_no_array_is_made_whole_to_be_laid_out_anew(mesh: dict[str, int], capfd: pytest.CaptureFixture[str]) -> None:
    compiled(config_of("mhc", mesh, **EXPERTS, **OTHERS))
    assert REMADE not in capfd.readouterr().err


@pytest.mark.usefixtures("_compiled_now")
def test_a_whole_array_would_be_seen(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """The test would see the lookup in a table whose width is split as the batch is."""
    monkeypatch.setattr(sharding, "whole_rows", lambda table, axis: table)
    compiled(config_of("plain", {"fsdp": 2, "tensor": 2, "expert": 2}))
    assert REMADE in capfd.readouterr().err
