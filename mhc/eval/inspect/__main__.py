"""Look inside a checkpoint: profiles, ablations, activation patching, attention patterns.

    python -m eval.inspect profile --checkpoint runs/a --out report
    python -m eval.inspect ablate --checkpoint runs/a --how mean --rows 256 --json found.json
    python -m eval.inspect ablate --checkpoint runs/a --heads 3.1 5.0          # together, against random pairs
    python -m eval.inspect patch --checkpoint runs/a --clean "Paris is in" --corrupted "Tokyo is in" --answer " France"
    python -m eval.inspect attention --checkpoint runs/a --prompt "def main():" --layers 0 3 --out report

profile and ablate read validation rows; their intervals (95 %) are percentiles over rows drawn with replacement. patch
and attention read prompts, which open with the tokeniser's bos. Layers and heads are counted from 0; 3.1 is head 1 of
layer 3. What is edited are activations of the pass: the checkpoint is only read.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mhc import cli
from mhc.errors import UserError, did_you_mean
from mhc.eval.common import checkpoints
from mhc.eval.common.prompts import check_text
from mhc.eval.common.terminal import Progress, aligned

if TYPE_CHECKING:
    from mhc.config import Config
    from mhc.data.tokenizers import Tokenizer
    from mhc.eval.common.checkpoints import Checkpoint
    from mhc.eval.common.sheet import Sheet
    from mhc.eval.common.statistics import Estimate
    from mhc.eval.inspect.interventions import Case, Patched, Pattern, Profile

Found = dict[str, Any]  # what a view says of a checkpoint: the JSON
MOST_PATTERNS, MOST_TOKENS = 64, 256  # more cannot be seen in pictures
FEW = 10  # documents
NOTE = (
    "A pattern shows where a head reads, not what it does with what it finds: it is no explanation of an output. "
    "Test what it suggests with ablate and patch."
)
_BOUNDS = ("change", "change_low", "change_high")
_INK, _CONTROL = "#333333", "#d9d9d9"
_COLOURS = {"attention": "#0072b2", "feed-forward": "#d55e00", "block": "#333333"}


# Profile --------------------------------------------------------------------------------------------------------------


def profile(checkpoint: Checkpoint, options: Any) -> Found:
    """Sizes of activations, attention logits and entropies by layer and head."""
    from mhc.eval.inspect.interventions import profile, read_rows

    rows = read_rows(checkpoint, options.split, options.rows, options.batch_size)
    one = profile(checkpoint, rows, Progress("batches"))
    layers, heads = one.logit_max.shape
    found = {"split": options.split, "rows": int(rows.there.sum()), "documents": rows.documents, "tokens": one.tokens}
    found["sublayers"] = [
        {
            "sublayer": k,
            "kind": ("attention", "feed-forward")[k % 2],
            "residual_rms": one.residual.at(k),
            "output_rms": one.output.at(k),
        }
        for k in range(2 * layers)
    ]
    found["layers"] = [
        {"layer": layer, "entropy": one.entropy_by_layer.at(layer), "logit_max": float(one.logit_max[layer].max())}
        for layer in range(layers)
    ]
    found["heads"] = [
        {
            "layer": layer,
            "head": head,
            "entropy": one.entropy.at(layer, head),
            "first_token": one.first.at(layer, head),
            "logit_max": float(one.logit_max[layer, head]),
        }
        for layer in range(layers)
        for head in range(heads)
    ]
    print(f"{found['rows']} rows of {found['documents']} documents, {one.tokens:,} tokens; means over tokens (95 %)")
    print("\n".join([_profile_table(one), *_few(found)]))
    if options.out is not None:
        _say(_draw_profile(one, checkpoint.name, options.out))
    return found


def _profile_table(one: Profile) -> str:
    lines = [("layer", "residual rms", "attention rms", "feed-forward rms", "largest logit", "entropy", "by head")]
    for layer, largest in enumerate(one.logit_max.max(axis=1)):
        by_head = one.entropy.value[layer]
        lines.append(
            (
                str(layer),
                _with_bounds(one.residual.at(2 * layer + 1)),
                _with_bounds(one.output.at(2 * layer)),
                _with_bounds(one.output.at(2 * layer + 1)),
                f"{largest:.3g}",
                _with_bounds(one.entropy_by_layer.at(layer)),
                f"{by_head.min():.3g} to {by_head.max():.3g}",
            )
        )
    return aligned(lines)


def _draw_profile(one: Profile, name: str, folder: Path) -> Path:
    from mhc.eval.common.palette import Style
    from mhc.eval.common.sheet import Sheet

    residual, attention, feed_forward = (Style(colour) for colour in ("#333333", "#0072b2", "#d55e00"))
    legend = [(residual, "residual"), (attention, "attention's output"), (feed_forward, "feed-forward's output")]
    sheet = Sheet("profile", columns=2, rows=2, legend=legend, x="layer", sharey=False)
    for panel, title in enumerate(
        (
            f"rms over tokens, {one.tokens:,} of them",
            "largest attention logit, by head and of all",
            "entropy of attention, nats: mean over queries",
            "share of attention on the first token, position 0",
        )
    ):
        sheet.title(panel, title)
    layers, heads = one.logit_max.shape
    depth = np.arange(layers, dtype=np.float64)
    for label, style, part in (
        ("residual", residual, (one.residual.value, one.residual.low, one.residual.high)),
        ("attention", attention, tuple(x[::2] for x in (one.output.value, one.output.low, one.output.high))),
        ("feed-forward", feed_forward, tuple(x[1::2] for x in (one.output.value, one.output.low, one.output.high))),
    ):
        value, low, high = part
        x = (np.arange(len(value)) - 1) / 2 if label == "residual" else depth
        sheet.line(0, label, x, value, style, marker=True)
        sheet.panels[0].fill_between(x, low, high, color=style.colour, alpha=0.2, linewidth=0)
        for what, bound in (("low", low), ("high", high)):
            sheet.note(0, label, what, x, bound)
    sheet.log(0)
    for head in range(heads):
        sheet.points(1, f"head {head}", depth, one.logit_max[:, head], attention, size=3)
    sheet.line(1, name, depth, one.logit_max.max(axis=1), attention)
    for panel, estimate in ((2, one.entropy), (3, one.first)):
        if heads > 1:
            for head in range(heads):
                sheet.points(panel, f"head {head}", depth, estimate.value[:, head], attention, size=3)
                for what, bound in (("low", estimate.low), ("high", estimate.high)):
                    sheet.note(panel, f"head {head}", what, depth, bound[:, head])
        sheet.line(panel, name, depth, estimate.value.mean(axis=1), attention)
    return sheet.save(folder, folder)


# Ablation -------------------------------------------------------------------------------------------------------------


def ablate(checkpoint: Checkpoint, options: Any) -> Found:
    """Changes of loss where heads or sublayers are cut, beside those of random heads."""
    from mhc.eval.inspect.interventions import Ablater, Case, cases, differs, mean_outputs, random_heads, read_rows

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
    found: Found = {
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
    print(_ablation_text(found, options.top))
    if options.out is not None:
        _say(_draw_set(found, options.out) if options.heads else _draw_ablation(found, config, options.out))
    return found


def _change(change: Estimate, index: int) -> dict[str, float | None]:
    return dict(zip(_BOUNDS, change.at(index).values(), strict=True))


def _case(case: Case, change: Estimate, index: int, mark: bool, drawn: np.ndarray, alone: np.ndarray) -> Found:
    """What is said of a case; ``drawn``: changes by random sets of heads, ``alone``: by each head."""
    from mhc.eval.inspect.interventions import chance

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


def _ablation_text(found: Found, top: int) -> str:
    how = {"zero": "set to zero", "mean": f"set to its mean over {found['reference_rows']} rows of the train split"}
    done = how.get(found["how"], f"times {found['factor']}")
    out = [
        f"loss {found['loss']:.4f} nats a token: {found['rows']} rows of {found['documents']} documents, "
        f"{found['tokens']:,} targets; {done}"
    ]
    for kinds in (("heads",), ("head",), tuple(_COLOURS)):
        ranked = sorted(
            (case for case in found["cases"] if case["kind"] in kinds), key=lambda case: -abs(case["change"])
        )
        if not ranked:
            continue
        lines = [("ablated", "change of loss (95 %)", "not 0", "as random heads")]
        for case in ranked[:top]:
            bounds = {"value": case["change"], "low": case["change_low"], "high": case["change_high"]}
            chance = "—" if case["chance"] is None else f"p = {case['chance']:.3g}"
            lines.append((case["name"], _with_bounds(bounds, signed=True), "*" if case["differs"] else "", chance))
        out.append(aligned(lines))
        if len(ranked) > top:
            out.append(f"and {len(ranked) - top} more with smaller changes (--top, --json)")
    control = found["control"]
    out.append("* other than 0 at 5 % for all of a kind together (Bonferroni)")
    if control["draws"]:
        out.append(
            f"{control['draws']} draws of {control['heads']} random head(s): {control['mean']:+.4f} "
            f"({control['low']:+.4f} to {control['high']:+.4f}); p: how often such a draw, of one head any other, "
            "raises the loss as much"
        )
    else:
        out.append(f"no random heads to compare with: fewer than {control['heads']} others, or --draws 0")
    out += _few(found)
    return "\n".join(out)


def _draw_ablation(found: Found, config: Config, folder: Path) -> Path:
    from mhc.eval.common.palette import Style
    from mhc.eval.common.sheet import Sheet

    by_head = [case for case in found["cases"] if case["kind"] == "head"]
    by_layer = [case for case in found["cases"] if case["kind"] in _COLOURS]
    styles = {kind: Style(colour) for kind, colour in _COLOURS.items()}
    legend = [(style, kind) for kind, style in styles.items()] if by_layer else []
    sheet = Sheet("ablation", columns=(len(by_head) > 0) + (len(by_layer) > 0), legend=legend, x="layer", sharey=False)
    rows = f"{found['rows']} rows"
    if by_head:
        shape = (config.model.layers, config.attention.heads)
        values, marks = (np.array([case[key] for case in by_head]).reshape(shape) for key in ("change", "differs"))
        sheet.title(0, f"change of loss by head, nats over {rows}; dots: not 0")
        limit = float(np.abs(values).max()) or 1.0
        _heat(sheet, 0, values.T, "head", low=-limit, high=limit)
        layers, heads = np.nonzero(marks)
        sheet.panels[0].plot(layers, heads, linestyle="none", marker=".", markersize=5, color="black")
        sheet.note(0, "not 0", "layer, head", layers, heads)
    if by_layer:
        panel = len(sheet.panels) - 1
        sheet.title(panel, f"change of loss by layer, nats over {rows}, 95 %")
        control = found["control"]
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
            shift = (list(_COLOURS).index(case["kind"]) - 1) * 0.2
            bounds = [case["change"] if case[key] is None else case[key] for key in _BOUNDS]
            sheet.interval(panel, case["kind"], case["layer"] + shift, tuple(bounds), styles[case["kind"]])
    return sheet.save(folder, folder)


def _draw_set(found: Found, folder: Path) -> Path:
    from mhc.eval.common.palette import Style
    from mhc.eval.common.sheet import Sheet

    (case,) = found["cases"]
    sheet = Sheet("ablation", x="", y="change of loss, nats")
    sheet.title(
        0, f"{case['name']} against {found['control']['draws']} random sets of as many, {found['rows']} rows, 95 %"
    )
    sheet.level(0, 0.0)
    for place, (name, changes) in enumerate(((case["name"], [case]), ("random heads", found["control"]["changes"]))):
        for number, one in enumerate(changes):
            bounds = [one["change"] if one[key] is None else one[key] for key in _BOUNDS]
            x = place + (number / max(len(changes) - 1, 1) - 0.5) * 0.6 if place else 0.0
            sheet.interval(0, name, x, tuple(bounds), Style(_COLOURS["attention"] if not place else "#8a8a8a"))
    sheet.panels[0].set_xticks([0, 1], [case["name"] if len(case["name"]) < 30 else "the set", "random heads"])
    return sheet.save(folder, folder)


# Patching -------------------------------------------------------------------------------------------------------------


def patch(checkpoint: Checkpoint, options: Any) -> Found:
    """How much of the logit difference between two prompts each activation carries."""
    from mhc.eval.inspect import interventions

    tokenizer = _tokenizer(checkpoint.config)
    clean, corrupted = (_ids(tokenizer, getattr(options, name), f"--{name}") for name in ("clean", "corrupted"))
    answer, other = (options.answer_id, options.other_id)
    one = interventions.patch(
        checkpoint,
        clean,
        corrupted,
        options.activation,
        answer=answer,
        other=other,
        batch_size=options.batch_size,
        tell=Progress("patches"),
    )
    names = [_label(tokenizer, token) for token in (one.answer, one.other)]
    labels = [
        _label(tokenizer, a) if a == b else f"{_label(tokenizer, a)}|{_label(tokenizer, b)}"
        for a, b in zip(clean, corrupted, strict=True)
    ]
    found = {
        "activation": one.what,
        "clean": {"text": options.clean, "tokens": clean, "difference": one.clean},
        "corrupted": {"text": options.corrupted, "tokens": corrupted, "difference": one.corrupted},
        "answer": {"token": one.answer, "text": tokenizer.decode([one.answer])},
        "other": {"token": one.other, "text": tokenizer.decode([one.other])},
        "axes": ["layer", "head" if one.what == "head" else "position"],
        "difference": one.difference,
        "share": one.share,
        "everything": one.everything,
    }
    print(_patch_text(one, names, labels, options.top))
    if options.out is not None:
        _say(_draw_patch(one, names, labels, options.out))
    return found


def _patch_text(one: Patched, names: Sequence[str], labels: Sequence[str], top: int) -> str:
    place = "head" if one.what == "head" else "position"
    order = np.argsort(-np.abs(one.share), axis=None, kind="stable")[:top]
    lines = [("layer", place, "token" if place == "position" else "", "logit difference", "share recovered")]
    for layer, at in zip(*np.unravel_index(order, one.share.shape), strict=True):
        token = labels[at] if place == "position" else ""
        lines.append((str(layer), str(at), token, f"{one.difference[layer, at]:+.3f}", f"{one.share[layer, at]:+.3f}"))
    out = [
        f"logit of {names[0]} less that of {names[1]}: {one.clean:+.3f} after the clean prompt, {one.corrupted:+.3f} "
        "after the corrupted one; recovered share: 0 as corrupted, 1 as clean; one pair of prompts, so no interval",
        aligned(lines),
    ]
    if one.everything is not None:
        out.append(f"all of the state before block 0 patched: {one.everything:.4f}, which must be 1")
    return "\n".join(out)


def _draw_patch(one: Patched, names: Sequence[str], labels: Sequence[str], folder: Path) -> Path:
    from mhc.eval.common.sheet import Sheet

    by_position = one.what != "head"
    places = one.share.shape[1]
    sheet = Sheet(
        "patch", wide=by_position and places > 12, height=3.8, x="token" if by_position else "head", sharey=False
    )
    what = {"state": "residual state before each block", "head": "a head's results, all positions"}
    sheet.title(0, f"share of {names[0]} − {names[1]} recovered: {what.get(one.what, f'output of each {one.what}')}")
    _heat(sheet, 0, np.clip(one.share, -1, 1), "layer", low=-1.0, high=1.0, exact=one.share)
    if by_position:
        _token_axis(sheet.panels[0].xaxis, labels, least=64)
    return sheet.save(folder, folder)


# Attention ------------------------------------------------------------------------------------------------------------


def attention(checkpoint: Checkpoint, options: Any) -> Found:
    """Patterns of heads over a prompt."""
    from mhc.eval.inspect.interventions import patterns

    tokenizer = _tokenizer(checkpoint.config)
    tokens = _ids(tokenizer, options.prompt, "--prompt")
    labels = [_label(tokenizer, token) for token in tokens]
    every = list(patterns(checkpoint, tokens, options.heads))
    rows = np.arange(len(tokens))
    lines: list[Sequence[str]] = [("layer", "head", "entropy", "on the first", "on itself", "on the one before")]
    found = []
    for one in every:
        shares = {
            "first": float(one.weights[:, 0].mean()),
            "itself": float(one.weights[rows, rows].mean()),
            "before": float(one.weights[rows[1:], rows[:-1]].mean()) if len(rows) > 1 else 0.0,
        }
        lines.append((str(one.layer), str(one.head), *(f"{x:.3f}" for x in (one.entropy, *shares.values()))))
        found.append(
            {"layer": one.layer, "head": one.head, "entropy": one.entropy, "shares": shares, "weights": one.weights}
        )
    print(f"means over the {len(tokens)} queries of one prompt; entropy in nats, shares of attention on a token")
    print(f"{aligned(lines)}\n{NOTE}")
    if options.out is not None:
        for layer in sorted({one.layer for one in every}):
            _say(_draw_patterns([one for one in every if one.layer == layer], labels, options.out))
    return {"prompt": options.prompt, "tokens": tokens, "texts": labels, "note": NOTE, "heads": found}


def _draw_patterns(every: Sequence[Pattern], labels: Sequence[str], folder: Path) -> Path:
    from matplotlib import colormaps

    from mhc.eval.common.palette import INK
    from mhc.eval.common.sheet import Sheet

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
    for panel, one in enumerate(every):
        sheet.title(panel, f"layer {one.layer}, head {one.head}: entropy {one.entropy:.2f}")
        axes = sheet.panels[panel]
        for query, weights in enumerate(one.weights):
            sheet.note(panel, f"query {query}", "weight", np.arange(len(weights)), weights)
        image = axes.imshow(np.where(one.visible, one.weights, np.nan), cmap=colours, vmin=0, vmax=1)
        axes.grid(visible=False)
        for axis in (axes.xaxis, axes.yaxis):
            _token_axis(axis, labels, least=32)
    for axes in sheet.panels[len(every) :]:
        axes.set_visible(False)
    if image is not None:
        bar = sheet.figure.colorbar(image, ax=sheet.panels, shrink=0.8, pad=0.01, aspect=30)
        bar.ax.tick_params(labelsize=8, colors=INK)
    sheet.figure.supxlabel(NOTE, fontsize=8, color=INK)
    return sheet.save(folder, folder)


# What the views share -------------------------------------------------------------------------------------------------


def _heat(
    sheet: Sheet, panel: int, values: np.ndarray, y: str, *, low: float, high: float, exact: np.ndarray | None = None
) -> None:
    """values [rows, columns] as colours around 0, rows upwards and named ``y``; ``exact``: for the table."""
    from matplotlib.ticker import MaxNLocator

    axes = sheet.panels[panel]
    for number, row in enumerate(values if exact is None else exact):
        sheet.note(panel, f"{y} {number}", "value", np.arange(len(row)), row)
    image = axes.imshow(
        values, aspect="auto", origin="lower", cmap="RdBu_r", vmin=low, vmax=high, interpolation="nearest"
    )
    axes.grid(visible=False)
    axes.set_ylabel(y)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    bar = sheet.figure.colorbar(image, ax=axes, pad=0.01, aspect=20)
    bar.ax.tick_params(labelsize=8, colors=_INK)


def _token_axis(axis: Any, labels: Sequence[str], *, least: int) -> None:
    """Names the places by their tokens, where there is room for so many."""
    if len(labels) <= least:
        axis.set_ticks(range(len(labels)), [label.replace("$", r"\$") for label in labels], fontsize=6.5)
        if axis.axis_name == "x":
            for tick in axis.get_ticklabels():
                tick.set_rotation(90)


def _few(found: Found) -> list[str]:
    """A line where the intervals are those of few documents."""
    if found["documents"] >= FEW:
        return []
    return [f"note: rows of {found['documents']} document(s): the intervals tell nothing of others (--rows)"]


def _with_bounds(bounds: dict[str, float | None], signed: bool = False) -> str:
    """``value (low to high)``."""
    sign = "+" if signed else ""
    value, low, high = (bounds[key] for key in ("value", "low", "high"))
    text = f"{value:{sign}.4g}"
    return text if low is None or high is None else f"{text} ({low:{sign}.4g} to {high:{sign}.4g})"


def _say(path: Path) -> None:
    print(path, file=sys.stderr)


def _tokenizer(config: Config) -> Tokenizer:
    from mhc.data import tokenizers

    return tokenizers.load(config.data.tokenizer)


def _ids(tokenizer: Tokenizer, text: str, option: str) -> list[int]:
    """bos and the tokens of a prompt."""
    check_text(text, option)
    return [tokenizer.bos_id, *tokenizer.encode(text).tolist()]


def _label(tokenizer: Tokenizer, token: int) -> str:
    """A token as a picture can show it: a space as ·, what is no Latin text by its number."""
    if token in (tokenizer.bos_id, tokenizer.eos_id):
        return "bos" if token == tokenizer.bos_id else "eos"
    text = tokenizer.decode([token]).replace(" ", "·").replace("\n", "\\n").replace("\t", "\\t")
    return text if text and all(" " < one < "\u0250" and one != "\x7f" for one in text) else f"#{token}"


# The command line -----------------------------------------------------------------------------------------------------

VIEWS: dict[str, Callable[[Checkpoint, Any], Found]] = {
    "profile": profile,
    "ablate": ablate,
    "patch": patch,
    "attention": attention,
}
# Options of single views, and what they are where they are not given.
_DEFAULTS: dict[str, tuple[tuple[str, ...], Any]] = {
    "split": (("profile", "ablate"), "validation"),
    "rows": (("profile", "ablate"), 64),
    "batch_size": (("profile", "ablate", "patch"), 8),
    "how": (("ablate",), "zero"),
    "factor": (("ablate",), 0.5),
    "units": (("ablate",), ["heads", "layers"]),
    "heads": (("ablate", "attention"), []),
    "draws": (("ablate",), 20),
    "seed": (("ablate",), 0),
    "reference": (("ablate",), 64),
    "top": (("ablate", "patch"), 20),
    "clean": (("patch",), None),
    "corrupted": (("patch",), None),
    "answer": (("patch",), None),
    "other": (("patch",), None),
    "activation": (("patch",), "state"),
    "prompt": (("attention",), None),
    "layers": (("attention",), None),
}
_LEAST = {"rows": 0, "batch_size": 1, "draws": 0, "seed": 0, "reference": 0, "top": 1}


def _parser() -> cli.Parser:
    parser = cli.Parser(
        description="Profiles, ablations, activation patching, attention patterns.",
        example="{prog} profile --checkpoint runs/a --out report",
        fields=checkpoints.FIELDS,
    )
    parser.add_argument("view", help=", ".join(VIEWS))
    checkpoints.add_arguments(parser)
    parser.add_argument("--json", metavar="FILE", help="write what was found there")
    parser.add_argument("--out", metavar="DIR", help="write pictures and their numbers there")
    parser.add_argument("--batch_size", type=int, help="rows at once (8); changes nothing but speed")
    rows = parser.add_argument_group("profile, ablate")
    rows.add_argument("--split", choices=("validation", "train"), help="of the corpus (validation)")
    rows.add_argument("--rows", type=int, help="of the split, 0: all (64)")
    cut = parser.add_argument_group("ablate")
    cut.add_argument("--how", choices=("zero", "mean", "scale"), help="what takes an activation's place (zero)")
    cut.add_argument("--factor", type=float, help="of --how scale (0.5)")
    cut.add_argument("--units", nargs="+", choices=("heads", "layers"), help="what is ablated one by one (both)")
    cut.add_argument("--heads", nargs="+", metavar="L.H", help="a set that is ablated together; attention: those drawn")
    cut.add_argument("--draws", type=int, help="of as many random heads as the set or a layer has (20)")
    cut.add_argument("--seed", type=int, help="of the draws (0)")
    cut.add_argument("--reference", type=int, metavar="ROWS", help="of the train split, for the means (64)")
    cut.add_argument("--top", type=int, help="lines of the table; also of patch (20)")
    pair = parser.add_argument_group("patch")
    pair.add_argument("--clean", metavar="TEXT", help="prompt that activations are taken from")
    pair.add_argument("--corrupted", metavar="TEXT", help="prompt that they are put into, of as many tokens")
    pair.add_argument("--answer", metavar="TEXT", help="next token after --clean; without: the most probable one")
    pair.add_argument("--other", metavar="TEXT", help="next token after --corrupted; likewise")
    pair.add_argument(
        "--activation", choices=("state", "attention", "feed-forward", "head"), help="what is taken (state)"
    )
    text = parser.add_argument_group("attention")
    text.add_argument("--prompt", metavar="TEXT", help="text to be read")
    text.add_argument("--layers", nargs="+", type=int, help="whose heads are drawn (first, middle, last)")
    return parser


def _checked(options: Any) -> None:
    """Refuses what needs no checkpoint to be refused, and fills in defaults."""
    if options.view not in VIEWS:
        raise UserError(f"{options.view}: allowed: {', '.join(VIEWS)}{did_you_mean(options.view, VIEWS)}")
    given = {name for name in _DEFAULTS if getattr(options, name) is not None}
    for name, (views, default) in _DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
        elif options.view not in views:
            raise UserError(f"--{name}: not an option of {options.view}, allowed with {', '.join(views)}")
    for name, least in _LEAST.items():
        if getattr(options, name) < least:
            raise UserError(f"--{name}: given {getattr(options, name)}, allowed: {least} or more")
    needed = {"patch": ("clean", "corrupted"), "attention": ("prompt",)}.get(options.view, ())
    for name in needed:
        if getattr(options, name) is None:
            raise UserError(f"{options.view}: --{name} TEXT is needed")
    for name, how in (("factor", "scale"), ("reference", "mean")):
        if name in given and options.how != how:
            raise UserError(f"--{name}: given {getattr(options, name)}, allowed with --how {how}")
    if options.view == "ablate" and {"heads", "units"} <= given:
        raise UserError("--units and --heads: one of the two, --heads is a set that is ablated together")
    if not math.isfinite(options.factor):
        raise UserError(f"--factor: given {options.factor}, allowed: a finite number")
    heads = []
    for text in options.heads:
        match = re.fullmatch(r"(\d+)\.(\d+)", text)
        if match is None:
            raise UserError(f"--heads: given {text}, allowed: LAYER.HEAD, e.g. 3.1")
        heads.append((int(match[1]), int(match[2])))
    options.heads = list(dict.fromkeys(heads))
    options.json = cli.check_file(options.json, "--json") if options.json else None
    options.out = cli.check_writable(options.out, "--out") if options.out else None


def _checked_with(config: Config, options: Any) -> None:
    """Refuses what the run's config does not have: layers, heads, prompts; finds the ids of answers."""
    layers, heads = config.model.layers, config.attention.heads
    for layer, head in options.heads:
        if layer >= layers or head >= heads:
            raise UserError(f"--heads: given {layer}.{head}, allowed: layers 0 to {layers - 1}, heads 0 to {heads - 1}")
    if options.view == "attention":
        for layer in options.layers or []:
            if not 0 <= layer < layers:
                raise UserError(f"--layers: given {layer}, allowed: 0 to {layers - 1}")
        if options.layers is not None or not options.heads:
            chosen = options.layers if options.layers is not None else [0, layers // 2, layers - 1]
            options.heads += [(layer, head) for layer in chosen for head in range(heads)]
            options.heads = list(dict.fromkeys(options.heads))
        if len(options.heads) > MOST_PATTERNS:
            raise UserError(
                f"attention: {len(options.heads)} patterns, allowed: {MOST_PATTERNS}; choose by --heads or --layers"
            )
    texts = {name: getattr(options, name) for name in ("clean", "corrupted", "prompt")}
    ids = {name: _ids(_tokenizer(config), text, f"--{name}") for name, text in texts.items() if text is not None}
    for name, tokens in ids.items():
        if config.positions.kind == "learned" and len(tokens) > config.max_length:
            raise UserError(
                f"--{name}: {len(tokens)} tokens, allowed: {config.max_length}, the model's learned positions"
            )
        if name == "prompt" and len(tokens) > MOST_TOKENS:
            raise UserError(f"--prompt: {len(tokens)} tokens, allowed: {MOST_TOKENS}; more cannot be seen in a picture")
    if options.view == "patch":
        if len(ids["clean"]) != len(ids["corrupted"]):
            raise UserError(
                f"--clean has {len(ids['clean'])} tokens and --corrupted {len(ids['corrupted'])} (bos included), "
                "allowed: equally many, so that each position has its counterpart"
            )
        if ids["clean"] == ids["corrupted"]:
            raise UserError("--clean and --corrupted: the same tokens, allowed: two prompts that differ")
        options.answer_id = _next_token(config, options.clean, options.answer, "--answer")
        options.other_id = _next_token(config, options.corrupted, options.other, "--other")


def _next_token(config: Config, prompt: str, text: str | None, option: str) -> int | None:
    """The id of the one token by which ``text`` goes on from the prompt."""
    if text is None:
        return None
    tokenizer = _tokenizer(config)
    before = _ids(tokenizer, prompt, option)
    whole = _ids(tokenizer, prompt + text, option)
    if whole[:-1] == before:
        return whole[-1]
    if whole[: len(before)] == before:
        raise UserError(f"{option}: {text!r} is {len(whole) - len(before)} tokens after the prompt, allowed: one")
    raise UserError(f"{option}: {text!r} joins the prompt's last token, allowed: a text that begins a token of its own")


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code. Raises UserError for a mistake."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    changes = checkpoints.parse_changes(rest, parser)
    _checked(options)

    _checked_with(checkpoints.config_of(options.checkpoint, options.step, changes), options)
    checkpoint = checkpoints.load(options.checkpoint, options.step, average=options.average, changes=changes)
    print(f"{checkpoint.name}: compiling, then measuring", file=sys.stderr, flush=True)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    found = VIEWS[options.view](checkpoint, options)
    if options.json is not None:
        from mhc.files import write_json

        about = {"checkpoint": checkpoint.name, "kind": checkpoint.config.residual.kind, "steps": checkpoint.steps}
        write_json(options.json, {"view": options.view, **about, **found})
    return 0


if __name__ == "__main__":
    cli.run_main(main)
