"""Going through a tree scope by scope."""

from __future__ import annotations

import ast
from collections.abc import Iterator

__all__ = ["FUNCTIONS", "own_nodes"]

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Nodes of the body of a function, lambda or class, without the bodies of those inside it."""
    body = getattr(scope, "body", [])
    pending = list(body) if isinstance(body, list) else [body]
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            pending.extend(ast.iter_child_nodes(node))
