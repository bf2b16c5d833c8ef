"""Test the list of chips: which peak a device has, and what every TPU has."""

from __future__ import annotations

import math

import pytest

from mhc import chips


@pytest.mark.parametrize(
    ("device_kind", "peak"),
    [
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v5p", 459e12),
        ("TPU v6 lite", 918e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("cpu", None),
    ],
)
def test_a_device_has_the_peak_of_its_kind(device_kind: str, peak: float | None) -> None:
    """The longest name that a kind begins with counts: "TPU v5 lite" is no "TPU v5"."""
    assert chips.peak_flops(device_kind) == peak


def test_slices_grow_and_no_two_kinds_are_alike() -> None:
    for tpu in chips.TPUS.values():
        sizes = [math.prod(int(side) for side in shape.split("x")) for shape in tpu.slices]
        assert sizes == sorted(sizes)
    kinds = [kind for chip in (*chips.TPUS.values(), *chips.GPUS) for kind in chip.kinds]
    assert len(kinds) == len(set(kinds)) == len(chips.PEAK_FLOPS)
