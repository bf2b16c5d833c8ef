"""Run the Python files that users write: config files with ``get_config()``, grid files with ``get_grid()``."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mhc import checkout
from mhc.errors import UserError, did_you_mean


def result_of(path: str, function: str, kind: str, *, near: Sequence[str] = (), locate: bool = False) -> Any:
    """Call a function of a user's file, and return its result.

    Args:
      path: ``file.py``, or ``file.py:text`` to call the function with a text.
      function: its name: ``get_config``.
      kind: the word for such a file in messages: ``config``.
      near: paths of other files of the kind, of which a message offers the nearest where this one is not there.
      locate: whether a UserError that the file raises gets the file and line; else it is passed on as it is.

    Raises:
      UserError: the file is not there, cannot be run, has no such function, or raises; with its line if one is known.
    """
    file, colon, text = path.partition(":")
    if not Path(file).is_file():
        hint = did_you_mean(file, near) or checkout.hint(Path(file).parts)
        raise UserError(f"{kind} file {file}: no such file{hint}")
    # What lies beside this package in a checkout (`configs`) can be imported from any working directory.
    if checkout.exists() and str(checkout.ROOT) not in sys.path:
        sys.path.append(str(checkout.ROOT))
    look_beside(file)
    with _told(file, kind, locate):
        call = runpy.run_path(file).get(function)
    if call is None:
        raise UserError(f"{kind} file {file}: it defines no {function}()")
    with _told(file, kind, locate):
        return call(text) if colon else call()


def look_beside(file: str) -> None:
    """Let imports find modules in the working directory, then those beside a user's file, after all others."""
    for folder in (os.getcwd(), str(Path(file).resolve().parent)):
        if folder not in sys.path:
            sys.path.append(folder)


@contextlib.contextmanager
def _told(file: str, kind: str, locate: bool) -> Iterator[None]:
    """Turn whatever the user's file raises within the block into a UserError of one line."""
    try:
        yield
    except SyntaxError as error:
        raise UserError(f"{kind} file {error.filename}, line {error.lineno}: {error.msg}") from None
    except Exception as error:  # the file is the user's, and so is whatever it raises
        if isinstance(error, UserError) and not locate:
            raise
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        place = f", line {lines[-1]}" if lines else ""
        reason = error.args[0] if isinstance(error, KeyError) and error.args else error  # str() quotes a KeyError's
        name = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        hint = checkout.hint((error.name or "").split(".")) if isinstance(error, ModuleNotFoundError) else ""
        raise UserError(f"{kind} file {file}{place}: {name}{reason}{hint}") from None
