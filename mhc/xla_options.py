"""Find which options this release of XLA knows, since an unknown one ends the process or the compilation.

XLA drops options from release to release. An option that only saves time or fixes an order is left out if it is gone.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping

# Reads XLA_FLAGS without making a device, in a third of the time that jax would take; an abort leaves no core file.
_READ_FLAGS = """
import resource
from jaxlib import xla_client
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
xla_client.CompileOptions().executable_build_options.debug_options
"""


def unknown_flags(flags: Iterable[str]) -> set[str]:
    """Return those of some flags for ``XLA_FLAGS`` (``--name=value``) that the installed XLA does not know.

    This asks a process of its own, in half a second: XLA reads the variable once, and aborts over an unknown flag.
    """
    environment = {**os.environ, "XLA_FLAGS": " ".join(flags)}
    asked = subprocess.run(
        [sys.executable, "-c", _READ_FLAGS], env=environment, capture_output=True, text=True, errors="replace"
    )
    named = re.search(r"Unknown flags? in XLA_FLAGS: (.*)", asked.stderr)
    return set() if named is None else set(named[1].split())


_REFUSALS = {
    r"Unknown flags? in XLA_FLAGS: (.+)": "this release of XLA does not know {}",
    r"Couldn't interpret value (\S*) for flag (\S+?)\.?$": "given {} for --{}, which is no value of it",
    r'Could not open file "(.+?)" to read flags': "given {}, which is no file of flags; a flag begins with --",
}


def refusal(log: str) -> str | None:
    """Return XLA's complaint about ``XLA_FLAGS`` as a line, from the output of a process that it ended; else None."""
    for pattern, words in _REFUSALS.items():
        told = re.search(pattern, log, re.MULTILINE)
        if told is not None:
            return f"XLA_FLAGS: {words.format(*told.groups())}"
    return None


def known_options(options: Mapping[str, bool | int]) -> dict[str, bool | int]:
    """Return those of some options for ``jax.jit(compiler_options=…)`` on a CPU that the installed XLA knows."""
    return {name: value for name, value in options.items() if _is_known(name, value)}


@functools.cache
def _is_known(option: str, value: bool | int) -> bool:
    import jax

    try:
        jax.jit(lambda: 0, compiler_options={option: value}).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" in str(error):
            return False
        raise
    return True
