"""Turn errors of kinds from elsewhere into one line that names the kind and the place, whatever their code raises."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from mhc import kinds
from mhc.errors import UserError, failure


class KindError(UserError, ValueError):
    """Reports a residual kind from elsewhere that does not keep the protocol, or whose code raises."""


def is_elsewhere(kind: str) -> bool:
    """Return whether a kind was registered by somebody else's code, which the contract tests do not see."""
    spec = kinds.known().get(kind)
    return spec is not None and not spec.builder


def name_of(kind: str) -> str:
    """Return a kind's name for messages, with the module that registered it."""
    module = kinds.module_of(kind)
    return f"residual kind {kind!r}" + (f" of module {module}" if module else "")


@contextlib.contextmanager
def blamed(kind: str, part: str) -> Iterator[None]:
    """Turn errors of the code of a kind from elsewhere into a KindError; errors of this project's kinds pass unchanged.

    Args:
      kind: its name. part: what runs, for the message: "its builder", "`read`".

    Raises:
      KindError: one line with the kind, the part, the error, and the file and line where they are known.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not is_elsewhere(kind):
            raise
        raise KindError(f"{name_of(kind)}: {part} failed{failure(error)}") from error
