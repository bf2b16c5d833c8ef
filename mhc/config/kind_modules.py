"""Import the modules of ``residual.module``, which register residual kinds from elsewhere."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator

from mhc.errors import UserError, failure
from mhc.rules import refuse


class ModuleError(UserError):
    """Reports a module of ``residual.module`` that does not exist or cannot be imported."""


def check_modules(name: str, value: str) -> None:
    """Raise UserError for the value of field ``name`` that is no list of module names."""
    for _ in _module_names(name, value):
        pass


def load(modules: str | None) -> None:
    """Import the modules that register kinds from elsewhere, each once in a process.

    Modules are searched for on Python's path, in the working directory, and beside the config file that a program ran.

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
                    f"residual.module: no module {name}, allowed: one that Python finds, on PYTHONPATH, in the working "
                    "directory or beside the config file"
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
    return ModuleError(f"residual.module: importing {name} failed{failure(error)}")
