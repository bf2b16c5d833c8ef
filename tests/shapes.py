"""Check jaxtyping annotations by an import hook: the shape and dtype of every annotated array, at every call.

The package imports jaxtyping under ``TYPE_CHECKING`` alone, so that its users need no jaxtyping; at run time its
annotations are strings that nothing evaluates. The hook compiles a module that mentions jaxtyping with three changes:
those imports run; a function keeps those annotations that name an array, since others may name what only a type checker
imports; and jaxtyping, with beartype, checks the function. A jitted function is checked while jax traces it.

Fields of dataclasses are not checked: jax makes trees of shapes, of layouts and of None of the same classes.
"""

from __future__ import annotations

import ast
import functools
import importlib.machinery
import sys
import typing
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import CodeType, ModuleType
from typing import Any

CHECK, ARRAY = "__check_shapes__", "__array__"  # names that a checked module gets


def check_shapes(function: Any) -> Any:
    """Return the function with its arguments and its result checked.

    Its annotations are evaluated at its first call, when its module knows every name. A name that it
    does not know is an error; beartype by itself would leave the annotation unchecked.
    """

    @functools.cache
    def checked() -> Any:
        from beartype import beartype
        from jaxtyping import jaxtyped

        function.__annotations__ = typing.get_type_hints(function)
        return jaxtyped(typechecker=beartype)(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return checked()(*args, **kwargs)

    return call


class _Checks(ast.NodeTransformer):
    """Decorates the functions whose annotations name an array type that the module imports from jaxtyping."""

    def __init__(self) -> None:
        self.types: set[str] = set()  # of arrays
        self.unknown: set[str] = set()  # names that a type checker alone knows

    def visit_If(self, node: ast.If) -> Any:
        """Run the imports from jaxtyping where only a type checker would."""
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            return self.generic_visit(node)
        run = []
        for line in node.body:
            if isinstance(line, ast.ImportFrom) and line.module == "jaxtyping":
                run.append(self.visit(line))
            elif isinstance(line, ast.Import | ast.ImportFrom):
                self.unknown.update(alias.asname or alias.name for alias in line.names)
        return [*run, node]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        if node.module == "jaxtyping":
            self.types.update(alias.asname or alias.name for alias in node.names)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        a = node.args
        arguments = [*a.posonlyargs, *a.args, *a.kwonlyargs, *(x for x in (a.vararg, a.kwarg) if x is not None)]
        if not any(map(self._names_an_array, [node.returns, *(argument.annotation for argument in arguments)])):
            return node
        for argument in arguments:
            argument.annotation = self._kept(argument.annotation)
        node.returns = self._kept(node.returns)
        # Innermost, so that jit, custom_vjp and the like call the checked function.
        node.decorator_list.append(ast.copy_location(ast.Name(CHECK, ast.Load()), node))
        return node

    def _names_an_array(self, annotation: ast.expr | None) -> bool:
        return annotation is not None and any(
            isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in self.types
            for node in ast.walk(annotation)
        )

    def _kept(self, annotation: ast.expr | None) -> ast.expr | None:
        """Return the checked form of an annotation.

        ``Array`` in it stands for NumPy's arrays too, which jax takes; a name that cannot be looked up, for anything.
        """
        if annotation is None or not self._names_an_array(annotation):
            return None
        for node in ast.walk(annotation):
            if isinstance(node, ast.Name):
                node.id = ARRAY if node.id == "Array" else "object" if node.id in self.unknown else node.id
        return annotation


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles a module that mentions jaxtyping with its checks, past ``__pycache__``; loads others as Python does."""

    def get_code(self, fullname: str) -> CodeType | None:
        source = self.get_data(self.path)
        if b"jaxtyping" not in source:
            return super().get_code(fullname)
        tree = ast.fix_missing_locations(_Checks().visit(ast.parse(source, self.path)))
        return compile(tree, self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        if b"jaxtyping" in self.get_data(self.path):
            import jax
            import numpy as np

            module.__dict__.update({CHECK: check_shapes, ARRAY: jax.Array | np.ndarray})
        super().exec_module(module)


class _Finder(MetaPathFinder):
    """Finds the modules of a package where Python does, for ``_Loader`` to load."""

    def __init__(self, package: str):
        self.package = package

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != self.package:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(name, spec.loader.path)
        return spec


def install(package: str) -> None:
    """Check the shapes of a package's modules that are imported from now on."""
    sys.meta_path.insert(0, _Finder(package))
