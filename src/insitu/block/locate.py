"""Finding the `with` statement that a frame is entering, in a parsed source."""

from __future__ import annotations

import ast
import dis
import sys
from collections.abc import Iterator
from itertools import islice
from types import CodeType, FrameType
from typing import NamedTuple

__all__ = ["Entry", "Place", "find"]

With = ast.With | ast.AsyncWith
Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Position = tuple["int | None", "int | None", "int | None", "int | None"]

_ITEMS_HAVE_LINES = sys.version_info >= (3, 13)  # before, they have that of the statement
_ENTERING = frozenset({"SETUP_WITH", "BEFORE_WITH", "BEFORE_ASYNC_WITH"})


class Entry(NamedTuple):
    """An instruction that calls `__enter__` or `__aenter__` for a `with` statement."""

    code: CodeType
    offset: int
    line: int

    @classmethod
    def of(cls, frame: FrameType) -> Entry | None:
        """What the frame is doing, if it is that."""
        code, offset = frame.f_code, frame.f_lasti
        while code.co_code[offset] == dis.EXTENDED_ARG:
            offset += 2
        return cls(code, offset, frame.f_lineno) if _is_entering(code, offset) else None


class Place(NamedTuple):
    """A `with` item in a tree, and what is around it."""

    node: With
    item: int
    scopes: tuple[Scope, ...]
    statement: ast.stmt
    """The statement at module level that holds it all."""

    @property
    def class_name(self) -> str | None:
        """Name of the class whose private names the code around means."""
        for scope in reversed(self.scopes):
            if isinstance(scope, ast.ClassDef):
                return scope.name
        return None

    @property
    def function(self) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """The function directly around."""
        if self.scopes and not isinstance(self.scopes[-1], ast.ClassDef):
            return self.scopes[-1]
        return None

    @property
    def qualname(self) -> str:
        """As in `__qualname__`; `<module>` at module level."""
        parts: list[str] = []
        for scope in self.scopes:
            parts.append(scope.name)
            if not isinstance(scope, ast.ClassDef):
                parts.append("<locals>")
        if parts and parts[-1] == "<locals>":
            parts.pop()
        return ".".join(parts) or "<module>"


def find(tree: ast.Module, entry: Entry) -> Place | None:
    """The `with` item of `tree` that `entry` enters, going by its position."""
    for statement in tree.body:
        for node, scopes in _withs(statement, entry.line, ()):
            item = _item(node, entry)
            if item is not None:
                return Place(node, item, scopes, statement)
    return None


def _is_entering(code: CodeType, offset: int) -> bool:
    name = dis.opname[code.co_code[offset]]
    if name in _ENTERING:
        return True
    # 3.14 loads the method and calls it.
    return name == "CALL" and offset >= 2 and dis.opname[code.co_code[offset - 2]] == "LOAD_SPECIAL"


def _position(code: CodeType, offset: int, line: int) -> Position:
    """First and last line, first and last column of an instruction; no columns before Python 3.11."""
    positions = getattr(code, "co_positions", None)
    if positions is None:
        return (line, None, None, None)
    return next(islice(positions(), offset // 2, None))


def _withs(node: ast.AST, line: int, scopes: tuple[Scope, ...]) -> Iterator[tuple[With, tuple[Scope, ...]]]:
    """Every `with` whose head, up to its body, holds the line. Expressions hold none and aren't entered."""
    if isinstance(node, (ast.stmt, ast.ExceptHandler)):
        if not node.lineno <= line <= (node.end_lineno or node.lineno):
            return
        if isinstance(node, (ast.With, ast.AsyncWith)) and line <= _head_end(node):
            yield node, scopes
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            scopes = (*scopes, node)
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, field, ()):
            yield from _withs(child, line, scopes)


def _head_end(node: With) -> int:
    last = node.items[-1]
    expression = last.optional_vars or last.context_expr
    return expression.end_lineno or expression.lineno


def _item(node: With, entry: Entry) -> int | None:
    """Which item of the statement is entered; None if it is not this statement."""
    here = _position(entry.code, entry.offset, entry.line)
    exact = [number for number, item in enumerate(node.items) if _position_of(item.context_expr) == here]
    if exact:
        return exact[0]
    lines = [item.context_expr.lineno if _ITEMS_HAVE_LINES else node.lineno for item in node.items]
    there = [number for number, line in enumerate(lines) if line == entry.line]
    if len(there) < 2:
        return there[0] if there else None
    # Items that can't be told apart are entered in order, once for each copy that the compiler has made of the
    # statement (it copies what is in a `finally`).
    entries = [
        offset
        for offset in range(0, len(entry.code.co_code), 2)
        if _is_entering(entry.code, offset)
        and _position_at(entry.code, offset) == _position_at(entry.code, entry.offset)
    ]
    return there[entries.index(entry.offset) % len(there)]


def _position_at(code: CodeType, offset: int) -> Position:
    if hasattr(code, "co_positions"):
        return _position(code, offset, 0)
    for start, end, line in code.co_lines():
        if start <= offset < end:
            return (line, None, None, None)
    return (None, None, None, None)


def _position_of(node: ast.expr) -> Position:
    return (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)
