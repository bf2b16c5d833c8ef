"""Test the house's floors: a room imports only rooms below it, and the library rooms need jax and flax alone."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Room → floor. The longest name that a module starts with counts; every module must have one. A room may import its own
# floor (data beside model) and those below.
FLOORS = {
    "mhc": 0,  # the package itself: a docstring
    "mhc.errors": 0,
    "mhc.extras": 0,
    "mhc.checkout": 0,
    "mhc.python_files": 0,
    "mhc.rules": 0,
    "mhc.xla_options": 0,
    "mhc.kind_table": 0,
    "mhc.kinds": 0,
    "mhc.attention_impls": 0,
    "mhc.files": 0,
    "mhc.chips": 0,
    "mhc.config": 0,
    "mhc.full_disk": 0,
    "mhc.stdio": 0,
    "mhc.cli": 1,
    "mhc.remote": 1,
    "mhc.run_folder": 1,
    "mhc.rng": 1,
    "mhc.provenance": 1,
    "mhc.kernels": 2,
    "mhc.residual": 3,
    "mhc.model": 4,
    "mhc.model.parameters": 1,
    "mhc.data": 4,
    "mhc.sharding": 2,
    "mhc.distributed": 1,
    "mhc.monitor": 5,
    "mhc.train": 6,
    "mhc.interop": 7,
    "mhc.grid": 7,
    "mhc.eval.common": 7,
    "mhc.eval": 8,  # the rooms of evaluation, which stand apart: see APART
    "mhc.eval.watch": 9,  # a program made of two of them
    "eval": 9,
    "tpu": 7,
    "bench": 7,
    "configs": 7,
    "tools": 8,
    "train": 8,
}
# Rooms whose own rooms import none of one another: these meet in modules of lower floors alone.
APART = ("mhc.eval",)
# mhc.residual and mhc.kernels are used as a library in other people's models.
LIBRARY = ("mhc.residual", "mhc.kernels", "mhc.rng", "mhc.kind_table", "mhc.kinds", "mhc.rules", "mhc.errors")
LIBRARY_NEEDS = {"jax", "flax", "numpy"}  # numpy comes with jax
# functional.py and what it is made of are the bottom of the house, though they lie in the residual's folder:
# kernels are checked against them.
FLOORS |= {f"mhc.residual.{name}": 2 for name in ("functional", "arrays", "initial", "runner", "mixing", "reads")}


def floor(module: str) -> int | None:
    """Return the floor of one of our modules; None for a module of others."""
    parts = module.split(".")
    names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    known = next((name for name in names if name in FLOORS), None)
    if known == "mhc" and module != "mhc":
        raise AssertionError(f"{module} has no floor in tests/test_floors.py")
    return None if known is None else FLOORS[known]


def modules() -> list[tuple[str, Path]]:
    """Return every module of the project with its file."""
    files = [ROOT / "train.py"]
    for top in ("mhc", "eval", "tpu", "bench", "configs", "tools"):
        files += sorted((ROOT / top).rglob("*.py"))
    named = ((file.relative_to(ROOT).with_suffix("").parts, file) for file in files)
    return [(".".join(parts).removesuffix(".__init__"), file) for parts, file in named]


def imported(source: str, module: str, is_package: bool, *, in_functions: bool = True) -> Iterator[str]:
    """Yield the absolute names of what a module imports at run time, not under TYPE_CHECKING.

    ``in_functions``: also what it imports when a function is called, not only when the module itself is imported.
    """

    def walk(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not in_functions:
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield from walk(other)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                keep = len(module.split(".")) - node.level + is_package
                base = ".".join([*module.split(".")[:keep], *([base] if base else [])])
            # `from mhc import config` imports mhc.config; a name that is no module changes no floor.
            yield from (f"{base}.{alias.name}" for alias in node.names)
        else:
            for child in ast.iter_child_nodes(node):
                yield from walk(child)

    return walk(ast.parse(source))


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """Return what a module imports although it must not, as `module imports name: why`."""
    own = floor(module)
    assert own is not None, f"{module} has no floor in tests/test_floors.py"
    found = []
    for name in imported(source, module, is_package):
        top = name.split(".")[0]
        theirs = _known_floor(name)
        if theirs is not None and theirs > own:
            found.append(f"{module} imports {name}: floor {theirs} is above floor {own}")
        for outer in APART:
            rooms = (_room_in(outer, module), _room_in(outer, name))
            if None not in rooms and rooms[0] != rooms[1] and theirs == own:
                found.append(f"{module} imports {name}: the rooms of {outer} stand apart")
        if module.startswith(LIBRARY) and theirs is None and top not in LIBRARY_NEEDS | sys.stdlib_module_names:
            found.append(f"{module} imports {name}: it may need only jax, flax and the standard library")
        if (
            module.startswith(LIBRARY)
            and theirs is not None
            and not f"{name}.".startswith(tuple(f"{room}." for room in LIBRARY))
        ):
            found.append(f"{module} imports {name}: it must work without the rest of the project")
    return found


def _room_in(outer: str, module: str) -> str | None:
    """Return the room of ``outer`` that a module stands in; None: it stands in none of them."""
    return module.removeprefix(f"{outer}.").split(".")[0] if module.startswith(f"{outer}.") else None


def circle(sources: Mapping[str, tuple[str, bool]]) -> list[str]:
    """Return modules that import one another in a circle while they are imported; empty where there is none.

    Args:
      sources: {module: (its source, whether it is a package)}.
    """
    graph: dict[str, set[str]] = {}
    for module, (source, is_package) in sources.items():
        names = imported(source, module, is_package, in_functions=False)
        # `from mhc.config import Config` imports the package, `from mhc import config` a module of it.
        modules = {name if name in sources else name.rpartition(".")[0] for name in names}
        # With a module its packages are imported, but for those that the importing module lies in.
        packages = {package for name in modules for package in _packages(name)} - {module, *_packages(module)}
        graph[module] = {name for name in modules | packages if name in sources and name != module}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def _packages(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def _known_floor(name: str) -> int | None:
    # `from mhc import x` may name an attribute of the package rather than a module.
    file = ROOT.joinpath(*name.split("."))
    is_module = file.with_suffix(".py").exists() or file.is_dir()
    return floor(name if is_module or "." not in name else name.rpartition(".")[0])


@pytest.mark.parametrize(("module", "file"), modules(), ids=lambda value: value if isinstance(value, str) else "")
def test_no_import_climbs_a_floor(module: str, file: Path) -> None:
    assert not violations(file.read_text("utf-8"), module, file.name == "__init__.py")


def test_no_modules_import_one_another_in_a_circle() -> None:
    assert circle({name: (file.read_text("utf-8"), file.name == "__init__.py") for name, file in modules()}) == []


@pytest.mark.parametrize(
    ("first", "second", "is_circle"),
    [
        ("import b", "import a", True),
        ("from . import b", "from a import name", True),
        ("class A:\n    from b import x", "try:\n    import a\nexcept ImportError:\n    pass", True),
        ("import b", "def f():\n    import a", False),
        ("import b", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a", False),
        ("import b", "import c", False),
    ],
)
def test_a_circle_is_seen(first: str, second: str, is_circle: bool) -> None:
    sources = {"a": (first, False), "b": (second, False), "c": ("", False)}
    if first.startswith("from ."):
        sources = {"a": ("from . import b", True), "a.b": (second, False)}
    assert bool(circle(sources)) == is_circle


def test_a_circle_through_a_package_is_seen() -> None:
    """``q`` needs a module of ``p`` that imports nothing, but with it comes ``p`` itself."""
    sources = {"p": ("from p import x", True), "p.x": ("import q", False), "p.y": ("", False)}
    assert set(circle(sources | {"q": ("from p.y import name", False)})) == {"p", "p.x", "q"}
    assert circle(sources | {"q": ("", False)}) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mhc.model.decoder", "from mhc.train import step"),
        ("mhc.model.decoder", "def f():\n    import mhc.train.run"),
        ("mhc.model.decoder", "from ..train import run"),
        ("mhc.residual.plain", "import grain"),
        ("mhc.residual.plain", "from mhc.config import Config"),
        ("mhc.residual.functional", "from mhc.residual import registry"),
        ("mhc.data.rows.packing", "import eval.compare"),
        ("mhc.eval.common.page", "from mhc.eval.compare.runs import Arm"),
        ("mhc.eval.inspect.interventions", "from mhc.eval.perplexity.score import score"),
        ("mhc.eval.compare.runs", "def f():\n    from mhc.eval import mappings"),
        ("mhc.eval.mappings", "import mhc.eval.watch"),
    ],
)
def test_a_climbing_import_is_seen(module: str, source: str) -> None:
    assert violations(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mhc.train.run", "from mhc.model import decoder\nimport grain"),
        ("mhc.residual.plain", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import jaxtyping"),
        ("mhc.residual.plain", "import jax.numpy as jnp\nfrom flax import nnx\nimport functools"),
        ("mhc.residual.plain", "from . import functional"),
        ("mhc.eval.compare.runs", "from mhc.eval.common import page\nfrom mhc.eval.compare import figures"),
        ("mhc.eval.watch", "from mhc.eval.perplexity.score import score"),
    ],
)
def test_an_import_of_a_room_below_is_fine(module: str, source: str) -> None:
    assert not violations(source, module)


def test_the_library_rooms_import_nothing_that_a_training_run_alone_needs() -> None:
    """This checks what `from mhc.residual import ...` loads beyond what jax and flax import by themselves."""
    code = (
        "import jax, flax.nnx, sys; before = set(sys.modules); import mhc.residual; print(*set(sys.modules) - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert "mhc" in loaded
    assert loaded <= {"mhc"} | LIBRARY_NEEDS | sys.stdlib_module_names
