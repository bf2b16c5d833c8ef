"""Import the modules of ``residual.module``, which register residual kinds from elsewhere."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Iterator

from mhc.errors import UserError
from mhc.rules import refuse

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class ModuleError(UserError):
    """Reports a module of ``residual.module`` that does not exist or cannot be imported."""


def check_modules(name: str, value: str) -> None:
    """Raise UserError for the value of field ``name`` that is no list of module names."""
    for _ in _module_names(name, value):
        pass


def load(modules: str | None) -> None:
    """Import the modules that register kinds from elsewhere, each once in a process.

    Modules are searched for on Python's path, and then in the working directory.

    Args:
      modules: names as ``import`` takes them, separated by commas; None: nothing to import.

    Raises:
      ModuleError: there is no such module, or importing it fails; the message has the file and line.
      UserError: ``modules`` is no list of module names.
    """
    for name in [] if modules is None else _module_names("residual.module", modules):
        if name in sys.modules:
            continue
        try:
            _import(name)
        except ModuleNotFoundError as error:
            if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
                raise ModuleError(
                    f"residual.module: no module {name}, allowed: one that Python finds, on PYTHONPATH or in the "
                    "working directory"
                ) from None
            raise _failed(name, error) from None
        except (Exception, SystemExit) as error:  # the module is the user's, and so is whatever it raises
            raise _failed(name, error) from None


def _module_names(field: str, modules: str) -> Iterator[str]:
    for part in modules.split(","):
        name = part.strip()
        if not all(step.isidentifier() for step in name.split(".")) or name.endswith(".py"):
            allowed = "names of modules as `import` takes them, separated by commas"
            stem = name.removesuffix(".py").replace("/", ".").strip(".")
            refuse(field, modules, allowed, f" (did you mean {stem}?)" if name.endswith(".py") else "")
        yield name


def _import(name: str) -> None:
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    importlib.import_module(name)


def _failed(name: str, error: BaseException) -> ModuleError:
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [
        frame for frame in frames if "importlib" not in frame.filename and not frame.filename.startswith(_PACKAGE)
    ]
    file, line = (theirs[-1].filename, theirs[-1].lineno) if theirs else ("", None)
    if isinstance(error, SyntaxError):
        file, line = error.filename or file, error.lineno
    place = f" ({file}, line {line})" if file else ""
    # str() of a KeyError is quoted, that of a SyntaxError repeats the place; args[0] of an OSError is its number alone.
    plain = isinstance(error, (KeyError, SyntaxError)) and error.args
    text = " ".join(str(error.args[0] if plain else error).split())
    return ModuleError(f"residual.module: importing {name} failed{place}: {type(error).__name__}: {text}")
