"""Show how much of the logit difference between two prompts each activation carries."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mhc.eval.common.checkpoints import Checkpoint
from mhc.eval.common.sheet import Sheet
from mhc.eval.common.terminal import Progress, aligned
from mhc.eval.inspect.patching import Patched, patch
from mhc.eval.inspect.prompts import ids_of, label_of, tokenizer_of
from mhc.eval.inspect.views.drawing import heat, token_axis


def view(checkpoint: Checkpoint, options: Any) -> dict[str, Any]:
    """Print and return how much of the logit difference between two prompts each activation carries."""
    tokenizer = tokenizer_of(checkpoint.config)
    clean, corrupted = (ids_of(tokenizer, getattr(options, name), f"--{name}") for name in ("clean", "corrupted"))
    patched = patch(
        checkpoint,
        clean,
        corrupted,
        options.activation,
        answer=options.answer_id,
        other=options.other_id,
        batch_size=options.batch_size,
        tell=Progress("patches"),
    )
    names = [label_of(tokenizer, token) for token in (patched.answer, patched.other)]
    labels = [
        label_of(tokenizer, a) if a == b else f"{label_of(tokenizer, a)}|{label_of(tokenizer, b)}"
        for a, b in zip(clean, corrupted, strict=True)
    ]
    result = {
        "activation": patched.what,
        "clean": {"text": options.clean, "tokens": clean, "difference": patched.clean},
        "corrupted": {"text": options.corrupted, "tokens": corrupted, "difference": patched.corrupted},
        "answer": {"token": patched.answer, "text": tokenizer.decode([patched.answer])},
        "other": {"token": patched.other, "text": tokenizer.decode([patched.other])},
        "axes": ["layer", "head" if patched.what == "head" else "position"],
        "difference": patched.difference,
        "share": patched.share,
        "everything": patched.everything,
    }
    print(_text(patched, names, labels, options.top))
    if options.out is not None:
        print(_draw(patched, names, labels, options.out), file=sys.stderr)
    return result


def _text(patched: Patched, names: Sequence[str], labels: Sequence[str], top: int) -> str:
    place = "head" if patched.what == "head" else "position"
    order = np.argsort(-np.abs(patched.share), axis=None, kind="stable")[:top]
    lines: list[Sequence[str]] = [
        ("layer", place, "token" if place == "position" else "", "logit difference", "share recovered")
    ]
    for layer, at in zip(*np.unravel_index(order, patched.share.shape), strict=True):
        token = labels[at] if place == "position" else ""
        values = (f"{values[layer, at]:+.3f}" for values in (patched.difference, patched.share))
        lines.append((str(layer), str(at), token, *values))
    out = [
        f"logit of {names[0]} less that of {names[1]}: {patched.clean:+.3f} after the clean prompt, "
        f"{patched.corrupted:+.3f} after the corrupted one; recovered share: 0 as corrupted, 1 as clean; one pair of "
        "prompts, so no interval",
        aligned(lines),
    ]
    if patched.everything is not None:
        out.append(f"all of the state before block 0 patched: {patched.everything:.4f}, which must be 1")
    return "\n".join(out)


def _draw(patched: Patched, names: Sequence[str], labels: Sequence[str], folder: Path) -> Path:
    by_position = patched.what != "head"
    places = patched.share.shape[1]
    sheet = Sheet(
        "patch", wide=by_position and places > 12, height=3.8, x="token" if by_position else "head", sharey=False
    )
    names_of = {"state": "residual state before each block", "head": "a head's results, all positions"}
    what = names_of.get(patched.what, f"output of each {patched.what}")
    sheet.title(0, f"share of {names[0]} − {names[1]} recovered: {what}")
    heat(sheet, 0, np.clip(patched.share, -1, 1), "layer", low=-1.0, high=1.0, exact=patched.share)
    if by_position:
        token_axis(sheet.panels[0].xaxis, labels, least=64)
    return sheet.save(folder, folder)
