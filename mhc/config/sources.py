"""Parse ``data.source`` and ``data.validation``: one source, a mixture of several, or several sets."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

from mhc.config.group import setting
from mhc.errors import UserError, did_you_mean
from mhc.rules import refuse

SOURCES = ("stdlib", "tfds:<name>", "text:<glob>", "tokens:<glob>", "prepared:<folder>", "windtunnel:<task>")
_PREFIXES = [form.partition(":")[0] for form in SOURCES]
_FORMS = {"mix": "NAME=WEIGHT*SOURCE", "sets": "NAME=SOURCE"}
_ALLOWED = {"mix": "mix:<name>=<weight>*<source>;…", "sets": "sets:<name>=<source>;…"}
_WHOLE = {"mix": "data.source", "sets": "data.validation"}


class Share(NamedTuple):
    """Describes one source of a mixture or of several validation sets."""

    name: str
    """Its name in metrics; "" where it is the only source."""
    weight: float
    """The share of sequences that come from it; the weights of a mixture add up to 1."""
    source: str
    """The source, such as ``text:books/*.txt``."""


def source_field(default: Any, doc: str, *, several: str) -> Any:
    """Return a dataclass field that holds a source, or several.

    Args:
      default: the field's default.
      doc: what the field means, in one line.
      several: the prefix under which it may name several: ``mix`` or ``sets``.
    """
    words = f"one of {', '.join(SOURCES)}, {_ALLOWED[several]}"

    def check(name: str, value: str) -> None:
        if value.startswith(f"{several}:"):
            shares(value, name)
        else:
            _check_source(name, value, words)

    return setting(default, doc, words=words, further=check)


def shares(value: str, field: str = "data.source") -> tuple[Share, ...]:
    """Return the sources of ``mix:NAME=WEIGHT*SOURCE;…`` or ``sets:NAME=SOURCE;…``; any other text is one source.

    A ``;`` may end the last part.

    Args:
      value: the text.
      field: the field that holds it, for messages.

    Raises:
      UserError: a part has another form, a name is used twice, or a weight is not a positive number.
    """
    kind, _, rest = value.partition(":")
    if kind not in _FORMS:
        return (Share("", 1.0, value),)
    form = _FORMS[kind]
    parsed: dict[str, Share] = {}
    parts = rest.strip().removesuffix(";").split(";")
    for place, part in enumerate(parts, start=1):
        if not part.strip():
            which = f"part {place} of {len(parts)} is empty" if len(parts) > 1 else f"{value!r} names no source"
            raise UserError(f"{field}: {which}, allowed: {kind}:{form};{form};…")
        share = _share(part, kind, field)
        if share.name in parsed:
            raise UserError(
                f"{field}: the name {share.name!r} is used twice, allowed: {form} with a different name in each part"
            )
        parsed[share.name] = share
    total = sum(share.weight for share in parsed.values())
    if not math.isfinite(total) or not all(share.weight / total for share in parsed.values()):
        weights = ", ".join(f"{share.weight:g}" for share in parsed.values())
        raise UserError(f"{field}: the weights {weights} are too large or too far apart, allowed: e.g. 0.7 and 0.3")
    return tuple(share._replace(weight=share.weight / total) for share in parsed.values())


def _share(part: str, kind: str, field: str) -> Share:
    """Return the Share that one part describes, with its weight as it was given."""
    form = _FORMS[kind]
    name, equals, weighted = (text.strip() for text in part.partition("="))
    weight, star, source = weighted.partition("*") if kind == "mix" else ("1", "*", weighted)
    weight, source = weight.strip(), source.strip()
    if weighted and (":" in weight or weight in ("", "stdlib")):  # the star, if any, belongs to a glob
        example = source if star and not weight else weighted
        raise UserError(f"{field}: the part {name!r} has no weight, allowed: {form}, e.g. {name}=1*{example}")
    if not (name and equals and star and source):
        refuse(field, part.strip(), f"{kind}:{form};{form};… with {form} in each part")
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        refuse(field, name, f"{form} with a name of letters, digits, '_', '-' and '.'")
    try:
        number = float(weight)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        refuse(field, weight, f"{form} with a weight above 0 ({name})")
    _check_source(field, source, ", ".join(SOURCES))
    return Share(name, number, source)


def _check_source(field: str, value: str, allowed: str) -> None:
    """Refuse what is not a single source. Raises UserError."""
    prefix, colon, rest = value.partition(":")
    if colon and prefix in _WHOLE:
        refuse(field, value, f"{allowed}; {prefix}: is for {_WHOLE[prefix]} as a whole")
    if value != "stdlib" and not (prefix in _PREFIXES[1:] and rest):
        refuse(field, value, allowed, did_you_mean(prefix, _PREFIXES) if not colon or rest else "")
