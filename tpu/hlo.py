"""Read the collectives and the memory of a compiled program from what XLA writes about it."""

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
_BODY = re.compile(r"body=%?([\w.\-]+)")
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_CONSTANT = re.compile(r"%?([\w.\-]+) = s32\[\]\S* constant\((\d+)\)")
_BELOW = re.compile(r"compare\([^)]*%([\w.\-]+)\), direction=LT")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')


_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (.*):$")


class Memory(NamedTuple):
    """Holds how many bytes of one device's main memory a program uses."""

    arguments: int
    outputs: int  # without those that take an argument's place
    temporaries: int

    @property
    def peak(self) -> int:
        """Return the sum of all parts, since XLA allocates everything for as long as the program runs."""
        return sum(self)


def memory(text: str) -> Memory:
    """Return what XLA's buffer assignment allots in main memory; constants and on-chip memories are left out."""
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
    """Holds the count and bytes of the collectives of one kind on one device."""

    number: int  # how often one runs
    size: int  # bytes of their results


class _Line(NamedTuple):
    """Describes one instruction of a computation."""

    name: str  # with its computation's name
    operation: str
    size: int  # bytes of the result
    calls: tuple[str, ...]
    trips: int  # how often a loop runs; 1 for anything else
    channel: str  # the parts of one asynchronous collective share it


def shape_bytes(shape: str) -> int:
    """Return the bytes of a shape as XLA writes it, all arrays of a tuple together."""
    total = 0
    for dtype, dimensions in _ARRAY.findall(shape):
        count = 1
        for dimension in filter(None, dimensions.split(",")):
            count *= int(dimension)
        total += count * _BYTES.get(dtype, 0)
    return total


def _bounds(text: str) -> dict[str, int]:
    """Return the constant that each loop's condition compares the counter with; a scan counts up to it from 0."""
    current, constants, bounds = "", dict[str, int](), dict[str, int]()
    for line in text.splitlines():
        head, constant, below = _COMPUTATION.match(line), _CONSTANT.search(line), _BELOW.search(line)
        if head:
            current, constants = head[2], {}
        elif constant:
            constants[constant[1]] = int(constant[2])
        elif below and below[1] in constants:
            bounds[current] = constants[below[1]]
    return bounds


def trip_counts(text: str) -> dict[str, int]:
    """Return how often each loop runs, by the name of its body; 1 where it cannot be read."""
    bounds, counts = _bounds(text), dict[str, int]()
    for line in text.splitlines():
        body = _BODY.search(line)
        if body:
            counts[body[1]] = _trips(line, bounds)
    return counts


def _trips(line: str, bounds: dict[str, int]) -> int:
    """Return how often the loop of a ``while`` runs."""
    known, condition = _TRIPS.search(line), _CONDITION.search(line)
    return int(known[1]) if known else bounds.get(condition[1] if condition else "", 1)


def _computations(text: str) -> tuple[str, dict[str, list[_Line]]]:
    """Return (name of the entry computation, the instructions of every computation)."""
    entry, current, computations = "", "", dict[str, list[_Line]]()
    bounds = _bounds(text)
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head:
            current = head[2]
            computations[current] = []
            entry = current if head[1] else entry
            continue
        operation = _OPERATION.match(line)
        if operation is None or not current:
            continue
        branches = _BRANCHES.search(line)
        names = branches[1].split(",") if branches else []
        called = (*_CALLED.findall(line), *(name.strip().lstrip("%") for name in names))
        channel = _CHANNEL.search(line)
        repeats = _trips(line, bounds) if operation[2] == "while" else 1
        name = f"{current}/{line.split(' = ')[0].strip()}"
        shared = channel[1] if channel else name
        computations[current].append(_Line(name, operation[2], shape_bytes(operation[1]), called, repeats, shared))
    return entry, computations


def collectives(text: str) -> dict[str, Collectives]:
    """Count the collectives of a compiled program by kind; one in a loop counts as often as the loop runs.

    An asynchronous collective counts once, although a compiler may spread it over several fusions. A loop whose trip
    count cannot be read counts as one round. XLA:TPU fuses a reduce-scatter to an all-reduce of which each device keeps
    its part; it counts as a reduce-scatter.
    """
    entry, computations = _computations(text)
    counted: dict[tuple[str, str], Collectives] = {}

    def count(kind: str, key: str, times: int, size: int) -> None:
        before = counted.get((kind, key), Collectives(0, 0))
        counted[kind, key] = Collectives(max(before.number, times), max(before.size, times * size))

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
    by_kind = {kind: [each for (name, _), each in counted.items() if name == kind] for kind in KINDS}
    return {
        kind: Collectives(sum(each.number for each in every), sum(each.size for each in every))
        for kind, every in by_kind.items()
        if every
    }


def gathered_shapes(text: str) -> Iterator[tuple[int, ...]]:
    """Yield the shape of the result of each all-gather in the program."""
    for line in text.splitlines():
        operation = _OPERATION.match(line)
        if operation and operation[2].startswith("all-gather") and not operation[2].endswith("-done"):
            for _, dimensions in _ARRAY.findall(operation[1]):
                yield tuple(int(d) for d in dimensions.split(",") if d)


def as_json(totals: Mapping[str, Collectives]) -> dict[str, dict[str, int]]:
    """Return {kind: {count, bytes}}."""
    return {kind: {"count": total.number, "bytes": total.size} for kind, total in totals.items()}
