"""Time functions in turns, so that other load on the machine hits all of them alike, and say on which machine."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


@dataclasses.dataclass
class Sample:
    """Holds what the timed calls of one function took, call by call, in seconds."""

    wall: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)  # of all threads of this process


def interleaved(functions: Mapping[str, Callable[[], Any]], rounds: int, *, calls: int = 1) -> dict[str, Sample]:
    """Call every function ``calls`` times in each of ``rounds`` rounds; return the mean seconds a call, round by round.

    Each function is called once before, which compiles it. A call ends when its arrays are there.
    """
    import jax

    for function in functions.values():
        jax.block_until_ready(function())
    samples = {name: Sample() for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(calls):
                jax.block_until_ready(function())
            samples[name].wall.append((time.perf_counter() - wall) / calls)
            samples[name].cpu.append((time.process_time() - cpu) / calls)
    return samples


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return {median, low, high} of values; low and high are the quartiles."""
    several = [*values, *values] if len(values) == 1 else values
    low, median, high = statistics.quantiles(several, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high}


def ratio(sample: Sample, base: Sample) -> dict[str, float]:
    """Return the spread over rounds of a function's seconds divided by those of another in the same round."""
    return spread([mine / other for mine, other in zip(sample.wall, base.wall, strict=True)])


def seconds(sample: Sample) -> dict[str, Any]:
    """Return {seconds, cpu_seconds}, each the spread over rounds."""
    return {"seconds": spread(sample.wall), "cpu_seconds": spread(sample.cpu)}


def machine() -> dict[str, Any]:
    """Return {date, machine, cores, load, jax}: ``load`` is how many processes wanted to run in the last minute."""
    import jax

    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {jax.device_count()} × {jax.devices()[0].device_kind}",
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "jax": jax.__version__,
    }


def write(figures: Mapping[str, Any], file: str | None) -> None:
    """Write the figures to a JSON file, where one is named."""
    if file is not None:
        Path(file).write_text(json.dumps(figures, indent=2) + "\n")
