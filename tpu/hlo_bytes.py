"""Count the bytes that a scheduled program reads and writes, by the part of the step that asks for them.

XLA's own count needs generated code, which takes minutes, gives one number, and counts a loop's body once. This count
needs the plan alone, says where the bytes go, and counts a body as often as it runs. Each instruction reads its
operands and writes its result, a fusion reads of an operand only the slice that it takes, and on-chip memory counts as
any other.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tpu.hlo import shape_bytes, trip_counts

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.+?) ([\w\-]+)\((.*)$")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLS = re.compile(r"calls=%?([\w.\-]+)")
_BODY = re.compile(r"body=%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCH_LIST = re.compile(r"branch_computations=\{([^}]*)\}")
_SCOPE = re.compile(r'op_name="([^"]*)"')
# They move nothing: names for what is there, or the ends of copies that were counted at their beginning.
_FREE = frozenset(
    {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "iota", "after-all", "opt-barrier"}
    | {"copy-done", "async-done"}
)
_SLICES = ("slice", "dynamic-slice")
_PARTS = ("maps", "read", "write", "attention", "feed_forward", "optimizer", "loss", "embed")


class _Instruction(NamedTuple):
    name: str
    shape: str
    operation: str
    operands: tuple[str, ...]
    arguments: str  # the operands as they are written
    attributes: str
    root: bool


def bytes_by_scope(program: str) -> dict[str, int]:
    """Return the bytes that a program moves by pass and part, ``backward write``, the largest first.

    A pass is ``forward``, ``recomputed`` or ``backward``; a part is a named scope of the step, or ``other``. What bears
    no name is ``unnamed``: Pallas kernels, and copies between main memory and the chip.
    """
    return dict(sorted(_Count(program).run().items(), key=lambda item: -item[1]))


def scope_of(op_name: str) -> str:
    """Return the pass and the part of an instruction from its metadata's ``op_name``."""
    if not op_name:
        return "unnamed"
    backward, recomputed = "transpose(" in op_name, "rematted_computation" in op_name
    which = "recomputed" if recomputed else "backward" if backward else "forward"
    names = re.split(r"[/();]+", op_name)
    return f"{which} {next((part for part in _PARTS if part in names), 'other')}"


class _Count:
    def __init__(self, program: str):
        self.computations: dict[str, dict[str, _Instruction]] = {}
        self.entry, self.bounds = "", trip_counts(program)
        self.total: dict[str, int] = {}
        current = ""
        for text in program.splitlines():
            head, line = _HEAD.match(text), _LINE.match(text)
            if head:
                current = head[2]
                self.computations[current] = {}
                self.entry = current if head[1] else self.entry
            elif line and current:
                instruction = _instruction(line)
                self.computations[current][instruction.name] = instruction

    def run(self) -> dict[str, int]:
        self._walk(self.entry, 1)
        return self.total

    def _walk(self, computation: str, times: int) -> None:
        here = self.computations.get(computation, {})
        for instruction in here.values():
            attributes = instruction.attributes
            if instruction.operation in _FREE:
                continue
            if instruction.operation == "while":
                body = _BODY.search(attributes)
                if body:
                    self._walk(body[1], times * self.bounds.get(body[1], 1))
            elif instruction.operation in ("conditional", "call"):
                branches = _BRANCH_LIST.search(attributes)
                names = _NAME.findall(branches[1]) if branches else _BRANCHES.findall(attributes)
                for name in names[:1] if instruction.operation == "conditional" else names:
                    self._walk(name, times)  # of a choice one branch runs; ours are alike in size
            else:
                scope = _SCOPE.search(attributes)
                name = scope_of(scope[1] if scope else "")
                self.total[name] = self.total.get(name, 0) + times * self._bytes(instruction, here)

    def _bytes(self, instruction: _Instruction, here: dict[str, _Instruction]) -> int:
        operation, size = instruction.operation, shape_bytes(instruction.shape)
        operands = [shape_bytes(here[name].shape) for name in instruction.operands if name in here]
        if operation in _SLICES:
            return 2 * size
        if operation == "copy-start":  # its result names both sides and a counter
            return 2 * operands[0]
        called = _CALLS.search(instruction.attributes)
        inside = self.computations.get(called[1], {}) if called else {}
        if operation == "async-start":
            return sum(2 * shape_bytes(each.shape) for each in inside.values() if each.root)
        if operation == "fusion":
            operands = [_taken(inside, number, whole) for number, whole in enumerate(operands)]
        return size + sum(operands)


def _instruction(line: re.Match[str]) -> _Instruction:
    arguments, attributes = _split(line[5])
    operands = tuple(_NAME.findall(arguments))
    return _Instruction(line[2], line[3], line[4], operands, arguments, attributes, bool(line[1]))


def _split(text: str) -> tuple[str, str]:
    """Return what stands before the parenthesis that ends an instruction's operands, and what stands after it."""
    depth = 1
    for number, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[:number], text[number + 1 :]
    return text, ""


def _taken(fusion: dict[str, _Instruction], number: int, whole: int) -> int:
    """Return how many of the ``whole`` bytes of its operand ``number`` a fusion reads."""
    name = next(
        (each.name for each in fusion.values() if each.operation == "parameter" and each.arguments == str(number)), None
    )
    users = [each for each in fusion.values() if name in each.operands]
    taken = 0
    for user in users:
        if user.operation in _SLICES:
            taken += shape_bytes(user.shape)
        elif user.operation == "dynamic-update-slice" and user.operands[0] == name and user.operands[1] in fusion:
            taken += shape_bytes(fusion[user.operands[1]].shape)
        else:
            return whole
    return min(taken, whole)
