"""List the chips that a run may be trained on: how fast they are, what they hold, and the slices built of them."""

from __future__ import annotations

import dataclasses

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """Describes a chip.

    Attributes:
      kinds: how jax's ``device_kind`` of the chip may begin.
      peak_flops: dense bfloat16 FLOP/s, the denominator of mfu.
    """

    kinds: tuple[str, ...]
    peak_flops: float


@dataclasses.dataclass(frozen=True)
class Tpu(Chip):
    """Describes a chip of a TPU generation.

    Attributes:
      hbm: bytes of its memory.
      libtpu: what libtpu calls the generation.
      slices: common shapes of slices, smallest first.
    """

    hbm: int
    libtpu: str
    slices: tuple[str, ...]


_FLAT = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBIC = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")

# By the name that a slice begins with, such as v5p:2x2x4.
TPUS = {
    "v4": Tpu(("TPU v4",), 275e12, 32 * GIB, "v4", _CUBIC),
    "v5e": Tpu(("TPU v5 lite",), 197e12, 16 * GIB, "v5e", _FLAT),
    "v5p": Tpu(("TPU v5p", "TPU v5"), 459e12, 95 * GIB, "v5", _CUBIC),
    "v6e": Tpu(("TPU v6 lite",), 918e12, 32 * GIB, "v6e", _FLAT),
}
GPUS = (
    Chip(("NVIDIA A100",), 312e12),
    Chip(("NVIDIA H100",), 989e12),
    Chip(("NVIDIA H200",), 989e12),
)

# Peak dense bfloat16 FLOP/s by the start of jax's device_kind.
PEAK_FLOPS = {kind: chip.peak_flops for chip in (*TPUS.values(), *GPUS) for kind in chip.kinds}


def peak_flops(device_kind: str) -> float | None:
    """Return the peak dense bfloat16 FLOP/s of a device, by jax's ``device_kind``; None for one that is not listed."""
    begins = [kind for kind in PEAK_FLOPS if device_kind.startswith(kind)]
    return PEAK_FLOPS[max(begins, key=len)] if begins else None
