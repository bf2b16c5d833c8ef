"""The residual kinds: what each allows, and how training treats its parameters.

Free of jax, so that a configuration is refused before anything heavy is loaded. The kinds of this project stand below;
``mhc.residual.register`` adds one from elsewhere, and the configuration, the layout and the optimiser then know it too.
"""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Mapping

MAX_STREAMS = 8


@dataclasses.dataclass(frozen=True)
class Parameter:
    """How training treats a parameter of one connection. Its group is always "maps": float32, without weight decay."""

    axes: tuple[str, ...]
    """A logical axis of ``mhc.sharding.RULES`` for each axis, without the leading one of stacked blocks."""
    muon: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """(input axes, output axes), counted from the right, of the matrix that Muon takes; None: AdamW takes it."""
    dynamic: bool = False
    """Whether ``residual.decay_dynamic`` subjects it to weight decay."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """A residual topology as the configuration, the layout and the optimiser see it."""

    name: str
    streams: tuple[int, ...] = tuple(range(1, MAX_STREAMS + 1))
    """The N that it exists for."""
    why_streams: str = ""
    """The reason where these are not all."""
    inits: tuple[str, ...] = ()
    """Initialisation presets, the default first; none: nothing to choose."""
    collapses: tuple[str, ...] = ("mean", "sum", "head")
    """Ways to end, the default first."""
    options: tuple[str, ...] = ()
    """Which of the fields that only some kinds have it takes: scale, alpha, sinkhorn, dynamic, tanh, decay_dynamic."""
    parameters: Mapping[str, Parameter] = dataclasses.field(default_factory=dict)
    """Its parameters by their path below the connection or the topology, such as ``phi`` or ``gate/kernel``."""

    @property
    def default_streams(self) -> int:
        """N where none is asked for: 4, or the largest below."""
        return max(n for n in self.streams if n <= 4)

    def refusal(self, field: str, value: object) -> str | None:
        """What is allowed for ``n``, ``init`` or ``collapse``, and why, where ``value`` is not; None where it is."""
        allowed: tuple[object, ...] = {"n": self.streams, "init": self.inits, "collapse": self.collapses}[field]
        if value is None or value in allowed:
            return None
        words, why = " or ".join(map(str, allowed)) or "None", ""
        if field == "n":
            if len(allowed) > 2 and allowed == tuple(range(self.streams[0], self.streams[-1] + 1)):
                words = f"from {allowed[0]} to {allowed[-1]}"
            why = f": {self.why_streams}" if self.why_streams else ""
        elif field == "init" and not allowed:
            why = ": it has no presets"
        return f"{words} with residual.kind={self.name}{why}"


# The learned collapse belongs to every topology of streams; its parameters are the topology's, not a connection's.
_HEAD = {
    "head/fn": Parameter(("streams", "stream_width", "maps")),
    "head/base": Parameter(("maps",)),
    "head/scale": Parameter(("maps",)),
}
_MANIFOLD = {
    "phi": Parameter(("streams", "stream_width", "maps"), muon=((-3, -2), (-1,))),
    "alpha": Parameter(("maps",)),
    "bias": Parameter(("maps",)),
}
_MANIFOLD_INITS = ("home", "equivalent", "fanin", "v4")
_MANIFOLD_OPTIONS = ("alpha", "sinkhorn")

_KINDS: dict[str, Kind] = {}
_PARAMETERS: dict[str, Parameter] = dict(_HEAD)
_PATH = re.compile(r"(?:^|[/_])residual/(.+)$")


def declare(kind: Kind) -> None:
    """Make a kind known. Declaring the same one again changes nothing.

    Raises:
      ValueError: another kind has the name, or a parameter of the same path is treated in another way.
    """
    if kind.name in _KINDS and _KINDS[kind.name] != kind:
        raise ValueError(f"residual kind {kind.name!r} is already declared in another way")
    for name, parameter in kind.parameters.items():
        if name in _PARAMETERS and _PARAMETERS[name] != parameter:
            raise ValueError(
                f"parameter {name!r} of kind {kind.name!r} is declared in another way by another kind: "
                f"{_PARAMETERS[name]}; give it another name"
            )
    _KINDS[kind.name] = kind
    _PARAMETERS.update(kind.parameters)


def known() -> Mapping[str, Kind]:
    """Every kind by name."""
    return types.MappingProxyType(_KINDS)


def names() -> tuple[str, ...]:
    """The names of the kinds."""
    return tuple(_KINDS)


def inits() -> tuple[str, ...]:
    """Every preset of any kind."""
    return tuple(dict.fromkeys(init for kind in _KINDS.values() for init in kind.inits))


def collapses() -> tuple[str, ...]:
    """Every collapse of any kind."""
    return tuple(dict.fromkeys(collapse for kind in _KINDS.values() for collapse in kind.collapses))


def parameter(path: str) -> Parameter | None:
    """How to treat the parameter (or the optimiser's copy) at ``path``, a/b/c; None where it is not a residual's.

    Raises:
      ValueError: it lies below a residual connection and no kind declares it.
    """
    found = _PATH.search(path)
    if found is None:
        return None
    if found[1] not in _PARAMETERS:
        raise ValueError(f"{path}: no residual kind declares a parameter {found[1]!r}; add it to the Kind's parameters")
    return _PARAMETERS[found[1]]


PLAIN = Kind(
    "plain",
    streams=(1,),
    why_streams="it has one stream",
    collapses=("mean", "sum"),
    options=("scale",),
)
HC = Kind(
    "hc",
    inits=("hc",),
    collapses=("sum", "mean", "head"),
    options=("alpha", "dynamic", "tanh", "decay_dynamic"),
    parameters={
        "w_pre": Parameter(("stream_width",), dynamic=True),
        "w_post": Parameter(("stream_width",), dynamic=True),
        "w_res": Parameter(("stream_width", "maps"), dynamic=True),
        "alpha": Parameter(("maps",)),
        "b_pre": Parameter(("maps",)),
        "b_post": Parameter(("maps",)),
        "b_res": Parameter(("maps", "maps")),
    },
)
MHC = Kind("mhc", inits=_MANIFOLD_INITS, options=_MANIFOLD_OPTIONS, parameters=_MANIFOLD)
MHC_LITE = Kind(
    "mhc_lite",
    streams=(1, 2, 3, 4, 5),
    why_streams="it mixes all N! permutation matrices",
    inits=_MANIFOLD_INITS,
    options=_MANIFOLD_OPTIONS,
    parameters=_MANIFOLD,
)
KROMHC = Kind(
    "kromhc",
    streams=(1, 2, 4, 8),
    why_streams="its H_res is a Kronecker product of 2 x 2 matrices",
    inits=_MANIFOLD_INITS,
    options=_MANIFOLD_OPTIONS,
    parameters=_MANIFOLD,
)
IDENTITY = Kind("identity", inits=_MANIFOLD_INITS, options=_MANIFOLD_OPTIONS, parameters=_MANIFOLD)

for _kind in (PLAIN, HC, MHC, MHC_LITE, KROMHC, IDENTITY):
    declare(_kind)
