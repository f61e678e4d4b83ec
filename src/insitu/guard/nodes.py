"""Syntax trees of Python: nodes made by hand, and what is asked of others."""

from __future__ import annotations

import ast
from typing import Any


def at(node: Any, where: ast.AST) -> Any:
    """``node``, with what has no line in it on the line of another."""
    for each in ast.walk(node):
        if not hasattr(each, "lineno") and "lineno" in each._attributes:
            ast.copy_location(each, where)
    return node


def call_of(where: ast.AST, name: str, *arguments: ast.expr) -> ast.Call:
    """``name(*arguments)``, on the line of ``where``."""
    return at(ast.Call(ast.Name(name, ast.Load()), list(arguments), []), where)


def hashable(node: ast.expr) -> ast.expr:
    """The value as a key, which is looked at first."""
    return node if isinstance(node, ast.Constant) else call_of(node, "_hashable_", node)


def again(node: ast.expr) -> ast.expr:
    """To be read once more: a name in a node of its own."""
    return ast.copy_location(ast.Name(node.id, ast.Load()) if isinstance(node, ast.Name) else node, node)


def as_tuple(target: Any) -> Any:
    """Brackets around targets mean what parentheses do."""
    if isinstance(target, (ast.List, ast.Tuple)):
        elements = [as_tuple(each) for each in target.elts]
        return ast.copy_location(ast.Tuple(elements, ast.Store()), target)
    if isinstance(target, ast.Starred):
        return ast.copy_location(ast.Starred(as_tuple(target.value), ast.Store()), target)
    return target


def within(statement: ast.AST) -> Any:
    """A statement and all in it, without the bodies of functions; exits of loops in it stay in it."""
    pending: list[tuple[ast.AST, bool]] = [(statement, False)]
    while pending:
        node, looped = pending.pop()
        if not (looped and isinstance(node, (ast.Break, ast.Continue))):
            yield node
        if not isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            inside = looped or isinstance(node, (ast.For, ast.While))
            pending += [(child, inside) for child in ast.iter_child_nodes(node)]


def is_no_grad(node: ast.expr) -> bool:
    """Whether it is ``torch.no_grad()`` or ``torch.inference_mode()``, with which a block begins anyway."""
    function = node.func if isinstance(node, ast.Call) and not node.args and not node.keywords else None
    return (
        isinstance(function, ast.Attribute)
        and function.attr in ("no_grad", "inference_mode")
        and isinstance(function.value, ast.Name)
        and function.value.id == "torch"
    )


def arguments_of(arguments: ast.arguments) -> list[ast.arg]:
    """All, of whatever kind."""
    others = [each for each in (arguments.vararg, arguments.kwarg) if each is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *others]
