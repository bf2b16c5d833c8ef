"""Define the table of residual kinds: its rows, and the functions that add to it and read it.

``mhc.kinds`` adds this project's rows and has all names of this module; import that one.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import types
from collections.abc import Callable, Mapping
from typing import Any

from mhc.errors import UserError, did_you_mean
from mhc.rules import Rule

# The fields that every kind has; all other fields of `residual.*` are options of kinds.
COMMON = ("kind", "n", "init", "collapse", "module", "value_residual", "value_init")


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
    """The ways in which streams become one after the last block, the default first; empty: there is no choice."""
    own_norms: bool = False
    """Whether its reads normalise in the place of the model's norms (``owns_norm`` of its topology): then a model that
    has trained norms cannot go on under it, whatever ``preserving`` says."""
    fixes_collapse: str = ""
    """The option that, when true, leaves no choice of the collapse; "": there is none."""
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
        elif not allowed:
            why = ": it has no presets" if field == "init" else ": how its stream ends is fixed"
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
        not among its streams; ``decayed_by``, ``preserving``, ``convention`` or ``fixes_collapse`` names an option that
        it lacks.
    """
    if kind.name in _KINDS and _KINDS[kind.name] != kind:
        raise ValueError(f"residual kind {kind.name!r} is already declared differently")
    if not re.fullmatch(r"[A-Za-z]\w*", kind.name):
        raise ValueError(f"kind {kind.name!r}: its name must be letters, digits and '_', a letter first")
    valid = isinstance(kind.streams, tuple) and all(type(n) is int and n >= 1 for n in kind.streams)
    if not valid or not kind.streams:
        raise ValueError(f"kind {kind.name!r}: streams must be a tuple of ints from 1")
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
    if kind.fixes_collapse and kind.fixes_collapse not in kind.options:
        raise ValueError(f"kind {kind.name!r}: fixes_collapse names {kind.fixes_collapse!r}, which is no option of it")
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
