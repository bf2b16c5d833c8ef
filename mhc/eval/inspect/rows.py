"""Read the rows that a model is inspected on, and run observers over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from mhc.data.corpus.sources import Split
from mhc.errors import UserError
from mhc.eval.common.checkpoints import Checkpoint
from mhc.eval.common.program import Program, multiple
from mhc.eval.common.rows import packed, scored_places
from mhc.eval.common.scoring import FIELDS
from mhc.model.decoder import Decoder, Observer

Tell = Callable[[int, int], None]
"""Called with how many are done, and of how many."""
INPUTS = ("tokens", "segment_ids", "positions")


class Rows(NamedTuple):
    """Holds rows of a corpus in batches of one shape. R of them hold a scored target."""

    batches: list[dict[str, np.ndarray]]  # FIELDS [B, T] int32, counted [B, T] float32: whether the target is scored
    there: np.ndarray  # bool: which of all rows of the batches are those R
    documents: int  # with a scored target

    def sums(self, name: str) -> np.ndarray:
        """Return how many tokens each row [R] has ("segment_ids"), or how many are scored ("counted")."""
        return np.concatenate([(batch[name] > 0).sum(axis=1) for batch in self.batches])[self.there]


def read_rows(checkpoint: Checkpoint, split: Split, rows: int, batch_size: int) -> Rows:
    """Return rows packed as the run's validation reads them, all for 0. Raises UserError where there is no token."""
    config = checkpoint.config
    corpus = packed(config, split, rows=rows, batch_size=multiple(batch_size, checkpoint.mesh))
    batches, documents = [], set()
    for batch in corpus.batches:
        counted = scored_places(config, batch)
        documents |= set(np.unique(batch["documents"][counted]).tolist())
        kept = {name: batch[name] for name in FIELDS if name in batch}
        batches.append({**kept, "counted": counted.astype(np.float32)})
    there = np.concatenate([batch["counted"].any(axis=1) for batch in batches]) if batches else np.zeros(0, bool)
    if not there.any():
        raise UserError("nothing to score: the split has no token")
    return Rows(batches, there, len(documents))


def observed(decoder: Decoder, batch: dict[str, jax.Array], observe: Observer) -> dict[str, jax.Array]:
    """Return what an observer saw in every sublayer, as ``Decoder.forward`` gathers it."""
    return decoder.forward(batch["tokens"], batch.get("segment_ids"), batch.get("positions"), observe).observed


def over(program: Program, rows: Rows, tell: Tell) -> list[Any]:
    """Return a program's results for the inputs of each batch, on the host."""
    parts = []
    for number, batch in enumerate(rows.batches):
        parts.append(jax.device_get(program(program.put({name: batch[name] for name in INPUTS}))))
        tell(number + 1, len(rows.batches))
    return parts
