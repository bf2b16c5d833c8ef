"""The input pipeline: source → shuffle → repeat → tokenise → pack → batch, on grain.

Order. The documents of the training split, long ones in pieces, are shuffled anew each epoch, and the epochs follow one
another without end: one global order. Row r of a batch of B rows is a stream of its own over the positions r, r + B,
r + 2B, … of that order. So the batches depend on the corpus, the seed, T and B alone: a process takes the rows that its
devices hold of the same global batch, and a state merged from all can be restored by another number of processes.

State. Two integers a row: the position of its document, and the pairs already taken from it (see `mhc.data.packing`).

Mixtures. Every source has an order of its own, and a row a stream in each of them; which one its next sequence comes
from depends on the seed, the row and the number of the batch (`mhc.data.mixture`). The state has two integers a row and
source, and that number.

Worker processes. Rows share nothing: of W = ``data.workers`` processes number w takes the rows w, w + W, …, and hands
over with them where each is afterwards; the batch and its state are put together from these. So the number of
processes changes neither. Threads would be of no use, since the tokenizers library holds the interpreter's lock.
"""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np
from absl import flags

from mhc.config import DataConfig
from mhc.data.files import TokenFiles, piece_size
from mhc.data.mixture import Assignment
from mhc.data.packing import Batch, Document, DocumentStream, Piece, Pieces, Tokenised, empty_batch, fill_row
from mhc.data.prepared import Prepared
from mhc.data.sources import Joined, Source, Split, joint_fingerprint, open_source, parts
from mhc.data.tokenizers import Tokenizer, load
from mhc.errors import UserError

_STATE_FORMAT = 2  # 1 had the rows as [first, last + 1]
_PLACES = ("position", "offset")  # a row's: its state
_MEANS = {  # what a position belongs to, for messages
    "format": "form (by another version of mhc)",
    "batch_size": "train.batch_size",
    "seed": "seed.data",
    "corpus": "corpus in data.source (names or sizes of its files, or how they are read and held out)",
    "piece": "data.sequence_length, which says where long documents are cut",
    "tokenizer": "data.tokenizer",
    "mixture": "mixture in data.source (its names or weights)",
}


class TrainIterator:
    """Endless batches with a state; make it with `train_iterator`.

    ``close()`` ends the thread and the processes that prepare batches; it may be called again, and is at exit if it was
    not before.
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
        shares = [one for one, _ in parts(data, "train")]
        self._orders = _open_orders(data, tokenizer, seed)
        corpus = _fingerprint(self._orders)
        self._identity = {
            "format": _STATE_FORMAT,
            "batch_size": batch_size,
            "seed": seed,
            "corpus": corpus,
            "piece": piece_size(data),
            "tokenizer": tokenizer.content_hash,
        }
        if len(shares) > 1:
            self._identity["mixture"] = [[one.name, one.weight] for one in shares]
        self._rows = list(rows)
        self._assign = Assignment([one.weight for one in shares], seed) if len(shares) > 1 else None
        packing = _Packing(self._assign, len(shares), self._rows, batch_size, data.sequence_length)
        packed: grain.IterDataset
        if data.workers:
            packed = _SharedDataset(_Worker(data, tokenizer.content_hash, corpus, seed, packing), data.prefetch)
        else:
            packed = _PackedDataset(packing, self._orders)
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
        places = {name: state[name].tolist() for name in _PLACES}
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
            order = self._orders[number]
            document = order.source.name(order.pieces.document(int(order.places[position])))
            found.append({"row": row, "document": document, "offset": offset})
        return found

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues after the batch at which ``state`` was taken, by a process or by `merge_states` of all of them.

        Raises UserError when the state belongs to another batch size, seed, corpus or tokeniser, or lacks rows of this
        process.
        """
        for key, ours in self._identity.items():
            if state.get(key) != ours and not (key == "format" and state.get(key) == 1):
                raise UserError(
                    f"the data position was saved with another {_MEANS[key]}; restore what it was, or begin a "
                    f"new run with train.init_from ({key}: saved {state.get(key)}, now {ours})"
                )
        place = {row: index for index, row in enumerate(_rows(state))}
        missing = [row for row in self._rows if row not in place]
        if missing:
            raise UserError(
                f"the data position has {len(place)} rows of the batch, this process needs row {missing[0]} too; "
                "merge the states of all processes"
            )
        mine = [place[row] for row in self._rows]
        places = {name: np.asarray(state[name], np.int64)[mine] for name in _PLACES}
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


class _Order(NamedTuple):
    """One source's documents in the order that training reads them, without end."""

    source: Source
    pieces: Pieces
    places: grain.MapDataset  # of pieces: their numbers
    documents: grain.MapDataset


def _open_orders(data: DataConfig, tokenizer: Tokenizer, seed: int) -> list[_Order]:
    # grain adds the epoch to the seed: without a hash, seed 1 would begin with the second epoch of seed 0
    order_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    orders = []
    for _, own in parts(data, "train"):
        source = open_corpus(own, tokenizer, "train")
        pieces = Pieces(source, piece_size(data))
        places = grain.MapDataset.range(len(pieces)).shuffle(seed=order_seed).repeat()
        documents = grain.MapDataset.source(pieces).shuffle(seed=order_seed).repeat().map(_Encode(tokenizer))
        orders.append(_Order(source, pieces, places, documents))
    return orders


def _fingerprint(orders: Sequence[_Order]) -> str:
    return orders[0].source.fingerprint if len(orders) == 1 else joint_fingerprint([order.source for order in orders])


class _Packing(NamedTuple):
    """How batches are packed."""

    assign: Assignment | None  # None: one source
    sources: int
    rows: Sequence[int]
    batch_size: int
    length: int

    def start(self) -> dict[str, Any]:
        """The state before the first batch: ``position`` and ``offset``, int64 [rows] or [rows, sources]."""
        position = np.asarray(self.rows, np.int64)
        if self.assign is not None:
            position = np.repeat(position[:, None], self.sources, axis=1)
        return {"position": position, "offset": np.zeros_like(position), "batches": np.int64(0)}


class _PackedDataset(grain.IterDataset):
    """Batches of packed rows over endless orders of documents; of a mixture also ``sources`` [rows] int32."""

    def __init__(self, packing: _Packing, orders: Sequence[_Order]):
        super().__init__([order.documents for order in orders])
        self._packing, self._orders = packing, orders

    def __iter__(self) -> _PackedIterator:
        return _PackedIterator(self._packing, self._orders)


class _PackedIterator(grain.DatasetIterator):
    """Its state is that of `_Packing.start`."""

    def __init__(self, packing: _Packing, orders: Sequence[_Order]):
        super().__init__()
        self._packing, self._orders = packing, orders
        self.set_state(packing.start())

    def __next__(self) -> Batch:
        rows, assign = self._packing.rows, self._packing.assign
        batch = empty_batch(len(rows), self._packing.length)
        chosen = [0 if assign is None else assign(self._made, row) for row in rows]
        for index, number in enumerate(chosen):
            fill_row(batch, index, self._streams[index][number])
        if assign is not None:
            batch["sources"] = np.asarray(chosen, np.int32)
        self._made += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        def every(name: str) -> np.ndarray:
            values = np.array([[getattr(stream, name) for stream in own] for own in self._streams], np.int64)
            return values[:, 0] if self._packing.assign is None else values

        return {**{name: every(name) for name in _PLACES}, "batches": np.int64(self._made)}

    def set_state(self, state: dict[str, Any]) -> None:
        self._made = int(state["batches"])
        position, offset = (state[name].reshape(-1, self._packing.sources) for name in _PLACES)
        self._streams = [
            [
                DocumentStream(order.documents.__getitem__, int(place), self._packing.batch_size, int(taken))
                for order, place, taken in zip(self._orders, positions, offsets, strict=True)
            ]
            for positions, offsets in zip(position, offset, strict=True)
        ]


# Worker processes -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Worker:
    """What a worker process is told: it opens the corpus itself, since an index may be large."""

    data: DataConfig
    tokenizer: str  # its content_hash
    corpus: str  # its fingerprint
    seed: int
    packing: _Packing

    def open(self) -> _PackedIterator:
        tokenizer = load(self.data.tokenizer)
        orders = _open_orders(self.data, tokenizer, self.seed)
        for what, ours, theirs in (
            ("data.tokenizer", tokenizer.content_hash, self.tokenizer),
            ("data.source", _fingerprint(orders), self.corpus),
        ):
            if ours != theirs:
                raise UserError(f"{what} changed while the run began: a worker process finds {ours}, the run {theirs}")
        return _PackedIterator(self.packing, orders)

    @staticmethod
    def start(index: int, count: int) -> None:
        """In the process itself. Signals are the run's to answer, warnings its to give; its end is the worker's."""
        logging.disable(logging.WARNING)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        parent = multiprocessing.parent_process()
        if parent is not None:

            def end_with_it() -> None:
                parent.join()
                os._exit(1)

            threading.Thread(target=end_with_it, name="mhc-data-parent", daemon=True).start()


class _WorkerDataset(grain.IterDataset):
    """The rows of a worker from a state on: its batches, with where each row is afterwards."""

    def __init__(self, worker: _Worker, state: dict[str, Any]):
        super().__init__()
        self._worker, self._state = worker, state

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """grain's way to say which share a process has."""
        packing = self._worker.packing
        self._worker = dataclasses.replace(self._worker, packing=packing._replace(rows=packing.rows[sl]))
        self._state = {**self._state, **{name: self._state[name][sl] for name in _PLACES}}

    def __iter__(self) -> _WorkerIterator:
        return _WorkerIterator(self._worker, self._state)


class _WorkerIterator(grain.DatasetIterator):
    def __init__(self, worker: _Worker, state: dict[str, Any]):
        super().__init__()
        self._worker, self._state = worker, state
        self._packed: _PackedIterator | None = None

    def __next__(self) -> Batch:
        if self._packed is None:
            self._packed = self._worker.open()
            self._packed.set_state(self._state)
        batch = next(self._packed)
        state = self._packed.get_state()
        return {**batch, **{name: state[name] for name in _PLACES}}

    def get_state(self) -> dict[str, Any]:
        return {}  # the batches have it

    def set_state(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


class _SharedDataset(grain.IterDataset):
    """As `_PackedDataset`, its rows shared out among worker processes, each ``prefetch`` batches ahead."""

    def __init__(self, worker: _Worker, prefetch: int):
        super().__init__()
        self._worker, self._prefetch = worker, prefetch

    def __iter__(self) -> _SharedIterator:
        return _SharedIterator(self._worker, self._prefetch)


class _SharedIterator(grain.DatasetIterator):
    def __init__(self, worker: _Worker, prefetch: int):
        super().__init__()
        self._worker = worker
        self._options = grain.MultiprocessingOptions(
            num_workers=min(worker.data.workers, len(worker.packing.rows)), per_worker_buffer_size=max(prefetch, 1)
        )
        self._state = worker.packing.start()
        self._processes: grain.DatasetIterator | None = None

    def __next__(self) -> Batch:
        count = self._options.num_workers
        shares = [self._next_share() for _ in range(count)]  # in turn, by grain
        batch = {}
        for name in shares[0]:
            arrays = [share[name] for share in shares]
            whole = batch[name] = np.empty((sum(map(len, arrays)), *arrays[0].shape[1:]), arrays[0].dtype)
            for index, array in enumerate(arrays):
                whole[index::count] = array
        self._state = {**{name: batch.pop(name) for name in _PLACES}, "batches": self._state["batches"] + 1}
        return batch

    def _next_share(self) -> Batch:
        if self._processes is None:
            if not flags.FLAGS.is_parsed():  # by absl.app, which no program here is; grain reads them
                flags.FLAGS.mark_as_parsed()
            # no shared memory: pipes are fast enough, containers have little of it, and a kill leaves it behind
            options = grain.experimental.DatasetOptions(min_shm_size=sys.maxsize)
            own = grain.experimental.WithOptionsIterDataset(_WorkerDataset(self._worker, self._state), options)
            self._processes = iter(own.mp_prefetch(self._options, worker_init_fn=_Worker.start))
        try:
            share: Batch = next(self._processes)
        except RuntimeError as error:
            if "exit code -" not in str(error):  # a signal; of anything else the traceback is above
                raise
            raise UserError(
                f"data.workers={self._options.num_workers}: a worker process was ended from outside, perhaps for its "
                "memory; start again to go on from the last checkpoint, perhaps with fewer"
            ) from None
        return share

    def get_state(self) -> dict[str, Any]:
        return self._state

    def set_state(self, state: dict[str, Any]) -> None:
        self._stop()
        self._state = state

    def _stop(self) -> None:
        if self._processes is not None:
            self._processes.close()
            self._processes = None

    def close(self) -> None:
        self._stop()
        super().close()
