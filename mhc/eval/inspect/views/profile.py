"""Show sizes of activations, attention logits and entropies by layer and head."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from mhc.eval.common.checkpoints import Checkpoint
from mhc.eval.common.palette import INK, Style
from mhc.eval.common.sheet import Sheet
from mhc.eval.common.terminal import Progress, aligned
from mhc.eval.inspect.profile import Profile, profile
from mhc.eval.inspect.rows import read_rows
from mhc.eval.inspect.views.drawing import COLOURS, few, with_bounds
from mhc.model.edits import SUBLAYERS


def view(checkpoint: Checkpoint, options: Any) -> dict[str, Any]:
    """Print and return sizes of activations, attention logits and entropies by layer and head."""
    rows = read_rows(checkpoint, options.split, options.rows, options.batch_size)
    measured = profile(checkpoint, rows, Progress("batches"))
    layers, heads = measured.logit_max.shape
    result: dict[str, Any] = {
        "split": options.split,
        "rows": int(rows.there.sum()),
        "documents": rows.documents,
        "tokens": measured.tokens,
    }
    result["sublayers"] = [
        {
            "sublayer": k,
            "kind": SUBLAYERS[k % 2],
            "residual_rms": measured.residual.at(k),
            "output_rms": measured.output.at(k),
        }
        for k in range(2 * layers)
    ]
    result["layers"] = [
        {"layer": layer, "entropy": measured.entropy_by_layer.at(layer), "logit_max": float(largest)}
        for layer, largest in enumerate(measured.logit_max.max(axis=1))
    ]
    result["heads"] = [
        {
            "layer": layer,
            "head": head,
            "entropy": measured.entropy.at(layer, head),
            "first_token": measured.first.at(layer, head),
            "logit_max": float(measured.logit_max[layer, head]),
        }
        for layer in range(layers)
        for head in range(heads)
    ]
    text = f"{result['rows']} rows of {result['documents']} documents, {measured.tokens:,} tokens"
    print(f"{text}; means over tokens (95 %)")
    print("\n".join([_table(measured), *few(result)]))
    if options.out is not None:
        print(_draw(measured, checkpoint.name, options.out), file=sys.stderr)
    return result


def _table(measured: Profile) -> str:
    lines = [("layer", "residual rms", "attention rms", "feed-forward rms", "largest logit", "entropy", "by head")]
    for layer, largest in enumerate(measured.logit_max.max(axis=1)):
        by_head = measured.entropy.value[layer]
        lines.append(
            (
                str(layer),
                with_bounds(measured.residual.at(2 * layer + 1)),
                with_bounds(measured.output.at(2 * layer)),
                with_bounds(measured.output.at(2 * layer + 1)),
                f"{largest:.3g}",
                with_bounds(measured.entropy_by_layer.at(layer)),
                f"{by_head.min():.3g} to {by_head.max():.3g}",
            )
        )
    return aligned(lines)


def _draw(measured: Profile, name: str, folder: Path) -> Path:
    residual, attention, feed_forward = (
        Style(colour) for colour in (INK, COLOURS["attention"], COLOURS["feed-forward"])
    )
    legend = [(residual, "residual"), (attention, "attention's output"), (feed_forward, "feed-forward's output")]
    sheet = Sheet("profile", columns=2, rows=2, legend=legend, x="layer", sharey=False)
    for panel, title in enumerate(
        (
            f"rms over tokens, {measured.tokens:,} of them",
            "largest attention logit, by head and of all",
            "entropy of attention, nats: mean over queries",
            "share of attention on the first token, position 0",
        )
    ):
        sheet.title(panel, title)
    layers, heads = measured.logit_max.shape
    between, depth = (np.arange(2 * layers) - 1) / 2, np.arange(layers, dtype=np.float64)
    for label, style, x, estimate, sublayers in (
        ("residual", residual, between, measured.residual, slice(None)),
        ("attention", attention, depth, measured.output, slice(0, None, 2)),
        ("feed-forward", feed_forward, depth, measured.output, slice(1, None, 2)),
    ):
        low, high = estimate.low[sublayers], estimate.high[sublayers]
        sheet.line(0, label, x, estimate.value[sublayers], style, marker=True)
        sheet.panels[0].fill_between(x, low, high, color=style.colour, alpha=0.2, linewidth=0)
        for what, bound in (("low", low), ("high", high)):
            sheet.note(0, label, what, x, bound)
    sheet.log(0)
    for head in range(heads):
        sheet.points(1, f"head {head}", depth, measured.logit_max[:, head], attention, size=3)
    sheet.line(1, name, depth, measured.logit_max.max(axis=1), attention)
    for panel, estimate in ((2, measured.entropy), (3, measured.first)):
        if heads > 1:
            for head in range(heads):
                sheet.points(panel, f"head {head}", depth, estimate.value[:, head], attention, size=3)
                for what, bound in (("low", estimate.low), ("high", estimate.high)):
                    sheet.note(panel, f"head {head}", what, depth, bound[:, head])
        sheet.line(panel, name, depth, estimate.value.mean(axis=1), attention)
    return sheet.save(folder, folder)
