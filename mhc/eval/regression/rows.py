"""Choose the tokens that a model is compared on: prompts, and rows of the run's validation set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mhc.config import Config
from mhc.errors import UserError

PROMPTS = (
    "The residual stream carries what every layer has written so far, and",
    "In 1905, 3 of the 17 papers were about light; 2 + 2 = 4, 10 / 4 = 2.5.",
    "def mean(values: list[float]) -> float:\n    return sum(values) / len(values)\n",
    'Zoë asked: "Où est la gare?" – Über die Brücke, dann links. 東京の天気は晴れです。 Привет, мир!',
    "a a a a a a a a a a a a a a a a b",
    "",
)


class Rows(NamedTuple):
    """Holds the rows that the model reads, int32 [R, T] each; padding has segment 0."""

    tokens: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray

    @property
    def valid(self) -> np.ndarray:
        """Return bool [R, T]: which places hold tokens and no padding; M of them do."""
        return self.segment_ids > 0


def make_rows(config: Config, prompts: Sequence[str], validation: int, length: int) -> Rows:
    """Return rows of prompts, bos before each, then the first rows of the run's validation, all cut at ``length``.

    Where the tokeniser has more ids than the model (one imported without its own), they are taken modulo the model's.

    Raises:
      UserError: the validation set cannot be read, or has no text.
    """
    from mhc.data import pipeline, tokenizers
    from mhc.eval.common.prompts import place_of

    tokenizer = tokenizers.load(config.data.tokenizer)
    every = []
    for number, prompt in enumerate(prompts, start=1):
        try:
            ids = [tokenizer.bos_id, *tokenizer.encode(prompt).tolist()][:length]
        except UserError as error:
            raise UserError(f"{place_of(prompt, number)}: {error}") from None
        every.append((ids, [1] * len(ids), range(len(ids))))
    if validation:
        batches = pipeline.validation_batches(config.data, tokenizer, batch_size=validation, batches=1)
        batch = next(iter(batches), None)
        if batch is None:
            raise UserError("--rows: the validation set is empty; allowed: 0, or another --config.data.validation")
        for row in range(validation):
            every.append(tuple(batch[name][row, :length].tolist() for name in Rows._fields))
    longest = max(len(ids) for ids, _, _ in every)
    arrays = np.zeros((3, len(every), longest), np.int32)
    for row, fields in enumerate(every):
        for array, values in zip(arrays, fields, strict=True):
            array[row, : len(values)] = values
    arrays[0] %= config.vocab_size
    return Rows(*arrays[:, (arrays[1] > 0).any(axis=1)])  # a small validation set leaves rows empty
