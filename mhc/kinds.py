"""Declare the residual kinds: what each allows, its options, and how training treats its parameters.

This module is free of jax, so that a configuration is refused before anything heavy is loaded. A kind of this project
is one row of the table below and one file in ``mhc/residual``; ``mhc.residual.register`` adds a kind from elsewhere.
The configuration, the layout over a mesh, the optimiser, the exporter and the contract tests read the table; none of
them names a kind.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import types
from collections.abc import Callable, Mapping
from typing import Any

from mhc.errors import UserError, did_you_mean
from mhc.rules import Rule, refuse

# The fields that every kind has; all other fields of `residual.*` are options of kinds.
COMMON = ("kind", "n", "init", "collapse", "module")


@dataclasses.dataclass(frozen=True)
class Parameter:
    """Describes how training treats a parameter of a connection. Its group is "maps": float32, without weight decay."""

    axes: tuple[str, ...]
    """The logical axis of ``mhc.sharding.RULES`` for each axis, without the leading axis of stacked blocks."""
    muon: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """(input axes, output axes), counted from the right, of the matrix that Muon takes; None: AdamW takes it."""
    decayed_by: str | None = None
    """The option of the kind that, when true, puts weight decay on the parameter; None: nothing does."""


@dataclasses.dataclass(frozen=True)
class Option(Rule):
    """Declares a field of ``residual.*`` that some kinds have: ``Option("places streams turn by", default=1, low=1)``.

    Kinds that share an option's name share its type, default and bounds; their words may differ.
    """

    default: Any = dataclasses.field(default=None, kw_only=True)
    type: Any = dataclasses.field(default=None, kw_only=True)
    """The field's type, such as ``float | None``; None: that of the default."""
    initial: bool = dataclasses.field(default=False, kw_only=True)
    """It is True where the option only affects initial values, so that an exported model does not need it."""
    anywhere: bool = dataclasses.field(default=False, kw_only=True)
    """Whether a config may set it under a kind that lacks it, so that one base config serves several kinds. Any other
    option is refused there, since it would silently have no effect."""

    def __post_init__(self) -> None:
        if self.type is None:
            if self.default is None:
                raise ValueError(f"an option whose default is None needs a type: {self.doc}")
            object.__setattr__(self, "type", type(self.default))
        try:
            self.check("default", self.type, self.default)
        except UserError as error:
            raise ValueError(f"option {self.doc!r}: {error}") from None

    def same_field(self, other: Option) -> bool:
        """Return whether two options declare the same field: everything but their descriptions is equal."""
        return dataclasses.replace(self, doc="", words="") == dataclasses.replace(other, doc="", words="")


@dataclasses.dataclass(frozen=True)
class Kind:
    """Describes a residual topology to the configuration, the layout, the optimiser and the exporter."""

    name: str
    streams: tuple[int, ...] = tuple(range(1, 9))
    """The numbers of streams N that it allows."""
    why_streams: str = ""
    """Why N is restricted; "": it is not."""
    default_n: int | None = None
    """The default N; None: the largest allowed N up to 4, or else the smallest."""
    inits: tuple[str, ...] = ()
    """The presets of the initial maps, the default first; empty: there is nothing to choose."""
    preserving: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The values of ``residual.*`` under which a fresh model computes the plain residual's function, so that a plain
    model's weights can be trained on under this kind (upcycling); empty: no initial maps do that."""
    collapses: tuple[str, ...] = ("mean", "sum", "head")
    """The ways in which streams become one after the last block, the default first."""
    options: Mapping[str, Option] = dataclasses.field(default_factory=dict)
    """Its options by name. Those that are arguments of its builder are passed to it."""
    parameters: Mapping[str, Parameter] = dataclasses.field(default_factory=dict)
    """Its parameters by their paths below the connection or the topology, such as ``phi`` or ``gate/kernel``."""
    check: Callable[[Any], None] | None = None
    """A check of the whole ``mhc.config.Config`` of a run of this kind, which raises UserError: options that do not go
    together, or that the model's sizes do not allow."""
    builder: str = ""
    """``module:name`` of its builder, which is imported on first use; "": ``mhc.residual.register`` was given it."""
    mixing: str = ""
    """``module:name`` of the ``Mixing`` that gives H_res, where the builder takes one."""
    convention: str = ""
    """The option whose choices are conventions for one projection of the same weights: reports show the maps under each
    of them (``Mixing.order_under``). "": there are none."""

    @property
    def default_streams(self) -> int:
        """Return the default N."""
        if self.default_n is not None:
            return self.default_n
        return max((n for n in self.streams if n <= 4), default=min(self.streams))

    def refusal(self, field: str, value: object) -> str | None:
        """Return what a field allows, and why, if it does not allow a value; None if it does.

        Args:
          field: ``n``, ``init`` or ``collapse``.
          value: the given value; None, the default, is always allowed.
        """
        allowed: tuple[object, ...] = {"n": self.streams, "init": self.inits, "collapse": self.collapses}[field]
        if value is None or (value in allowed and isinstance(value, type(allowed[0])) and not isinstance(value, bool)):
            return None
        words, why = " or ".join(map(str, allowed)) or "None", ""
        if field == "n":
            if len(allowed) > 2 and allowed == tuple(range(self.streams[0], self.streams[-1] + 1)):
                words = f"from {allowed[0]} to {allowed[-1]}"
            why = f": {self.why_streams}" if self.why_streams else ""
        elif field == "init" and not allowed:
            why = ": it has no presets"
        return f"{words} with residual.kind={self.name}{why}"

    @property
    def is_plain(self) -> bool:
        """Return whether the kind always computes the plain residual's function, under the values of ``preserving``."""
        return not self.parameters and bool(self.preserving)


# The table of kinds ---------------------------------------------------------------------------------------------------

_KINDS: dict[str, Kind] = {}
_PARAMETERS: dict[str, Parameter] = {}
_OPTIONS: dict[str, Option] = {}
_MODULES: dict[str, str] = {}  # kind from elsewhere: the module that registered it
_PATH = re.compile(r"(?:^|[/_])residual/(.+)$")


def declare(kind: Kind, module: str | None = None) -> None:
    """Add a kind to the table. Declaring an equal kind again changes nothing.

    Args:
      kind: the kind.
      module: the module whose import declares it, where it is not one of this project's.

    Raises:
      ValueError: another kind has the name; another kind declares a parameter of the same path, or an option of the
        same name, differently; an option's name is that of a field of every kind, or no identifier; the default N is
        not among its streams; ``decayed_by``, ``preserving`` or ``convention`` names an option that it
        lacks.
    """
    if kind.name in _KINDS and _KINDS[kind.name] != kind:
        raise ValueError(f"residual kind {kind.name!r} is already declared differently")
    if not re.fullmatch(r"[A-Za-z]\w*", kind.name):
        raise ValueError(f"kind {kind.name!r}: its name must be letters, digits and '_', a letter first")
    valid = isinstance(kind.streams, tuple) and all(type(n) is int and n >= 1 for n in kind.streams)
    if not valid or not kind.streams or not kind.collapses:
        raise ValueError(f"kind {kind.name!r}: streams must be a tuple of ints from 1, and collapses must not be empty")
    if kind.default_n is not None and kind.default_n not in kind.streams:
        raise ValueError(f"kind {kind.name!r}: default_n={kind.default_n} is not among its streams {kind.streams}")
    for name, parameter in kind.parameters.items():
        if name in _PARAMETERS and _PARAMETERS[name] != parameter:
            raise ValueError(
                f"parameter {name!r} of kind {kind.name!r} is declared differently by another kind: "
                f"{_PARAMETERS[name]}; give it another name"
            )
        if parameter.decayed_by is not None and parameter.decayed_by not in kind.options:
            raise ValueError(f"parameter {name!r} of kind {kind.name!r}: no option {parameter.decayed_by!r} decays it")
    for name, option in kind.options.items():
        if not name.isidentifier():
            raise ValueError(f"option {name!r} of kind {kind.name!r}: its name must be a Python identifier")
        if name in COMMON:
            raise ValueError(f"option {name!r} of kind {kind.name!r}: every kind has a field of this name")
        if name in _OPTIONS and not _OPTIONS[name].same_field(option):
            raise ValueError(
                f"option {name!r} of kind {kind.name!r} is declared differently by another kind; give it another name"
            )
    if kind.convention and not (kind.convention in kind.options and kind.options[kind.convention].choices):
        raise ValueError(f"kind {kind.name!r}: convention names {kind.convention!r}, which is no option with choices")
    for name in kind.preserving:
        if name not in (*COMMON, *kind.options):
            raise ValueError(f"kind {kind.name!r}: preserving names {name!r}, which is no field of it")
    _KINDS[kind.name] = kind
    _PARAMETERS.update(kind.parameters)
    for name, option in kind.options.items():
        _OPTIONS.setdefault(name, option)
    if module is not None:
        _MODULES[kind.name] = module


def known() -> Mapping[str, Kind]:
    """Return every kind by name."""
    return types.MappingProxyType(_KINDS)


def names() -> tuple[str, ...]:
    """Return the names of the kinds."""
    return tuple(_KINDS)


def options() -> Mapping[str, Option]:
    """Return every option of any kind by name."""
    return types.MappingProxyType(_OPTIONS)


def owners(option: str) -> tuple[str, ...]:
    """Return the names of the kinds that have an option."""
    return tuple(kind.name for kind in _KINDS.values() if option in kind.options)


def inits() -> tuple[str, ...]:
    """Return every preset of any kind."""
    return tuple(dict.fromkeys(init for kind in _KINDS.values() for init in kind.inits))


def collapses() -> tuple[str, ...]:
    """Return every collapse of any kind."""
    return tuple(dict.fromkeys(collapse for kind in _KINDS.values() for collapse in kind.collapses))


def parameter(path: str) -> Parameter | None:
    """Return how to treat a parameter, or the optimiser's copy of it; None where it belongs to no residual connection.

    Args:
      path: the parameter's path, a/b/c.

    Raises:
      ValueError: it belongs to a residual connection and no kind declares it.
    """
    match = _PATH.search(path)
    if match is None:
        return None
    if match[1] not in _PARAMETERS:
        raise ValueError(f"{path}: no residual kind declares a parameter {match[1]!r}; add it to the Kind's parameters")
    return _PARAMETERS[match[1]]


def referred(place: str) -> Any:
    """Import and return the object that a text ``module:name`` names."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def module_of(kind: str) -> str | None:
    """Return the module whose import registers a kind.

    None: the kind is this project's, or the running program itself registered it.
    """
    return _MODULES.get(kind)


def modules_for(kind: str, given: str | None) -> str | None:
    """Return the modules to import for a kind: the given ones, and the module that registered the kind."""
    registered = _MODULES.get(kind)
    names = [] if given is None else [part.strip() for part in given.split(",")]
    return given if registered is None or registered in names else ",".join([*names, registered])


def unknown(kind: str) -> str:
    """Return the message for an unknown kind: the known kinds, the nearest of them, and how to add one."""
    return f"unknown residual kind {kind!r}; allowed: {', '.join(_KINDS)}{did_you_mean(kind, _KINDS)}, or register it"


# This project's kinds -------------------------------------------------------------------------------------------------

SINKHORN_PRESETS = ("paper", "deepseek")  # orders of normalisation; ``mhc.residual.functional.sinkhorn`` describes them

# Options that several kinds share.
_ALPHA = Option(
    "initial gate of the maps' input-dependent part; None: the preset's value",
    default=None,
    type=float | None,
    initial=True,
)
_RMS_EPS = Option("added under the root of the maps' norm", default=1e-6, low=0, anywhere=True)
_MAP_EPS = Option("sinkhorn=deepseek and collapse=head: added to the read weights", default=1e-6, low=0, anywhere=True)


def _check_hc(config: Any) -> None:
    """Refuse options that have no effect without the input-dependent part. Raises UserError."""
    residual = config.residual
    if not residual.dynamic:
        if residual.decay_dynamic:
            refuse("residual.decay_dynamic", True, "False with residual.dynamic=False: nothing is left to decay")
        if residual.alpha is not None:
            refuse("residual.alpha", residual.alpha, "None with residual.dynamic=False: no gate is left")


# The learned collapse (collapse=head) of every topology with streams; its parameters are not a connection's.
_PARAMETERS |= {
    "head/fn": Parameter(("streams", "stream_width", "maps")),
    "head/base": Parameter(("maps",)),
    "head/scale": Parameter(("maps",)),
}


def _manifold(name: str, mixing: str, **fields: Any) -> Kind:
    """Return a kind that differs from mhc in its H_res alone.

    Args:
      name: the kind's name.
      mixing: ``module:name`` of the Mixing that gives H_res.
      fields: further fields of Kind; options and parameters are added to the shared ones.
    """
    options = {
        "alpha": _ALPHA,
        "res_gap": Option(
            "init=equivalent: how far the logits off the diagonal lie below those on it",
            default=4.0,
            low=0,
            initial=True,
            anywhere=True,
        ),
        "sinkhorn": Option(
            "mhc: order of the normalisations; deepseek also adds map_eps to pre, for every kind related to mhc",
            default="paper",
            choices=SINKHORN_PRESETS,
        ),
        "iters": Option("mhc: Sinkhorn iterations", default=20, low=1, anywhere=True),
        "rms_eps": _RMS_EPS,
        "map_eps": _MAP_EPS,
        "sinkhorn_eps": Option(
            "sinkhorn=deepseek: added to the sums that are divided by",
            default=1e-6,
            low=0,
            anywhere=True,
        ),
    }
    return Kind(
        name,
        inits=fields.pop("inits", ("home", "equivalent", "fanin", "v4")),
        preserving={"init": "equivalent", "alpha": 0.0, "collapse": "mean"},
        options=options | fields.pop("options", {}),
        parameters={
            "phi": Parameter(("streams", "stream_width", "maps"), muon=((-3, -2), (-1,))),
            "alpha": Parameter(("maps",)),
            "bias": Parameter(("maps",)),
            **fields.pop("parameters", {}),
        },
        builder="mhc.residual.manifold:ManifoldHyperConnections",
        mixing=mixing,
        **fields,
    )


PLAIN = Kind(
    "plain",
    streams=(1,),
    why_streams="it has one stream",
    preserving={"scale": 1.0},
    collapses=("mean", "sum"),
    options={"scale": Option("plain: x' = scale x + F(x); 0 leaves the residual out, as a control", default=1.0)},
    builder="mhc.residual.plain:PlainResidual",
)
HC = Kind(
    "hc",
    inits=("hc",),
    preserving={"init": "hc", "collapse": "mean"},
    collapses=("sum", "mean", "head"),
    options={
        "alpha": _ALPHA,
        "dynamic": Option("hc: the maps depend on the input; False: they are the biases alone", default=True),
        "tanh": Option("hc: apply tanh to the input-dependent part", default=True),
        "rms_eps": _RMS_EPS,
        "map_eps": _MAP_EPS,
        "decay_dynamic": Option("hc: apply weight decay to the input-dependent part's weights too", default=False),
    },
    parameters={
        "w_pre": Parameter(("stream_width",), decayed_by="decay_dynamic"),
        "w_post": Parameter(("stream_width",), decayed_by="decay_dynamic"),
        "w_res": Parameter(("stream_width", "maps"), decayed_by="decay_dynamic"),
        "alpha": Parameter(("maps",)),
        "b_pre": Parameter(("maps",)),
        "b_post": Parameter(("maps",)),
        "b_res": Parameter(("maps", "maps")),
    },
    check=_check_hc,
    builder="mhc.residual.hyper:HyperConnections",
)
MHC = _manifold("mhc", "mhc.residual.mixing.sinkhorn:Sinkhorn", convention="sinkhorn")
MHC_LITE = _manifold(
    "mhc_lite",
    "mhc.residual.mixing.permutations:Permutations",
    streams=(1, 2, 3, 4, 5),
    why_streams="it mixes all N! permutation matrices",
)
KROMHC = _manifold(
    "kromhc",
    "mhc.residual.mixing.kronecker:Kronecker",
    streams=(1, 2, 4, 8),
    why_streams="its H_res is a Kronecker product of 2 x 2 matrices",
)
IDENTITY = _manifold("identity", "mhc.residual.mixing.identity:Identity")
_NOT_FROM_ZERO = ("home", "equivalent")  # presets of what does not learn from residual logits of zero


def _check_go_mhc(config: Any) -> None:
    """Refuse a rotation of more than 32 axes. Raises UserError."""
    n, s = config.residual.n or GO_MHC.default_streams, config.residual.s
    if n * s > 32:
        refuse("residual.s", s, f"at most {32 // n} with residual.n={n}: it rotates n s axes, 32 at most")


GO_MHC = _manifold(
    "go_mhc",
    "mhc.residual.mixing.orthostochastic:Orthostochastic",
    inits=_NOT_FROM_ZERO,
    options={"s": Option("go_mhc: rows and columns of the rotation that make one of H_res", default=2, low=1)},
    check=_check_go_mhc,
)
TBP_MHC = _manifold(
    "tbp_mhc",
    "mhc.residual.mixing.transport:Transport",
    inits=_NOT_FROM_ZERO,
    options={"minorize": Option("tbp_mhc: mix a learned share of the uniform map in", default=True)},
    parameters={"delta": Parameter(())},
)
SHC = _manifold("shc", "mhc.residual.mixing.spectral:Spectral", parameters={"gamma": Parameter(("maps",))})
ISO = _manifold("iso", "mhc.residual.mixing.rotations:Isometric")
ORTHO = _manifold("ortho", "mhc.residual.mixing.rotations:Orthogonal")
CIRCULANT = _manifold(
    "circulant",
    "mhc.residual.mixing.circulant:Circulant",
    options={
        "beta": Option(
            "circulant: what is not the identity has the share beta / (2 S) over S sublayers, 1/4 at most",
            default=4.0,
            above=0,
        )
    },
)

for _kind in (PLAIN, HC, MHC, MHC_LITE, KROMHC, IDENTITY):
    declare(_kind)
for _kind in (GO_MHC, TBP_MHC, SHC, ISO, ORTHO, CIRCULANT):
    declare(_kind)
