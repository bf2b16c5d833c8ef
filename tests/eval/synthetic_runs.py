"""Made-up run folders with the files, keys and rough shapes of real ones, for tests of the comparison.

python -m tests.eval.synthetic_runs DIR      writes three arms, to look at a report
"""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

from mhc.config import Config
from mhc.monitor.writers import JsonlWriter, write_json

GAINS = [
    f"gain/{direction}_{span}_{statistic}"
    for direction in ("forward", "backward")
    for span in ("single", "composite")
    for statistic in ("mean", "max")
]


def config(kind: str, *, seed: int = 0, steps: int = 200, layers: int = 16, **changes: Any) -> Config:
    """A configuration; ``changes`` as section__field=value."""
    base = Config()
    sections: dict[str, Any] = {
        "residual": {"kind": kind},
        "seed": {"init": seed, "data": seed},
        "train": {"steps": steps},
        "model": {"layers": layers},
        "data": {"sequence_length": 128},
    }
    for name, value in changes.items():
        section, field = name.split("__")
        sections.setdefault(section, {})[field] = value
    parts = {name: dataclasses.replace(getattr(base, name), **fields) for name, fields in sections.items()}
    return dataclasses.replace(base, **parts)


def probe(settings: Config, step: int) -> dict[str, Any]:
    """One record of probes.jsonl: gains that compound over depth and grow with training as the kind's do."""
    size = 2 * settings.model.layers
    share = step / settings.train.steps
    rate = {"plain": 0.0, "hc": 0.22 * share}.get(settings.residual.kind, 0.0)
    wiggle = 1 + 0.05 * np.sin(np.arange(size))
    single = np.exp(rate * wiggle)
    out: dict[str, Any] = {"step": step}
    for direction in ("forward", "backward"):
        inexact = "backward" if settings.residual.sinkhorn == "paper" else "forward"
        one = single + (0.004 * share if settings.residual.kind == "mhc" and direction == inexact else 0.0)
        composite = np.cumprod(one) if direction == "forward" else np.cumprod(one[::-1])[::-1]
        for span, values in (("single", one), ("composite", composite)):
            out[f"gain/{direction}_{span}_mean"] = values
            out[f"gain/{direction}_{span}_max"] = 1.3 * values
    out["ds_error/rows"] = np.full(size, 1e-7)
    out["ds_error/columns"] = np.full(size, 1e-3 * share)
    out["grad/norm"] = {"embedding": 0.1, "attention": 0.5, "head": 0.2}
    return out


def write_run(
    folder: Path, settings: Config, *, until: int | None = None, spike_at: int | None = None, probes: bool = True
) -> Path:
    """Write one run folder; it stays unfinished (no summary) when ``until`` is below the planned steps."""
    steps = settings.train.steps
    last = steps if until is None else until
    kind = settings.residual.kind
    random = np.random.default_rng(settings.seed.init + 17 * len(kind))
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", dataclasses.asdict(settings))
    offset = {"plain": 0.0, "hc": -0.11, "mhc": -0.09}.get(kind, -0.05) + 0.01 * random.normal()
    speed = {"plain": 9000.0, "hc": 3600.0, "mhc": 4100.0}.get(kind, 5000.0)
    val_loss = bits = 0.0
    losses: list[float] = []
    norms: list[float] = []
    metrics = JsonlWriter(folder / "metrics.jsonl")
    for step in range(1, last + 1):
        clean = 2.25 + 3.3 * math.exp(-step / (0.12 * steps)) + offset * min(1.0, step / 40)
        loss = clean + 0.05 * random.normal() + (3.0 if step == spike_at else 0.0)
        norm = 0.4 + 2.5 * math.exp(-step / 25) + 0.08 * abs(random.normal())
        norm *= 1 + (3.0 * step / steps if kind == "hc" else 0.0)
        row: dict[str, Any] = {
            "step": step,
            "loss": loss,
            "tokens": 2048 * step,
            "grad_norm": norm,
            "update_norm": 0.02,
            "param_norm": 30.0,
            "update_ratio": 0.0007,
            "lr": 0.02,
            "logit_max": 9.0,
            "log_z": 1.0,
            "skipped": 0,
            "nonfinite": 0,
            "seconds": 2048 / speed,
            "tokens_per_second": speed * (1 + 0.02 * random.normal()),
            "mfu": None,
            "z_loss": None,
            "z_grad_norm": None,
            "spike": step == spike_at,
        }
        if step % max(1, steps // 4) == 0 or step == steps:
            val_loss, bits = clean + 0.03, (clean + 0.03) / math.log(2)
            row |= {"val_loss": val_loss, "val_bits_per_byte": bits}
        losses.append(loss)
        norms.append(norm)
        metrics.write(row)
    metrics.close()
    if probes:
        every = max(1, steps // 10)
        log = JsonlWriter(folder / "probes.jsonl")
        for step in range(0, last + 1, every):
            log.write(probe(settings, step))
        log.close()
    if last >= steps:
        write_json(
            folder / "summary.json",
            {
                "final_loss": losses[-1],
                "best_loss": min(losses),
                "val_loss": val_loss,
                "bits_per_byte": bits,
                "tokens_per_second": speed,
                "seconds": 2048 * steps / speed,
                "params": 433_184 + (20_000 if kind != "plain" else 0),
                "steps": steps,
                "exit_reason": "finished",
            },
        )
    return folder


def demo(root: Path) -> Path:
    """The three arms of a small comparison."""
    for kind in ("plain", "hc", "mhc"):
        write_run(root / kind, config(kind))
    return root


if __name__ == "__main__":
    demo(Path(sys.argv[1]))
