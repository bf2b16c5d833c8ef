"""Measure loss, perplexity and bits per byte of checkpoints on a corpus.

    python -m eval.perplexity --checkpoint runs/a
    python -m eval.perplexity --checkpoint runs/plain runs/hc runs/mhc --rows 0 --out report
    python -m eval.perplexity --checkpoint runs/a --config.data.source='text:books/*.txt' --stride 256 --average 5

By default it scores the rows that the run's own validation read, packed as there, so that the loss is that of the run's
metrics; ``--rows 0`` takes the whole split. With ``--stride S`` every document is read alone, by windows of the
sequence length of which each scores its last S tokens: all but the first ones have at least T - S tokens of context.

Every target token counts once and the same. Intervals (95 %) are percentiles over documents drawn with replacement;
several checkpoints are scored on the same documents, and their differences are paired by document.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mhc import cli
from mhc.eval.common import checkpoints
from mhc.eval.common.rows import add_arguments, corpus_of, rows_of
from mhc.eval.common.terminal import Progress, aligned
from mhc.eval.perplexity.score import Scored, score, summary


def table(summaries: Sequence[dict[str, Any]]) -> str:
    """Return a table with a line for each checkpoint."""
    lines = [("checkpoint", "loss", "perplexity", "bits/token", "bits/byte (95 %)", "minus first (95 %)")]
    for entry in summaries:
        values = {name: entry[name]["value"] for name in ("loss", "perplexity", "bits_per_token", "bits_per_byte")}
        bits, gap = entry["bits_per_byte"], entry.get("minus_first")
        interval = "one document" if bits["low"] is None else f"{bits['low']:.4f} to {bits['high']:.4f}"
        lines.append(
            (
                entry["checkpoint"],
                f"{values['loss']:.4f}",
                f"{values['perplexity']:.4g}",
                f"{values['bits_per_token']:.4f}",
                "—" if not _is_known(bits) else f"{bits['value']:.4f} ({interval})",
                "—" if gap is None else f"{gap['value']:+.4f} ({gap['low']:+.4f} to {gap['high']:+.4f})",
            )
        )
    return aligned(lines)


def _is_known(bits: Mapping[str, float | None]) -> bool:
    return bits["value"] is not None and not math.isnan(bits["value"])


def draw(summaries: Sequence[dict[str, Any]], folder: Path) -> Path:
    """Draw perplexity.png (and its numbers as CSV): bits per byte with intervals, and loss by tokens of context."""
    from mhc.eval.common.palette import styles_of_kinds
    from mhc.eval.common.sheet import Sheet

    names = checkpoints.short_names([one["checkpoint"] for one in summaries])
    styles = styles_of_kinds([one["kind"] for one in summaries])
    by_text = all(_is_known(one["bits_per_byte"]) for one in summaries)
    measure = "bits_per_byte" if by_text else "loss"
    sheet = Sheet("perplexity", columns=2, legend=list(zip(styles, names, strict=True)), x="", sharey=False)
    sheet.title(0, "bits per byte, 95 % over documents" if by_text else "nats per token, 95 % over documents")
    sheet.title(1, "nats per token by tokens of context")
    for number, (entry, style) in enumerate(zip(summaries, styles, strict=True)):
        value = entry[measure]
        low, high = (value["value"] if value[end] is None else value[end] for end in ("low", "high"))
        sheet.interval(0, entry["checkpoint"], number, (value["value"], low, high), style)
        buckets = by_buckets(entry["by_context"])
        x = np.array([bucket["context"] for bucket in buckets], float)
        sheet.line(1, entry["checkpoint"], x, np.array([bucket["loss"] for bucket in buckets]), style, marker=True)
    sheet.panels[0].set_xticks([])
    sheet.panels[1].set_xscale("log", base=2)
    sheet.panels[1].set_xlabel("tokens of context")
    return sheet.save(folder, folder)


def by_buckets(by_context: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the loss by context in buckets that double: [2^k, 2^(k+1)), weighted by tokens."""
    buckets: dict[int, list[float]] = {}
    for point in by_context:
        bucket = buckets.setdefault(point["context"].bit_length() - 1, [0.0, 0.0])
        bucket[0] += point["loss"] * point["tokens"]
        bucket[1] += point["tokens"]
    return [{"context": 2**k, "loss": nll / tokens, "tokens": int(tokens)} for k, (nll, tokens) in buckets.items()]


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit code. Raises UserError for a mistake."""
    parser = cli.Parser(
        description="Loss, perplexity and bits per byte.",
        example="{prog} --checkpoint runs/plain runs/mhc --rows 0 --out report",
        fields=checkpoints.FIELDS,
    )
    checkpoints.add_arguments(parser, several=True)
    add_arguments(parser)
    parser.add_argument("--json", metavar="FILE", help="write what was found there")
    parser.add_argument("--out", metavar="DIR", help="write perplexity.png and its numbers there")
    options, rest = parser.parse_known_args(arguments)
    changes = checkpoints.parse_changes(rest, parser)
    out = cli.check_writable(options.out, "--out") if options.out else None
    if options.json:
        cli.check_file(options.json, "--json")

    for name in options.checkpoint:  # none is scored before all are there, and the options fit them
        rows_of(options, checkpoints.config_of(name, options.step, changes), changes)
    every: list[Scored] = []
    for name in options.checkpoint:
        checkpoint = checkpoints.load(name, options.step, average=options.average, changes=changes)
        corpus = corpus_of(checkpoint.config, options, changes)
        print(f"{checkpoint.name}: compiling, then scoring", file=sys.stderr)
        every.append(score(checkpoint, corpus, Progress("tokens", name=checkpoint.name)))
        del checkpoint
    summaries = [summary(scored, every[0]) for scored in every]
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
