"""Show changes of loss where heads or sublayers are ablated, beside those of random heads."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

from mhc.config import Config
from mhc.eval.common.ablation import Case, cases
from mhc.eval.common.checkpoints import Checkpoint
from mhc.eval.common.palette import Style
from mhc.eval.common.sheet import Sheet
from mhc.eval.common.statistics import Bounds, Estimate
from mhc.eval.common.terminal import Progress, aligned
from mhc.eval.inspect.ablation import Ablater, chance, differs, mean_outputs, random_heads
from mhc.eval.inspect.rows import read_rows
from mhc.eval.inspect.views.drawing import COLOURS, few, heat, with_bounds

_BOUNDS = ("change", "change_low", "change_high")
_CONTROL = "#d9d9d9"


def view(checkpoint: Checkpoint, options: Any) -> dict[str, Any]:
    """Print and return changes of loss where heads or sublayers are ablated, beside those of random heads."""
    config = checkpoint.config
    which = [Case("heads", None, tuple(options.heads))] if options.heads else cases(config, options.units)
    size = len(options.heads) or config.attention.heads
    control = random_heads(config, size, options.draws, options.seed, options.heads)
    factor = options.factor if options.how == "scale" else 0.0
    means = None
    if options.how == "mean":
        reference = read_rows(checkpoint, "train", options.reference, options.batch_size)
        means = mean_outputs(checkpoint, reference, Progress("batches of the reference"))
    rows = read_rows(checkpoint, options.split, options.rows, options.batch_size)
    done = Ablater(checkpoint, rows).ablate([*which, *control], factor, means, Progress("ablations"))

    count = len(which)
    kinds = [case.kind for case in which]
    marks = [bool(differs(done.change, kinds.count(kind))[i]) for i, kind in enumerate(kinds)]
    drawn = done.change.value[count:]
    alone = done.change.value[np.array([kind == "head" for kind in [*kinds, *["random"] * len(drawn)]])]
    result: dict[str, Any] = {
        "how": options.how,
        "factor": factor if options.how == "scale" else None,
        "split": options.split,
        "rows": int(rows.there.sum()),
        "documents": rows.documents,
        "tokens": done.tokens,
        "reference_rows": int(reference.there.sum()) if options.how == "mean" else None,
        "loss": done.base,
        "cases": [_case(case, done.change, i, marks[i], drawn, alone) for i, case in enumerate(which)],
        "control": {
            "heads": size,
            "draws": len(drawn),
            "seed": options.seed,
            "mean": float(drawn.mean()) if len(drawn) else None,
            "low": float(np.percentile(drawn, 2.5)) if len(drawn) else None,
            "high": float(np.percentile(drawn, 97.5)) if len(drawn) else None,
            "changes": [
                {"heads": [list(head) for head in case.heads], **_change(done.change, count + i)}
                for i, case in enumerate(control)
            ],
        },
    }
    print(_text(result, options.top))
    if options.out is not None:
        path = _draw_set(result, options.out) if options.heads else _draw(result, config, options.out)
        print(path, file=sys.stderr)
    return result


def _change(change: Estimate, index: int) -> Bounds:
    return dict(zip(_BOUNDS, change.at(index).values(), strict=True))


def _case(case: Case, change: Estimate, index: int, mark: bool, drawn: np.ndarray, alone: np.ndarray) -> dict[str, Any]:
    """Return the results of a case for JSON, given the changes by random sets of heads and by each head alone."""
    # A single head is compared with all others, which are every draw of one.
    control = {"head": np.delete(alone, index) if case.kind == "head" else alone, "attention": drawn, "heads": drawn}
    against = control.get(case.kind, np.zeros(0))
    return {
        "name": case.name,
        "kind": case.kind,
        "layer": case.layer,
        "heads": [list(head) for head in case.heads],
        **_change(change, index),
        "differs": mark,
        "chance": chance(float(change.value[index]), against) if len(against) else None,
    }


def _text(result: dict[str, Any], top: int) -> str:
    how = {"zero": "set to zero", "mean": f"set to its mean over {result['reference_rows']} rows of the train split"}
    done = how.get(result["how"], f"times {result['factor']}")
    out = [
        f"loss {result['loss']:.4f} nats a token: {result['rows']} rows of {result['documents']} documents, "
        f"{result['tokens']:,} targets; {done}"
    ]
    for kinds in (("heads",), ("head",), tuple(COLOURS)):
        ranked = sorted(
            (case for case in result["cases"] if case["kind"] in kinds), key=lambda case: -abs(case["change"])
        )
        if not ranked:
            continue
        lines = [("ablated", "change of loss (95 %)", "not 0", "as random heads")]
        for case in ranked[:top]:
            bounds = {"value": case["change"], "low": case["change_low"], "high": case["change_high"]}
            likely = "—" if case["chance"] is None else f"p = {case['chance']:.3g}"
            lines.append((case["name"], with_bounds(bounds, signed=True), "*" if case["differs"] else "", likely))
        out.append(aligned(lines))
        if len(ranked) > top:
            out.append(f"and {len(ranked) - top} more with smaller changes (--top, --json)")
    control = result["control"]
    out.append("* other than 0 at 5 % for all of a kind together (Bonferroni)")
    if control["draws"]:
        out.append(
            f"{control['draws']} draws of {control['heads']} random head(s): {control['mean']:+.4f} "
            f"({control['low']:+.4f} to {control['high']:+.4f}); p: how often such a draw, of one head any other, "
            "raises the loss as much"
        )
    else:
        out.append(f"no random heads to compare with: fewer than {control['heads']} others, or --draws 0")
    out += few(result)
    return "\n".join(out)


def _draw(result: dict[str, Any], config: Config, folder: Path) -> Path:
    by_head = [case for case in result["cases"] if case["kind"] == "head"]
    by_layer = [case for case in result["cases"] if case["kind"] in COLOURS]
    styles = {kind: Style(colour) for kind, colour in COLOURS.items()}
    legend = [(style, kind) for kind, style in styles.items()] if by_layer else []
    sheet = Sheet("ablation", columns=(len(by_head) > 0) + (len(by_layer) > 0), legend=legend, x="layer", sharey=False)
    rows = f"{result['rows']} rows"
    if by_head:
        shape = (config.model.layers, config.attention.heads)
        values, marks = (np.array([case[key] for case in by_head]).reshape(shape) for key in ("change", "differs"))
        sheet.title(0, f"change of loss by head, nats over {rows}; dots: not 0")
        limit = float(np.abs(values).max()) or 1.0
        heat(sheet, 0, values.T, "head", low=-limit, high=limit)
        layers, heads = np.nonzero(marks)
        sheet.panels[0].plot(layers, heads, linestyle="none", marker=".", markersize=5, color="black")
        sheet.note(0, "not 0", "layer, head", layers, heads)
    if by_layer:
        panel = len(sheet.panels) - 1
        sheet.title(panel, f"change of loss by layer, nats over {rows}, 95 %")
        control = result["control"]
        if control["draws"]:
            sheet.panels[panel].axhspan(control["low"], control["high"], color=_CONTROL, zorder=0)
            sheet.level(panel, control["mean"], f"{control['draws']} × {control['heads']} random heads")
            for what in ("mean", "low", "high"):
                sheet.note(panel, "random heads", what, [math.nan], [control[what]])
        sheet.level(panel, 0.0)
        sizes = np.abs([case["change"] for case in by_layer])
        if sizes.max() > 10 * np.median(sizes) > 0:  # one layer that is all would leave the others on one line
            sheet.panels[panel].set_yscale("symlog", linthresh=float(f"{np.median(sizes):.0e}"), linscale=0.5)
        for case in by_layer:
            shift = (list(COLOURS).index(case["kind"]) - 1) * 0.2
            bounds = [case["change"] if case[key] is None else case[key] for key in _BOUNDS]
            sheet.interval(panel, case["kind"], case["layer"] + shift, tuple(bounds), styles[case["kind"]])
    return sheet.save(folder, folder)


def _draw_set(result: dict[str, Any], folder: Path) -> Path:
    (case,) = result["cases"]
    sheet = Sheet("ablation", x="", y="change of loss, nats")
    sheet.title(
        0, f"{case['name']} against {result['control']['draws']} random sets of as many, {result['rows']} rows, 95 %"
    )
    sheet.level(0, 0.0)
    for place, (name, changes) in enumerate(((case["name"], [case]), ("random heads", result["control"]["changes"]))):
        for number, ablated in enumerate(changes):
            bounds = [ablated["change"] if ablated[key] is None else ablated[key] for key in _BOUNDS]
            x = place + (number / max(len(changes) - 1, 1) - 0.5) * 0.6 if place else 0.0
            sheet.interval(0, name, x, tuple(bounds), Style(COLOURS["attention"] if not place else "#8a8a8a"))
    sheet.panels[0].set_xticks([0, 1], [case["name"] if len(case["name"]) < 30 else "the set", "random heads"])
    return sheet.save(folder, folder)
