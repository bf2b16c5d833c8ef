"""Make batches from sources: shuffle, repeat, tokenise and pack, on grain.

Order. The documents of the training split, long ones in pieces, are shuffled anew each epoch, and the epochs follow one
another without end: one global order. Row r of a batch of B rows is a stream of its own over the positions r, r + B,
r + 2B, … of that order. So the batches depend on the corpus, the seed, T and B alone: a process takes the rows that its
devices hold of the same global batch, and a state merged from all can be restored by another number of processes.

Wind tunnels (`mhc.data.windtunnel`) are endless: a position is the number of a sequence, and each fills a row.

State. Two integers a row: the position of its document, and the pairs already taken from it (see
`mhc.data.rows.packing`).

Mixtures. Every source has an order of its own, and a row a stream in each of them; which one its next sequence comes
from depends on the seed, the row and the number of the batch (`mhc.data.rows.mixture`). The state has two integers a
row and source, and that number.

Worker processes take their share of the rows (`mhc.data.rows.workers`). Neither order nor state depends on how many
there are.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np

from mhc.config import DataConfig
from mhc.data.corpus.fidelity import share_lost
from mhc.data.corpus.pieces import Pieces, piece_size
from mhc.data.corpus.sources import Source, parts
from mhc.data.corpus.text import TextFiles
from mhc.data.corpus.token_ids import TokenFiles
from mhc.data.rows.encoding import Encode, open_corpus
from mhc.data.rows.iterator import PLACES, PackedDataset, Packing
from mhc.data.rows.mixture import Assignment
from mhc.data.rows.order import digests, fingerprint, open_orders
from mhc.data.rows.packing import Batch, empty_batch, fill_row
from mhc.data.rows.spread import RowStream
from mhc.data.rows.workers import SharedDataset, Worker
from mhc.data.tokenizers import Tokenizer
from mhc.data.windtunnel.rows import TaskValidation, open_task
from mhc.errors import UserError

_STATE_FORMAT = 2  # 1 had the rows as [first, last + 1]
_MEANS = {  # what each part of a position's identity is, for messages
    "format": "form (by another version of mhc)",
    "batch_size": "train.batch_size",
    "seed": "seed.data",
    "sequence_length": "data.sequence_length, which says where long documents are cut",
    "holdout": "data.holdout",
    "corpus": "corpus in data.source (names or sizes of its files, or how they are read and held out)",
    "tokenizer": "data.tokenizer",
    "piece": "data.sequence_length, which says where long documents are cut",
    "mixture": "mixture in data.source (its names or weights)",
}
_SHOWN = ("batch_size", "seed", "sequence_length", "holdout")  # values that the user has set, so that they are shown
_OPTIONAL = ("sequence_length", "holdout")  # not in older states, nor where a source has a split of its own


class TrainIterator:
    """Yields endless batches, and has a state; make it with `train_iterator`.

    ``close()`` ends the thread and the processes that prepare batches. It may be called again, and is called at exit.
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
        shares = [share for share, _ in parts(data, "train")]
        self._orders = open_orders(data, tokenizer, seed)
        corpus = fingerprint(self._orders)
        self._identity = {
            "format": _STATE_FORMAT,
            "batch_size": batch_size,
            "seed": seed,
            "sequence_length": data.sequence_length,
            "corpus": corpus,
            "tokenizer": tokenizer.content_hash,
            "piece": piece_size(data),
        }
        if any(order.source.holdout is not None for order in self._orders):
            self._identity["holdout"] = data.holdout
        if len(shares) > 1:
            self._identity["mixture"] = [[share.name, share.weight] for share in shares]
        self._rows = list(rows)
        self._assign = Assignment([share.weight for share in shares], seed) if len(shares) > 1 else None
        packing = Packing(self._assign, len(shares), self._rows, batch_size, data.sequence_length)
        packed: grain.IterDataset
        if data.workers:
            packed = SharedDataset(
                Worker(data, tokenizer.content_hash, digests(self._orders), seed, packing), data.prefetch
            )
        else:
            packed = PackedDataset(packing, self._orders)
        # In a list, so that closing can let go of it: grain's iterators close themselves when they are deleted, which
        # at the interpreter's exit is too late (their modules are gone, and a traceback lands on stderr).
        self._held: list[grain.DatasetIterator] = [
            iter(grain.experimental.ThreadPrefetchIterDataset(packed, prefetch_buffer_size=data.prefetch))
        ]
        self.close = weakref.finalize(self, _close, self._held)

    def __iter__(self) -> TrainIterator:
        return self

    def __next__(self) -> Batch:
        """Return the rows of the next batch. Raises UserError for a document that cannot be read or encoded."""
        return next(self._batches)

    def get_state(self) -> dict[str, Any]:
        """Return the position after the batches that were handed out, for JSON; batches prepared ahead do not count."""
        state = self._batches.get_state()
        places = {name: state[name].tolist() for name in PLACES}
        batches = {} if self._assign is None else {"batches": int(state["batches"])}
        return {**self._identity, **batches, "rows": self._rows, **places}

    def files(self) -> dict[str, dict[str, int]]:
        """Return {source as the user named it: {file: its bytes, unpacked}} for the sources that are read as files."""
        sources = [order.source for order in self._orders]
        return {source.label: source.file_sizes for source in sources if isinstance(source, TextFiles | TokenFiles)}

    def describe(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        """Return where each row of the batch after ``state`` begins: row, document, offset in its piece."""
        beginnings = []
        for row, position, offset in zip(_rows(state), state["position"], state["offset"], strict=True):
            number = 0
            if self._assign is not None:
                number = self._assign(state["batches"], row)
                position, offset = position[number], offset[number]
            order = self._orders[number]
            beginnings.append({"row": row, "document": order.name(position), "offset": offset})
        return beginnings

    def set_state(
        self, state: dict[str, Any], remedy: str = "restore what it was, or begin a new run with train.init_from"
    ) -> None:
        """Continue after the batch at which ``state`` was taken, by a process or by `merge_states` of all of them.

        Raises:
          UserError: the state belongs to another batch size, seed, corpus, share held out, length or tokeniser, or
            lacks rows of this process. The line ends with the ``remedy``.
        """
        for key in filter(self._identity.__contains__, _MEANS):
            saved, ours = state.get(key), self._identity[key]
            if saved == ours or (key == "format" and saved == 1) or (key in _OPTIONAL and saved is None):
                continue
            values = f" (saved {saved}, now {ours})" if key in _SHOWN else ""
            raise UserError(f"the data position was saved with another {_MEANS[key]}; {remedy}{values}")
        place = {row: index for index, row in enumerate(_rows(state))}
        missing = [row for row in self._rows if row not in place]
        if missing:
            raise UserError(
                f"the data position has {len(place)} rows of the batch, this process needs row {missing[0]} too; "
                "merge the states of all processes"
            )
        mine = [place[row] for row in self._rows]
        places = {name: np.asarray(state[name], np.int64)[mine] for name in PLACES}
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
    """Return training batches of ``data.sequence_length`` tokens a row, without padding: every weight is 1.

    Args:
      batch_size: rows of the global batch.
      rows: those of the global batch that are made here: None for all, or `mhc.sharding.local_rows` where processes
        share the batch.
    Raises:
      UserError: the corpus cannot be read, is empty or shorter than a sequence, or has ids outside the vocabulary.
    """
    rows = range(batch_size) if rows is None else rows
    return TrainIterator(data, tokenizer, batch_size=batch_size, seed=seed, rows=rows)


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of the whole batch from those of all processes, in any order; they may share rows.

    Raises:
      ValueError: rows are missing.
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
    """Yields a fixed validation set, again and again; make it with `validation_batches` or `validation_sets`.

    Spread rows are kept after they were made once (up to 256 MB), since a document is tokenised for each of them.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        length: int,
        batch_size: int,
        rows: Sequence[int],
        count: int,
        spread: bool,
    ):
        self._source, self._tokenizer = source, tokenizer
        self._pieces = Pieces(source, None)
        self._encode = Encode(tokenizer)
        self._length = length
        self._batch_size = batch_size
        self._rows = np.asarray(rows)
        self._count, self._spread = count, spread
        self._kept: list[Batch] | None = None
        self.documents = 0  # that the rows touch; 0 before they were made
        self.row_count = 0  # 0 before they were made

    @functools.cached_property
    def lost(self) -> float:
        """Return the share of the text's bytes that the tokeniser loses, by `mhc.data.corpus.fidelity`."""
        return share_lost(self._source, self._tokenizer)

    def coverage(self, name: str = "") -> str:
        """Return a line that tells how much of the set is read; unless that is all, the rows are made to count it."""
        subject = f"validation set {name}" if name else "validation"
        if not self._count:
            return f"{subject}: all of its {len(self._source):,} document(s)"
        if not self.documents:
            for _ in self:
                pass
        return (
            f"{subject}: {self.row_count:,} row(s) of {self._length:,} tokens touch {self.documents:,} of "
            f"{len(self._source):,} document(s)"
        )

    def __iter__(self) -> Iterator[Batch]:
        if self._kept is not None:
            for narrow in self._kept:
                yield {
                    name: array.astype(np.float32 if name == "weights" else np.int32) for name, array in narrow.items()
                }
            return
        keeps = self._spread and 0 < self._count * self._length <= _KEPT
        kept: list[Batch] = []
        for batch in self._read():
            mine = {name: array[self._rows] for name, array in batch.items()}
            if keeps:
                kept.append({name: array.astype(_narrow(array)) for name, array in mine.items()})
            yield mine
        if keeps:
            self._kept = kept

    def _read(self) -> Iterator[Batch]:
        """Yield the global batches of the set, and note which documents they read."""
        count = len(self._pieces)
        sizes = self._source.sizes
        stream = RowStream(
            lambda index: self._encode.map(self._pieces[index]),
            *(0, count),
            length=self._length,
            count=self._count,
            sizes=sizes,
            spread=self._spread,
        )
        row_count, more = 0, True
        while more:
            batch, filled = empty_batch(self._batch_size, self._length), 0
            while filled < self._batch_size and (more := stream.next_row() and fill_row(batch, filled, stream)):
                filled += 1
            row_count += filled
            if filled:
                yield batch
        self.documents, self.row_count = len(stream.touched), row_count


_KEPT = 1 << 24  # tokens of validation rows that are kept, at some 10 bytes each and at most 16


def _narrow(array: np.ndarray) -> np.dtype:
    """Return the smallest type for the values of one field of a batch, none of which is negative."""
    return np.min_scalar_type(int(array.max(initial=0)))


def validation_sets(
    data: DataConfig,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    batches: int = 0,
    count: int | None = None,
    spread: bool = False,
    rows: Sequence[int] | None = None,
) -> dict[str, ValidationBatches] | dict[str, TaskValidation]:
    """Return the validation sets by name; one alone is called "".

    Documents are read in order, and no token is a target twice; in a whole set every token but bos is a target once.
    The last batch is padded with rows and places of weight 0, so that every process has as many batches.

    Args:
      batch_size, rows: as for `train_iterator`.
      batches: of each set, at most; 0 for all of it.
      count: rows of each set, in place of ``batches``.
      spread: whether the rows are spread over the documents by `mhc.data.rows.spread`, or are the first ones.
    Raises:
      UserError: as `train_iterator`, but a split shorter than a sequence is no error.
    """
    rows = range(batch_size) if rows is None else rows
    count = batches * batch_size if count is None else count
    task = open_task(data)
    if task is not None:
        return {"": TaskValidation(task, batch_size, count, rows)}
    return {
        share.name: ValidationBatches(
            open_corpus(config, tokenizer, "validation"),
            *(tokenizer, data.sequence_length, batch_size, rows, count, spread),
        )
        for share, config in parts(data, "validation")
    }


def validation_batches(
    data: DataConfig,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    batches: int = 0,
    count: int | None = None,
    spread: bool = False,
    rows: Sequence[int] | None = None,
) -> ValidationBatches | TaskValidation:
    """Return all validation sets as one, each after the other; the arguments are those of `validation_sets`."""
    rows = range(batch_size) if rows is None else rows
    count = batches * batch_size if count is None else count
    task = open_task(data)
    if task is not None:
        return TaskValidation(task, batch_size, count, rows)
    source = open_corpus(data, tokenizer, "validation")
    return ValidationBatches(source, tokenizer, data.sequence_length, batch_size, rows, count, spread)


def _close(held: list[grain.DatasetIterator]) -> None:
    while held:
        held.pop().close()
