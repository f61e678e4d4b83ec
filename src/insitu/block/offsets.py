"""Where in the bytecode the inside of a `with` statement begins."""

from __future__ import annotations

import dis
import sys
from types import CodeType

__all__ = ["exception_table", "first_inside"]


def first_inside(code: CodeType, entering: int) -> int:
    """Offset of the first instruction inside the `with` whose `__enter__` is called at offset `entering`."""
    if sys.version_info < (3, 11):
        operations = code.co_code
        setups = (dis.opmap["SETUP_WITH"], dis.opmap["SETUP_ASYNC_WITH"])
        return next(at + 2 for at in range(entering, len(operations), 2) if operations[at] in setups)
    ranges = _ranges_with_handler(code)
    around = _handler_at(ranges, entering)
    return min(start for start, _, handler in ranges if start > entering and handler != around)


def _handler_at(ranges: list[tuple[int, int, int]], offset: int) -> int | None:
    return next((handler for start, end, handler in ranges if start <= offset < end), None)


def _ranges_with_handler(code: CodeType) -> list[tuple[int, int, int]]:
    """Stretches of code (start, end, handler) whose exceptions go to an `__exit__` or `__aexit__`."""
    begin = (dis.opmap["PUSH_EXC_INFO"], dis.opmap["WITH_EXCEPT_START"])
    operations = code.co_code
    return [
        (start, end, handler)
        for start, end, handler in exception_table(code.co_exceptiontable)  # pyright: ignore[reportAttributeAccessIssue]
        if (operations[handler], operations[handler + 2]) == begin
    ]


def exception_table(table: bytes) -> list[tuple[int, int, int]]:
    """Start, end and handler of every entry, as offsets in the bytecode."""
    numbers = _numbers(table)
    return [
        (2 * start, 2 * (start + length), 2 * handler)
        for start, length, handler in zip(numbers[::4], numbers[1::4], numbers[2::4], strict=True)
    ]


def _numbers(table: bytes) -> list[int]:
    """Numbers in groups of six bits, marked with 64 where another group follows."""
    numbers: list[int] = []
    value = 0
    for byte in table:
        value = (value << 6) | (byte & 63)
        if not byte & 64:
            numbers.append(value)
            value = 0
    return numbers
