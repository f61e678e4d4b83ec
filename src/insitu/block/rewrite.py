"""What is changed in a block's tree so that it means the same as module-level code.

Every node keeps its place in the user's file. Rewriting what was rewritten changes nothing: a block inside a
block is taken from the outer one's tree.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from .mangle import Mangler
from .saves import SAVE_NAME

__all__ = ["rewritten"]

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def rewritten(body: Sequence[ast.stmt], class_name: str | None, first_argument: str | None) -> ast.Module:
    """`body` as a module: private names written out, `super()` given its arguments, `x.save()` made a mark.

    `body` itself is changed. `first_argument` is that of the function around it, for `super()`.
    """
    module = ast.Module(body=list(body), type_ignores=[])
    if class_name is not None:
        module = Mangler(class_name).visit(module)
    module = _Super(first_argument).visit(module)
    module = _Nonlocal().visit(module)
    module = _Unmark().visit(module)
    module = _Mark().visit(module)
    first = module.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        module.body.insert(0, ast.copy_location(ast.Pass(), first))  # else it would become a docstring
    return ast.fix_missing_locations(module)


class _Super(ast.NodeTransformer):
    """`super()` finds its class and object in the function it stands in, which the block is no part of."""

    def __init__(self, first_argument: str | None) -> None:
        self._first = first_argument

    def visit_Call(self, node: ast.Call) -> ast.Call:  # noqa: N802
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

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _visit_function  # noqa: N815

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:  # noqa: N802
        return node  # a class written in the block: its methods find their own


def first_argument(function: ast.AST | None) -> str | None:
    """Name of a function's first positional parameter."""
    if not isinstance(function, _FUNCTIONS):
        return None
    parameters = [*function.args.posonlyargs, *function.args.args]
    return parameters[0].arg if parameters else None


class _Nonlocal(ast.NodeTransformer):
    """Names of the block are module-level names to functions in it: `nonlocal x` is `global x`."""

    def __init__(self) -> None:
        self._functions: list[set[str]] = []

    def _visit_function(self, node: ast.AST) -> ast.AST:
        self._functions.append(_bound_in(node))
        self.generic_visit(node)
        self._functions.pop()
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _visit_function  # noqa: N815

    def visit_Nonlocal(self, node: ast.Nonlocal) -> list[ast.stmt]:  # noqa: N802
        within = set().union(*self._functions[:-1]) if self._functions else set()
        kept = [name for name in node.names if name in within]
        of_block = [name for name in node.names if name not in within]
        statements: list[ast.stmt] = []
        if kept:
            statements.append(ast.copy_location(ast.Nonlocal(kept), node))
        if of_block:
            statements.append(ast.copy_location(ast.Global(of_block), node))
        return statements


def _bound_in(function: ast.AST) -> set[str]:
    """Names that are variables of a function."""
    names: set[str] = set()
    elsewhere: set[str] = set()
    if isinstance(function, _FUNCTIONS):
        names |= {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
    for node in _own_nodes(function):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            names.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            names.add(node.rest)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            elsewhere.update(node.names)
    return names - elsewhere


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    body = getattr(function, "body", [])
    pending = list(body) if isinstance(body, list) else [body]
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            pending.extend(ast.iter_child_nodes(node))


class _Unmark(ast.NodeTransformer):
    """Puts `x.save()` back where an outer block was rewritten: the names may be others here."""

    def visit_Call(self, node: ast.Call) -> ast.Call:  # noqa: N802
        self.generic_visit(node)
        if _is_mark(node):
            method = ast.copy_location(ast.Attribute(node.args[0], "save", ast.Load()), node)
            return ast.copy_location(ast.Call(method, [], []), node)
        return node


class _Mark(ast.NodeTransformer):
    """Makes `EXPR.save()` a call of `Saves.mark`, with the names of the block that the statement gives to it."""

    def __init__(self) -> None:
        self._names: dict[ast.Call, list[str]] = {}
        self._scopes: list[set[str] | None] = []  # for each inner scope, the names it declares global

    def visit_Call(self, node: ast.Call) -> ast.Call:  # noqa: N802
        names = self._names.pop(node, [])
        self.generic_visit(node)
        if not is_save(node):
            return node
        assert isinstance(node.func, ast.Attribute)
        mark = ast.copy_location(ast.Name(SAVE_NAME, ast.Load()), node)
        arguments = [ast.copy_location(ast.Constant(name), node) for name in names]
        return ast.copy_location(ast.Call(mark, [node.func.value, *arguments], []), node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:  # noqa: N802
        for target in node.targets:
            self._give(target, node.value)
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:  # noqa: N802
        if node.value is not None:
            self._give(node.target, node.value)
        return self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.AST:  # noqa: N802
        self._give(node.target, node.value)
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:  # noqa: N802
        if is_save(node.value):
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
                for inner_target, inner_value in zip(target.elts, value.elts):
                    self._give(inner_target, inner_value)
        elif isinstance(target, ast.Name) and is_save(value) and self._is_of_block(target.id):
            assert isinstance(value, ast.Call)
            self._names.setdefault(value, []).append(target.id)

    def _is_of_block(self, name: str) -> bool:
        return not self._scopes or (self._scopes[-1] is not None and name in self._scopes[-1])

    def _visit_scope(self, node: ast.AST) -> ast.AST:
        declared = {name for inner in _own_nodes(node) if isinstance(inner, ast.Global) for name in inner.names}
        self._scopes.append(declared)
        self.generic_visit(node)
        self._scopes.pop()
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = visit_ClassDef = _visit_scope  # noqa: N815


def is_save(node: ast.AST) -> bool:
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
