"""How much work a pickle is, before anything is made of it."""

from __future__ import annotations

import pickletools
from typing import Any, BinaryIO, TypeAlias

MAX_OPERATIONS = 2_000_000  # the optimizer of a network with 10,000 weight tensors needs 1.6 million
_CALLS = {"REDUCE", "NEWOBJ"}
_FILLS = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}  # an object below what they take
_GETS, _PUTS = {"GET", "BINGET", "LONG_BINGET"}, {"PUT", "BINPUT", "LONG_BINPUT"}
_PLAIN = {each.name for each in pickletools.opcodes if each.stack_after and not each.stack_before} - {"MARK"} - _GETS
# The number of values in an object, repeated ones included; in a list if more may be put into the object.
_Object: TypeAlias = "int | list[int]"


def operations(file: BinaryIO, pickles: int = 1) -> int:
    """The operations of consecutive pickles, and the values in the arguments of the functions that they call: a shape
    of many dimensions costs each tensor that repeats it. Any number above ``MAX_OPERATIONS`` if there are more.

    Raises exceptions of many kinds for malformed pickles.
    """
    total = 0
    for _ in range(pickles):
        stack: list[_Object] = []
        marks: list[int] = []
        memo: dict[Any, _Object] = {}
        for operation, argument, _ in pickletools.genops(file):
            total += 1
            name = operation.name
            if name in _GETS:
                stack.append(memo[argument])
            elif name in _PUTS:
                memo[argument] = stack[-1]
            elif name in _PLAIN:
                stack.append([1] if name.startswith("EMPTY") else 1)
            elif name == "MARK":
                marks.append(len(stack))
            else:
                values = _combine(operation, stack, marks)
                total += values if name in _CALLS else 0
            if total > MAX_OPERATIONS:
                return total
    return total


def _combine(operation: pickletools.OpcodeInfo, stack: list[_Object], marks: list[int]) -> int:
    """Do an operation that takes objects off the stack; the number of values in them."""
    name, takes = operation.name, operation.stack_before
    first = marks.pop() if pickletools.markobject in takes else len(stack) - len(takes) + (name in _FILLS)
    values = min(sum(each if isinstance(each, int) else each[0] for each in stack[first:]), MAX_OPERATIONS)
    del stack[first:]
    if name in _FILLS:
        filled = stack[-1]
        assert isinstance(filled, list)
        filled[0] = min(filled[0] + values, MAX_OPERATIONS)
    elif operation.stack_after:
        stack.append([1 + values] if name in _CALLS else 1 + values)
    return values
