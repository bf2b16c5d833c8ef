"""Show attention patterns of heads over a prompt."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps

from mhc.eval.common.checkpoints import Checkpoint
from mhc.eval.common.palette import INK
from mhc.eval.common.sheet import Sheet
from mhc.eval.common.terminal import aligned
from mhc.eval.inspect.patterns import Pattern, patterns
from mhc.eval.inspect.prompts import ids_of, label_of, tokenizer_of
from mhc.eval.inspect.views.drawing import token_axis

NOTE = (
    "A pattern shows where a head reads, not what it does with what it finds: it is no explanation of an output. "
    "Test what it suggests with ablate and patch."
)


def view(checkpoint: Checkpoint, options: Any) -> dict[str, Any]:
    """Print and return the patterns of heads over a prompt."""
    tokenizer = tokenizer_of(checkpoint.config)
    tokens = ids_of(tokenizer, options.prompt, "--prompt")
    labels = [label_of(tokenizer, token) for token in tokens]
    every = list(patterns(checkpoint, tokens, options.heads))
    rows = np.arange(len(tokens))
    lines: list[Sequence[str]] = [("layer", "head", "entropy", "on the first", "on itself", "on the one before")]
    heads = []
    for pattern in every:
        shares = {
            "first": float(pattern.weights[:, 0].mean()),
            "itself": float(pattern.weights[rows, rows].mean()),
            "before": float(pattern.weights[rows[1:], rows[:-1]].mean()) if len(rows) > 1 else 0.0,
        }
        numbers = (f"{value:.3f}" for value in (pattern.entropy, *shares.values()))
        lines.append((str(pattern.layer), str(pattern.head), *numbers))
        heads.append(
            {
                "layer": pattern.layer,
                "head": pattern.head,
                "entropy": pattern.entropy,
                "shares": shares,
                "weights": pattern.weights,
            }
        )
    print(f"means over the {len(tokens)} queries of one prompt; entropy in nats, shares of attention on a token")
    print(f"{aligned(lines)}\n{NOTE}")
    if options.out is not None:
        for layer in sorted({pattern.layer for pattern in every}):
            path = _draw([pattern for pattern in every if pattern.layer == layer], labels, options.out)
            print(path, file=sys.stderr)
    return {"prompt": options.prompt, "tokens": tokens, "texts": labels, "note": NOTE, "heads": heads}


def _draw(every: Sequence[Pattern], labels: Sequence[str], folder: Path) -> Path:
    columns = min(4, len(every))
    rows = -(-len(every) // columns)
    sheet = Sheet(
        f"attention_{every[0].layer}",
        columns=columns,
        rows=rows,
        height=3.1,
        x="attended",
        y="query",
        wide=True,
        sharey=False,
    )
    colours = colormaps["viridis"].with_extremes(bad="#efefef")
    image = None
    for panel, pattern in enumerate(every):
        sheet.title(panel, f"layer {pattern.layer}, head {pattern.head}: entropy {pattern.entropy:.2f}")
        axes = sheet.panels[panel]
        for query, weights in enumerate(pattern.weights):
            sheet.note(panel, f"query {query}", "weight", np.arange(len(weights)), weights)
        image = axes.imshow(np.where(pattern.visible, pattern.weights, np.nan), cmap=colours, vmin=0, vmax=1)
        axes.grid(visible=False)
        for axis in (axes.xaxis, axes.yaxis):
            token_axis(axis, labels, least=32)
    for axes in sheet.panels[len(every) :]:
        axes.set_visible(False)
    if image is not None:
        bar = sheet.figure.colorbar(image, ax=sheet.panels, shrink=0.8, pad=0.01, aspect=30)
        bar.ax.tick_params(labelsize=8, colors=INK)
    sheet.figure.supxlabel(NOTE, fontsize=8, color=INK)
    return sheet.save(folder, folder)
