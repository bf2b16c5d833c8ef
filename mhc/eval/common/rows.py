"""Read the rows of a corpus that are scored: packed as the run's validation reads them, or document by document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mhc.errors import UserError

if TYPE_CHECKING:
    import argparse

    from mhc.config import Config
    from mhc.data.corpus.sources import Split
    from mhc.data.rows.packing import Batch


class Corpus(NamedTuple):
    """Holds rows to be scored, each place with its document."""

    batches: Iterator[Batch]  # fields of mhc.data.rows.packing; also documents [B, T] int32 and context [B, T] int32
    documents: int  # of the split
    lost: float = 0.0  # share of the text's bytes that the tokeniser loses


def packed(config: Config, split: Split, *, rows: int, batch_size: int, eos: bool = True) -> Corpus:
    """Return the rows of the run's validation, by its rule: documents end to end, cut at the sequence length.

    Args:
      rows: how many of each set, where validation has several; 0 for all.
      eos: whether the end of a document is scored as well.
    """
    from mhc.data import tokenizers
    from mhc.data.rows.packing import empty_batch

    source, encode = _open(config, split)
    length, end = config.data.sequence_length, tokenizers.load(config.data.tokenizer).eos_id
    spread = config.validation.rule != "first"

    def batches() -> Iterator[Batch]:
        for first, last in _sets(source):
            sizes = None if source.sizes is None else source.sizes[first:last]
            stream = _Numbered(encode, first, last, length=length, count=rows, sizes=sizes, spread=spread)
            more = True
            while more:
                batch = empty_batch(batch_size, length) | {"documents": np.zeros((batch_size, length), np.int32)}
                filled = 0
                while filled < batch_size and (more := stream.fill(batch, filled)):
                    filled += 1
                if not eos:
                    batch["weights"][batch["targets"] == end] = 0.0
                if filled:
                    yield batch | {"context": batch["positions"] + 1}

    return Corpus(batches(), len(source), _lost(config, source))


def _sets(source: Any) -> list[tuple[int, int]]:
    """Return [first, last) document of each of the sources that are joined in one."""
    ends = np.cumsum([len(part) for part in getattr(source, "sources", [source])]).tolist()
    return list(zip([0, *ends], ends, strict=False))


class _Numbered:
    """Streams packed rows of the documents [first, last), and records the document of each place."""

    def __init__(self, encode: Any, first: int, last: int, **which: Any):
        from mhc.data.rows.spread import RowStream

        self._stream = RowStream(encode, first, last, **which)
        self._taken: list[tuple[int, int]] = []  # (document, pairs) of the current row

    def take(self, room: int) -> Any:
        """Return the next pairs, at most ``room``, as ``Rows.take`` does."""
        taken = self._stream.take(room)
        if taken is not None:
            self._taken.append((self._stream.document, len(taken[0])))
        return taken

    def fill(self, batch: Batch, row: int) -> bool:
        """Fill a row of a batch; return whether there was one more."""
        from mhc.data.rows.packing import fill_row

        self._taken = []
        more: bool = self._stream.next_row() and fill_row(batch, row, self)  # type: ignore[arg-type]
        numbers = [np.full(pairs, document, np.int32) for document, pairs in self._taken]
        if numbers:
            joined = np.concatenate(numbers)
            batch["documents"][row, : len(joined)] = joined
        return more


def sliding(config: Config, split: Split, *, rows: int, batch_size: int, stride: int, eos: bool = True) -> Corpus:
    """Return each document alone, by windows of T tokens that score their last ``stride``; the first scores all."""
    from mhc.data.rows.packing import empty_batch
    from mhc.eval.common.scoring import Window, windows

    source, encode = _open(config, split)
    length = config.data.sequence_length

    def every() -> Iterator[tuple[int, Any, Window]]:
        """Yield (number of the document, the document, window)."""
        for number in range(len(source)):
            document = encode(number)
            for window in windows(len(document.target_bytes) - (not eos), length, stride):
                yield number, document, window

    def batches() -> Iterator[Batch]:
        batch, filled, total = None, 0, 0
        for number, document, (start, scored, end) in every():
            if rows and total == rows:
                break
            if batch is None:
                zeros = {name: np.zeros((batch_size, length), np.int32) for name in ("documents", "context")}
                batch, filled = empty_batch(batch_size, length) | zeros, 0
            place, count = (filled, slice(0, end - start)), end - start
            batch["tokens"][place] = document.tokens[start:end]
            batch["targets"][place] = document.tokens[start + 1 : end + 1]
            batch["target_bytes"][place] = document.target_bytes[start:end]
            batch["segment_ids"][place] = 1
            batch["positions"][place] = np.arange(count)
            batch["weights"][filled, scored - start : count] = 1.0
            batch["documents"][place] = number
            batch["context"][place] = np.arange(count) + 1
            filled, total = filled + 1, total + 1
            if filled == batch_size:
                yield batch
                batch = None
        if batch is not None:
            yield batch

    return Corpus(batches(), len(source), _lost(config, source))


def _lost(config: Config, source: Any) -> float:
    from mhc.data import tokenizers
    from mhc.data.corpus import fidelity

    return fidelity.share_lost(source, tokenizers.load(config.data.tokenizer))


def _open(config: Config, split: Split) -> tuple[Any, Any]:
    """Return (documents, function from a number to its Document) of a split."""
    from mhc.data import tokenizers
    from mhc.data.rows.encoding import encoder, open_corpus

    tokenizer = tokenizers.load(config.data.tokenizer)
    source = open_corpus(config.data, tokenizer, split)
    encode = encoder(source, tokenizer)
    return source, encode


def scored_places(config: Config, batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return [B, T] bool: whether the target there is scored. Those within a prefix were seen beforehand."""
    counted = batch["weights"] > 0
    return counted & (batch["positions"] + 1 >= config.attention.prefix) if config.attention.prefix else counted


# The command line -----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which tokens are scored: --split, --rows, --stride, --without_eos, --batch_size."""
    parser.add_argument("--split", choices=("validation", "train"), default="validation", help="of the corpus")
    parser.add_argument(
        "--rows", type=int, help="rows or windows scored, 0: all; without: as many as the run's validation read"
    )
    parser.add_argument("--stride", type=int, metavar="S", help="documents alone, by windows that score S tokens")
    parser.add_argument(
        "--without_eos", action="store_true", help="score text alone, not the ends of documents (as lm-eval does)"
    )
    parser.add_argument("--batch_size", type=int, default=8, help="rows at once (8); changes nothing but speed")


def rows_of(options: argparse.Namespace, config: Config, changes: Mapping[str, Any]) -> int:
    """Return how many rows or windows are scored, 0: all. Raises UserError for options that do not fit the run."""
    for name, least in (("rows", 0), ("batch_size", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise UserError(f"--{name}: given {value}, allowed: {least}{' (all)' if least == 0 else ''} or more")
    length = config.data.sequence_length
    if options.stride is not None and not 1 <= options.stride <= length:
        raise UserError(f"--stride: given {options.stride}, allowed: 1 to data.sequence_length={length}")
    if options.rows is not None:
        return int(options.rows)
    return 0 if "data.source" in changes else config.validation_rows


def corpus_of(config: Config, options: argparse.Namespace, changes: Mapping[str, Any]) -> Corpus:
    """Return the rows that the options name of a run's data.

    Args:
      config: of the run, changed.
      changes: of its config, as the user gave them.

    Raises:
      UserError: the options do not fit the run, or the data cannot be read.
    """
    rows, eos = rows_of(options, config, changes), not options.without_eos
    if options.stride is None:
        return packed(config, options.split, rows=rows, batch_size=options.batch_size, eos=eos)
    return sliding(config, options.split, rows=rows, batch_size=options.batch_size, stride=options.stride, eos=eos)
