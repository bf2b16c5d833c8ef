"""Say in one line which extra of this package installs what a program or a module misses.

``pip install mhc-jax`` brings jax and flax, which are enough for ``mhc.residual`` and ``mhc.kernels``. Everything that
trains, evaluates or reads data needs the extra ``[train]``.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from types import TracebackType

from mhc.errors import UserError

# What Python imports of the packages of [train] in pyproject.toml, in the same order (tests/test_package.py).
TRAIN = (
    "absl",
    "array_record",
    "grain",
    "matplotlib",
    "ml_collections",
    "optax",
    "orbax",
    "PIL",
    "scipy",
    "tensorboardX",
    "tensorflow_datasets",
    "tokenizers",
)


class MissingExtra(UserError, ImportError):
    """Says which packages are missing and which command installs them.

    It is a UserError for programs, which print it as one line, and an ImportError for whoever imports a module.
    """


def command(extra: str) -> str:
    """Return the command that installs an extra, of a checkout as well: ``pip install 'mhc-jax[train]'``."""
    return f"pip install 'mhc-jax[{extra}]'"


def require_train(what: str) -> None:
    """Refuse to go on where packages of the extra ``[train]`` are not installed.

    Args:
        what: what needs them, as the message begins: ``mhc.train``.
    Raises: MissingExtra.
    """
    missing = [package for package in TRAIN if _is_missing(package)]
    if missing:
        _print_as_a_line()
        raise MissingExtra(
            f"{what} needs more than jax and flax: {command('train')} (not installed: {', '.join(missing)})"
        )


def _is_missing(package: str) -> bool:
    if package in sys.modules:
        return sys.modules[package] is None
    return importlib.util.find_spec(package) is None


@functools.cache
def _print_as_a_line() -> None:
    """Have Python print a MissingExtra that nobody catches as one line and exit with 2.

    ``python -m mhc.train`` fails when it imports its package, before it can catch anything itself. Other exceptions are
    printed as they would have been.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, MissingExtra):
            before(kind, error, trace)
            return
        sys.stderr.write(f"error: {error}\n")
        if not hasattr(sys, "ps1"):  # an interactive Python goes on
            raise SystemExit(2)

    sys.excepthook = hook
