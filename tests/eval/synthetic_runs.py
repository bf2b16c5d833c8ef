"""Make up run folders with the files, keys and rough shapes of real ones, for tests of the comparison.

python -m tests.eval.synthetic_runs DIR            writes three arms, to look at a report
python -m tests.eval.synthetic_runs DIR --grid     twenty: five topologies, seeds, and two rates, with spikes
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mhc import config as configs
from mhc.config import Config
from mhc.files import JsonlWriter, write_json

GAINS = [
    f"gain/{direction}_{span}_{statistic}"
    for direction in ("forward", "backward")
    for span in ("single", "composite")
    for statistic in ("mean", "max")
] + ["gain/worst_case_mean", "gain/worst_case_max"]


def config(kind: str, *, seed: int = 0, steps: int = 200, layers: int = 16, **changes: Any) -> Config:
    """Return a configuration; ``changes`` are section__field=value."""
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


def probe(settings: Config, step: int, *, old: bool = False) -> dict[str, Any]:
    """Return a record of probes.jsonl: gains that compound over depth and grow with training as the kind's do.

    ``old``: with the keys of runs from before the probes measured the stream.
    """
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
    if old:
        out["grad/norm"] = {"embedding": 0.1, "attention": 0.5, "head": 0.2}
        return out
    n, depth = 1 if settings.residual.kind == "plain" else 4, np.arange(size)
    drift = 1 - np.exp(-(0.02 + 0.2 * share) * (depth + 1))
    for statistic, factor in (("mean", 1.0), ("max", 1.3)):
        out[f"gain/worst_case_{statistic}"] = factor * single
    for span, distance in (("single", 0.1 * share * wiggle), ("composite", drift)):
        out[f"mix/to_identity_{span}"] = distance if n > 1 else 0 * distance
        out[f"mix/to_uniform_{span}"] = np.sqrt(1 - 1 / n) * (1 - distance)
    out["mix/frozen"] = np.zeros(size)
    out["maps/pre_mean"] = np.full((size, n), 1 / n)
    out["maps/post_mean"] = np.ones((size, n))
    out["stream/rms"] = np.outer(1 + 0.1 * depth, np.ones(n))
    out["stream/effective"] = 1 + (n - 1) * (1 - np.exp(-depth / 8)) * np.ones(size)
    out["activation/residual_rms"] = (0.02 + share) * (1 + 0.2 * depth)
    out["activation/sublayer_out_rms"] = 0.3 * (0.02 + share) * wiggle
    out["activation/attention_logit_max"] = 0.5 + 6 * share * wiggle[::2]
    out["activation/attention_entropy"] = 4 - share * wiggle[::2]
    out["representation/rank"] = np.maximum(20 - 0.4 * depth[::2], 3) * (1 - 0.5 * share)
    out["representation/mean_cosine"] = 0.1 + 0.01 * depth[::2]
    if step:
        out["grad/norm"] = 0.1 * wiggle * (1 + share)
        out["grad/group_norm"] = {"embedding": 0.1, "attention": 0.5, "head": 0.2, "maps": 0.01}
        out["update/ratio"] = 1e-3 * wiggle
        out["update/group_ratio"] = {"embedding": 1e-3, "attention": 2e-3, "head": 1e-3, "maps": 1e-4}
    return out


def spike(step: int, *, cause: str = "loss_spike", action: str = "log", **fields: Any) -> dict[str, Any]:
    """Return a flagged step of events.jsonl; ``flagged`` names what was flagged."""
    event: dict[str, Any] = {
        "step": step,
        "event": "spike",
        "time": 0.0,
        "flagged": ["loss"],
        "cause": cause,
        "monitors": {},
        "loss": 6.0,
        "grad_norm": 3.0,
        "z_loss": 9.0,
        "z_grad_norm": 1.0,
        "history": {"step": [step], "loss": [6.0], "grad_norm": [3.0], "grad_norm_by_sublayer": [[1.0, 1.0]]},
        "action": action,
        "batch": {"hash": f"{step:016x}", "documents": [{"row": 0, "document": "stdlib, example 3", "offset": 9}]},
    }
    return event | fields


def crossed(step: int, monitor: str) -> dict[str, Any]:
    """Return the event of a monitor that crossed its threshold at a probe."""
    return {"step": step, "event": "monitor", "time": 0.0, "monitor": monitor, "value": 200.0, "threshold": 100.0}


def rewound(step: int, to: int) -> dict[str, Any]:
    return {"step": step, "event": "rewind", "time": 0.0, "cause": "loss_spike", "to": to, "skipped_batches": 5}


def write_run(
    folder: Path,
    settings: Config,
    *,
    until: int | None = None,
    spike_at: int | None = None,
    probes: bool = True,
    events: Sequence[dict[str, Any]] = (),
    offset: float = 0.0,
    old: bool = False,
    exit_reason: str = "finished",
) -> Path:
    """Write one run folder; it stays unfinished (no summary) when ``until`` is below the planned steps.

    Args:
        spike_at: a step whose loss is 3 higher, and flagged. events: of events.jsonl. offset: added to the loss.
        old: as runs from before events and the probes of the stream.
    """
    steps = settings.train.steps
    last = steps if until is None else until
    kind = settings.residual.kind
    random = np.random.default_rng(settings.seed.init + 17 * len(kind))
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", configs.to_dict(settings))
    offset += {"plain": 0.0, "hc": -0.11, "mhc": -0.09}.get(kind, -0.05) + 0.01 * random.normal()
    wiggle = 0.1 * (1 + 0.05 * np.sin(np.arange(2 * settings.model.layers)))
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
        if not old:
            row["grad_norm_by_sublayer"] = [float(f"{x:.4e}") for x in norm * wiggle]
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
            log.write(probe(settings, step, old=old))
        log.close()
    if not old:
        log = JsonlWriter(folder / "events.jsonl")
        for event in events:
            log.write(event)
        log.close()
    if last >= steps or exit_reason != "finished":
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
                "exit_reason": exit_reason,
            },
        )
    return folder


def demo(root: Path) -> Path:
    """Write the three arms of a small comparison."""
    for kind in ("plain", "hc", "mhc"):
        write_run(root / kind, config(kind))
    return root


def grid(root: Path, *, steps: int = 1000) -> Path:
    """Write twenty arms: five topologies, two seeds, two learning rates, with spikes, a rewind and a halt."""
    kinds = ("plain", "hc", "mhc", "mhc_lite", "identity")
    for kind in kinds:
        for seed in (0, 1):
            for lr in (0.003, 0.01):
                events: list[dict[str, Any]] = []
                if kind == "hc" and lr == 0.01:
                    events = [
                        crossed(steps // 2, "forward_gain"),
                        spike(steps // 2 + 40, cause="signal_explosion", monitors={"forward_gain": steps // 2}),
                        spike(steps // 2 + 42, cause="signal_explosion", flagged=["loss", "grad_norm"]),
                        spike(700, cause="gradient_explosion", flagged=["grad_norm"]),
                        spike(705, cause="gradient_explosion", flagged=["loss"], action="rewind"),
                        rewound(705, 600),
                        crossed(800, "attention_logit"),
                    ]
                settings = config(kind, seed=seed, steps=steps, optimizer__lr=lr)
                shift = 0.02 * (lr == 0.003) + 0.01 * seed
                write_run(root / f"{kind},lr={lr:g},seed={seed}", settings, events=events, offset=shift)
    return root


if __name__ == "__main__":
    (grid if "--grid" in sys.argv else demo)(Path(sys.argv[1]))
