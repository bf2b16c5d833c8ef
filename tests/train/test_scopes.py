"""Test the names that a trace shows: each part of a block is told apart in the compiled step, and no result changes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from mhc.residual import protocol
from mhc.sharding import make_mesh
from mhc.train.step import Trainer
from tests.contracts import topologies
from tests.small import packed, small, trainer

BLOCK = {"read", "write", "attention", "feed_forward"}
ENDS = {"embed", "logits", "loss"}


@pytest.fixture(autouse=True)
def programs_cached_by_their_names_too() -> Iterator[None]:
    """Let the cache tell programs by their names too: a stored one has the names of the code that compiled it."""
    name = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    yield
    jax.config.update(name, before)


def lowered(made: Trainer) -> Any:
    """Return the step, traced and not yet compiled."""
    batch = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in packed(8).items()}
    step: Any = made.step
    return step.lower(made.abstract, batch)


def scopes(text: str, *, backward: bool = False) -> set[str]:
    """Return the scopes by which operations of a compiled program are named: all, or those of the backward pass."""
    paths = re.findall(r'op_name="(jit[^"]*/[^"]*)"', text)  # arguments have names too, and no paths
    return {part for path in paths if not backward or "transpose(" in path for part in re.findall(r"[a-z_]+", path)}


KINDS = ["plain", pytest.param("hc", marks=pytest.mark.product), "mhc"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_compiled_step_names_its_parts_forward_and_backward(kind):
    text = lowered(trainer(small(kind))).compile().as_text()
    # The plain residual's read is nothing, and its write an addition with nothing to compute in the backward pass.
    parts = (BLOCK | ENDS | {"maps"}) - ({"read", "maps"} if kind == "plain" else set())
    assert parts | {"optimizer"} <= scopes(text)
    assert parts - ({"write"} if kind == "plain" else set()) <= scopes(text, backward=True)


def test_a_kind_of_someone_else_is_named_without_a_word_of_its_own():
    with topologies.registry_restored():
        protocol.register(*topologies.BUILDERS["normed"])
        config = small("normed")
        text = lowered(Trainer(config, make_mesh(config.mesh, jax.devices()[:1]))).compile().as_text()
    assert scopes(text) >= BLOCK | ENDS


def test_a_program_without_names_would_be_seen(monkeypatch):
    monkeypatch.setattr(jax, "named_scope", lambda name: contextlib.nullcontext())
    text = lowered(Trainer(small("mhc"), trainer(small("mhc")).mesh)).compile().as_text()
    assert not (BLOCK | ENDS | {"maps", "optimizer"}) & scopes(text)


@pytest.mark.parametrize("kind", ["plain", *(pytest.param(kind, marks=pytest.mark.product) for kind in ("hc", "mhc"))])
def test_names_change_nothing_that_is_computed(kind, monkeypatch):
    config = small(kind, model={"scan": False})
    named = lowered(Trainer(config, trainer(config).mesh)).as_text()
    monkeypatch.setattr(jax, "named_scope", lambda name: contextlib.nullcontext())
    assert lowered(Trainer(config, trainer(config).mesh)).as_text() == named
