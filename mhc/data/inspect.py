"""Show what a run reads: packed batches in clear, and statistics of the corpus.

    python -m mhc.data.inspect --config configs/demo.py --config.data.source='text:corpus/*.txt'
    python -m mhc.data.inspect --config configs/demo.py --split validation --rows 1 --places
    python -m mhc.data.inspect --config configs/demo.py --documents 0 --json found.json

Prints the first rows of the first batches exactly as training (or validation) gets them: for every segment its places,
positions and text, with ⟨bos⟩ and ⟨eos⟩, and which targets count; ``--places`` a line for each place. Then, over
``--documents`` documents of the split, their number, tokens, bytes a token and lengths, and over the batches that were
made the share of padding and of each source of a mixture. Of several validation sets, each by itself.
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
from mhc.data.corpus.fidelity import reason, share_lost
from mhc.data.corpus.fidelity import said as share_said
from mhc.data.corpus.sources import Split, parts
from mhc.data.rows.encoding import encoder, open_corpus
from mhc.data.rows.packing import Batch
from mhc.data.tokenizers import Tokenizer
from mhc.errors import UserError

WIDTH = 100  # characters of a segment's text that are shown, half from each end


class Segment(NamedTuple):
    """Describes a stretch of one document within a row."""

    first: int  # place in the row
    last: int
    positions: tuple[int, int]  # within its stretch
    counted: int  # targets with a weight
    text: str  # of the inputs and the last target


def spelled(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    """Return the text of ids, with ⟨bos⟩ and ⟨eos⟩ where they are."""
    names = {tokenizer.eos_id: "⟨eos⟩", tokenizer.bos_id: "⟨bos⟩"}
    (marks,) = np.nonzero(np.isin(ids, list(names)))
    out = []
    for before, mark in itertools.pairwise([-1, *marks.tolist(), len(ids)]):
        out.append(tokenizer.decode(ids[before + 1 : mark]) + (names[int(ids[mark])] if mark < len(ids) else ""))
    return "".join(out)


def segments(tokenizer: Tokenizer, batch: Batch, row: int) -> list[Segment]:
    """Return the segments of a row, in order; padding is none."""
    ids = batch["segment_ids"][row]
    stretches = []
    for number in np.unique(ids[ids > 0]):
        (places,) = np.nonzero(ids == number)
        first, last = int(places[0]), int(places[-1])
        tokens = np.append(batch["tokens"][row, first : last + 1], batch["targets"][row, last])
        positions = batch["positions"][row, [first, last]]
        counted = int((batch["weights"][row, places] > 0).sum())
        ends = (int(positions[0]), int(positions[1]))
        stretches.append(Segment(first, last, ends, counted, spelled(tokenizer, tokens)))
    return stretches


def read(config: Config, split: Split, batches: int) -> Iterator[tuple[str, Batch]]:
    """Yield the first batches of training, or of each validation set in turn, each with its set's name or ""."""
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
    for name, rows in sets.items():
        print(rows.said(name))
        yield from ((name, batch) for batch in itertools.islice(rows, batches))


# Statistics -----------------------------------------------------------------------------------------------------------


class Lengths(NamedTuple):
    """Holds the lengths of the documents that were read."""

    documents: int  # of the split
    tokens: np.ndarray  # of each document read: bos left out, eos counted
    bytes: np.ndarray
    lost: float  # share of the bytes that the tokeniser loses


def lengths(config: Config, split: Split, most: int, tell: Any = lambda done, total: None) -> Lengths:
    """Measure ``most`` documents, evenly over the split; 0: all."""
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
    return Lengths(count, np.array(tokens, np.int64), np.array(size, np.int64), share_lost(source, tokenizer))


def statistics(found: Lengths, batches: Sequence[Batch], config: Config) -> dict[str, Any]:
    """Return the statistics of a split; numbers of tokens and bytes are of the documents that were read."""
    tokens = found.tokens
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
        sources = {one.name: {"weight": one.weight, "share": float(x)} for one, x in zip(named, part, strict=True)}
    return {
        "documents": found.documents,
        "documents_read": len(tokens),
        "tokens": int(tokens.sum()),
        "bytes": int(found.bytes.sum()),
        "bytes_lost": found.lost,
        "bytes_per_token": float(found.bytes.sum() / max(tokens.sum(), 1)),
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
    """Yield lines on a row of batch ``number``; ``names`` are those of a mixture's sources."""
    where = f"set {of_set}, " if of_set else ""
    of_source = f", of {names[int(batch['sources'][row])]}" if "sources" in batch else ""
    stretches = segments(tokenizer, batch, row)
    padding = int((batch["segment_ids"][row] == 0).sum())
    yield f"{where}batch {number}, row {row}{of_source}: {len(stretches)} segment(s), {padding} places of padding"
    for index, s in enumerate(stretches, start=1):
        text = s.text if len(s.text) <= WIDTH else f"{s.text[: WIDTH // 2]} … {s.text[-WIDTH // 2 :]}"
        whole = "all count" if s.counted == s.last - s.first + 1 else f"{s.counted} count"
        yield (
            f"  segment {index}: places {s.first}–{s.last}, positions {s.positions[0]}–{s.positions[1]}, "
            f"{whole}: {text!r}"
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


def report(said: dict[str, Any], config: Config) -> Iterator[str]:
    """Yield lines on the statistics."""
    some = "" if said["documents_read"] == said["documents"] else f" ({said['documents_read']:,} of them read)"
    sizes = said["tokens_of_a_document"]
    yield (
        f"{said['documents']:,} documents{some}: {said['tokens']:,} tokens, {said['bytes']:,} bytes, "
        f"{said['bytes_per_token']:.3f} bytes a token"
    )
    name = config.data.tokenizer
    yield reason(said["bytes_lost"], name) or share_said(said["bytes_lost"], name)
    yield (
        f"tokens of a document: mean {sizes['mean']:,.1f}, 5 % {sizes['p5']:,.0f}, median {sizes['p50']:,.0f}, "
        f"95 % {sizes['p95']:,.0f}, longest {sizes['max']:,}; longer than a row: {said['longer_than_a_row']:.1%}"
    )
    most = max(entry["documents"] for entry in said["histogram"])
    for entry in said["histogram"]:
        bar = "█" * math.ceil(40 * entry["documents"] / most)
        yield f"  {entry['from']:>9,} to {entry['below'] - 1:>9,}  {entry['documents']:>9,}  {bar}"
    yield f"in {said['batches']} batch(es): padding {said['padding']:.2%}, targets that count {said['counted']:.2%}"
    for name, entry in (said["sources"] or {}).items():
        yield f"  {name}: {entry['share']:.2%} of the rows, weight {entry['weight']:.2%}"


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit code. Raises UserError for a mistake."""
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
    names = [one.name for one in shares(config.data.source)]
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
        each = {one.name: dataclasses.replace(config, data=own) for one, own in parts(config.data, "validation")}
    by_set = {
        name: statistics(lengths(own, options.split, options.documents, tell), batches.get(name, []), config)
        for name, own in each.items()
    }
    for name, figures in by_set.items():
        print("\n".join([*([f"set {name}:"] if name else []), *report(figures, config)]))
    if options.json:
        from mhc.files import write_json

        described = by_set.get("", {"sets": by_set})
        write_json(options.json, {"split": options.split, "sequence_length": config.data.sequence_length, **described})
    return 0


if __name__ == "__main__":
    cli.run_main(main)
