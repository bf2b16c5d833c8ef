"""Let a user's filter decide which tokens may follow where the state before the last norm is small."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

import numpy as np

from mhc.data.tokenizers import Tokenizer
from mhc.errors import UserError, failure
from mhc.python_files import result_of

Allows = Callable[[str, str], object]
"""(text so far, prompt included; text of a candidate) -> whether the candidate may follow."""
CANDIDATES = 50


def of_regex(pattern: str) -> Allows:
    """Return the filter of candidates that a regular expression matches from beginning to end.

    Raises:
      UserError: the pattern is no regular expression.
    """
    try:
        matches = re.compile(pattern, re.DOTALL).fullmatch
    except re.error as error:
        raise UserError(f"--prior_regex: given {pattern}, allowed: a regular expression ({error})") from None
    return lambda text, candidate: matches(candidate)


def of_file(path: str) -> Allows:
    """Return the filter of a user's file: what its ``get_filter()`` returns.

    Raises:
      UserError: no such file, or one without a ``get_filter`` that returns a callable.
    """
    found = result_of(path, "get_filter", "filter")
    if not callable(found):
        raise UserError(f"--prior_file {path}: get_filter() returned {found!r}, allowed: a callable (text, candidate)")

    def allows(text: str, candidate: str) -> object:
        try:
            return bool(found(text, candidate))
        except Exception as error:  # the file is the user's, and so is whatever it raises
            raise UserError(f"--prior_file {path}: the filter failed on {candidate!r}{failure(error)}") from error

    return allows


@dataclasses.dataclass(frozen=True)
class PriorCheck:
    """Describes the check: where the norm of the state before the last norm is below ``norm``, ``allows`` is asked.

    It is asked about the ``candidates`` most probable of the tokens that could be drawn. A token that ends the text has
    the text "".
    """

    norm: float
    allows: Allows
    candidates: int = CANDIDATES

    def filtered(
        self, chosen: np.ndarray, text: str, tokenizer: Tokenizer, ends: frozenset[int]
    ) -> tuple[np.ndarray, str]:
        """Return (the logits to draw from [V], -inf where a token is left out; ``filtered`` or ``empty``).

        Where the filter leaves nothing, the logits come back as they were, and the word is ``empty``.

        Args:
          chosen: logits [V] to draw from, -inf where a token is left out already.
          text: the prompt and what follows it so far.
          tokenizer: gives the candidates' texts.
          ends: ids that end a text.
        """
        order: Sequence[int] = np.argsort(-chosen, kind="stable")[: self.candidates].tolist()
        possible = [token for token in order if chosen[token] > -np.inf]
        kept = [token for token in possible if self.allows(text, "" if token in ends else tokenizer.decode([token]))]
        if not kept:
            return chosen, "empty"
        out = np.full_like(chosen, -np.inf)
        out[kept] = chosen[kept]
        return out, "filtered"
