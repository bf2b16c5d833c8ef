"""Compare the outputs of two models for the same tokens, and find the first layer in which they differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mhc.eval.common.statistics import Bounds, ratio
from mhc.eval.common.terminal import aligned
from mhc.eval.regression.outputs import Logits, Outputs

# Groups that say what the model is, for the list of what differs.
_MODEL = ("model", "attention", "positions", "mlp", "moe", "norm", "head", "residual")


def divergence(logits: Logits, reference: Logits) -> np.ndarray:
    """Return KL(reference || other) of each token in nats, float64 [M].

    Where not all logits are kept, the tokens left out count as one, which gives a lower bound.
    """
    step = max(2**22 // reference.values.shape[-1], 1)  # tokens at once, as float64
    parts = (slice(start, start + step) for start in range(0, len(reference.values), step))
    return np.concatenate([_divergence(_part(logits, part), _part(reference, part)) for part in parts])


def _part(logits: Logits, tokens: slice) -> Logits:
    ids = None if logits.ids is None else logits.ids[tokens]
    return Logits(logits.values[tokens], ids, logits.log_z[tokens], logits.best[tokens])


def _divergence(logits: Logits, reference: Logits) -> np.ndarray:
    whole = reference.ids is None
    log_p, log_q = (_log_probabilities(side, whole) for side in (reference, logits))
    kl = np.sum(np.exp(log_p) * (log_p - log_q), axis=-1)
    if not whole:
        left, other = (np.maximum(1.0 - np.exp(log).sum(axis=-1), 1e-9) for log in (log_p, log_q))
        kl += np.where(left > 1e-6, left * np.log(left / other), 0.0)  # below it is rounding
    return np.maximum(kl, 0.0)


def _log_probabilities(logits: Logits, whole: bool) -> np.ndarray:
    values = logits.values.astype(np.float64)
    if not whole:
        return values - logits.log_z[:, None]
    shifted = values - values.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def mean_by_row(values: np.ndarray, row: np.ndarray) -> Bounds:
    """Return the mean over tokens [M], with the interval (95 %) over rows drawn with replacement; none for one row."""
    _, row = np.unique(row, return_inverse=True)
    return ratio(np.bincount(row, values), np.bincount(row)).at()


def _apart(where: str, ours: np.ndarray, theirs: np.ndarray) -> dict[str, Any]:
    """Return largest and mean absolute difference, the largest magnitude of ``theirs``, and the ratio of the two."""
    gap = np.abs(ours - theirs)
    largest, scale = float(gap.max()), float(np.abs(theirs).max())
    relative = largest / scale if scale else 0.0 if largest == 0 else math.inf
    mean = float(gap.mean(dtype=np.float64))
    return {"where": where, "largest": largest, "mean": mean, "scale": scale, "relative": relative}


@np.errstate(invalid="ignore")  # what is not finite differs, and is no error here
def compare(outputs: Outputs, reference: Outputs, tolerance: float) -> dict[str, Any]:
    """Return what differs, and from which place on, as JSON except for arrays.

    Both outputs are of the same rows, and hold the logits of the same tokens.
    """
    ours, theirs = outputs.about["config"], reference.about["config"]
    layers, notes = _layers(outputs, reference)
    for field in ("device", "versions"):
        if outputs.about[field] != reference.about[field]:
            here, there = (_words(about[field]) for about in (outputs.about, reference.about))
            notes.append(f"{field}: {here} and {there}")
    logits = _apart("logits", outputs.logits.values, reference.logits.values)
    layers.append(logits)
    above = [layer["where"] for layer in layers if not layer["relative"] <= tolerance]  # NaN is above
    kl = divergence(outputs.logits, reference.logits)
    changed = (outputs.logits.best != reference.logits.best).astype(np.float64)
    gap = np.abs(outputs.logits.values - reference.logits.values)
    row, place = np.nonzero(reference.rows.valid)
    worst = int(np.argmax(np.nan_to_num(gap.max(axis=-1), nan=np.inf)))
    return {
        "checkpoint": outputs.about["checkpoint"],
        "against": reference.about["checkpoint"],
        "tolerance": tolerance,
        "within": logits["relative"] <= tolerance,
        "rows": len(reference.rows.tokens),
        "tokens": len(row),
        "vocabulary": reference.about["vocabulary"],
        "logits_a_token": reference.logits.values.shape[-1],
        "largest": logits["largest"],
        "largest_logit": logits["scale"],
        "relative": logits["relative"],
        "largest_at": {"row": int(row[worst]), "place": int(place[worst])},
        "mean": mean_by_row(gap.mean(axis=-1, dtype=np.float64), row),
        "top1_changed": {**mean_by_row(changed, row), "tokens": int(changed.sum())},
        "kl": {**mean_by_row(kl, row), "largest": float(kl.max())},
        "layers": layers,
        "first_above": above[0] if above else None,
        "config": {
            f"{group}.{name}": [theirs.get(group, {}).get(name), value]
            for group in _MODEL
            for name, value in ours[group].items()
            if theirs.get(group, {}).get(name) != value
        },
        "notes": notes,
    }


def _layers(outputs: Outputs, reference: Outputs) -> tuple[list[dict[str, Any]], list[str]]:
    """Return (differences of hidden states in the order of the computation, notes on what cannot be compared)."""
    ours, theirs = outputs.about["config"], reference.about["config"]
    if outputs.hidden is None or reference.hidden is None:
        return [], ["no hidden states were kept (--save with --activations): nothing by layer"]
    widths = (outputs.hidden.shape[-1], reference.hidden.shape[-1])
    if widths[0] != widths[1]:
        return [], [f"widths {widths[0]} and {widths[1]}: hidden states cannot be compared, logits are"]
    at = {name: k for k, name in enumerate(reference.about["points"])}
    layers = [
        _apart(name, outputs.hidden[k], reference.hidden[at[name]])
        for k, name in enumerate(outputs.about["points"])
        if name in at
    ]
    notes = []
    depths = (ours["model"]["layers"], theirs["model"]["layers"])
    if depths[0] != depths[1]:
        notes.append(f"{depths[0]} and {depths[1]} blocks: those after the first {min(depths)} have no counterpart")
    collapses = {config["residual"]["collapse"] for config in (ours, theirs)}
    if "sum" in collapses and len(collapses) > 1:
        notes.append("one sums its streams, one does not: hidden states before the head's norm differ by a factor")
    return layers, notes


def _words(value: object) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, Mapping) else str(value)


def text(result: dict[str, Any]) -> str:
    """Return a comparison as the text that is printed."""

    def interval(estimate: dict[str, Any], digits: str) -> str:
        if estimate["low"] is None:
            return "one row"
        return f"95 % over rows: {estimate['low']:{digits}} to {estimate['high']:{digits}}"

    mean, changed, kl = result["mean"], result["top1_changed"], result["kl"]
    kept, vocabulary = result["logits_a_token"], result["vocabulary"]
    which = f"all {vocabulary:,}" if kept == vocabulary else f"the reference's {kept:,} most probable of {vocabulary:,}"
    bound = "" if kept == vocabulary else " (at least)"
    at = result["largest_at"]
    lines = [f"{result['checkpoint']}, against {result['against']}"]
    lines += [f"  {name}: {there} there, {here} here" for name, (there, here) in result["config"].items()]
    lines.append(f"{result['rows']} rows, {result['tokens']:,} tokens; logits of {which} tokens")
    lines.append(
        aligned(
            [
                (
                    "logits, abs difference",
                    f"largest {result['largest']:.3g} = {result['relative']:.3g} of the largest logit "
                    f"{result['largest_logit']:.4g}, at row {at['row']}, place {at['place']}",
                ),
                ("", f"mean {mean['value']:.3g} ({interval(mean, '.3g')})"),
                (
                    "top-1 changed",
                    f"{changed['value']:.2%} of tokens, {changed['tokens']:,} ({interval(changed, '.2%')})",
                ),
                (
                    "KL in nats a token" + bound,
                    f"mean {kl['value']:.3g} ({interval(kl, '.3g')}), largest {kl['largest']:.3g}",
                ),
            ]
        )
    )
    if len(result["layers"]) > 1:
        table = [("where", "largest", "mean", "of the largest there", "× before")]
        before = None
        for layer in result["layers"]:
            grown = "" if not before else f"{layer['relative'] / before:.3g}"
            table.append((layer["where"], *(f"{layer[key]:.3g}" for key in ("largest", "mean", "relative")), grown))
            before = layer["relative"]
        lines += ["", aligned(table), ""]
    lines += [f"note: {note}" for note in result["notes"]]
    tolerance, first = result["tolerance"], result["first_above"]
    verdict = "within" if result["within"] else "not within"
    lines.append(f"logits {verdict} {tolerance:g} of the largest")
    lines.append(f"first above {tolerance:g}: {first or 'nothing'}")
    return "\n".join(lines)
