"""Measure what a topology costs: speed and parameters, also as a share of plain's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mhc.eval.compare.runs import is_plain
from mhc.eval.compare.topologies import Topology, reference_of


def relative_cost(topology: Topology, topologies: Sequence[Topology]) -> tuple[float | None, float | None] | None:
    """Return (tokens per second, parameters) divided by those of the plain reference; None without a reference.

    The reference is the plain topology that differs in the residual alone.
    """
    reference = topology if is_plain(topology.arms[0]) else reference_of(topology, topologies)
    if reference is None:
        return None

    def share(measure: Callable[[Topology], float | None]) -> float | None:
        ours, theirs = measure(topology), measure(reference)
        return ours / theirs if ours is not None and theirs else None

    return share(speed), share(parameters)


def speed(topology: Topology) -> float | None:
    """Return tokens per second: the median over the arms of the median over steps; None where no run logged it."""
    medians = [
        float(np.median(values)) for arm in topology.every_arm if len(values := arm.column("tokens_per_second")[1])
    ]
    return float(np.median(medians)) if medians else None


def parameters(topology: Topology) -> float | None:
    """Return the number of parameters, from the first arm whose summary holds it."""
    known = [arm.summary["params"] for arm in topology.every_arm if arm.summary and "params" in arm.summary]
    return float(known[0]) if known else None
