"""`x.save()` in a block's text, which no object needs to know: it becomes a call of `Saves.mark`."""

from __future__ import annotations

import ast
from typing import Any

from .saves import SAVE_NAME
from .walk import FUNCTIONS, own_nodes

__all__ = ["Mark", "Unmark", "saved_within"]


class Unmark(ast.NodeTransformer):
    """Puts `x.save()` back where an outer block was rewritten: the names may be others here."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if _is_mark(node):
            method = ast.copy_location(ast.Attribute(node.args[0], "save", ast.Load()), node)
            return ast.copy_location(ast.Call(method, [], []), node)
        return node


class Mark(ast.NodeTransformer):
    """Makes `EXPR.save()` a call of `Saves.mark`, with the block's names that it is given to."""

    def __init__(self) -> None:
        self._names: dict[ast.Call, list[str]] = {}
        self._scopes: list[set[str]] = []  # for each function or class inside, the names it declares global

    def visit_Call(self, node: ast.Call) -> ast.Call:
        names = self._names.pop(node, [])
        self.generic_visit(node)
        if not _is_save(node):
            return node
        assert isinstance(node.func, ast.Attribute)
        mark = ast.copy_location(ast.Name(SAVE_NAME, ast.Load()), node)
        arguments = [ast.copy_location(ast.Constant(name), node) for name in names]
        return ast.copy_location(ast.Call(mark, [node.func.value, *arguments], []), node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        for target in node.targets:
            self._give(target, node.value)
        return self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.AST:
        self._give(node.target, node.value)
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if _is_save(node.value):
            assert isinstance(node.value, ast.Call)
            assert isinstance(node.value.func, ast.Attribute)
            self._give(node.value.func.value, node.value)
        return self.generic_visit(node)

    def _give(self, target: ast.expr, value: ast.expr) -> None:
        """Note that what `value` saves is assigned to `target`."""
        if isinstance(value, ast.IfExp):
            self._give(target, value.body)
            self._give(target, value.orelse)
        elif isinstance(value, ast.NamedExpr):
            self._give(target, value.value)
        elif isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, (ast.Tuple, ast.List)):
            parts = [*target.elts, *value.elts]
            if len(target.elts) == len(value.elts) and not any(isinstance(part, ast.Starred) for part in parts):
                for inner_target, inner_value in zip(target.elts, value.elts, strict=True):
                    self._give(inner_target, inner_value)
        elif isinstance(target, (ast.Tuple, ast.List)) and _is_save(value):
            for part in target.elts:  # the parts of what is saved are saved
                self._give(part.value if isinstance(part, ast.Starred) else part, value)
        elif isinstance(target, ast.Name) and _is_save(value) and self._is_of_block(target.id):
            assert isinstance(value, ast.Call)
            self._names.setdefault(value, []).append(target.id)

    def _is_of_block(self, name: str) -> bool:
        return not self._scopes or name in self._scopes[-1]

    def _visit_scope(self, node: ast.AST) -> ast.AST:
        declared = {name for inner in own_nodes(node) if isinstance(inner, ast.Global) for name in inner.names}
        self._scopes.append(declared)
        self.generic_visit(node)
        self._scopes.pop()
        return node

    def visit(self, node: ast.AST) -> Any:
        return self._visit_scope(node) if isinstance(node, (*FUNCTIONS, ast.ClassDef)) else super().visit(node)


def saved_within(tree: ast.AST) -> frozenset[int]:
    """Lines with marks inside what another mark saves, which brings home whatever was made of them."""
    marks = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_mark(node)]
    inner = (node for mark in marks for node in ast.walk(mark.args[0]))
    return frozenset(node.lineno for node in inner if isinstance(node, ast.Call) and _is_mark(node))


def _is_save(node: ast.AST) -> bool:
    """Whether the node is `EXPR.save()`, without arguments."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "save"
        and not node.args
        and not node.keywords
    )


def _is_mark(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id == SAVE_NAME and bool(node.args)
