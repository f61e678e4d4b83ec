"""`nonlocal` in code that is no longer inside a function."""

from __future__ import annotations

import ast
from typing import Any

from .walk import FUNCTIONS, own_nodes

__all__ = ["NonlocalToGlobal"]


class NonlocalToGlobal(ast.NodeTransformer):
    """Names of the block are module-level names to functions in it: `nonlocal x` is `global x`."""

    def __init__(self) -> None:
        self._functions: list[set[str]] = []

    def _visit_function(self, node: ast.AST) -> ast.AST:
        self._functions.append(_bound_in(node))
        self.generic_visit(node)
        self._functions.pop()
        return node

    def visit(self, node: ast.AST) -> Any:
        return self._visit_function(node) if isinstance(node, FUNCTIONS) else super().visit(node)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> list[ast.stmt]:
        within = set().union(*self._functions[:-1]) if self._functions else set()
        kept = [name for name in node.names if name in within]
        of_block = [name for name in node.names if name not in within]
        statements: list[ast.stmt] = []
        if kept:
            statements.append(ast.copy_location(ast.Nonlocal(kept), node))
        if of_block:
            statements.append(ast.copy_location(ast.Global(of_block), node))
        return statements


_NAMED = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.ExceptHandler,
    ast.MatchAs,
    ast.MatchStar,
)


def _bound_in(function: ast.AST) -> set[str]:
    """Names that are variables of a function."""
    names: set[str] = set()
    elsewhere: set[str] = set()
    if isinstance(function, FUNCTIONS):
        names |= {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
    for node in own_nodes(function):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, _NAMED):
            names.add(node.name or "")
        elif isinstance(node, ast.MatchMapping) and node.rest:
            names.add(node.rest)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            elsewhere.update(node.names)
    return names - elsewhere
