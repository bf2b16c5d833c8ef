"""Collectives and memory of a compiled program, read off what XLA writes about it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_BYTES = {
    **dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn", "f8e5m2"), 1),
    **dict.fromkeys(("s16", "u16", "bf16", "f16"), 2),
    **dict.fromkeys(("s32", "u32", "f32"), 4),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 8),
}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_OPERATION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.+?) ([\w\-]+)\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:body|condition|to_apply|calls)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_CONSTANT = re.compile(r"%?([\w.\-]+) = s32\[\]\S* constant\((\d+)\)")
_BELOW = re.compile(r"compare\([^)]*%([\w.\-]+)\), direction=LT")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')


_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (.*):$")


class Memory(NamedTuple):
    """Bytes of one device's main memory."""

    arguments: int
    outputs: int  # beside those that take an argument's place
    temporaries: int

    @property
    def peak(self) -> int:
        """All of it: what is allocated for a program is so for as long as it runs."""
        return sum(self)


def memory(text: str) -> Memory:
    """What XLA's buffer assignment gives out in main memory; constants and on-chip memories are left out."""
    arguments = outputs = temporaries = 0
    for line in text.splitlines():
        allocation = _ALLOCATION.match(line)
        if allocation is None or allocation[2].startswith("color "):  # another memory
            continue
        size, kind = int(allocation[1]), allocation[2]
        if kind.startswith("parameter "):
            arguments += size
        elif kind.startswith("preallocated-temp"):
            temporaries += size
        elif "maybe-live-out" in kind or kind.startswith("output shape"):
            outputs += size
    return Memory(arguments, outputs, temporaries)


class Collectives(NamedTuple):
    """Of one kind: how often the program runs one, and the bytes of what they give, on one device."""

    number: int
    size: int  # bytes


class _Line(NamedTuple):
    name: str  # of its computation and itself
    operation: str
    size: int  # bytes of the result
    calls: tuple[str, ...]
    trips: int  # of a loop; 1 otherwise
    channel: str  # of a collective: what parts of one asynchronous collective share


def _size(shape: str) -> int:
    total = 0
    for dtype, dimensions in _ARRAY.findall(shape):
        count = 1
        for dimension in filter(None, dimensions.split(",")):
            count *= int(dimension)
        total += count * _BYTES.get(dtype, 0)
    return total


def _bounds(text: str) -> dict[str, int]:
    """By condition of a loop: the constant that its counter is compared with, which a scan counts up to from 0."""
    current, constants, found = "", dict[str, int](), dict[str, int]()
    for line in text.splitlines():
        head, constant, below = _COMPUTATION.match(line), _CONSTANT.search(line), _BELOW.search(line)
        if head:
            current, constants = head[2], {}
        elif constant:
            constants[constant[1]] = int(constant[2])
        elif below and below[1] in constants:
            found[current] = constants[below[1]]
    return found


def _computations(text: str) -> tuple[str, dict[str, list[_Line]]]:
    """(name of the entry, lines of each computation that matter)."""
    entry, current, found = "", "", dict[str, list[_Line]]()
    bounds = _bounds(text)
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head:
            current = head[2]
            found[current] = []
            entry = current if head[1] else entry
            continue
        operation = _OPERATION.match(line)
        if operation is None or not current:
            continue
        branches = _BRANCHES.search(line)
        names = branches[1].split(",") if branches else []
        called = (*_CALLED.findall(line), *(name.strip().lstrip("%") for name in names))
        channel = _CHANNEL.search(line)
        repeats = 1
        if operation[2] == "while":
            known, condition = _TRIPS.search(line), _CONDITION.search(line)
            repeats = int(known[1]) if known else bounds.get(condition[1] if condition else "", 1)
        name = f"{current}/{line.split(' = ')[0].strip()}"
        shared = channel[1] if channel else name
        found[current].append(_Line(name, operation[2], _size(operation[1]), called, repeats, shared))
    return entry, found


def collectives(text: str) -> dict[str, Collectives]:
    """The collectives of a compiled program by kind, those in loops as often as the loops run.

    An asynchronous collective, which a compiler may spread over several fusions, counts once; a loop whose trip count
    cannot be read counts as one round. What XLA:TPU fuses to an all-reduce of which a device keeps its part is a
    reduce-scatter.
    """
    entry, computations = _computations(text)
    found: dict[tuple[str, str], Collectives] = {}

    def count(kind: str, key: str, times: int, size: int) -> None:
        before = found.get((kind, key), Collectives(0, 0))
        found[kind, key] = Collectives(max(before.number, times), max(before.size, times * size))

    def walk(name: str, times: int, fused: bool) -> None:
        for line in computations.get(name, ()):
            kind = line.operation.removesuffix("-start")
            if kind in KINDS:
                # The result of a start holds the operand too.
                size = line.size // 2 if line.operation.endswith("-start") and kind != "all-reduce" else line.size
                # Channels are no names: those of different instructions may be the same.
                count(kind, line.channel if fused else line.name, times, size)
                continue  # a reduction's own computation holds no collective
            if line.operation == "fusion" and line.calls and line.calls[0].startswith("all-reduce-scatter"):
                count("reduce-scatter", line.name, times, line.size)
                continue
            for called in line.calls:
                walk(called, times * line.trips, fused or line.operation == "fusion")

    walk(entry, 1, False)
    totals = {kind: [one for (name, _), one in found.items() if name == kind] for kind in KINDS}
    return {
        kind: Collectives(sum(one.number for one in every), sum(one.size for one in every))
        for kind, every in totals.items()
        if every
    }


def gathered_shapes(text: str) -> Iterator[tuple[int, ...]]:
    """The shape of what each all-gather of the program gives."""
    for line in text.splitlines():
        operation = _OPERATION.match(line)
        if operation and operation[2].startswith("all-gather") and not operation[2].endswith("-done"):
            for _, dimensions in _ARRAY.findall(operation[1]):
                yield tuple(int(d) for d in dimensions.split(",") if d)


def as_json(found: Mapping[str, Collectives]) -> dict[str, dict[str, int]]:
    """{kind: {count, bytes}}."""
    return {kind: {"count": total.number, "bytes": total.size} for kind, total in found.items()}
