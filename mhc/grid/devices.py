"""Share a machine out among several arms: an accelerator for each, or a share of the cores."""

from __future__ import annotations

import dataclasses
import glob
import importlib.util
import os
from collections.abc import Mapping

from mhc.errors import UserError


@dataclasses.dataclass(frozen=True)
class Slot:
    """Describes a place for one arm at a time."""

    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    devices: tuple[str, ...] = ()
    """Accelerators of this machine that its arm uses: cuda:0, tpu:3."""
    cores: tuple[int, ...] = ()
    """Cores that its arm is bound to; (): all."""


def accelerators(environment: Mapping[str, str]) -> list[str]:
    """Return the accelerators that jax would use on this machine, found without loading it: cuda:0, tpu:3, …"""
    platforms = [name for name in environment.get("JAX_PLATFORMS", "").split(",") if name]

    def wanted(*names: str) -> bool:
        return not platforms or any(name in platforms for name in names)

    if wanted("tpu") and importlib.util.find_spec("libtpu"):
        chips = len(glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*"))
        visible = _visible(environment.get("TPU_VISIBLE_CHIPS"), chips)
        if visible:
            return [f"tpu:{chip}" for chip in visible]
    plugins = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
    if wanted("cuda", "gpu") and plugins:
        return [
            f"cuda:{chip}"
            for chip in _visible(environment.get("CUDA_VISIBLE_DEVICES"), len(glob.glob("/dev/nvidia[0-9]*")))
        ]
    return []


def _visible(listed: str | None, count: int) -> list[str]:
    """Return the devices that a variable lists, or all if it is not set; an empty or negative entry ends the list."""
    if listed is None:
        return [str(number) for number in range(count)]
    names: list[str] = []
    for name in (entry.strip() for entry in listed.split(",")):
        if not name or name.startswith("-"):
            break
        names.append(name)
    return names if count else []


def slots(jobs: int | None, devices: list[str], cores: list[int]) -> list[Slot]:
    """Return a slot for each arm that runs at a time.

    One job has the whole machine. Several jobs get an accelerator each, or equal shares of the cores if there is none.

    Args:
        jobs: the number of slots; None for one an accelerator, or one.
        devices: the accelerators of the machine, as of ``accelerators``.
        cores: numbers of the cores that this process may use.
    Raises:
        UserError: there are more jobs than accelerators.
    """
    jobs = jobs or max(1, len(devices))
    if jobs == 1:
        return [Slot(devices=tuple(devices))]
    if devices:
        if jobs > len(devices):
            raise UserError(
                f"--jobs {jobs}: allowed: at most {len(devices)}, one an accelerator ({', '.join(devices)})"
            )
        return [Slot(_pinned(device), (device,)) for device in devices[:jobs]]
    if not cores:
        return [Slot()] * jobs
    share = max(1, len(cores) // jobs)
    starts = [slot * share % len(cores) for slot in range(jobs)]
    return [Slot(cores=tuple(cores[start : start + share])) for start in starts]


def _pinned(device: str) -> dict[str, str]:
    kind, _, number = device.partition(":")
    if kind == "cuda":
        return {"CUDA_VISIBLE_DEVICES": number}
    # One chip a process: the runtime has to be told that there is no slice around it.
    return {"TPU_VISIBLE_CHIPS": number, "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1", "TPU_PROCESS_BOUNDS": "1,1,1"}


def own_cores() -> list[int]:
    """Return the cores that this process may use; [] if the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
