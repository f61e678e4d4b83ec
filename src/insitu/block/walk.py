"""Going through a tree scope by scope."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any, TypeVar

__all__ = ["FUNCTIONS", "clone", "own_nodes"]

NodeT = TypeVar("NodeT", bound=ast.AST)

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


def clone(node: NodeT) -> NodeT:
    """A copy of a tree. `deepcopy` would also follow what others hang on nodes; some nodes all trees share."""
    copy = type(node).__new__(type(node))
    for name in (*node._fields, *node._attributes):
        if hasattr(node, name):
            setattr(copy, name, _clone_field(getattr(node, name)))
    return copy


def _clone_field(value: Any) -> Any:
    if isinstance(value, list):
        return [_clone_field(item) for item in value]
    return clone(value) if isinstance(value, ast.AST) else value
