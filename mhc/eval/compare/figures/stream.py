"""Draw the figures of the stream: distances of maps, diversity of streams, activations, attention, gradients."""

from __future__ import annotations

import numpy as np

from mhc.eval.common.sheet import Floats, Sheet
from mhc.eval.compare.figures.series import MOST_MAPS, Figure, Gallery, finite_range, over_depth, over_steps
from mhc.eval.compare.runs import Arm


def grad_heat(gallery: Gallery) -> Sheet | None:
    """Draw the gradient norm of each sublayer over steps."""
    tables = []
    for series in gallery.series:
        norms_of = [table for arm in series.arms if len((table := _sublayer_gradients(arm))[0])]
        if norms_of:
            tables.append((series, max(norms_of, key=lambda table: float(np.nanmax(table[1])))))
    tables = tables[: 2 * MOST_MAPS]
    span = finite_range(float(v) for _, (_, norms) in tables for v in norms.ravel() if v > 0)
    if span is None:
        return None
    rows = -(-len(tables) // 2)
    sheet = Sheet("grad_heat", columns=2, rows=rows, height=1.75, y="sublayer", sharey=False)
    for panel, (series, (steps, norms)) in enumerate(tables):
        sheet.title(panel, series.label)
        sheet.heat(
            panel, series.label, steps, norms, low=span[0], high=max(span[1], 1.01 * span[0]), colours=panel == 0
        )
        if panel < len(tables) - 2:
            sheet.panels[panel].set_xlabel("")
    for axes in sheet.panels[len(tables) :]:
        axes.set_visible(False)
    return sheet


def _later_mean(values: Floats, axis: int) -> Floats:
    """Return the mean over sublayers after the first, where all streams are still alike."""
    return np.asarray((values[:, 1:] if values.shape[1] > 1 else values).mean(axis=axis))


def _sublayer_gradients(arm: Arm, most: int = 160) -> tuple[Floats, Floats]:
    """Return (steps, norms [P, S]): the largest of each stretch of steps in the metrics; the probes' in older runs."""
    rows = [row for row in arm.metrics if row.get("grad_norm_by_sublayer")]
    if not rows:
        return arm.probe("grad/norm")
    steps = np.array([row["step"] for row in rows], np.float64)
    norms = np.array([row["grad_norm_by_sublayer"] for row in rows], np.float64)
    size = -(-len(steps) // most)
    starts = np.arange(0, len(steps), size)
    return steps[starts], np.maximum.reduceat(norms, starts, axis=0)


FIGURES = (
    Figure(
        "stream",
        "Distance to the identity and to uniform over depth",
        "Frobenius distance of H_res, and of the product H_k … H_0, to I and to J/N, at the last probe. Products of "
        "doubly stochastic maps drift to uniform: all streams become one. It is the price of their stability. Log "
        "scale; what is exactly 0 is not drawn.",
        over_depth(
            "mix_depth",
            "mix/to_identity_single",
            [
                (f"{span} map, distance to {name}", f"mix/to_{target}_{span}")
                for span in ("single", "composite")
                for target, name in (("identity", "the identity"), ("uniform", "uniform"))
            ],
            y="distance / √N",
            columns=2,
            mixing=True,
            log=True,
        ),
    ),
    Figure(
        "stream",
        "Effective streams and representation rank over steps",
        "Participation ratios. Streams: 1 means that all carry the same vector, N that they are orthogonal and equal. "
        "Rank: of the hidden states' covariance over the probe's tokens; a fall is a collapse across tokens.",
        over_steps(
            "diversity_steps",
            "representation/rank",
            [
                ("effective streams (mean over sublayers after 0)", "stream/effective", _later_mean),
                ("rank of the representation (smallest block)", "representation/rank", np.min),
            ],
            y="participation ratio",
            sharey=False,
        ),
    ),
    Figure(
        "stream",
        "Effective streams, rank and likeness of tokens over depth",
        "At the last probe. Rank and cosine stand after each block, the streams after each sublayer.",
        over_depth(
            "diversity_depth",
            "representation/rank",
            [
                ("effective streams", "stream/effective"),
                ("rank of the representation", "representation/rank"),
                ("mean cosine between tokens", "representation/mean_cosine"),
            ],
            y="",
            columns=3,
            sharey=False,
        ),
    ),
    Figure(
        "stream",
        "Activation norms over depth",
        "At the last probe, on the fixed probe batch; log scale.",
        over_depth(
            "activations",
            "activation/residual_rms",
            [
                ("residual stream", "activation/residual_rms"),
                ("output of the sublayer", "activation/sublayer_out_rms"),
            ],
            y="root mean square",
            columns=2,
            log=True,
        ),
    ),
    Figure(
        "stream",
        "Attention over steps",
        "Logits that grow and an entropy that falls towards 0 come before some instabilities.",
        over_steps(
            "attention",
            "activation/attention_logit_max",
            [
                ("largest attention logit", "activation/attention_logit_max", np.max),
                ("attention entropy (nats, mean over blocks)", "activation/attention_entropy", np.mean),
            ],
            y="",
            sharey=False,
        ),
    ),
    Figure(
        "stream",
        "Gradient norms and relative updates over depth",
        "Of each sublayer (its maps among its parameters) at the step of the last probe; log scale.",
        over_depth(
            "gradients",
            "grad/norm",
            [("gradient norm", "grad/norm"), ("update / parameter norm", "update/ratio")],
            y="",
            columns=2,
            log=True,
            sharey=False,
        ),
    ),
    Figure(
        "stream",
        "Gradient norm over steps and depth",
        "Of each sublayer; one colour scale for all. Of several seeds the one with the largest norm.",
        grad_heat,
    ),
)
