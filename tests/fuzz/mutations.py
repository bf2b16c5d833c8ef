"""Damage good inputs by strategies: bytes that are cut, flipped or doubled, JSON with values that do not belong."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

ODD_TEXTS = [
    "",
    " ",
    "\x00",
    "\ud800",
    "\ufeff",
    "🙂",
    "../..",
    "null",
    "NaN",
    "1e999",
    "a" * 300,
    "é\u0301",
    "-1",
    "[",
    "{}",
]
ODD_NUMBERS = [0, -1, 1, 2, 3, 255, 2**31, -(2**31), 2**63, 2**64, 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf")]

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(ODD_NUMBERS),
    st.sampled_from(ODD_TEXTS),
    st.integers(-3, 300),
    st.floats(),
    st.text(max_size=8),
)
odd_json = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def damaged_bytes(draw: st.DrawFn, good: bytes) -> bytes:
    """Return `good` after one to three edits of its bytes."""
    content = bytearray(good)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(content)))
        edit = draw(st.sampled_from(["cut", "drop", "flip", "insert", "double", "nothing left"]))
        if edit == "cut":
            del content[at:]
        elif edit == "drop":
            del content[at : at + draw(st.integers(1, 20))]
        elif edit == "flip" and at < len(content):
            content[at] ^= 1 << draw(st.integers(0, 7))
        elif edit == "insert":
            content[at:at] = draw(
                st.binary(max_size=8)
                | st.sampled_from([b"\x00", b"\n", b"\r\n", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"[" * 9])
            )
        elif edit == "double":
            content[at:at] = content[at : at + draw(st.integers(1, 60))]
        elif edit == "nothing left":
            content.clear()
    return bytes(content)


def places(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of every value within a JSON value, itself (the empty path) first."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [above, *(path for key, part in inner for path in places(part, (*above, key)))]


@st.composite
def damaged_json(draw: st.DrawFn, good: Any, most: int = 2) -> Any:
    """Return a copy of a JSON value in which up to `most` places were replaced, removed, renamed or doubled."""
    value = json.loads(json.dumps(good))
    for _ in range(draw(st.integers(1, most))):
        path = draw(st.sampled_from(places(value)))
        if not path:
            if draw(st.integers(0, 9)) == 0:
                value = draw(odd_json)
            continue
        holder = value
        for key in path[:-1]:
            holder = holder[key]
        edit = draw(st.sampled_from(["replace", "replace", "replace", "remove", "rename", "another's"]))
        if edit == "replace":
            holder[path[-1]] = draw(odd_json)
        elif edit == "remove":
            del holder[path[-1]]
        elif edit == "rename" and isinstance(holder, dict):
            holder[draw(st.text(max_size=6))] = holder.pop(path[-1])
        elif edit == "another's":
            other: Any = value
            for key in draw(st.sampled_from(places(value))):
                other = other[key]
            holder[path[-1]] = json.loads(json.dumps(other))
    return value


def as_bytes(value: Any) -> bytes:
    """Return the UTF-8 of a JSON value; lone surrogates stay escaped, NaN and infinities are written as Python does."""
    return json.dumps(value).encode()
