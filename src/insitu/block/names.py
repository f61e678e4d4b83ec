"""Which names module-level code reads and binds, told by its bytecode: dead code asks for nothing."""

from __future__ import annotations

import dis
from types import CodeType

__all__ = ["binds", "reads"]

_OF_COMPILER = frozenset({"__annotations__", "__conditional_annotations__", "__annotate__", "__classdict__"})
_READS = frozenset({"LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS", "DELETE_NAME", "DELETE_GLOBAL"})
_MODULE_BINDS = frozenset({"STORE_NAME", "DELETE_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})
_INNER_BINDS = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL"})


def reads(code: CodeType) -> frozenset[str]:
    """Names that the code, or a function or class in it, may look up outside itself; builtins too."""
    return frozenset(_names(code, _READS, _READS)) - _OF_COMPILER


def binds(code: CodeType) -> frozenset[str]:
    """Names that the code binds or deletes at module level, from inner functions too (`global`)."""
    return frozenset(_names(code, _MODULE_BINDS, _INNER_BINDS)) - _OF_COMPILER


def _names(code: CodeType, operations: frozenset[str], inner_operations: frozenset[str]) -> set[str]:
    found: set[str] = set()
    before = None
    for op in dis.get_instructions(code):
        # `except E as e` ends in `e = None; del e`, which reads nothing.
        if op.opname in operations and before != (op.opname.replace("DELETE", "STORE"), op.argval):
            found.add(op.argval)
        before = (op.opname, op.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _names(constant, inner_operations, inner_operations)
    return found
