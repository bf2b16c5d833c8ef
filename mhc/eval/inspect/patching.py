"""Patch activations of one prompt into the forward pass of another, one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mhc.config import Config
from mhc.errors import UserError
from mhc.eval.common.checkpoints import Checkpoint
from mhc.eval.common.program import Program, multiple
from mhc.eval.inspect.rows import Tell
from mhc.model.decoder import Decoder
from mhc.model.edits import SUBLAYERS, Edits

PATCHES = ("state", *SUBLAYERS, "head")


class Patched(NamedTuple):
    """Holds how far single activations of a clean prompt restore its answer in the pass of a corrupted prompt."""

    what: str  # of PATCHES
    clean: float  # logit of the answer less that of the other one after the clean prompt
    corrupted: float
    difference: np.ndarray  # [L, T], of heads [L, H]: the same where one activation is patched
    share: np.ndarray  # of it that is recovered: 0 as corrupted, 1 as clean
    everything: float | None  # share where the whole state before block 0 is patched, 1 if all is well
    answer: int
    other: int


def patch(
    checkpoint: Checkpoint,
    clean: Sequence[int],
    corrupted: Sequence[int],
    what: str,
    *,
    answer: int | None = None,
    other: int | None = None,
    batch_size: int = 16,
    tell: Tell = lambda done, total: None,
) -> Patched:
    """Patch one activation after the other, of each block: at one position, or of one head at all positions.

    Args:
      clean: token ids.
      corrupted: as many token ids.
      what: one of PATCHES; ``state`` is the residual state before a block.
      answer: the token whose logit after the last token counts in favour; None: the most probable one after ``clean``.
      other: the token whose logit counts against; None: the most probable one after ``corrupted``.
      batch_size: rows at once; one of them is the clean prompt.
      tell: called with how many patches are done, and of how many.

    Raises:
      UserError: the same token follows both prompts, so that there is nothing to recover.
    """
    layers, length = checkpoint.config.model.layers, len(clean)
    places = checkpoint.config.attention.heads if what == "head" else length
    variants: list[Any] = [None, *(["all"] if what == "state" else [])]
    variants += [(layer, place) for layer in range(layers) for place in range(places)]
    rows = multiple(max(batch_size, 2), checkpoint.mesh)
    tokens = np.array([clean, *[corrupted] * (rows - 1)], np.int32)

    def run(decoder: Decoder, batch: dict[str, jax.Array], edits: Edits) -> jax.Array:
        h = decoder.forward(batch["tokens"], edits=edits).h
        return decoder.logits(h[:, -1:])[:, 0]

    program = Program(checkpoint, run)
    batch = program.put({"tokens": tokens})
    differences: list[np.ndarray] = []  # logit of the answer less that of the other one, of each variant
    ends: tuple[float, float] = (0.0, 0.0)
    for first in range(0, len(variants), rows - 1):
        some = variants[first : first + rows - 1]
        logits = np.asarray(program(batch, _patches(some, what, checkpoint.config, rows, length)), np.float64)
        if first == 0:
            answer = int(logits[0].argmax()) if answer is None else answer
            other = int(logits[1].argmax()) if other is None else other
            if answer == other:
                raise UserError(f"token {answer} follows both prompts: name two that differ by --answer and --other")
            ends = (logits[0, answer] - logits[0, other], logits[1, answer] - logits[1, other])
            if abs(ends[0] - ends[1]) < 1e-4:
                raise UserError(f"--clean, --corrupted: the logit difference is {ends[0]:.4f} after both of them")
        differences.append(logits[1 : 1 + len(some), answer] - logits[1 : 1 + len(some), other])
        tell(min(first + rows - 1, len(variants)), len(variants))
    difference = np.concatenate(differences)
    share = (difference - ends[1]) / (ends[0] - ends[1])
    start = len(variants) - layers * places
    assert answer is not None and other is not None
    return Patched(
        what,
        *ends,
        difference[start:].reshape(layers, places),
        share[start:].reshape(layers, places),
        float(share[1]) if what == "state" else None,
        answer,
        other,
    )


def _patches(variants: Sequence[Any], what: str, config: Config, rows: int, length: int) -> Edits:
    """Return edits that patch each variant in a row of its own, from row 1 on.

    A variant is None (nothing is patched), "all" (the state before block 0) or (block, position or head).
    """
    layers = config.model.layers
    if what == "head":
        where = np.zeros((layers, rows, length, config.attention.heads), bool)
    elif what == "state":
        where = np.zeros((layers, rows, length), bool)
    else:
        where = np.zeros((layers, 2, rows, length), bool)
    for row, variant in enumerate(variants, start=1):
        if variant == "all":
            where[0, row] = True
        elif variant is not None:
            layer, place = variant
            if what == "head":
                where[layer, row, :, place] = True
            elif what == "state":
                where[layer, row, place] = True
            else:
                where[layer, SUBLAYERS.index(what), row, place] = True
    name = {"head": "head_patch", "state": "state_patch"}.get(what, "output_patch")
    return Edits(**{name: where})  # type: ignore[arg-type]
