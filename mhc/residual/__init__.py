"""Residual topologies: the plain residual, Hyper-Connections, and manifold-constrained Hyper-Connections.

Needs jax and flax only. ``functional`` holds the maths, ``build`` the topologies by kind, ``protocol`` what a decoder relies on.
"""

import functools

from mhc.residual import functional
from mhc.residual.functional import MHC_KINDS, Gains, Maps
from mhc.residual.hyper import HyperConnections
from mhc.residual.manifold import ManifoldHyperConnections
from mhc.residual.plain import PlainResidual
from mhc.residual.protocol import Connection, ResidualTopology, build, kinds, register

register("plain", PlainResidual)
register("hc", HyperConnections)
for _kind in MHC_KINDS:
    register(_kind, functools.partial(ManifoldHyperConnections, kind=_kind))

__all__ = [
    "Connection",
    "Gains",
    "HyperConnections",
    "ManifoldHyperConnections",
    "Maps",
    "PlainResidual",
    "ResidualTopology",
    "build",
    "functional",
    "kinds",
    "register",
]
