"""`super()` in code that is taken out of its method."""

from __future__ import annotations

import ast
from typing import Any

from .walk import FUNCTIONS

__all__ = ["SuperArguments", "first_argument"]


class SuperArguments(ast.NodeTransformer):
    """`super()` finds its class and object in the function it stands in, which the block is no part of."""

    def __init__(self, first_argument: str | None) -> None:
        self._first = first_argument

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        is_super = isinstance(node.func, ast.Name) and node.func.id == "super"
        if is_super and not node.args and not node.keywords and self._first is not None:
            names = ("__class__", self._first)
            node.args = [ast.copy_location(ast.Name(name, ast.Load()), node) for name in names]
        return node

    def _visit_function(self, node: ast.AST) -> ast.AST:
        outer, self._first = self._first, first_argument(node)
        self.generic_visit(node)
        self._first = outer
        return node

    def visit(self, node: ast.AST) -> Any:
        return self._visit_function(node) if isinstance(node, FUNCTIONS) else super().visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        return node  # a class written in the block: its methods find their own


def first_argument(function: ast.AST | None) -> str | None:
    """Name of a function's first positional parameter."""
    if not isinstance(function, FUNCTIONS):
        return None
    parameters = [*function.args.posonlyargs, *function.args.args]
    return parameters[0].arg if parameters else None
