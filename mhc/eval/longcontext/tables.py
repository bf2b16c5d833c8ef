"""Put the results for a checkpoint into tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mhc.eval.common.terminal import aligned


def text(result: dict[str, Any]) -> str:
    """Return the tables of a checkpoint, as they are printed."""
    parts = [f"{result['checkpoint']} ({result['kind']}), trained on {result['trained_length']} tokens a row"]
    parts += [f"{title}\n{aligned([heading, *rows])}" for title, heading, rows in _tables(result) if rows]
    notes = "\n".join(f"note: {note}" for note in result["notes"])
    return "\n\n".join([*parts, notes] if notes else parts)


Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]  # title, headings, rows


def _tables(result: dict[str, Any]) -> Iterator[Table]:
    if "needle" in result:
        yield from _needle_tables(result)
    if "loss" in result:
        yield _loss_table(result["loss"])
    yield (
        f"Minus {result.get('first')}, needles as means over depths; paired, 95 %",
        ["measure", "difference", "samples"],
        [(gap["measure"], _nats(gap, "+"), str(gap["samples"])) for gap in result.get("minus_first", ())],
    )
    times = ("first_token_seconds", "step_seconds_median", "step_seconds_p95")
    yield (
        "Cost of one row in ms, compilation apart, 95 %",
        ["length", "prompt", "first token", "next ones, median", "P95", "cache, bytes", "passes", "steps"],
        [
            (
                str(row["length"]),
                str(row["prompt"]),
                *(_milliseconds(row[name]) for name in times),
                f"{row['cache_bytes']:,}",
                str(row["repeats"]),
                str(row["steps"]),
            )
            for row in result.get("cost", ())
        ],
    )


def _needle_tables(result: dict[str, Any]) -> Iterator[Table]:
    k, n = result["needle"]["candidates"], result["needle"]["samples"]
    measured = ["exact, %", f"first of {k}, % (chance {100 / k:.0f})", "mean rank", "gain, nats a token"]
    over = f"means over {n} samples, 95 %"
    yield (
        f"Needles by length and depth, {over}",
        ["length", "depth", *measured],
        [(str(cell["length"]), f"{cell['depth']:g}", *_measured(cell)) for cell in result.get("retrieval", ())],
    )
    yield (
        "Position bias: the same evidence in the same text, 95 % over paired samples",
        ["length", "measure", "best depth", "worst", "best - worst", "p"],
        [
            (str(bias["length"]), bias["measure"], f"{bias['best']:g}", f"{bias['worst']:g}", *_spread(bias))
            for bias in result.get("position_bias", ())
        ],
    )
    for part, title, column in (
        ("distractors", "Distractors", "distractors"),
        ("joined", "Two needles to be joined", "number of"),
    ):
        if part in result:
            rows = [(str(next(iter(row.values()))), *_measured(row)) for row in result[part]["rows"]]
            yield f"{title}, {result[part]['length']} tokens, {over}", [column, *measured], rows


def _loss_table(loss: dict[str, Any]) -> Table:
    rows = []
    for series in loss["series"]:
        cells = [
            _nats(bucket["minus_first"], "+") if "minus_first" in bucket else _nats(bucket["loss"])
            for bucket in series["buckets"]
        ]
        rows.append((series["scaling"], *cells))
    return (
        f"Loss in nats by tokens of context, and what another scaling adds to it; {_of(loss)}, 95 % over them",
        ["scaling", *(f"{bucket['from']}-{bucket['to']}" for bucket in loss["series"][0]["buckets"])],
        rows,
    )


def _share(estimate: dict[str, float]) -> str:
    return f"{100 * estimate['value']:.0f} ({100 * estimate['low']:.0f} to {100 * estimate['high']:.0f})"


def _nats(estimate: dict[str, float | None], sign: str = "") -> str:
    bounds = "one sample" if estimate["low"] is None else f"{estimate['low']:{sign}.3f} to {estimate['high']:{sign}.3f}"
    return f"{estimate['value']:{sign}.3f} ({bounds})"


def _of(loss: dict[str, Any]) -> str:
    if loss["joined"]:
        return f"{loss['documents']} rows of documents joined"
    return f"{loss['documents']} documents, {loss['rows']} row{'s' if loss['rows'] > 1 else ''} of each"


def _milliseconds(estimate: dict[str, Any]) -> str:
    value = f"{1e3 * estimate['value']:.2f}"
    if estimate["low"] is None:
        return value
    return f"{value} ({1e3 * estimate['low']:.2f} to {1e3 * estimate['high']:.2f})"


def _measured(cell: dict[str, Any]) -> tuple[str, ...]:
    return _share(cell["exact"]), _share(cell["first"]), f"{cell['mean_rank']:.1f}", _nats(cell["gain"], "+")


def _spread(bias: dict[str, Any]) -> tuple[str, str]:
    return _nats(bias["spread"]), f"{bias['p']:.4f}"
