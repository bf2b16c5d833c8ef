"""Define the residual topologies: plain, Hyper-Connections, and manifold-constrained Hyper-Connections.

Needs jax and flax only. ``HyperConnection`` wraps a sublayer of any model; ``functional`` holds the maths; ``build``
gives a whole topology by its kind, as a decoder wants it; ``register`` adds a kind.
"""

from mhc.kinds import Kind, Option, Parameter
from mhc.residual import functional
from mhc.residual.elsewhere import KindError
from mhc.residual.functional import Gains, Maps
from mhc.residual.mixing import Mixing
from mhc.residual.protocol import Connection, ResidualTopology, build, kinds, register
from mhc.residual.runner import ManifoldRunner, Runner, StreamRunner
from mhc.residual.streams import StreamConnection, StreamTopology, TokenMaps
from mhc.residual.wrapper import HyperConnection

__all__ = [
    "Connection",
    "Gains",
    "HyperConnection",
    "Kind",
    "KindError",
    "ManifoldRunner",
    "Maps",
    "Mixing",
    "Option",
    "Parameter",
    "ResidualTopology",
    "Runner",
    "StreamConnection",
    "StreamRunner",
    "StreamTopology",
    "TokenMaps",
    "build",
    "functional",
    "kinds",
    "register",
]
