"""Residual topologies: the plain residual, Hyper-Connections, and manifold-constrained Hyper-Connections.

Needs jax and flax only. ``HyperConnection`` wraps a sublayer of any model; ``functional`` holds the maths; ``build``
gives a whole topology by its kind, as a decoder wants it; ``register`` adds a kind.
"""

import functools as _functools

from mhc import kinds as _kinds
from mhc.kinds import Kind, Parameter
from mhc.residual import functional
from mhc.residual.functional import Gains, Maps
from mhc.residual.hyper import HyperConnections as _HyperConnections
from mhc.residual.manifold import ManifoldHyperConnections as _ManifoldHyperConnections
from mhc.residual.plain import PlainResidual as _PlainResidual
from mhc.residual.protocol import Connection, ResidualTopology, build, kinds, register
from mhc.residual.streams import StreamConnection, StreamTopology, TokenMaps
from mhc.residual.wrapper import HyperConnection

register(_kinds.PLAIN, _PlainResidual)
register(_kinds.HC, _HyperConnections)
for _kind in (_kinds.MHC, _kinds.MHC_LITE, _kinds.KROMHC, _kinds.IDENTITY):
    register(_kind, _functools.partial(_ManifoldHyperConnections, kind=_kind.name))

__all__ = [
    "Connection",
    "Gains",
    "HyperConnection",
    "Kind",
    "Maps",
    "Parameter",
    "ResidualTopology",
    "StreamConnection",
    "StreamTopology",
    "TokenMaps",
    "build",
    "functional",
    "kinds",
    "register",
]
