"""Test that shapes are checked in every test, and that arrays broadcast over ranks only where the code says so."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mhc
from mhc.model import moe, norms
from mhc.model.attention import context
from tests import shapes
from tests.small import small

SOURCES = [path for path in Path(mhc.__file__).parent.rglob("*.py") if "jaxtyping" in path.read_text("utf-8")]

MODULE = """
from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int
    from nowhere import Nothing


def right(x: Float[Array, "B T D"], nothing: Nothing | None = None) -> Float[Array, "B D"]:
    return jnp.sum(x, axis=1)


def wrong(x: Float[Array, "B T D"]) -> Float[Array, "B T"]:
    return jnp.sum(x, axis=1)


@functools.partial(jax.jit, static_argnums=1)
def wrong_dtype(x: Float[Array, " D"], nothing: Nothing | None = None) -> tuple[Int[Array, " D"], Nothing | None]:
    return x, nothing


def wrong_later(x: Float[Array, " D"]) -> tuple[Int[Array, " D"], Layer]:
    return x, Layer()


class Layer:
    def __call__(self, x: Float[Array, "... D"], scale: Float[Array, " D"] | None = None) -> Float[Array, "... D"]:
        return x
"""


@pytest.fixture
def annotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Return a module with right and wrong annotations, imported under the hook."""
    (tmp_path / "annotated_here.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    shapes.install("annotated_here")
    yield importlib.import_module("annotated_here")
    del sys.modules["annotated_here"]


def test_a_wrong_annotation_is_seen(annotated: ModuleType) -> None:
    x = jnp.zeros((2, 3, 4))
    assert annotated.right(x).shape == (2, 4)
    assert annotated.right(np.zeros((2, 3, 4), np.float32)).shape == (2, 4)
    with pytest.raises(TypeError, match=r"checking the return value of annotated_here\.wrong"):
        annotated.wrong(x)
    with pytest.raises(TypeError, match=r"checking the return value of annotated_here\.wrong_dtype"):
        annotated.wrong_dtype(jnp.zeros(3))
    with pytest.raises(TypeError, match=r"checking the return value of annotated_here\.wrong_later"):
        annotated.wrong_later(jnp.zeros(3))


def test_an_array_of_another_shape_is_seen(annotated: ModuleType) -> None:
    layer = annotated.Layer()
    assert layer(jnp.zeros((2, 4)), jnp.zeros(4)).shape == (2, 4)
    for scale in (jnp.zeros(3), jnp.zeros((1, 4)), jnp.zeros(4, jnp.int32)):
        with pytest.raises(TypeError, match="checking parameter 'scale'"):
            jax.jit(layer)(jnp.zeros((2, 4)), scale)


def test_the_model_is_checked() -> None:
    config = small("plain", moe={"experts": 4})
    scores = jnp.zeros((2, 3, 4))
    assert moe.route(config, scores, jnp.zeros(4))[0].shape == (2, 3, 2)
    with pytest.raises(TypeError, match="checking parameter 'bias'"):
        moe.route(config, scores, jnp.zeros((1, 4)))
    with pytest.raises(TypeError, match="checking parameter 'x'"):
        norms.RMSNorm(3, 1e-6)(jnp.zeros(3, jnp.int32))
    with pytest.raises(TypeError, match="checking parameter 'keys'"):
        context.visible(jnp.zeros((2, 3), int), jnp.zeros((1, 3), int))


def arrays_named(node: ast.FunctionDef) -> bool:
    """Return whether an annotation of the function names an array type by its shape."""
    annotations = [
        node.returns,
        *(a.annotation for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)),
    ]
    return any("[Array, " in ast.unparse(annotation) for annotation in annotations if annotation is not None)


def test_every_annotated_function_is_checked() -> None:
    checked = 0
    for path in SOURCES:
        name = ".".join(path.relative_to(Path(mhc.__file__).parents[1]).with_suffix("").parts)
        module = importlib.import_module(name.removesuffix(".__init__"))
        for owner in ast.parse(path.read_text("utf-8")).body:
            for node in owner.body if isinstance(owner, ast.ClassDef) else [owner]:
                if isinstance(node, ast.FunctionDef) and arrays_named(node):
                    holder = getattr(module, owner.name) if isinstance(owner, ast.ClassDef) else module
                    function = inspect.getattr_static(holder, node.name)
                    assert hasattr(getattr(function, "fget", function), "__wrapped__"), f"{name}: {node.name}"
                    checked += 1
    assert checked >= 50


def test_ranks_are_not_promoted_unasked() -> None:
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.zeros((2, 3)) + jnp.zeros(3)
    assert (jnp.zeros((2, 3)) + jnp.zeros(3)[None] + 1).shape == (2, 3)


def test_no_module_needs_jaxtyping_at_run_time() -> None:
    """Users install none of the tests' tools; here they are installed, so that importing a module shows nothing."""
    root = Path(__file__).parents[1]
    files = [
        file
        for folder in ("mhc", "eval", "tpu", "bench", "configs", "examples")
        for file in (root / folder).rglob("*.py")
    ]
    assert len(files) > 300
    for file in files:
        for line in ast.parse(file.read_text("utf-8")).body:  # what stands under TYPE_CHECKING is deeper
            names = [line.module or ""] if isinstance(line, ast.ImportFrom) else []
            names += [name.name for name in line.names] if isinstance(line, ast.Import) else []
            needed = {name.partition(".")[0] for name in names} & {"jaxtyping", "beartype", "pytest", "hypothesis"}
            assert not needed, f"{file.relative_to(root)} imports {needed}"
