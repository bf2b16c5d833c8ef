"""Name slices of TPUs, and make the devices of a slice that this machine does not have."""

from __future__ import annotations

import math
import os
from typing import Any, NamedTuple

from mhc.chips import TPUS
from mhc.errors import UserError, did_you_mean


class Slice(NamedTuple):
    """Describes a slice by its chip, such as v5p, and its shape, such as 4x4x8."""

    chip: str
    shape: str

    @property
    def chips(self) -> int:
        """Return the number of chips."""
        return math.prod(int(side) for side in self.shape.split("x"))

    @property
    def hbm(self) -> int:
        """Return the bytes of one chip's memory."""
        return TPUS[self.chip].hbm

    def __str__(self) -> str:
        return f"{self.chip}:{self.shape}"


def parse_slice(text: str) -> Slice:
    """Read a slice's name, such as ``v5p:4x4x8``.

    Raises:
      UserError: the generation is not known, or the shape has another number of sides.
    """
    chip, _, shape = text.partition(":")
    if chip not in TPUS:
        raise UserError(f"--topology: {text!r}, allowed: {', '.join(TPUS)} and a shape{did_you_mean(chip, TPUS)}")
    sides = shape.split("x")
    dimensions = TPUS[chip].slices[0].count("x") + 1
    if len(sides) != dimensions or not all(side.isdigit() and int(side) > 0 for side in sides):
        example = f"{chip}:{TPUS[chip].slices[-3]}"
        raise UserError(f"--topology: {text!r}, allowed: {dimensions} sides, such as {example}")
    return Slice(chip, shape)


def devices_of(slice_: Slice) -> list[Any]:
    """Return the devices of a slice that this machine does not have.

    Raises:
      UserError: libtpu is missing, in use by a process that does not share it, or does not know the slice.
    """
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # libtpu's lock is there for chips; no chip is touched here, and several steps may be compiled at once.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    import jax
    from jax.experimental import topologies

    jax.config.update("jax_platforms", "cpu")  # nothing runs: arrays of this process, if any, live on the host
    name = f"{TPUS[slice_.chip].libtpu}:{slice_.shape}"
    try:
        options = {"chips_per_host_bounds": [1, 1, 1]} if slice_.chips == 1 else {}
        topology = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        if "lockfile" in str(error):
            raise UserError(
                "--topology: libtpu is in use by another process of this machine; wait until that has ended, or let "
                "several use it: ALLOW_MULTIPLE_LIBTPU_LOAD=1"
            ) from None
        first = (str(error).splitlines() or ["no reason given"])[0]
        raise UserError(f"--topology: libtpu has no {slice_}: {first} (pip install -e '.[tpu]')") from None
    return list(topology.devices)
