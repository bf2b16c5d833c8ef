"""List the implementations of attention and what each lacks.

Like `mhc.kinds` this module is free of jax, so that a configuration is refused before anything heavy is loaded.
`mhc.model.attention` holds the implementations.
"""

from __future__ import annotations

from collections.abc import Collection

NAMES = ("auto", "xla", "sdpa", "flash")

# What a configuration may need of an implementation, in the words of messages.
SOFTCAP = "softcap"
VALUE_WIDTH = "values of another width than the keys"
BIAS = "additive bias (alibi, relative_bias)"
PREFIX = "prefix mask"

_LACKS: dict[str, tuple[str, ...]] = {"sdpa": (SOFTCAP, VALUE_WIDTH), "flash": (BIAS, PREFIX)}


def lacks(name: str, needs: Collection[str]) -> str | None:
    """Return the first of ``needs`` that an implementation lacks, in words; None where it has them all."""
    return next((feature for feature in _LACKS.get(name, ()) if feature in needs), None)
