"""Loss, perplexity and bits per byte of checkpoints on a corpus.

    python -m eval.perplexity --checkpoint runs/a
    python -m eval.perplexity --checkpoint runs/plain runs/hc runs/mhc --rows 0 --out report
    python -m eval.perplexity --checkpoint runs/a --config.data.source='text:books/*.txt' --stride 256 --average 5

By default the rows that the run's own validation read, packed as there, so that the loss is the one of its metrics;
``--rows 0`` takes the whole split. With ``--stride S`` every document is read alone, by windows of the sequence length
of which each scores its last S tokens: all but the first ones have at least T - S tokens of context.

Every target token counts once and the same. Intervals (95 %) are percentiles over documents drawn with replacement;
several checkpoints are scored on the same documents, and their differences are paired by document.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mhc import cli
from mhc.errors import UserError
from mhc.eval.common import checkpoints
from mhc.eval.common.terminal import Progress, aligned

if TYPE_CHECKING:
    import argparse

    from mhc.config import Config
    from mhc.data.corpus.sources import Split
    from mhc.data.rows.packing import Batch
    from mhc.eval.common.scoring import Sums


class Corpus(NamedTuple):
    """Rows to be scored, each place with its document."""

    batches: Iterator[Batch]  # fields of mhc.data.rows.packing; also documents [B, T] int32 and context [B, T] int32
    documents: int  # of the split
    lost: float = 0.0  # share of the text's bytes that the tokeniser loses


class Found(NamedTuple):
    """What a checkpoint scored."""

    name: str
    kind: str  # of the residual
    steps: tuple[int, ...]
    documents: np.ndarray  # numbers of those that have a scored token
    sums: Sums  # of each of them
    by_position: np.ndarray  # [T, 2]: nats and tokens by the number of tokens before the target that the model saw
    tokenizer: str  # hash: bits per token of others are not comparable
    seconds: float
    withheld: str | None = None  # why bits per byte says nothing


# Rows -----------------------------------------------------------------------------------------------------------------


def packed(config: Config, split: Split, *, rows: int, batch_size: int, eos: bool = True) -> Corpus:
    """Return the rows of the run's validation, by its rule: documents end to end, cut at the sequence length.

    Args:
      rows: of each set, where validation has several; 0 for all. eos: whether the end of a document is scored as well.
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
    """[first, last) document of each of the sources that are joined in one."""
    ends = np.cumsum([len(one) for one in getattr(source, "sources", [source])]).tolist()
    return list(zip([0, *ends], ends, strict=False))


class _Numbered:
    """A stream of packed rows that knows of which document each place is: those from ``first`` to before ``last``."""

    def __init__(self, encode: Any, first: int, last: int, **which: Any):
        from mhc.data.rows.spread import Rows

        self._stream = Rows(encode, first, last, **which)
        self._taken: list[tuple[int, int]] = []  # (document, pairs) of the row in hand

    def take(self, room: int) -> Any:
        taken = self._stream.take(room)
        if taken is not None:
            self._taken.append((self._stream.document, len(taken[0])))
        return taken

    def fill(self, batch: Batch, row: int) -> bool:
        from mhc.data.rows.packing import fill_row

        self._taken = []
        found = self._stream.next_row() and fill_row(batch, row, self)  # type: ignore[arg-type]
        numbers = [np.full(pairs, document, np.int32) for document, pairs in self._taken]
        if numbers:
            joined = np.concatenate(numbers)
            batch["documents"][row, : len(joined)] = joined
        return found


def sliding(config: Config, split: Split, *, rows: int, batch_size: int, stride: int, eos: bool = True) -> Corpus:
    """Each document alone, by windows of T tokens that score their last ``stride``; the first window scores all."""
    from mhc.data.rows.packing import empty_batch
    from mhc.eval.common.scoring import Window, windows

    source, encode = _open(config, split)
    length = config.data.sequence_length

    def every() -> Iterator[tuple[int, Any, Window]]:
        """(document, it, window)"""
        for number in range(len(source)):
            document = encode(number)
            for window in windows(len(document.target_bytes) - (not eos), length, stride):
                yield number, document, window

    def batches() -> Iterator[Batch]:
        batch, filled, made = None, 0, 0
        for number, document, (start, scored, end) in every():
            if rows and made == rows:
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
            filled, made = filled + 1, made + 1
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
    """(documents, number -> Document) of a split."""
    from mhc.data import tokenizers
    from mhc.data.rows.encoding import encoder, open_corpus

    tokenizer = tokenizers.load(config.data.tokenizer)
    source = open_corpus(config.data, tokenizer, split)
    encode = encoder(source, tokenizer)
    return source, encode


# Scores ---------------------------------------------------------------------------------------------------------------


def counts(config: Config, batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """[B, T]: whether the target there is scored. Those within a prefix were seen before they were predicted."""
    counted = batch["weights"] > 0
    return counted & (batch["positions"] + 1 >= config.attention.prefix) if config.attention.prefix else counted


def score(
    checkpoint: checkpoints.Checkpoint, corpus: Corpus, tell: Callable[[int], None] = lambda tokens: None
) -> Found:
    """Sums of a checkpoint over a corpus, added up in float64.

    Args:
      tell: called after each batch with the tokens scored so far.
    """
    from mhc.eval.common.scoring import Scorer, Sums

    started = time.monotonic()
    length = checkpoint.config.data.sequence_length
    sums = np.zeros((3, corpus.documents))
    by_position = np.zeros((length + 1, 2))
    for batch, scores in Scorer(checkpoint).each(corpus.batches):
        counted = counts(checkpoint.config, batch)
        documents, nll = batch["documents"][counted], scores.nll[counted].astype(np.float64)
        for row, values in zip(sums, (nll, np.ones(len(nll)), batch["target_bytes"][counted]), strict=True):
            row += np.bincount(documents, values, corpus.documents)
        context = batch["context"][counted]
        by_position[:, 0] += np.bincount(context, nll, length + 1)
        by_position[:, 1] += np.bincount(context, minlength=length + 1)
        tell(int(sums[1].sum()))
    if not sums[1].any():
        raise UserError("nothing to score: the split has no token")
    there = np.flatnonzero(sums[1])
    from mhc.data import tokenizers
    from mhc.data.corpus import fidelity

    tokenizer = tokenizers.load(checkpoint.config.data.tokenizer).content_hash
    seconds = time.monotonic() - started
    withheld = fidelity.reason(corpus.lost, checkpoint.config.data.tokenizer)
    of, kind = Sums(*sums[:, there]), checkpoint.config.residual.kind
    return Found(checkpoint.name, kind, checkpoint.steps, there, of, by_position[1:], tokenizer, seconds, withheld)


def summary(found: Found, first: Found | None) -> dict[str, Any]:
    """What is said of a checkpoint: measures with intervals, loss by position, difference to the first one."""
    from mhc.eval.common.scoring import intervals, measures, resampled

    weights = resampled(len(found.documents))
    alone = len(found.documents) < 2  # nothing to draw from
    whole = measures(*(float(part.sum()) for part in found.sums))
    bounds = intervals(found.sums, weights)
    context, (nll, tokens) = np.arange(1, len(found.by_position) + 1), found.by_position.T
    out = {
        "checkpoint": found.name,
        "kind": found.kind,
        "steps": list(found.steps),
        "documents": len(found.documents),
        "tokens": int(found.sums.tokens.sum()),
        "bytes": int(found.sums.bytes.sum()),
        **{
            name: {
                "value": value,
                "low": None if alone else bounds[name][0],
                "high": None if alone else bounds[name][1],
            }
            for name, value in _items(whole)
        },
        "by_context": [
            {"context": int(c), "loss": float(a / b), "tokens": int(b)}
            for c, a, b in zip(context, nll, tokens, strict=True)
            if b
        ],
        "seconds": found.seconds,
    }
    if found.withheld:
        out |= {"bits_per_byte": dict.fromkeys(("value", "low", "high")), "bits_per_byte_reason": found.withheld}
    if first is not None and first is not found and not alone:
        out["minus_first"] = difference(found, first, weights)
    return out


def _items(measures: Any) -> list[tuple[str, float]]:
    return list(measures._asdict().items())


def difference(found: Found, first: Found, weights: np.ndarray) -> dict[str, Any] | None:
    """Bits per byte (nats per token, where the corpus is of ids) less those of the first, paired by document.

    In nats per token also where a tokeniser loses text. None where the two did not score the same documents, or other
    tokens of them.
    """
    if not np.array_equal(found.documents, first.documents):
        return None
    tells = found.sums.bytes.any() and not found.withheld and not first.withheld
    by = "bytes" if tells else "tokens"
    size = getattr(found.sums, by)
    if not np.array_equal(size, getattr(first.sums, by)):
        return None
    gap = (found.sums.nll - first.sums.nll) / (math.log(2.0) if by == "bytes" else 1.0)
    drawn = (weights @ gap) / np.maximum(weights @ size, 1e-30)
    low, high = np.percentile(drawn, (2.5, 97.5))
    unit = "bits_per_byte" if by == "bytes" else "loss"
    return {"measure": unit, "value": float(gap.sum() / size.sum()), "low": float(low), "high": float(high)}


# The command line -----------------------------------------------------------------------------------------------------


def table(summaries: Sequence[dict[str, Any]]) -> str:
    """One line a checkpoint."""
    lines = [("checkpoint", "loss", "perplexity", "bits/token", "bits/byte (95 %)", "minus first (95 %)")]
    for one in summaries:
        values = {name: one[name]["value"] for name in ("loss", "perplexity", "bits_per_token", "bits_per_byte")}
        bits, gap = one["bits_per_byte"], one.get("minus_first")
        interval = "one document" if bits["low"] is None else f"{bits['low']:.4f} to {bits['high']:.4f}"
        lines.append(
            (
                one["checkpoint"],
                f"{values['loss']:.4f}",
                f"{values['perplexity']:.4g}",
                f"{values['bits_per_token']:.4f}",
                "—" if not _tells(bits) else f"{bits['value']:.4f} ({interval})",
                "—" if gap is None else f"{gap['value']:+.4f} ({gap['low']:+.4f} to {gap['high']:+.4f})",
            )
        )
    return aligned(lines)


def _tells(bits: Mapping[str, float | None]) -> bool:
    return bits["value"] is not None and not math.isnan(bits["value"])


def draw(summaries: Sequence[dict[str, Any]], folder: Path) -> Path:
    """perplexity.png (and its numbers as CSV): bits per byte with intervals, and loss by tokens of context."""
    from mhc.eval.common.sheet import Sheet
    from mhc.eval.compare.figures import styles_of_kinds

    names = checkpoints.short_names([one["checkpoint"] for one in summaries])
    styles = styles_of_kinds([one["kind"] for one in summaries])
    by_text = all(_tells(one["bits_per_byte"]) for one in summaries)
    measure = "bits_per_byte" if by_text else "loss"
    sheet = Sheet("perplexity", columns=2, legend=list(zip(styles, names, strict=True)), x="", sharey=False)
    sheet.title(0, "bits per byte, 95 % over documents" if by_text else "nats per token, 95 % over documents")
    sheet.title(1, "nats per token by tokens of context")
    for number, (one, style) in enumerate(zip(summaries, styles, strict=True)):
        value = one[measure]
        low, high = (value["value"] if value[end] is None else value[end] for end in ("low", "high"))
        sheet.interval(0, one["checkpoint"], number, (value["value"], low, high), style)
        buckets = by_buckets(one["by_context"])
        x = np.array([bucket["context"] for bucket in buckets], float)
        sheet.line(1, one["checkpoint"], x, np.array([bucket["loss"] for bucket in buckets]), style, marker=True)
    sheet.panels[0].set_xticks([])
    sheet.panels[1].set_xscale("log", base=2)
    sheet.panels[1].set_xlabel("tokens of context")
    return sheet.save(folder, folder)


def by_buckets(by_context: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Loss by context in buckets that double: [2^k, 2^(k+1)), weighted by tokens."""
    buckets: dict[int, list[float]] = {}
    for one in by_context:
        bucket = buckets.setdefault(one["context"].bit_length() - 1, [0.0, 0.0])
        bucket[0] += one["loss"] * one["tokens"]
        bucket[1] += one["tokens"]
    return [{"context": 2**k, "loss": nll / tokens, "tokens": int(tokens)} for k, (nll, tokens) in buckets.items()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--split, --rows, --stride, --without_eos and --batch_size: which tokens are scored, for ``corpus_of``."""
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
    """Rows or windows to score, 0: all. Raises UserError for options that make no sense or do not fit the sequence."""
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
    """What the options name of a run's data; ``changes``: of its config, as the user gave them. Raises UserError."""
    rows, eos = rows_of(options, config, changes), not options.without_eos
    if options.stride is None:
        return packed(config, options.split, rows=rows, batch_size=options.batch_size, eos=eos)
    return sliding(config, options.split, rows=rows, batch_size=options.batch_size, stride=options.stride, eos=eos)


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code. Raises UserError for a mistake."""
    parser = cli.Parser(prog="python -m eval.perplexity", description="Loss, perplexity and bits per byte.")
    checkpoints.add_arguments(parser, several=True)
    add_arguments(parser)
    parser.add_argument("--json", metavar="FILE", help="write what was found there")
    parser.add_argument("--out", metavar="DIR", help="write perplexity.png and its numbers there")
    options, rest = parser.parse_known_args(arguments)
    changes = checkpoints.parse_changes(rest, parser)
    out = cli.check_writable(options.out, "--out") if options.out else None
    if options.json:
        cli.check_file(options.json, "--json")

    from mhc.train.checkpoint import find_checkpoint

    for name in options.checkpoint:  # none is scored before all are there, and the options fit them
        config, _ = find_checkpoint(*checkpoints.locate(name, options.step))
        rows_of(options, checkpoints.changed(config, checkpoints.of_config(changes)), changes)
    found: list[Found] = []
    for name in options.checkpoint:
        checkpoint = checkpoints.load(name, options.step, average=options.average, changes=changes)
        corpus = corpus_of(checkpoint.config, options, changes)
        print(f"{checkpoint.name}: compiling, then scoring", file=sys.stderr)
        progress = Progress()

        def tell(tokens: int, name: str = checkpoint.name, progress: Progress = progress) -> None:
            progress(lambda seconds: f"{name}: {tokens:,} tokens, {tokens / seconds:,.0f} a second")

        found.append(score(checkpoint, corpus, tell))
        del checkpoint
    summaries = [summary(one, found[0]) for one in found]
    print(table(summaries))
    for line in dict.fromkeys(one["bits_per_byte_reason"] for one in summaries if "bits_per_byte_reason" in one):
        print(f"note: {line}")
    if options.json:
        from mhc.files import write_json

        write_json(
            options.json,
            {
                "split": options.split,
                "stride": options.stride,
                "eos": not options.without_eos,
                "checkpoints": summaries,
            },
        )
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        print(f"{draw(summaries, out)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    cli.run_main(main)
