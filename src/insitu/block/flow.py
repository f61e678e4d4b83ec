"""Which names a block may read before it has bound them itself."""

from __future__ import annotations

import dis
import sys
from functools import lru_cache
from types import CodeType

from .names import reads

__all__ = ["exposed"]

_STORES = ("STORE_NAME", "STORE_GLOBAL")
_DELETES = ("DELETE_NAME", "DELETE_GLOBAL")
_LOADS = ("LOAD_NAME", "LOAD_GLOBAL", *_DELETES)
_ENDS = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD", "JUMP_ABSOLUTE")


@lru_cache(maxsize=512)
def exposed(code: CodeType) -> frozenset[str]:
    """Names of module-level ``code`` that some path reads before binding them.

    One pass over the bytecode is enough: on a jump back, no less is bound than when the loop was entered.
    A function in the code counts as reading its names where it is defined.
    """
    found: set[str] = set()
    handlers = _handlers(code)
    arriving: dict[int, frozenset[str]] = {}
    bound: frozenset[str] | None = frozenset()

    def meet(target: int, state: frozenset[str]) -> None:
        arriving[target] = arriving[target] & state if target in arriving else state

    for op in dis.get_instructions(code):
        if op.offset in arriving:
            bound = arriving[op.offset] if bound is None else bound & arriving[op.offset]
        if bound is None:
            continue
        for target in handlers.get(op.offset, ()):
            meet(target, bound)
        if op.opname in _LOADS and op.argval not in bound:
            found.add(op.argval)
        elif op.opname in _STORES:
            bound |= {op.argval}
        inner: object = op.argval
        if isinstance(inner, CodeType):
            found |= reads(inner) - bound
        if op.opname in _DELETES:
            bound -= {op.argval}
        if op.opcode in dis.hasjrel or op.opcode in dis.hasjabs:
            meet(op.argval, bound)
        if op.opname in _ENDS or ("JUMP_BACKWARD" in op.opname and "IF" not in op.opname):
            bound = None
    return frozenset(found)


def _handlers(code: CodeType) -> dict[int, list[int]]:
    """Handlers by the offset from which they watch. Before 3.11 they are jumps like others."""
    table: dict[int, list[int]] = {}
    if sys.version_info >= (3, 11):
        from .offsets import exception_table

        for start, _, handler in exception_table(code.co_exceptiontable):
            table.setdefault(start, []).append(handler)
    return table
