"""State what the numbers of a comparison show, in sentences and by fixed rules."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mhc.data.corpus import fidelity
from mhc.eval.common.words import counted, listed, number, times
from mhc.eval.compare.comparison import Comparison
from mhc.eval.compare.ngram import Baselines
from mhc.eval.compare.recompute import Recomputed
from mhc.eval.compare.runs import Arm, differing_fields
from mhc.eval.compare.spikes import History, monitors, unjudged
from mhc.eval.compare.topologies import Paired, Topology

AGREEMENT = 1e-4  # relative difference up to which recomputed gains count as the logged ones

Measures = Mapping[str, Mapping[str, Any]]

_LISTED = 6  # comparisons over seeds that have a sentence
_NOT_DATA = ("data.prefetch", "data.workers", "data.cache_dir")  # change neither text nor order


@dataclasses.dataclass(frozen=True)
class Finding:
    """Holds one line of the report's summary, and whether it is a warning, which is shown apart."""

    text: str
    warning: bool = False


def findings(comparison: Comparison) -> list[Finding]:
    """Return sentences for the top of the report, the most important first; warnings last."""
    arms, measures, groups = comparison.arms, comparison.measures, comparison.topologies
    single = all(len(topology.every_arm) == 1 for topology in groups)
    texts = [
        *(_ranking(arms, measures) if single else _topology_ranking(groups)),
        *_seeds(groups, comparison.pairs),
        *_rates(groups),
        *_against_baselines(arms, measures, comparison.baselines),
        *_gains(arms, measures),
        *_health(arms, measures),
        *_events(comparison.histories),
        *_speed(arms, measures),
        *_recomputed(arms, comparison.recomputed),
    ]
    warnings = (*comparison.warnings, *_mismatches(arms), *_lossy(arms))
    return [*map(Finding, texts), *(Finding(text, warning=True) for text in warnings)]


def _lossy(arms: Sequence[Arm]) -> list[str]:
    """Return a line for each tokeniser that loses a part of the text."""
    shares: dict[str, float] = {}
    for arm in arms:
        name = str(arm.config["data"].get("tokenizer"))
        shares[name] = max(arm.lost, shares.get(name, 0.0))
    return [
        fidelity.why_withheld(share, name) or fidelity.describe(share, name) for name, share in shares.items() if share
    ]


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
    return [f"{text}, {listed(rest)}." if rest else f"{text}."]


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
        f"{text}; not under the bigram: {listed(over)}." if over else f"{text}, and every arm lies under the bigram."
    ]


def _scored(arms: Sequence[Arm], measures: Measures) -> dict[str, float]:
    """Return finite validation bits per byte by arm, the lowest first."""
    bits = {arm.name: measures[arm.name]["bits_per_byte"] for arm in arms}
    known = {name: value for name, value in bits.items() if value is not None and math.isfinite(value)}
    return dict(sorted(known.items(), key=lambda item: item[1]))


def _topology_ranking(topologies: Sequence[Topology]) -> list[str]:
    known = [topology for topology in topologies if math.isfinite(topology.best.mean)]
    if not known:
        return ["No topology has a finite validation result at any rate yet."]
    best, *others = sorted(known, key=lambda topology: topology.best.mean)
    n = len(best.best.scores)
    at = f" at rate {best.best.lr:g}" if len(best.rates) > 1 else ""
    text = (
        f"{best.label}{at} has the lowest validation bits per byte, {best.best.mean:.4f} "
        f"({f'mean over {n} seeds' if n > 1 else 'one seed'})"
    )
    rest = [f"{other.best.mean - best.best.mean:.4f} under {other.label}" for other in others[:3]]
    if len(others) > 3:
        rest.append(f"{others[-1].best.mean - best.best.mean:.4f} under the last, {others[-1].label}")
    failed = [topology.label for topology in topologies if math.isinf(topology.best.mean)]
    return [
        f"{text}, {listed(rest)}." if rest else f"{text}.",
        *([f"At every rate a seed of {listed(failed)} diverged or was halted."] if failed else []),
    ]


def _seeds(topologies: Sequence[Topology], pairs: Sequence[Paired]) -> list[str]:
    if all(len(topology.best.scores) <= 1 for topology in topologies):
        return [
            "Every arm ran with one seed, so a difference in loss between two arms cannot be told from the spread "
            "between seeds. Repeat with several seeds before ranking the arms."
            if all(len(topology.rates) == 1 for topology in topologies)
            else "Every topology has one seed at each rate, so a difference in loss between two cannot be told from "
            "the spread between seeds. Repeat with several seeds before ranking them."
        ]
    out = []
    for pair in pairs[:_LISTED]:
        out.append(f"{pair.topology} minus {pair.reference}: {pair.mean:+.4f} bits per byte; {pair.verdict}.")
    if len(pairs) > _LISTED:
        apart = [pair.topology for pair in pairs if pair.separated]
        out.append(
            f"Of all {len(pairs)} comparisons to plain, seeds separate {listed(apart) if apart else 'none'}; the table "
            "of topologies holds the rest."
        )
    return out


def _rates(topologies: Sequence[Topology]) -> list[str]:
    known = [topology for topology in topologies if topology.sensitivity is not None]
    if not known:
        return []
    parts = [f"{topology.label} {number(topology.sensitivity, 3)}" for topology in known]
    text = f"Learning-rate sensitivity (nats lost to the best rate, on average over the rates tried): {listed(parts)}."
    edge = [f"{topology.label} ({topology.best.lr:g})" for topology in known if topology.at_edge]
    if edge:
        text += f" The best rate is the smallest or largest tried for {listed(edge)}: a better one may lie beyond."
    return [text]


def _events(histories: Sequence[History]) -> list[str]:
    """Return sentences about loss events: causes, what crossed first, false alarms, and what was done."""
    events = [episode for one in histories for episode in one.loss_events]
    alone = sum(len(one.episodes) - len(one.loss_events) for one in histories)
    out = []
    if events:
        causes = Counter(episode.cause for episode in events)
        names = listed([f"{count} {cause}" for cause, count in causes.most_common()])
        text = f"{counted(len(events), 'loss event')} (flagged by z-score, or non-finite), by cause: {names}."
        leaders = Counter(episode.leader or "no monitor" for episode in events)
        text += f" Crossed first: {listed([f'{name} {times(count)}' for name, count in leaders.most_common()])}."
        out.append(text)
    if alone:
        out.append(f"The gradient norm alone was flagged {times(alone)}, without the loss.")
    alarms = [(one.monitor, one.false_alarms, one.crossings) for one in monitors(histories) if one.false_alarms]
    if alarms:
        names = listed([f"{name} {false} of {crossings}" for name, false, crossings in alarms])
        out.append(f"Crossings that no loss event followed within the window (false alarms): {names}.")
    acted = [
        f"{counted(sum(one.skipped for one in histories), 'update')} left out",
        f"{counted(sum(one.clipped for one in histories), 'step')} scaled by the zclip rule",
        f"{counted(sum(len(one.rewinds) for one in histories), 'rewind')}",
        f"{counted(sum(one.halted is not None for one in histories), 'arm')} halted",
    ]
    acted = [words for words in acted if not words.startswith("0 ")]
    if acted:
        out.append(f"What was done: {listed(acted)}.")
    elif events:
        out.append("Nothing was done about them but to log them.")
    return out + unjudged(histories)


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
        out.append(f"Non-finite losses or gradients occurred in {listed(broken)}.")
    spiky = [
        f"{arm.name} ({number(100 * measures[arm.name]['spike_score_loss'], 2)} % of steps)"
        for arm in arms
        if (measures[arm.name]["spike_score_loss"] or 0) > 0
    ]
    short = [arm.name for arm in arms if measures[arm.name]["spike_score_loss"] is None]
    every = "every arm" if not short else "every other arm"
    parts = [
        *([listed(spiky)] if spiky else [f"0 in {every}"] if len(short) < len(arms) else []),
        *([f"not judged in {listed(short)}, for want of steps before it"] if short else []),
    ]
    out.append(f"Spike score of the loss (7 standard deviations off the last 1000 steps): {'; '.join(parts)}.")
    norms = {arm.name: measures[arm.name]["max_grad_norm"] for arm in arms}
    known = {name: value for name, value in norms.items() if value is not None}
    if known:
        worst = max(known, key=lambda name: known[name])
        out[-1] += f" The largest gradient norm before clipping is {worst}'s: {number(known[worst], 3)}."
    running = [f"{arm.name} (step {arm.steps} of {arm.planned_steps})" for arm in arms if not arm.finished]
    if running:
        out.append(f"Unfinished: {listed(running)}. Their numbers are those of the last step logged.")
    return out


def _speed(arms: Sequence[Arm], measures: Measures) -> list[str]:
    """Return a sentence on the speed of each kind against plain's: medians over arms of medians over steps."""
    speeds: dict[str, list[float]] = {}
    for arm in arms:
        speed = measures[arm.name]["tokens_per_second"]
        if speed is not None:
            speeds.setdefault(arm.kind, []).append(speed)
    if "plain" not in speeds or len(speeds) < 2:
        return []
    plain = float(np.median(speeds["plain"]))
    parts = [f"{kind} {np.median(values) / plain:.2f}" for kind, values in speeds.items() if kind != "plain"]
    return [f"Tokens per second as a share of plain's ({plain:,.0f}): {listed(parts)}."]


def _recomputed(arms: Sequence[Arm], recomputed: Mapping[str, Recomputed] | None) -> list[str]:
    if recomputed is None:
        return ["Gains were not recomputed from the checkpoints (--no_recompute)."]
    known = {name: result.difference for name, result in recomputed.items() if result.difference is not None}
    out = []
    if known:
        worst = max(known, key=lambda name: known[name])
        every = len(recomputed) == len(arms)
        verdict = "agree with" if known[worst] <= AGREEMENT else "DIFFER from"
        source = "final checkpoints" if every else "final checkpoint of one arm of each topology"
        out.append(
            f"Gains recomputed from the {source} {verdict} the logged ones: largest relative difference "
            f"{known[worst]:.1e} ({worst}), limit {AGREEMENT:g}."
        )
    missing = [f"{name} ({result.reason})" for name, result in recomputed.items() if result.difference is None]
    if missing:
        out.append(f"Gains could not be compared with the logged ones for {listed(missing)}.")
    return out


def _mismatches(arms: Sequence[Arm]) -> list[str]:
    fields = differing_fields(arms)
    data = [field for field in fields if field.startswith("data.") and field not in _NOT_DATA]
    length = [field for field in fields if field in ("train.steps", "train.batch_size")]
    out = []
    if data:
        out.append(
            f"The arms did not train on the same data ({listed(data)} differ): their losses are not comparable, and "
            "the n-gram baselines are those of the first arm's data."
        )
    if length:
        out.append(f"The arms were not trained for equally long ({listed(length)} differ).")
    return out


def _finite(arm: Arm) -> bool:
    return all(bool(np.isfinite(arm.column(key)[1]).all()) for key in ("loss", "grad_norm"))


def _gain(value: float) -> str:
    if not math.isfinite(value):
        return "not finite"
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _under(margin: float) -> str:
    return f"{margin:.4f} under" if margin >= 0 else f"{-margin:.4f} over"
