"""Implement the group ``residual``, whose fields depend on the kind, which may come from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

from mhc import kinds
from mhc.config import kind_modules
from mhc.config.group import Group, hints, rules, unknown_field
from mhc.errors import did_you_mean
from mhc.rules import refuse


class ResidualGroup(Group):
    """Adds the options of the residual kinds to the fields that every kind has.

    The options, such as ``scale`` of plain, are declared with their kind (``mhc.kinds.Kind.options``) and are
    attributes here too. A kind from elsewhere is registered by importing ``module``, which happens on construction.
    """

    kind: str
    n: int | None
    init: str | None
    collapse: str | None
    module: str | None
    value_residual: bool
    value_init: str | None
    options: tuple[tuple[str, Any], ...]

    def __init__(
        self,
        kind: str = "mhc",
        n: int | None = None,
        init: str | None = None,
        collapse: str | None = None,
        module: str | None = None,
        value_residual: bool = False,
        value_init: str | None = None,
        options: Iterable[tuple[str, Any]] = (),
        **named: Any,
    ):
        """Check and set the fields.

        Args:
          kind: the topology.
          n: streams N.
          init: the preset of the initial maps.
          collapse: how the streams become one.
          module: the modules to import, separated by commas.
          value_residual: whether attention mixes in the values of block 0.
          value_init: the preset of its weights.
          options: options of kinds as pairs of name and value.
          named: options of kinds by name; they override those of ``options``.

        Raises:
          UserError: a module cannot be imported, a field is unknown, or a value is not allowed.
        """
        fields = {"kind": kind, "n": n, "init": init, "collapse": collapse, "module": module}
        fields |= {"value_residual": value_residual, "value_init": value_init}
        if isinstance(module, str):
            kind_modules.load(module)
        if isinstance(kind, str) and kind not in kinds.names():
            more = "residual.module names what registers others" if module is None else f"{module} registers no other"
            nearest = did_you_mean(kind, kinds.names())
            refuse("residual.kind", kind, f"one of {', '.join(kinds.names())}", f"{nearest}; {more}")
        for name, value in fields.items():
            checked = rules(type(self))[name].check(f"residual.{name}", hints(type(self))[name], value)
            object.__setattr__(self, name, checked)
        for name in ("n", "init", "collapse"):
            allowed = self.spec.refusal(name, getattr(self, name))
            if allowed is not None:
                refuse(f"residual.{name}", getattr(self, name), allowed)
        object.__setattr__(self, "options", _checked_options(self.spec, dict(options) | named))
        if collapse is not None and self.collapse_is_fixed:
            fixed = self.spec.fixes_collapse
            refuse("residual.collapse", collapse, f"None with residual.{fixed}=True: how the streams end is fixed")

    def __post_init__(self) -> None:
        """Do nothing: ``__init__`` has checked every field."""

    def __getattr__(self, name: str) -> Any:
        options = dict(self.__dict__.get("options", ()))
        if name in options:
            return options[name]
        if name in kinds.options():
            return kinds.options()[name].default
        raise AttributeError(f"no residual kind has an option {name!r}")

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickle by the fields, so that a process that unpickles imports the module of the kind."""
        return _from_fields, (type(self), self.flat())

    def flat(self) -> dict[str, Any]:
        """Return {field: value}, options beside the others.

        ``module`` is left out where there is none, and the value residual's fields where they are not set: configs that
        were stored before there were any have none.
        """
        common = {name: getattr(self, name) for name in kinds.COMMON}
        unset = {"module": None, "value_residual": False, "value_init": None}
        common = {name: value for name, value in common.items() if name not in unset or value != unset[name]}
        return common | dict(self.options)

    def changed(self, **fields: Any) -> Self:
        """Return this group with other values of fields or options. Raises UserError as ``__init__``."""
        return type(self)(**{**self.flat(), **fields})

    @property
    def spec(self) -> kinds.Kind:
        """Return what the kind declares."""
        return kinds.known()[self.kind]

    @property
    def collapse_is_fixed(self) -> bool:
        """Return whether an option of the kind leaves no choice of the collapse."""
        return bool(self.spec.fixes_collapse) and bool(getattr(self, self.spec.fixes_collapse))

    @property
    def is_plain(self) -> bool:
        """Return whether this is the plain residual, x' = x + F(x), and no values of block 0 are mixed in."""
        return self.spec.is_plain and not self.apart_from_plain and not self.value_residual

    @property
    def starts_values(self) -> str:
        """Return the preset of the value residual's weights."""
        return self.value_init or ("equivalent" if self.init == "equivalent" else "home")

    @property
    def apart_from_plain(self) -> dict[str, tuple[Any, Any]]:
        """Return {field: (value, needed)} of the fields by which a fresh model differs from the plain residual."""
        needed, spec = self.spec.preserving, self.spec
        defaults = {
            "init": next(iter(spec.inits), None),
            "collapse": next(iter(spec.collapses), None),
            "n": spec.default_streams,
        }
        values = {name: getattr(self, name) for name in needed}
        # A field that is None takes the kind's default or, where there is none, the value that keeps the function.
        values = {name: defaults.get(name, needed[name]) if value is None else value for name, value in values.items()}
        apart = {name: (values[name], needed[name]) for name in needed if values[name] != needed[name]}
        if self.value_residual and self.starts_values != "equivalent":
            apart["value_init"] = (self.starts_values, "equivalent")
        return apart


def _from_fields(group: type[ResidualGroup], fields: Mapping[str, Any]) -> ResidualGroup:
    return group(**fields)


def _checked_options(kind: kinds.Kind, given: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return the options of a kind with their values, and after them those of other kinds that any config may hold.

    Raises:
      UserError: an option is unknown, its value is not allowed, or it belongs to another kind and would have no effect.
    """
    values = {name: option.default for name, option in kind.options.items()}
    for name, value in sorted(given.items()):
        option = kinds.options().get(name)
        if option is None:
            raise unknown_field(f"residual.{name}", (*kinds.COMMON, *kinds.options()))
        checked = option.check(f"residual.{name}", option.type, value)
        if name in values or (checked != option.default and option.anywhere):
            values[name] = checked
        elif checked != option.default:
            owners = " and ".join(kinds.owners(name))
            refuse(
                f"residual.{name}",
                value,
                f"{option.default} with residual.kind={kind.name}: it is a choice of {owners}",
            )
    return tuple(values.items())
