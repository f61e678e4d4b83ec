"""What a block can't hold, refused by name before anything runs."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Sequence
from typing import NoReturn

from .errors import BlockSyntaxError

__all__ = ["refuse"]

_INSTEAD = {
    "return": "save what you need and return it after the `with`",
    "yield": "collect the values in a list that you save, and yield them after the `with`",
    "yield from": "collect the values in a list that you save, and yield them after the `with`",
    "await": "await before the `with` or after it",
    "async for": "use a plain `for` over values that you already have",
    "async with": "use a plain `with`, or enter it around the trace",
    "an async comprehension": "use a plain comprehension over values that you already have",
    "break": "set a flag that you save, and break after the `with`",
    "continue": "set a flag that you save, and continue after the `with`",
    "import *": "import the names that you need, or the module",
}


def refuse(body: Sequence[ast.stmt], filename: str) -> None:
    """Raise `BlockSyntaxError` at the first thing in `body` that would have to happen in the caller."""
    checker = _Checker(filename)
    for statement in body:
        checker.visit(statement)


class _Checker(ast.NodeVisitor):
    def __init__(self, filename: str) -> None:
        self._filename = filename
        self._loops = 0

    def _refuse(self, node: ast.AST, what: str, name: str | None = None) -> NoReturn:
        message = (
            f"{name or f'`{what}`'} can't be in a trace block, which runs beside the model "
            f"and not in this function: {_INSTEAD[what]}"
        )
        line = getattr(node, "lineno", 1)
        text = linecache.getline(self._filename, line)
        before = text.encode()[: getattr(node, "col_offset", 0)]
        raise BlockSyntaxError(message, (self._filename, line, len(before.decode()) + 1, text or None))

    def visit_Return(self, node: ast.Return) -> None:
        self._refuse(node, "return")

    def visit_Yield(self, node: ast.Yield) -> None:
        self._refuse(node, "yield")

    def visit_YieldFrom(self, node: ast.YieldFrom) -> None:
        self._refuse(node, "yield from")

    def visit_Await(self, node: ast.Await) -> None:
        self._refuse(node, "await")

    def visit_AsyncFor(self, node: ast.AsyncFor) -> None:
        self._refuse(node, "async for")

    def visit_AsyncWith(self, node: ast.AsyncWith) -> None:
        self._refuse(node, "async with")

    def visit_comprehension(self, node: ast.comprehension) -> None:
        if node.is_async:
            self._refuse(node.target, "an async comprehension", "an async comprehension")
        self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if any(alias.name == "*" for alias in node.names):
            self._refuse(node, "import *")

    def visit_Break(self, node: ast.Break) -> None:
        if not self._loops:
            self._refuse(node, "break", "`break` out of a loop around the block")

    def visit_Continue(self, node: ast.Continue) -> None:
        if not self._loops:
            self._refuse(node, "continue", "`continue` of a loop around the block")

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.target)
        self.visit(node.iter)
        self._visit_loop(node)

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        self._visit_loop(node)

    def _visit_loop(self, node: ast.For | ast.While) -> None:
        self._loops += 1
        for statement in node.body:
            self.visit(statement)
        self._loops -= 1
        for statement in node.orelse:
            self.visit(statement)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        # What the body of a function does, it does when it is called.
        for expression in (*node.decorator_list, *node.args.defaults, *node.args.kw_defaults):
            if expression is not None:
                self.visit(expression)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_Lambda(self, node: ast.Lambda) -> None:
        for expression in (*node.args.defaults, *node.args.kw_defaults):
            if expression is not None:
                self.visit(expression)
