"""Score signals of doubt where the truth is known: does one tell at which places the model is far from the posterior?

A place is far where KL(Bayes ‖ model) exceeds a tenth of a bit. A signal is scored by the area under its ROC curve
(AUC); the entropy of the model's own distribution is the baseline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from mhc.data.windtunnel import Task
from mhc.eval.common import page as pages
from mhc.eval.common import statistics
from mhc.eval.common.belief_map import diagnose, maps
from mhc.eval.common.checkpoints import Checkpoint
from mhc.eval.common.program import Program
from mhc.eval.windtunnel.attention import NO_ATTENTION, attends, batches
from mhc.eval.windtunnel.measures import distances
from mhc.eval.windtunnel.sections import Result, Shown
from mhc.model.decoder import Decoder

FAR = 0.1  # bits
LEAST = 0.05  # share of the places that each class must have, for an AUC to be told
BASELINE = "output"
SIGNALS = {
    "output": "entropy of the output",
    "hidden": "entropy of the last block's feed-forward activations",
    "lens": "entropy of the middle block's logit lens",
    "joint": "weak prior and sure likelihood together",
    "weak_prior": "weak prior: variance of the query–key cosines, the lower the higher",
    "sure_likelihood": "sure likelihood: abs(⟨value, feed-forward output⟩)",
}


class Scores(NamedTuple):
    """Holds how well each signal tells the far places.

    Attributes:
        far: the share of places that are far.
        auc: by signal; empty where a class has too few places.
        gain: AUC minus that of the baseline, by signal but the baseline.
    """

    far: float
    auc: dict[str, statistics.Estimate]
    gain: dict[str, statistics.Estimate]


def score(signals: Mapping[str, np.ndarray], kl: np.ndarray) -> Scores:
    """Return the AUC of each signal [sequences, places] for KL(Bayes ‖ model) > ``FAR``, intervals over sequences."""
    far = kl > FAR
    share = float(far.mean())
    if not LEAST <= share <= 1 - LEAST:
        return Scores(share, {}, {})
    base = signals[BASELINE]
    return Scores(
        share,
        {name: statistics.auc(values, far) for name, values in signals.items()},
        {name: statistics.auc(values, far, base) for name, values in signals.items() if name != BASELINE},
    )


def signals_at_places(checkpoint: Checkpoint, task: Task, sequences: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return (signals by name, KL in bits) of held-out sequences at the supervised places, [sequences, places] each."""
    parts: list[dict[str, np.ndarray]] = []
    divergence = []
    program = Program(checkpoint, _measured)
    drawn = list(batches(checkpoint.config, task, sequences, copies=4))
    found = program.each((inputs for _, inputs in drawn), ("tokens",))
    for (block, _), (_, result) in zip(drawn, found, strict=True):
        at = {name: np.asarray(leaf, np.float64) for name, leaf in result.items()}
        logs = at.pop("log_probabilities")[:, task.places]
        divergence.append(distances(logs, block.posterior, task.first_class).kl)
        parts.append({name: leaf[..., task.places] for name, leaf in at.items()})
    every = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    signals = {name: every[name] for name in ("output", "hidden", "lens")}
    if "prior" in every:
        by_head = {
            name: np.moveaxis(every[name], 0, -2).reshape(*every[name].shape[1:3], -1)
            for name in ("prior", "confidence")
        }
        diagnosis = diagnose(by_head["prior"], by_head["confidence"])
        shape = signals["output"].shape
        signals |= {
            "joint": diagnosis.joint.reshape(shape),
            "weak_prior": -diagnosis.prior.reshape(shape),
            "sure_likelihood": diagnosis.confidence.reshape(shape),
        }
    return signals, np.concatenate(divergence)


def _measured(decoder: Decoder, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return maps(decoder, batch["tokens"])


# ---------------------------------------------------------------------------------------------------------- the section


def measure(checkpoint: Checkpoint, task: Task, sequences: int) -> Result:
    """Return the AUC of every signal; the scalars are the AUCs and what each adds to that of the baseline."""
    found = score(*signals_at_places(checkpoint, task, sequences))
    scalars = {f"auc_{name}": float(estimate.value) for name, estimate in found.auc.items()}
    scalars |= {f"auc_{name}_minus_{BASELINE}": float(estimate.value) for name, estimate in found.gain.items()}
    return Result(scalars, as_json(found, sequences) | ({} if attends(checkpoint.config) else {"note": NO_ATTENTION}))


def as_json(found: Scores, sequences: int) -> dict[str, Any]:
    """Return what windtunnel.json says, with 95 % intervals over sequences."""
    return {
        "sequences": sequences,
        "far_bits": FAR,
        "far": found.far,
        "judged": bool(found.auc),
        "auc": {name: estimate.at() for name, estimate in found.auc.items()},
        f"auc_minus_{BASELINE}": {name: estimate.at() for name, estimate in found.gain.items()},
    }


def page(results: Sequence[Shown], folder: Path) -> str:
    """Return a table of AUCs: a row a signal, a column a checkpoint."""
    del folder  # nothing is drawn
    header = [pages.heading("signal"), *(pages.text(one.label) for one in results)]
    rows = [
        [pages.cell(pages.text(words), "text"), *(pages.cell(_shown(one.result.json, name)) for one in results)]
        for name, words in SIGNALS.items()
    ]
    shares = [f"{one.name}: {one.result.json['far']:.1%}" for one in results]
    return (
        f'<p class="note">AUC of each signal for places where KL(Bayes ‖ model) exceeds {FAR} bit, with 95 % intervals '
        "over sequences; 0.5 is chance. In brackets what it adds to the entropy of the output. Far places: "
        f"{pages.text('; '.join(shares))}. Nothing is judged where a class has under {LEAST:.0%} of the places.</p>"
        + pages.table(header, rows)
    )


def _shown(json: Mapping[str, Any], name: str) -> str:
    bounds, gain = json["auc"].get(name), json[f"auc_minus_{BASELINE}"].get(name)
    if bounds is None:
        return "not judged" if not json["judged"] else "–"
    text = f"{bounds['value']:.3f}"
    if bounds["low"] is not None:
        text += f" ({bounds['low']:.3f} to {bounds['high']:.3f})"
    return text if gain is None else f"{text} [{gain['value']:+.3f}]"
