"""Private names: inside a class, `__x` means `_TheClass__x`."""

from __future__ import annotations

import ast
from typing import TypeVar

__all__ = ["Mangler", "mangled"]

NodeT = TypeVar("NodeT", bound=ast.AST)


def mangled(name: str, class_name: str | None) -> str:
    """`name` as the compiler sees it inside a class."""
    owner = (class_name or "").lstrip("_")
    if not owner or not name.startswith("__") or name.endswith("__") or "." in name:
        return name
    return f"_{owner}{name}"


class Mangler(ast.NodeTransformer):
    """Writes private names out, so that code taken out of a class means what it did there."""

    def __init__(self, class_name: str | None) -> None:
        self._class_name = class_name

    def _change(self, node: NodeT, *fields: str) -> NodeT:
        for field in fields:
            value = getattr(node, field, None)
            if isinstance(value, str):
                setattr(node, field, mangled(value, self._class_name))
            elif isinstance(value, list):
                setattr(node, field, [mangled(name, self._class_name) for name in value])
        self.generic_visit(node)
        return node

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return self._change(node, "id")

    def visit_Attribute(self, node: ast.Attribute) -> ast.Attribute:
        return self._change(node, "attr")

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return self._change(node, "arg")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        return self._change(node, "name")

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AsyncFunctionDef:
        return self._change(node, "name")

    def visit_Global(self, node: ast.Global) -> ast.Global:
        return self._change(node, "names")

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.Nonlocal:
        return self._change(node, "names")

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.ExceptHandler:
        return self._change(node, "name")

    def visit_alias(self, node: ast.alias) -> ast.alias:
        if node.asname is None and mangled(node.name, self._class_name) != node.name:
            node.asname = mangled(node.name, self._class_name)
            return node
        return self._change(node, "asname")

    def visit_MatchAs(self, node: ast.MatchAs) -> ast.MatchAs:
        return self._change(node, "name")

    def visit_MatchStar(self, node: ast.MatchStar) -> ast.MatchStar:
        return self._change(node, "name")

    def visit_MatchMapping(self, node: ast.MatchMapping) -> ast.MatchMapping:
        return self._change(node, "rest")

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        # Its body has private names of its own, which the compiler knows; the rest is the outer class's.
        node.name, own_name = mangled(node.name, self._class_name), node.name
        node.decorator_list = [self.visit(child) for child in node.decorator_list]
        node.bases = [self.visit(child) for child in node.bases]
        node.keywords = [self.visit(child) for child in node.keywords]
        if node.name != own_name:  # the compiler would go by the name that was just changed
            inner = Mangler(own_name)
            node.body = [inner.visit(child) for child in node.body]
        return node
