"""List the cases of the contract: every kind × Sinkhorn preset × init preset × N, where it exists."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mhc import kinds, residual
from tests.contracts import topologies

SIZES = (1, 2, 3, 4, 8, 16)
WITHOUT_MAPS = (*topologies.WITHOUT_MAPS, "gated_residual", "attn_res", "denseformer", "laurel")
SLOTS = ("frac",)  # kinds whose streams are parts of one


@dataclasses.dataclass(frozen=True)
class Group:
    """Holds cases that differ in initial values alone, and so share their compiled programs."""

    kind: str
    n: int
    sinkhorn: str = "paper"

    def __str__(self) -> str:
        return f"{self.kind}{'-deepseek' if self.sinkhorn == 'deepseek' else ''}-n{self.n}"

    @property
    def spec(self) -> kinds.Kind:
        return specs()[self.kind]

    @property
    def inits(self) -> tuple[str | None, ...]:
        return self.spec.inits or (None,)

    @property
    def options(self) -> dict[str, Any]:
        """Return the fields of ``residual.*`` except ``init``."""
        sinkhorn = {"sinkhorn": self.sinkhorn} if "sinkhorn" in self.spec.options else {}
        return {"n": self.n, **sinkhorn}

    @property
    def exact(self) -> frozenset[str]:
        """Return what H_res keeps to rounding, see ``Mixing.exact``; the tests' own kinds mix as mhc does, or turn."""
        if self.spec.mixing:
            exact: frozenset[str] = kinds.referred(self.spec.mixing).exact
            return exact
        return frozenset({"rows", "signs"} if self.kind in topologies.DOUBLY_STOCHASTIC else ())

    @property
    def residual_logits(self) -> int:
        """Return how many logits of a token H_res has; 1 if the kind does not say."""
        return residual.functional.residual_logits(self.kind, self.n) if self.spec.mixing else 1

    @property
    def has_maps(self) -> bool:
        """Return whether the kind's connections have maps between streams."""
        return self.kind not in WITHOUT_MAPS

    @property
    def tolerance(self) -> float:
        """Return the tolerance for equality with the plain residual at init, where the eps of ``deepseek`` shows."""
        return 1e-4 if self.sinkhorn == "deepseek" else 2e-5


@dataclasses.dataclass(frozen=True)
class Case:
    group: Group
    init: str | None

    @property
    def starts_plain(self) -> bool:
        """Return whether a fresh network computes the plain residual's function."""
        wanted = self.group.spec.preserving.get("init")
        alike = self.group.kind in ("frac", "attn_res", "denseformer", "laurel")  # both presets are one
        return self.init is not None and (self.init == wanted or alike)

    def __str__(self) -> str:
        return str(self.group) + (f"-{self.init}" if self.init else "")


def specs() -> dict[str, kinds.Kind]:
    """Return every kind: those of the registry and those that tests register."""
    return {**kinds.known(), **{name: kind for name, (kind, _) in topologies.BUILDERS.items()}}


def groups() -> list[Group]:
    found = []
    for name, kind in specs().items():
        sinkhorns = ("paper", "deepseek") if name == "mhc" else ("paper",)
        found += [
            Group(name, n, sinkhorn)
            for sinkhorn in sinkhorns
            for n in SIZES
            if n in kind.streams and (name not in SLOTS or n != 3)
        ]
    return found


def cases() -> list[Case]:
    return [Case(group, init) for group in groups() for init in group.inits]


# Kinds that a mixing alone tells apart share a class, and with it all that the compiled step can get wrong. Plain is
# not here: tests/multidevice trains it on the same mesh. Nor is hc, whose step is that of mhc with less to compute.
ONE_OF_EACH_CLASS = ("mhc", "attn_res")


def is_fast(case: Case) -> bool:
    """Return whether `make test` checks a case through the decoder: one kind of a class, one preset, the default N.

    `make test-full` holds the rest of the product. The contract without a decoder is fast for every kind.
    """
    default = case.group.n == case.group.spec.default_streams and case.group.sinkhorn == "paper"
    return default and case.init == case.group.inits[0] and case.group.kind in ONE_OF_EACH_CLASS


def is_fast_alone(group: Group) -> bool:
    """Return whether `make test` checks a group without a decoder.

    It does so at the default N of every kind and preset, and at the smallest and the largest N of mhc.
    Golden values hold every mixing at N = 1, 2 and 4. The product of kromhc nests deepest at its largest N, which is
    fast too.
    """
    sizes = [n for n in SIZES if n in group.spec.streams]
    if group.n == group.spec.default_streams or group.sinkhorn != "paper":
        return group.n == group.spec.default_streams
    return (group.kind, group.n) in {("mhc", sizes[0]), ("mhc", sizes[-1]), ("kromhc", sizes[-1])}


every_group = pytest.mark.parametrize(
    "group",
    [pytest.param(group, marks=() if is_fast_alone(group) else pytest.mark.product) for group in groups()],
    ids=str,
)
# By case, not by test: what a case compiled is used by the next test, and then dropped.
every_case = pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if is_fast(case) else pytest.mark.product) for case in cases()],
    ids=str,
    scope="module",
)
