"""Annotations of variables: a function never evaluates them, module-level code would."""

from __future__ import annotations

import ast
from typing import Any

from .walk import FUNCTIONS

__all__ = ["DropAnnotations"]


class DropAnnotations(ast.NodeTransformer):
    """Makes `x: T = value` of the block itself `x = value`. Classes keep theirs."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        return ast.copy_location(ast.Assign([node.target], node.value), node)

    def visit(self, node: ast.AST) -> Any:
        return node if isinstance(node, (*FUNCTIONS, ast.ClassDef)) else super().visit(node)
