"""The input pipeline: source → shuffle → repeat → tokenise → pack → batch, on grain.

Order. The documents of the training split, long ones in pieces, are shuffled anew each epoch, and the epochs follow one
another without end: one global order. Row r of a batch of B rows is a stream of its own over the positions r, r + B,
r + 2B, … of that order. So the batches depend on the corpus, the seed, T and B alone: a process takes the rows that its
devices hold of the same global batch, and a state merged from all can be restored by another number of processes.

State. Two integers a row: the position of its document, and the pairs already taken from it (see `mhc.data.packing`).

Mixtures. Every source has an order of its own, and a row a stream in each of them; which one its next sequence comes
from depends on the seed, the row and the number of the batch (`mhc.data.mixture`). The state has two integers a row and
source, and that number.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import grain
import numpy as np

from mhc.config import DataConfig
from mhc.data.files import TokenFiles, piece_size
from mhc.data.mixture import Assignment
from mhc.data.packing import Batch, Document, DocumentStream, Piece, Pieces, Tokenised, empty_batch, fill_row
from mhc.data.prepared import Prepared
from mhc.data.sources import Joined, Source, Split, joint_fingerprint, open_source, parts
from mhc.data.tokenizers import ByteTokenizer, Tokenizer
from mhc.errors import UserError

_STATE_FORMAT = 2  # 1 had the rows as [first, last + 1]
_MOST_THREADS = 16


class TrainIterator:
    """Endless batches with a state; make it with `train_iterator`.

    ``close()`` ends the thread that prepares batches; it may be called again, and is at exit if it was not before.
    """

    def __init__(
        self,
        data: DataConfig,
        tokenizer: Tokenizer,
        *,
        batch_size: int,
        seed: int,
        rows: Sequence[int],
    ):
        several = parts(data, "train")
        sources = [open_corpus(own, tokenizer, "train") for _, own in several]
        corpus = sources[0].fingerprint if len(sources) == 1 else joint_fingerprint(sources)
        self._identity = {
            "format": _STATE_FORMAT,
            "batch_size": batch_size,
            "seed": seed,
            "corpus": corpus,
            "piece": piece_size(data),
            "tokenizer": tokenizer.content_hash,
        }
        if len(several) > 1:
            self._identity["mixture"] = [[one.name, one.weight] for one, _ in several]
        self._rows = list(rows)
        # grain adds the epoch to the seed: without a hash, seed 1 would begin with the second epoch of seed 0
        order_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
        orders = []
        self._places: list[tuple[Source, Pieces, grain.MapDataset]] = []
        for source in sources:
            pieces = Pieces(source, piece_size(data))
            places = grain.MapDataset.range(len(pieces)).shuffle(seed=order_seed).repeat()
            self._places.append((source, pieces, places))
            orders.append(grain.MapDataset.source(pieces).shuffle(seed=order_seed).repeat().map(_Encode(tokenizer)))
        self._assign = Assignment([one.weight for one, _ in several], seed) if len(several) > 1 else None
        # The tokenizers library takes a second for a megabyte, and lets go of the interpreter meanwhile: threads do.
        usual = 1 if isinstance(tokenizer, ByteTokenizer) else min(os.cpu_count() or 1, _MOST_THREADS)
        threads = min(len(rows), data.workers or usual)
        packed = _PackedDataset(_Packing(orders, self._assign, rows, batch_size, data.sequence_length, threads))
        # In a list, so that closing can let go of it: grain's iterators close themselves when they are deleted, which
        # at the interpreter's exit is too late (their modules are gone, and a traceback lands on stderr).
        self._held: list[grain.DatasetIterator] = [
            iter(grain.experimental.ThreadPrefetchIterDataset(packed, prefetch_buffer_size=data.prefetch))
        ]
        self.close = weakref.finalize(self, _close, self._held)

    def __iter__(self) -> TrainIterator:
        return self

    def __next__(self) -> Batch:
        """The next batch: this process' rows. Raises UserError when the source finds a document that it cannot read."""
        return next(self._batches)

    def get_state(self) -> dict[str, Any]:
        """What the batches handed out so far have consumed, for JSON; batches prepared ahead do not count."""
        state = self._batches.get_state()
        places = {name: state[name].tolist() for name in ("position", "offset")}
        batches = {} if self._assign is None else {"batches": int(state["batches"])}
        return {**self._identity, **batches, "rows": self._rows, **places}

    def describe(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        """Where each row of the batch after ``state`` begins: row, document (file and place), offset in its piece."""
        found = []
        for row, position, offset in zip(_rows(state), state["position"], state["offset"], strict=True):
            number = 0
            if self._assign is not None:
                number = self._assign(state["batches"], row)
                position, offset = position[number], offset[number]
            source, pieces, places = self._places[number]
            document = source.name(pieces.document(int(places[position])))
            found.append({"row": row, "document": document, "offset": offset})
        return found

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues after the batch at which ``state`` was taken, by a process or by `merge_states` of all of them.

        Raises UserError when the state belongs to another batch size, seed, corpus or tokeniser, or lacks rows of this
        process.
        """
        for key, ours in self._identity.items():
            if state.get(key) != ours and not (key == "format" and state.get(key) == 1):
                raise UserError(f"the data position was saved with {key}={state.get(key)}, this run has {key}={ours}")
        place = {row: index for index, row in enumerate(_rows(state))}
        missing = [row for row in self._rows if row not in place]
        if missing:
            raise UserError(
                f"the data position has {len(place)} rows of the batch, this process needs row {missing[0]} too; "
                "merge the states of all processes"
            )
        mine = [place[row] for row in self._rows]
        places = {name: np.asarray(state[name], np.int64)[mine] for name in ("position", "offset")}
        self._batches.set_state({**places, "batches": np.int64(state.get("batches", 0))})

    @property
    def _batches(self) -> grain.DatasetIterator:
        if not self._held:
            raise ValueError("the iterator is closed")
        return self._held[0]


def train_iterator(
    data: DataConfig,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    seed: int,
    rows: Sequence[int] | None = None,
) -> TrainIterator:
    """Training batches of ``data.sequence_length`` tokens a row: the ``rows`` of a global batch of ``batch_size``.

    ``rows`` is None for all of them, or `mhc.sharding.local_rows` where processes share the batch. Every weight is 1:
    training has no padding. Raises UserError for a corpus that cannot be read, is empty or shorter than a sequence, and
    for ids outside the vocabulary.
    """
    rows = range(batch_size) if rows is None else rows
    return TrainIterator(data, tokenizer, batch_size=batch_size, seed=seed, rows=rows)


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The state of the whole batch from those of all processes, in any order; some may hold the same rows.

    Raises ValueError where rows are missing.
    """
    by_row = {
        row: (position, offset)
        for state in states
        for row, position, offset in zip(_rows(state), state["position"], state["offset"], strict=True)
    }
    missing = set(range(states[0]["batch_size"])) - set(by_row)
    if missing:
        raise ValueError(f"no state has row {min(missing)} of the batch")
    rows = sorted(by_row)
    return {
        **states[0],
        "rows": rows,
        "position": [by_row[row][0] for row in rows],
        "offset": [by_row[row][1] for row in rows],
    }


def _rows(state: dict[str, Any]) -> Sequence[int]:
    rows: list[int] = state["rows"]
    return range(*rows) if state["format"] == 1 else rows


class ValidationBatches:
    """The fixed validation set, iterable again and again; make it with `validation_batches` or `validation_sets`."""

    def __init__(
        self, source: Source, tokenizer: Tokenizer, length: int, batch_size: int, rows: Sequence[int], batches: int
    ):
        self._pieces = Pieces(source, None)
        self._encode = _Encode(tokenizer)
        self._length = length
        self._batch_size = batch_size
        self._rows = np.asarray(rows)
        self._limit = batches

    def __iter__(self) -> Iterator[Batch]:
        stream = DocumentStream(lambda index: self._encode.map(self._pieces[index]), 0, 1, end=len(self._pieces))
        made = 0
        while not self._limit or made < self._limit:
            batch = empty_batch(self._batch_size, self._length)
            filled = 0
            while filled < self._batch_size and fill_row(batch, filled, stream):
                filled += 1
            if not filled:
                return
            made += 1
            yield {name: array[self._rows] for name, array in batch.items()}
            if filled < self._batch_size:
                return


def validation_sets(
    data: DataConfig,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    batches: int,
    rows: Sequence[int] | None = None,
) -> dict[str, ValidationBatches]:
    """The validation sets by name, each of at most ``batches`` batches (0: all of it); one alone is called "".

    In each the documents are in order, and every token but bos a target exactly once; ``rows`` is as for
    `train_iterator`. The last batch is padded with rows and places of weight 0, so that every process has as many
    batches. Raises UserError as `train_iterator`, but a split shorter than a sequence is no error.
    """
    rows = range(batch_size) if rows is None else rows
    return {
        one.name: ValidationBatches(
            open_corpus(own, tokenizer, "validation"), tokenizer, data.sequence_length, batch_size, rows, batches
        )
        for one, own in parts(data, "validation")
    }


def validation_batches(
    data: DataConfig,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    batches: int,
    rows: Sequence[int] | None = None,
) -> ValidationBatches:
    """The whole validation split as one set, sets one after the other; else as `validation_sets`."""
    rows = range(batch_size) if rows is None else rows
    source = open_corpus(data, tokenizer, "validation")
    return ValidationBatches(source, tokenizer, data.sequence_length, batch_size, rows, batches)


def open_corpus(data: DataConfig, tokenizer: Tokenizer, split: Split) -> Source:
    """`open_source`, checked against the tokeniser and the sequence length.

    Raises UserError for ids outside the vocabulary, for data prepared with another tokeniser, and for a training split
    shorter than a sequence.
    """
    source = open_source(data, split)
    for one in source.sources if isinstance(source, Joined) else [source]:
        if isinstance(one, TokenFiles):
            one.check_vocabulary(tokenizer.vocab_size)
        if isinstance(one, Prepared):
            one.check_tokenizer(tokenizer)
    if split == "train":
        encode = encoder(source, tokenizer)
        pairs = 0
        for index in range(len(source)):  # ends with the first document, as a rule
            pairs += len(encode(index).target_bytes)
            if pairs >= data.sequence_length:
                return source
        raise UserError(
            f"{source.label}: {pairs} tokens in its {len(source)} training document(s), "
            f"fewer than one sequence (data.sequence_length={data.sequence_length})"
        )
    return source


def encoder(source: Source, tokenizer: Tokenizer) -> Callable[[int], Document]:
    """Whole documents of a source by number, tokenised."""
    encode = _Encode(tokenizer)
    return lambda index: encode.map(Piece(source[index], source.ends(index)))


def _close(held: list[grain.DatasetIterator]) -> None:
    while held:
        held.pop().close()


class _Encode(grain.transforms.Map):
    """`Piece` to `Document`."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def map(self, piece: Piece) -> Document:
        tokenizer = self._tokenizer
        rest = 0  # text that a tokeniser turned into no id at all: counted at eos, so that documents' bytes add up
        if isinstance(piece.content, bytes):
            ids, lengths = tokenizer.encode_with_bytes(piece.content)
            rest = len(piece.content) - int(lengths.sum())
        elif isinstance(piece.content, Tokenised):
            ids, rest = piece.content.ids, piece.content.rest
            known = piece.content.lengths
            lengths = tokenizer.byte_lengths[ids] if known is None else known.astype(np.int32)
        else:
            ids = piece.content
            lengths = tokenizer.byte_lengths[ids]
        count = len(ids)
        tokens = np.empty(count + 2, np.int32)
        tokens[0], tokens[1:-1], tokens[-1] = tokenizer.bos_id, ids, tokenizer.eos_id
        target_bytes = np.empty(count + 1, np.int32)
        target_bytes[:-1], target_bytes[-1] = lengths, rest
        if piece.ends:
            return Document(tokens, target_bytes)
        return Document(tokens[:-1], target_bytes[:-1])


class _Packing(NamedTuple):
    """How batches are packed."""

    orders: Sequence[grain.MapDataset]  # endless, of documents; by source
    assign: Assignment | None  # None: one source
    rows: Sequence[int]
    batch_size: int
    length: int
    threads: int


class _PackedDataset(grain.IterDataset):
    """Batches of packed rows over endless orders of documents; of a mixture also ``sources`` [rows] int32."""

    def __init__(self, packing: _Packing):
        super().__init__(list(packing.orders))
        self._packing = packing

    def __iter__(self) -> _PackedIterator:
        return _PackedIterator(self._packing)


class _PackedIterator(grain.DatasetIterator):
    """Its state: ``position`` and ``offset``, int64 [rows] ([rows, sources] of a mixture), and ``batches`` so far."""

    def __init__(self, packing: _Packing):
        super().__init__()
        threads = packing.threads
        self._pool = futures.ThreadPoolExecutor(threads, "mhc-data") if threads > 1 else None
        self._packing = packing
        self._made = 0
        self._streams = [
            [DocumentStream(order.__getitem__, row, packing.batch_size) for order in packing.orders]
            for row in packing.rows
        ]

    def __next__(self) -> Batch:
        rows, assign = self._packing.rows, self._packing.assign
        batch = empty_batch(len(rows), self._packing.length)
        chosen = [0 if assign is None else assign(self._made, row) for row in rows]
        streams = [own[number] for own, number in zip(self._streams, chosen, strict=True)]
        run = self._pool.map if self._pool else map
        for _ in run(fill_row, [batch] * len(streams), range(len(streams)), streams):
            pass  # rows share nothing, so that the order in which threads fill them does not matter
        if assign is not None:
            batch["sources"] = np.asarray(chosen, np.int32)
        self._made += 1
        return batch

    def close(self) -> None:
        if self._pool:
            self._pool.shutdown()
        super().close()

    def get_state(self) -> dict[str, Any]:
        def every(name: str) -> np.ndarray:
            values = np.array([[getattr(stream, name) for stream in own] for own in self._streams], np.int64)
            return values[:, 0] if self._packing.assign is None else values

        return {"position": every("position"), "offset": every("offset"), "batches": np.int64(self._made)}

    def set_state(self, state: dict[str, Any]) -> None:
        count = len(self._packing.orders)
        self._made = int(state["batches"])
        self._streams = [
            [
                DocumentStream(order.__getitem__, int(position), self._packing.batch_size, int(offset))
                for order, position, offset in zip(self._packing.orders, positions, offsets, strict=True)
            ]
            for positions, offsets in zip(
                state["position"].reshape(-1, count), state["offset"].reshape(-1, count), strict=True
            )
        ]
