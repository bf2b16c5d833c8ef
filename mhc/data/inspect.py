"""Show what a run reads: packed batches as text, and statistics of the corpus.

    python -m mhc.data.inspect --config configs/demo.py --config.data.source='text:corpus/*.txt'
    python -m mhc.data.inspect --config configs/demo.py --split validation --rows 1 --places
    python -m mhc.data.inspect --config configs/demo.py --documents 0 --json found.json

The program prints the first rows of the first batches exactly as training (or validation) gets them: the places,
positions and text of each segment, with ⟨bos⟩ and ⟨eos⟩, and which targets count; ``--places`` prints a line for each
place. Then it prints the number, tokens, bytes a token and lengths of ``--documents`` documents of the split, and the
shares of padding and of each source of a mixture in the batches. Several validation sets are shown one by one.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mhc import cli
from mhc.config import Config, shares
from mhc.data import pipeline, tokenizers
from mhc.data.corpus import fidelity
from mhc.data.corpus.sources import Split, parts
from mhc.data.rows.encoding import encoder, open_corpus
from mhc.data.rows.packing import Batch
from mhc.data.tokenizers import Tokenizer
from mhc.errors import UserError
from mhc.files import write_json

WIDTH = 100  # characters of a segment's text that are shown, half from each end


class Segment(NamedTuple):
    """Describes a stretch of one document within a row."""

    first: int  # place in the row
    last: int
    positions: tuple[int, int]  # within its stretch
    counted: int  # targets with a weight
    text: str  # that the inputs and the last target spell


def spelled(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    """Return the text of ids, with ⟨bos⟩ and ⟨eos⟩ where they are."""
    names = {tokenizer.eos_id: "⟨eos⟩", tokenizer.bos_id: "⟨bos⟩"}
    (marks,) = np.nonzero(np.isin(ids, list(names)))
    out = []
    for before, mark in itertools.pairwise([-1, *marks.tolist(), len(ids)]):
        out.append(tokenizer.decode(ids[before + 1 : mark]) + (names[int(ids[mark])] if mark < len(ids) else ""))
    return "".join(out)


def segments(tokenizer: Tokenizer, batch: Batch, row: int) -> list[Segment]:
    """Return the segments of a row, in order; padding is skipped."""
    ids = batch["segment_ids"][row]
    row_segments = []
    for number in np.unique(ids[ids > 0]):
        (places,) = np.nonzero(ids == number)
        first, last = int(places[0]), int(places[-1])
        tokens = np.append(batch["tokens"][row, first : last + 1], batch["targets"][row, last])
        positions = batch["positions"][row, [first, last]]
        counted = int((batch["weights"][row, places] > 0).sum())
        ends = (int(positions[0]), int(positions[1]))
        row_segments.append(Segment(first, last, ends, counted, spelled(tokenizer, tokens)))
    return row_segments


def read(config: Config, split: Split, batches: int) -> Iterator[tuple[str, Batch]]:
    """Yield the first batches of training, or of each validation set, each with its set's name or ""."""
    tokenizer, size = tokenizers.load(config.data.tokenizer), config.train.batch_size
    if split == "train":
        data = dataclasses.replace(config.data, workers=0)  # a few batches: sooner read than processes started
        iterator = pipeline.train_iterator(data, tokenizer, batch_size=size, seed=config.seed.data)
        try:
            yield from (("", batch) for batch in itertools.islice(iterator, batches))
        finally:
            iterator.close()
        return
    spread = config.validation.rule != "first"
    sets = pipeline.validation_sets(
        config.data, tokenizer, batch_size=size, count=config.validation_rows, spread=spread
    )
    for name, validation in sets.items():
        print(validation.coverage(name))
        yield from ((name, batch) for batch in itertools.islice(validation, batches))


# Statistics -----------------------------------------------------------------------------------------------------------


class Lengths(NamedTuple):
    """Holds the sizes of the documents that were read."""

    documents: int  # in the split
    tokens: np.ndarray  # of each document read: bos left out, eos counted
    bytes: np.ndarray
    lost: float  # share of the bytes that the tokeniser loses


def lengths(config: Config, split: Split, most: int, tell: Any = lambda done, total: None) -> Lengths:
    """Measure at most ``most`` documents, spread evenly over the split; 0 stands for all."""
    tokenizer = tokenizers.load(config.data.tokenizer)
    source = open_corpus(config.data, tokenizer, split)
    encode = encoder(source, tokenizer)
    count = len(source)
    chosen = range(count) if most == 0 or count <= most else np.linspace(0, count - 1, most).astype(int).tolist()
    tokens, size = [], []
    for done, number in enumerate(chosen):
        pairs = encode(number).target_bytes
        tokens.append(len(pairs))
        size.append(int(pairs.sum()))
        tell(done, len(chosen))
    return Lengths(count, np.array(tokens, np.int64), np.array(size, np.int64), fidelity.share_lost(source, tokenizer))


def statistics(measured: Lengths, batches: Sequence[Batch], config: Config) -> dict[str, Any]:
    """Return the statistics of a split; tokens and bytes are counted over the documents that were read."""
    tokens = measured.tokens
    places = sum(batch["weights"].size for batch in batches)
    filled = sum(int((batch["segment_ids"] > 0).sum()) for batch in batches)
    counted = sum(int((batch["weights"] > 0).sum()) for batch in batches)
    ends = 2 ** np.arange(1, max(int(tokens.max()), 1).bit_length() + 1)
    histogram = [int(((tokens >= end // 2) & (tokens < end)).sum()) for end in ends]
    named = shares(config.data.source)
    sources = None
    if batches and "sources" in batches[0]:
        rows = np.concatenate([batch["sources"] for batch in batches])
        part = np.bincount(rows, minlength=len(named)) / len(rows)
        sources = {
            source.name: {"weight": source.weight, "share": float(share)}
            for source, share in zip(named, part, strict=True)
        }
    return {
        "documents": measured.documents,
        "documents_read": len(tokens),
        "tokens": int(tokens.sum()),
        "bytes": int(measured.bytes.sum()),
        "bytes_lost": measured.lost,
        "bytes_per_token": float(measured.bytes.sum() / max(tokens.sum(), 1)),
        "tokens_of_a_document": {
            "mean": float(tokens.mean()),
            **{f"p{p}": float(np.percentile(tokens, p)) for p in (5, 50, 95)},
            "max": int(tokens.max()),
        },
        "longer_than_a_row": float((tokens > config.data.sequence_length).mean()),
        "histogram": [
            {"from": int(end // 2), "below": int(end), "documents": count}
            for end, count in zip(ends, histogram, strict=True)
            if count
        ],
        "batches": len(batches),
        "padding": 1 - filled / max(places, 1),
        "counted": counted / max(places, 1),
        "sources": sources,
    }


# The command line -----------------------------------------------------------------------------------------------------


def describe_row(
    tokenizer: Tokenizer, batch: Batch, number: int, row: int, names: Sequence[str], of_set: str = ""
) -> Iterator[str]:
    """Yield lines that describe a row of batch ``number``; ``names`` are the names of a mixture's sources."""
    where = f"set {of_set}, " if of_set else ""
    source = f", of {names[int(batch['sources'][row])]}" if "sources" in batch else ""
    row_segments = segments(tokenizer, batch, row)
    padding = int((batch["segment_ids"][row] == 0).sum())
    yield f"{where}batch {number}, row {row}{source}: {len(row_segments)} segment(s), {padding} places of padding"
    for index, segment in enumerate(row_segments, start=1):
        text, (begin, end) = segment.text, segment.positions
        shown = text if len(text) <= WIDTH else f"{text[: WIDTH // 2]} … {text[-WIDTH // 2 :]}"
        whole = segment.counted == segment.last - segment.first + 1
        yield (
            f"  segment {index}: places {segment.first}–{segment.last}, positions {begin}–{end}, "
            f"{'all' if whole else segment.counted} count: {shown!r}"
        )


def describe_places(tokenizer: Tokenizer, batch: Batch, row: int) -> Iterator[str]:
    """Yield a line for each place of a row."""
    yield "  place segment position   input  target  bytes  weight"
    for place in range(batch["tokens"].shape[1]):
        token, target = (np.array([batch[name][row, place]]) for name in ("tokens", "targets"))
        if batch["segment_ids"][row, place] == 0:
            yield f"  {place:5}       –        –  padding"
            continue
        yield (
            f"  {place:5} {batch['segment_ids'][row, place]:7} {batch['positions'][row, place]:8} "
            f"{int(token[0]):7} {int(target[0]):7} {batch['target_bytes'][row, place]:6} "
            f"{batch['weights'][row, place]:7g}  {spelled(tokenizer, token)!r} → {spelled(tokenizer, target)!r}"
        )


def report(figures: dict[str, Any], config: Config) -> Iterator[str]:
    """Yield lines that report the `statistics` of a split."""
    some = "" if figures["documents_read"] == figures["documents"] else f" ({figures['documents_read']:,} of them read)"
    sizes = figures["tokens_of_a_document"]
    yield (
        f"{figures['documents']:,} documents{some}: {figures['tokens']:,} tokens, {figures['bytes']:,} bytes, "
        f"{figures['bytes_per_token']:.3f} bytes a token"
    )
    lost, name = figures["bytes_lost"], config.data.tokenizer
    yield fidelity.why_withheld(lost, name) or fidelity.describe(lost, name)
    yield (
        f"tokens of a document: mean {sizes['mean']:,.1f}, 5 % {sizes['p5']:,.0f}, median {sizes['p50']:,.0f}, "
        f"95 % {sizes['p95']:,.0f}, longest {sizes['max']:,}; longer than a row: {figures['longer_than_a_row']:.1%}"
    )
    most = max(group["documents"] for group in figures["histogram"])
    for group in figures["histogram"]:
        bar = "█" * math.ceil(40 * group["documents"] / most)
        yield f"  {group['from']:>9,} to {group['below'] - 1:>9,}  {group['documents']:>9,}  {bar}"
    padding, counted = figures["padding"], figures["counted"]
    yield f"in {figures['batches']} batch(es): padding {padding:.2%}, targets that count {counted:.2%}"
    for name, source in (figures["sources"] or {}).items():
        yield f"  {name}: {source['share']:.2%} of the rows, weight {source['weight']:.2%}"


def main(arguments: Sequence[str]) -> int:
    """Run the program and return its exit code. Raises UserError for a user's mistake."""
    parser = cli.Parser(
        description="Show packed batches and statistics of a corpus.",
        example="{prog} --config configs/demo.py --config.data.source='text:corpus/*.txt'",
        fields=cli.EVERY_FIELD,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="config file, e.g. configs/demo.py")
    parser.add_argument("--split", choices=("train", "validation"), default="train", help="of the corpus (train)")
    parser.add_argument("--batches", type=int, default=1, help="batches that are made (1)")
    parser.add_argument("--rows", type=int, default=4, help="rows shown of each batch (4)")
    parser.add_argument("--places", action="store_true", help="a line for each place of the rows shown")
    parser.add_argument("--documents", type=int, default=10_000, help="documents measured, 0: all (10000)")
    parser.add_argument("--json", metavar="FILE", help="write the statistics there")
    options, rest = parser.parse_known_args(arguments)
    config = cli.load_config(options.config, rest, parser)
    for name, least in (("batches", 1), ("rows", 0), ("documents", 0)):
        if getattr(options, name) < least:
            raise UserError(f"--{name}: given {getattr(options, name)}, allowed: {least} or more")
    if options.json:
        cli.check_file(options.json, "--json")
    tokenizer = tokenizers.load(config.data.tokenizer)
    names = [share.name for share in shares(config.data.source)]
    batches: dict[str, list[Batch]] = {}
    for name, batch in read(config, options.split, options.batches):
        of_set = batches.setdefault(name, [])
        of_set.append(batch)
        for row in range(min(options.rows, len(batch["tokens"]))):
            print("\n".join(describe_row(tokenizer, batch, len(of_set) - 1, row, names, name)))
            if options.places:
                print("\n".join(describe_places(tokenizer, batch, row)))
    last = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > 5:
            last = time.monotonic()
            print(f"measured {done:,} of {total:,} documents", file=sys.stderr, flush=True)

    each = {"": config}
    if options.split == "validation":
        sets = parts(config.data, "validation")
        each = {share.name: dataclasses.replace(config, data=data) for share, data in sets}
    figures = {
        name: statistics(lengths(part, options.split, options.documents, tell), batches.get(name, []), config)
        for name, part in each.items()
    }
    for name, values in figures.items():
        print("\n".join([*([f"set {name}:"] if name else []), *report(values, config)]))
    if options.json:
        about = {"split": options.split, "sequence_length": config.data.sequence_length}
        write_json(options.json, {**about, **figures.get("", {"sets": figures})})
    return 0


if __name__ == "__main__":
    cli.run_main(main)
