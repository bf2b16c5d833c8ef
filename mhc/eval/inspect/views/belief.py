"""Show over a text where the prior is weak and the likelihood sure, by layer, head and position."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mhc.eval.common import page as pages
from mhc.eval.common.belief_map import Diagnosis, diagnose, maps
from mhc.eval.common.checkpoints import Checkpoint
from mhc.eval.common.program import Program, multiple
from mhc.eval.common.sheet import Sheet
from mhc.eval.common.terminal import aligned
from mhc.eval.inspect.prompts import ids_of, label_of, tokenizer_of
from mhc.eval.inspect.views.drawing import heat, token_axis
from mhc.model.decoder import Decoder

NOTE = (
    "A mark says that the prior is weak and the likelihood sure beside the rest of this text. Whether such places are "
    "wrong is scored where the truth is known: eval.windtunnel --measures signals."
)
TOP = 20  # lines of the table


def view(checkpoint: Checkpoint, options: Any) -> dict[str, Any]:
    """Print and return prior strength, likelihood confidence and their joint diagnosis over a prompt.

    Position 0 sees no key but its own, so no variance, and is never judged.
    """
    tokenizer = tokenizer_of(checkpoint.config)
    tokens = ids_of(tokenizer, options.prompt, "--prompt")
    labels = [label_of(tokenizer, token) for token in tokens]

    def run(decoder: Decoder, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        found = maps(decoder, batch["tokens"])
        return {name: found[name] for name in ("prior", "confidence", "output", "hidden", "lens")}

    program = Program(checkpoint, run)
    batch = program.put({"tokens": np.array([tokens] * multiple(1, checkpoint.mesh), np.int32)})
    found = {name: np.asarray(leaf[0], np.float64) for name, leaf in program(batch).items()}
    chosen = np.array(options.layers)
    diagnosis = diagnose(found["prior"][chosen, :, 1:], found["confidence"][chosen, :, 1:], options.weak, options.sure)
    marked = np.r_[False, diagnosis.marked]
    print(f"{int(marked.sum())} of {len(tokens) - 1} positions marked; layers {', '.join(map(str, options.layers))}")
    print("".join(f"[[{label}]]" if mark else label for label, mark in zip(labels, marked, strict=True)))
    print(f"{_table(labels, found, diagnosis)}\n{NOTE}")
    if options.out is not None:
        print(_page(checkpoint.name, options.prompt, labels, found, marked, options.out), file=sys.stderr)
    return {
        "prompt": options.prompt,
        "tokens": tokens,
        "texts": labels,
        "note": NOTE,
        "layers": list(options.layers),
        "weak": options.weak,
        "sure": options.sure,
        **found,
        "joint": [None, *diagnosis.joint.tolist()],
        "marked": marked.tolist(),
    }


def _table(labels: Sequence[str], found: dict[str, np.ndarray], diagnosis: Diagnosis) -> str:
    """Return the positions with the highest joint score, from the highest on."""
    header = ("position", "token", "prior rank", "confidence rank", "joint", "output bits", "hidden", "lens bits", "")
    lines: list[Sequence[str]] = [header]
    for index in np.argsort(-diagnosis.joint, kind="stable")[:TOP]:
        at = int(index) + 1
        numbers = [diagnosis.prior[index], diagnosis.confidence[index], diagnosis.joint[index]]
        numbers += [found[name][at] for name in ("output", "hidden", "lens")]
        mark = "marked" if diagnosis.marked[index] else ""
        lines.append((str(at), labels[at], *(f"{value:.3f}" for value in numbers), mark))
    return aligned(lines)


def _page(
    name: str, prompt: str, labels: Sequence[str], found: dict[str, np.ndarray], marked: np.ndarray, folder: Path
) -> Path:
    """Write belief.html with its figure, belief.png and belief.csv; return the page's path."""
    sheet = Sheet("belief", columns=1, rows=2, height=3.4, x="position", wide=True, sharey=False)
    titles = {
        "prior": "prior strength: variance of the query–key cosines, mean over heads",
        "confidence": "likelihood confidence: abs(⟨value, feed-forward output⟩), mean over heads",
    }
    for panel, (signal, title) in enumerate(titles.items()):
        sheet.title(panel, title)
        by_layer = found[signal].mean(axis=1)
        scaled = by_layer / np.maximum(by_layer.max(axis=1, keepdims=True), 1e-30)
        heat(sheet, panel, scaled, "layer", low=-1.0, high=1.0, exact=by_layer)
        token_axis(sheet.panels[panel].xaxis, labels, least=64)
    drawn = pages.Drawn(
        sheet.save(folder, folder),
        "Prior strength and likelihood confidence",
        "By layer and position. Colours are shares of the layer's largest value; belief.csv has the values themselves.",
        wide=True,
    )
    words = "".join(
        f"<mark>{pages.text(label)}</mark>" if mark else pages.text(label)
        for label, mark in zip(labels, marked, strict=True)
    )
    body = (
        f"<h1>Prior and likelihood</h1><p class=lead>{pages.text(name)}</p>"
        f"<p><code>{words}</code></p><p class=note>{pages.text(NOTE)}</p>{pages.figures([drawn])}"
    )
    path = folder / "belief.html"
    path.write_text(pages.document("Prior and likelihood", body), "utf-8")
    return path
