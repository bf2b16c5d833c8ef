"""What the numbers of a comparison say, in sentences, by stated rules."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eval.ngram import Baselines
from eval.recompute import Recomputed
from eval.runs import Arm, differing_fields, twins

AGREEMENT = 1e-4  # relative difference up to which recomputed gains count as the logged ones

Measures = Mapping[str, Mapping[str, Any]]

_SEEDS = ("seed.init", "seed.data")
_LISTED = 4  # comparisons over seeds that are said in sentences
_NOT_DATA = ("data.prefetch", "data.cache_dir")  # change neither text nor order


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report's summary; a warning is set apart."""

    text: str
    warning: bool = False


def findings(
    arms: Sequence[Arm],
    measures: Measures,
    baselines: Baselines,
    recomputed: Mapping[str, Recomputed] | None,
    warnings: Sequence[str],
) -> list[Finding]:
    """Sentences for the top of the report, the most important first; warnings last."""
    out = [
        *_ranking(arms, measures),
        *_seeds(arms, measures),
        *_against_baselines(arms, measures, baselines),
        *_gains(arms, measures),
        *_health(arms, measures),
        *_speed(arms, measures),
        *_recomputed(arms, recomputed),
    ]
    said = [Finding(text) for text in out]
    return said + [Finding(text, warning=True) for text in (*warnings, *_mismatches(arms))]


def number(value: float | None, digits: int = 4) -> str:
    """``value`` for people: ``digits`` significant ones, an en dash for None."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "not finite"
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}g}"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    places = digits - 1 - (math.floor(math.log10(abs(value))) if value else 0)
    return f"{value:.{max(places, 0)}f}"


def groups(arms: Sequence[Arm]) -> dict[str, list[Arm]]:
    """Arms that differ in their seeds alone, under a label made of the kind and of what tells its groups apart."""
    out: dict[str, list[Arm]] = {}
    for arm in arms:
        same_kind = [other for other in arms if other.kind == arm.kind]
        varying = [field for field in differing_fields(same_kind) if field not in _SEEDS]
        details = ", ".join(f"{field.split('.')[-1]} {arm.flat.get(field)}" for field in varying)
        out.setdefault(f"{arm.kind} ({details})" if details else arm.kind, []).append(arm)
    return out


@dataclasses.dataclass(frozen=True)
class OverSeeds:
    """Validation bits per byte of the arms that differ in their seeds alone.

    Attributes:
        label: the kind, and what else tells the group from the others.
        n: seeds with a finite result.
        mean, std: over those seeds; std (n − 1 in the denominator) is None for one seed.
        differences: the group's result minus that of the plain arm that differs in the residual alone, for every seed
            that has both.
        verdict: what the differences allow to say; empty when there are fewer than two.
    """

    label: str
    n: int
    mean: float | None
    std: float | None
    differences: tuple[float, ...]
    verdict: str


def over_seeds(arms: Sequence[Arm], measures: Measures) -> list[OverSeeds]:
    """One entry per group of arms that differ in their seeds alone."""
    out = []
    scored = _scored(arms, measures)
    for label, group in groups(arms).items():
        values = [scored[arm.name] for arm in group if arm.name in scored]
        differences = []
        for arm in group if group[0].kind != "plain" else []:
            pair = [other.name for other in twins(arm, arms)]
            if len(pair) == 1 and pair[0] in scored and arm.name in scored:
                differences.append(scored[arm.name] - scored[pair[0]])
        out.append(
            OverSeeds(
                label,
                len(values),
                float(np.mean(values)) if values else None,
                float(np.std(values, ddof=1)) if len(values) > 1 else None,
                tuple(differences),
                _verdict(differences),
            )
        )
    return out


def _verdict(differences: Sequence[float]) -> str:
    """By the sign test alone: n equal signs come up by chance once in 2^(n−1) times."""
    n, lower = len(differences), sum(difference < 0 for difference in differences)
    if n < 2:
        return ""
    if lower not in (0, n):
        return "the seeds do not separate the two"
    return f"all {n} seeds agree in sign, as they would by chance once in {2 ** (n - 1)} times"


def _ranking(arms: Sequence[Arm], measures: Measures) -> list[str]:
    scored = _scored(arms, measures)
    if not scored:
        return ["No arm has a validation result yet."]
    (best, lowest), *others = scored.items()
    text = f"{best} has the lowest validation bits per byte: {lowest:.4f}"
    rest = [f"{bits - lowest:.4f} under {name}" for name, bits in others[:3]]
    if len(others) > 3:
        name, bits = others[-1]
        rest.append(f"{bits - lowest:.4f} under the last, {name}")
    return [f"{text}, {_join(rest)}." if rest else f"{text}."]


def _against_baselines(arms: Sequence[Arm], measures: Measures, baselines: Baselines) -> list[str]:
    scored = _scored(arms, measures)
    if not scored or baselines.unigram is None or baselines.bigram is None:
        return []
    worst, bits = list(scored.items())[-1]
    text = (
        f"Byte n-gram models reach {baselines.unigram:.4f} (unigram) and {baselines.bigram:.4f} (bigram) bits per "
        f"byte; the worst arm, {worst}, lies {_under(baselines.unigram - bits)} the unigram"
    )
    over = [name for name, bits in scored.items() if bits >= baselines.bigram]
    return [
        f"{text}; not under the bigram: {_join(over)}." if over else f"{text}, and every arm lies under the bigram."
    ]


def _scored(arms: Sequence[Arm], measures: Measures) -> dict[str, float]:
    """Finite validation bits per byte by arm, the lowest first."""
    bits = {arm.name: measures[arm.name]["bits_per_byte"] for arm in arms}
    known = {name: value for name, value in bits.items() if value is not None and math.isfinite(value)}
    return dict(sorted(known.items(), key=lambda item: item[1]))


def _seeds(arms: Sequence[Arm], measures: Measures) -> list[str]:
    results = over_seeds(arms, measures)
    if all(result.n <= 1 for result in results):
        return [
            "Every arm ran with one seed, so a difference in loss between two arms cannot be told from the spread "
            "between seeds. Repeat with several seeds before ranking the arms."
        ]
    paired = [result for result in results if len(result.differences) > 1]
    out = [
        f"{result.label} minus plain, paired by seed: {np.mean(result.differences):+.4f} bits per byte (from "
        f"{min(result.differences):+.4f} to {max(result.differences):+.4f}); {result.verdict}."
        for result in paired[:_LISTED]
    ]
    if len(paired) > _LISTED:
        out.append(f"The table over seeds holds {len(paired) - _LISTED} more of these comparisons.")
    return out


def _gains(arms: Sequence[Arm], measures: Measures) -> list[str]:
    peaks: dict[str, tuple[float, float]] = {}
    for arm in arms:
        forward, backward = (measures[arm.name][f"peak_{way}_gain"] for way in ("forward", "backward"))
        if arm.kind == "plain" or forward is None or backward is None:
            continue
        old = peaks.get(arm.kind, (0.0, 0.0))
        peaks[arm.kind] = (max(old[0], forward), max(old[1], backward))
    if not peaks:
        return []
    parts = [
        f"{kind} {_gain(forward)} forward and {_gain(backward)} backward" for kind, (forward, backward) in peaks.items()
    ]
    text = f"Peak composite gain (token mean; plain is 1): {'; '.join(parts)}."
    if "hc" in peaks and "mhc" in peaks and all(map(math.isfinite, (*peaks["hc"], *peaks["mhc"]))):
        forward, backward = (peaks["hc"][way] / peaks["mhc"][way] for way in (0, 1))
        text += f" HC's peak is {_gain(forward)} times mHC's forward and {_gain(backward)} times backward."
    return [text]


def _health(arms: Sequence[Arm], measures: Measures) -> list[str]:
    out = []
    broken = [arm.name for arm in arms if measures[arm.name]["nonfinite"] or not _finite(arm)]
    if broken:
        out.append(f"Non-finite losses or gradients occurred in {_join(broken)}.")
    spiky = [
        f"{arm.name} ({number(100 * measures[arm.name]['spike_score_loss'], 2)} % of steps)"
        for arm in arms
        if measures[arm.name]["spike_score_loss"] > 0
    ]
    out.append(
        f"Loss spikes (7 standard deviations off the last 1000 steps): {_join(spiky)}."
        if spiky
        else "No arm's loss spiked (7 standard deviations off the last 1000 steps)."
    )
    norms = {arm.name: measures[arm.name]["max_grad_norm"] for arm in arms}
    known = {name: value for name, value in norms.items() if value is not None}
    if known:
        worst = max(known, key=lambda name: known[name])
        out[-1] += f" The largest gradient norm before clipping is {worst}'s: {number(known[worst], 3)}."
    running = [f"{arm.name} (step {arm.steps} of {arm.planned_steps})" for arm in arms if not arm.finished]
    if running:
        out.append(f"Unfinished: {_join(running)}. Their numbers are those of the last step logged.")
    return out


def _speed(arms: Sequence[Arm], measures: Measures) -> list[str]:
    """Speed of each kind against plain's: medians over arms of medians over steps."""
    speeds: dict[str, list[float]] = {}
    for arm in arms:
        speed = measures[arm.name]["tokens_per_second"]
        if speed is not None:
            speeds.setdefault(arm.kind, []).append(speed)
    if "plain" not in speeds or len(speeds) < 2:
        return []
    plain = float(np.median(speeds["plain"]))
    parts = [f"{kind} {np.median(values) / plain:.2f}" for kind, values in speeds.items() if kind != "plain"]
    return [f"Tokens per second as a share of plain's ({plain:,.0f}): {_join(parts)}."]


def _recomputed(arms: Sequence[Arm], recomputed: Mapping[str, Recomputed] | None) -> list[str]:
    if recomputed is None:
        return ["Gains were not recomputed from the checkpoints (--no_recompute)."]
    known = {name: result.difference for name, result in recomputed.items() if result.difference is not None}
    out = []
    if known:
        worst = max(known, key=lambda name: known[name])
        verdict = "agree with" if known[worst] <= AGREEMENT else "DIFFER from"
        out.append(
            f"Gains recomputed from the final checkpoints {verdict} the logged ones: largest relative difference "
            f"{known[worst]:.1e} ({worst}), limit {AGREEMENT:g}."
        )
    missing = [f"{arm.name} ({recomputed[arm.name].reason})" for arm in arms if recomputed[arm.name].difference is None]
    if missing:
        out.append(f"Gains could not be compared with the logged ones for {_join(missing)}.")
    return out


def _mismatches(arms: Sequence[Arm]) -> list[str]:
    fields = differing_fields(arms)
    data = [field for field in fields if field.startswith("data.") and field not in _NOT_DATA]
    length = [field for field in fields if field in ("train.steps", "train.batch_size")]
    out = []
    if data:
        out.append(
            f"The arms did not train on the same data ({_join(data)} differ): their losses are not comparable, and the "
            "n-gram baselines are those of the first arm's data."
        )
    if length:
        out.append(f"The arms were not trained for equally long ({_join(length)} differ).")
    return out


def _finite(arm: Arm) -> bool:
    return all(bool(np.isfinite(arm.column(key)[1]).all()) for key in ("loss", "grad_norm"))


def _gain(value: float) -> str:
    if not math.isfinite(value):
        return "not finite"
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _under(margin: float) -> str:
    return f"{margin:.4f} under" if margin >= 0 else f"{-margin:.4f} over"


def _join(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
