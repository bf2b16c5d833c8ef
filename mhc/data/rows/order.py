"""Put the documents of each source into the order in which training reads them, on grain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from mhc.config import DataConfig
from mhc.data.corpus.indexed import IndexedFiles
from mhc.data.corpus.pieces import Pieces, piece_size
from mhc.data.corpus.sources import Source, joint_fingerprint, parts
from mhc.data.rows.encoding import Encode, open_corpus
from mhc.data.rows.packing import Batch, DocumentStream, empty_batch
from mhc.data.tokenizers import Tokenizer
from mhc.data.windtunnel.rows import TaskOrder, open_task


class Order(NamedTuple):
    """Holds the documents of one source in the order that training reads them, without end."""

    source: Source
    pieces: Pieces
    places: grain.MapDataset  # the number of the piece at each position
    documents: grain.MapDataset  # the piece at each position, tokenised

    def stream(self, position: int, stride: int, offset: int) -> DocumentStream:
        """Return the documents ``position, position + stride, …``, the first without its first ``offset`` pairs."""
        return DocumentStream(self.documents.__getitem__, position, stride, offset)

    def empty(self, rows: int, length: int) -> Batch:
        """Return a batch of padding."""
        return empty_batch(rows, length)

    def name(self, position: int) -> str:
        """Return the file and place of the document at a position."""
        return self.source.name(self.pieces.document(int(self.places[position])))


def open_orders(data: DataConfig, tokenizer: Tokenizer, seed: int) -> list[Order] | list[TaskOrder]:
    """Open the sources of training, each with the endless order of its documents that the seed gives.

    A wind tunnel has the endless order of its sequences.
    """
    task = open_task(data)
    if task is not None:
        return [TaskOrder(task, data.source, seed)]
    # grain adds the epoch to the seed: without a hash, seed 1 would begin with the second epoch of seed 0
    order_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    orders = []
    for _, config in parts(data, "train"):
        source = open_corpus(config, tokenizer, "train")
        pieces = Pieces(source, piece_size(data))
        places = grain.MapDataset.range(len(pieces)).shuffle(seed=order_seed).repeat()
        documents = grain.MapDataset.source(pieces).shuffle(seed=order_seed).repeat().map(Encode(tokenizer))
        orders.append(Order(source, pieces, places, documents))
    return orders


def fingerprint(orders: Sequence[Order | TaskOrder]) -> str:
    """Return a hash of the corpora, in hex: equal where names, sizes and the way of reading are."""
    sources: list[Any] = [order.source for order in orders]
    return sources[0].fingerprint if len(sources) == 1 else joint_fingerprint(sources)


def digests(orders: Sequence[Order | TaskOrder]) -> dict[str, str]:
    """Return {source as the user named it: a hash of what it holds, in hex}; of files it covers their contents."""
    sources: list[Any] = [order.source for order in orders]
    return {
        source.label: source.digest if isinstance(source, IndexedFiles) else source.fingerprint for source in sources
    }
