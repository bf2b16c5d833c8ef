"""Make covering arrays: few cases in which every two values of different factors meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Pair = tuple[tuple[str, Any], tuple[str, Any]]


def product(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return every combination; the last factor changes fastest."""
    return [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]


def pairs(case: Mapping[str, Any]) -> set[Pair]:
    """Return the pairs of values that a case holds."""
    return set(itertools.combinations(case.items(), 2))


def pairwise(
    factors: Mapping[str, Sequence[Any]], possible: Callable[[Mapping[str, Any]], bool] = lambda case: True
) -> list[dict[str, Any]]:
    """Return cases that hold every possible pair of values of two factors, chosen greedily and always the same.

    Values must be hashable. Where nothing is left to cover, a factor takes its first value: put the cheapest there.
    At least as many cases as the two longest factors have pairs are needed, and rarely many more come out.

    Args:
      possible: whether the values of some factors can be in one case; the first value of each must go with all.
    """
    left = {
        pair
        for (f, values), (g, others) in itertools.combinations(factors.items(), 2)
        for pair in itertools.product(((f, v) for v in values), ((g, w) for w in others))
        if possible(dict(pair))
    }
    order = sorted(factors, key=lambda name: -len(factors[name]))
    chosen = []
    while left:
        case = max(
            (_grown(factors, order, value, left, possible) for value in factors[order[0]]),
            key=lambda case: len(pairs(case) & left),
        )
        chosen.append(case)
        left -= pairs(case)
    return chosen


def _grown(
    factors: Mapping[str, Sequence[Any]],
    order: Sequence[str],
    first: Any,
    left: set[Pair],
    possible: Callable[[Mapping[str, Any]], bool],
) -> dict[str, Any]:
    """Return the case that begins with a value of the first factor and covers most with the other factors."""
    case = {order[0]: first}
    for name in order[1:]:

        def gain(value: Any, name: str = name) -> tuple[int, int]:
            ours = {pair for pair in left if (name, value) in pair}
            now = sum(1 for pair in ours if all(case.get(n, v if n == name else None) == v for n, v in pair))
            return now, len(ours) if now else 0

        case[name] = max((value for value in factors[name] if possible({**case, name: value})), key=gain)
    return {name: case[name] for name in factors}
