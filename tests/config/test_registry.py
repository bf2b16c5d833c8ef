"""What the configuration offers of residual topologies against what mhc.residual has."""

from __future__ import annotations

import pytest
from flax import nnx

from mhc import residual
from mhc.config import COLLAPSES, INITS, KINDS


def build(kind: str, **options: str) -> residual.ResidualTopology:
    """A topology over a width of 8."""
    return residual.build(kind, 8, rngs=nnx.Rngs(0), **options)


def test_every_kind_of_the_configuration_is_registered() -> None:
    assert set(KINDS) <= set(residual.kinds())
    assert set(INITS) == set(COLLAPSES) == set(KINDS)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "plain"])
def test_every_preset_and_collapse_builds_and_no_other(kind: str) -> None:
    for init in {init for inits in INITS.values() for init in inits}:
        if init in INITS[kind]:
            build(kind, init=init)
        else:
            with pytest.raises(ValueError, match=init):
                build(kind, init=init)
    for collapse in COLLAPSES[kind]:
        build(kind, collapse=collapse)
    with pytest.raises(ValueError, match="product"):
        build(kind, collapse="product")
