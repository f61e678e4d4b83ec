"""Annotations of variables: a function never evaluates them, module-level code would."""

from __future__ import annotations

import ast

__all__ = ["DropAnnotations"]


class DropAnnotations(ast.NodeTransformer):
    """Makes `x: T = value` of the block itself `x = value`. Classes keep theirs."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        return ast.copy_location(ast.Assign([node.target], node.value), node)

    def _leave(self, node: ast.AST) -> ast.AST:
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = visit_ClassDef = _leave  # noqa: N815
