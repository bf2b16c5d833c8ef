"""Put together what is known of the runs that are compared: all that findings, figures and report read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mhc.eval.compare.beliefs import Beliefs
from mhc.eval.compare.ngram import Baselines
from mhc.eval.compare.recompute import Recomputed
from mhc.eval.compare.runs import Arm, measures
from mhc.eval.compare.spikes import History, history
from mhc.eval.compare.topologies import Paired, Topology, paired, topologies

CROWD = 8  # with more arms than this, a topology is drawn as one, and one arm of each is recomputed


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Describes the runs of a comparison, each of its parts in the order of the arms.

    Attributes:
        arms: plain ones first, then by kind and name.
        topologies: arms that differ in learning rate and seeds alone, together.
        pairs: each topology against plain, seed by seed.
        histories: of each arm, its events.
        measures: {arm: what summary.json says of it}.
        baselines: byte n-gram models on the first arm's data.
        recomputed: {arm: gains of its last checkpoint}; None where they were not recomputed.
        warnings: what the reader must know first.
        beliefs: what eval.windtunnel measured; None where an arm is not trained on a wind tunnel.
    """

    arms: Sequence[Arm]
    topologies: Sequence[Topology]
    pairs: Sequence[Paired]
    histories: Sequence[History]
    measures: Mapping[str, Mapping[str, Any]]
    baselines: Baselines
    recomputed: Mapping[str, Recomputed] | None = None
    warnings: Sequence[str] = ()
    beliefs: Beliefs | None = None

    @property
    def crowded(self) -> bool:
        """Return whether there are too many arms to show each by itself."""
        return len(self.arms) > CROWD


def representatives(arms: Sequence[Arm]) -> list[Arm]:
    """Return the arms whose gains are recomputed: all if they are few, else each topology's first at its best rate."""
    return list(arms) if len(arms) <= CROWD else [topology.arms[0] for topology in topologies(arms)]


def comparison_of(
    arms: Sequence[Arm],
    baselines: Baselines,
    recomputed: Mapping[str, Recomputed] | None = None,
    warnings: Sequence[str] = (),
    beliefs: Beliefs | None = None,
) -> Comparison:
    """Return the comparison of runs: topologies, pairs, events and measures are read off the arms."""
    groups = topologies(arms)
    histories = [history(arm) for arm in arms]
    table = {arm.name: measures(arm) for arm in arms}
    for events in histories:
        table[events.arm] |= {"loss_events": len(events.loss_events), "rewinds": len(events.rewinds)}
    for name, row in table.items():
        result = (recomputed or {}).get(name)
        row["recomputed_gain_difference"] = result.difference if result else None
        row["recomputed_gains"] = result.peaks if result else None
    return Comparison(arms, groups, paired(groups), histories, table, baselines, recomputed, warnings, beliefs)
