"""The operations in a function's tree: which there are, what they are called, and a stop at each."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

# Free variables of a function with stops in it. Their names are never made private by a class.
STOP = "__insitu_stop__"
OPERATORS = "__insitu_operators__"

_OPERATORS = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.MatMult: "matmul",
    ast.Div: "truediv",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.Pow: "pow",
    ast.LShift: "lshift",
    ast.RShift: "rshift",
    ast.BitAnd: "and",
    ast.BitOr: "or",
    ast.BitXor: "xor",
}
# These look at the frame that calls them.
_OF_THE_FRAME = {"super", "locals", "vars", "dir", "eval", "exec"}

# These run later, or are rewritten by others.
_LEFT_ALONE = (
    ast.Lambda,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.GeneratorExp,
    ast.JoinedStr,
    ast.Assert,
)

OperationTree = ast.Call | ast.BinOp | ast.AugAssign


@dataclass(frozen=True)
class Found:
    """One operation. ``callee``: what it calls, as the parts of a dotted name; none if that is computed."""

    node: OperationTree
    name: str
    callee: tuple[str, ...]
    loops: bool

    @property
    def line(self) -> int:
        """Where its name stands, or begins what the operator stands between."""
        if isinstance(self.node, ast.Call):
            return self.node.func.end_lineno or self.node.lineno
        return self.node.lineno

    @property
    def text(self) -> str:
        return ast.unparse(self.node)


def find(definition: ast.FunctionDef) -> list[Found]:
    """The operations of a function, in the order in which its text names them."""
    finder = _Finder()
    for statement in definition.body:
        finder.visit(statement)
    order = sorted(finder.nodes, key=lambda pair: _position(pair[0]))
    seen: Counter[str] = Counter()
    found: list[Found] = []
    for node, loops in order:
        name = _name(node)
        found.append(Found(node, f"{name}_{seen[name]}", _callee(node), loops))
        seen[name] += 1
    return found


def stop_at(definition: ast.FunctionDef, operations: Iterable[Found]) -> None:
    """Rewrites a function so that it hands each of its operations to ``STOP``, lines as they are."""
    _Stopping({id(each.node): each.name for each in operations}).visit(definition)


class _Finder(ast.NodeVisitor):
    """Collects operations, and whether they stand in a loop."""

    def __init__(self) -> None:
        self.nodes: list[tuple[OperationTree, bool]] = []
        self._loops = 0

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp)):
            self._comprehension(node)
        elif not isinstance(node, _LEFT_ALONE):
            super().visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if not (isinstance(node.func, ast.Name) and node.func.id in _OF_THE_FRAME):
            self.nodes.append((node, self._loops > 0))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if not _is_text(node.left):
            self.nodes.append((node, self._loops > 0))
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self.nodes.append((node, self._loops > 0))
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self._in_loop([node.target, *node.body])
        for statement in node.orelse:
            self.visit(statement)

    def visit_While(self, node: ast.While) -> None:
        self._in_loop([node.test, *node.body])
        for statement in node.orelse:
            self.visit(statement)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp) -> None:
        first, *others = node.generators
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        self.visit(first.iter)
        self._in_loop([first.target, *first.ifs, *others, *parts])

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit(node.target)
        if node.value is not None:
            self.visit(node.value)

    def _in_loop(self, nodes: Iterable[ast.AST]) -> None:
        self._loops += 1
        for node in nodes:
            self.visit(node)
        self._loops -= 1


class _Stopping(ast.NodeTransformer):
    def __init__(self, names: dict[int, str]) -> None:
        self._names = names

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = self._names.get(id(node))
        self.generic_visit(node)
        if name is None:
            return node
        return _stopped(node, name, [node.func, *node.args], node.keywords)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        name = self._names.get(id(node))
        self.generic_visit(node)
        if name is None:
            return node
        return _stopped(node, name, [_operator(node), node.left, node.right])

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        name = self._names.get(id(node))
        self.generic_visit(node)
        if name is None or not isinstance(node.target, ast.Name):
            return node
        read = ast.copy_location(ast.Name(node.target.id, ast.Load()), node.target)
        value = _stopped(node, name, [_operator(node), read, node.value])
        return ast.copy_location(ast.Assign([node.target], value), node)


def _stopped(
    node: ast.AST, name: str, arguments: list[ast.expr], keywords: list[ast.keyword] | None = None
) -> ast.expr:
    call = ast.Call(ast.Name(STOP, ast.Load()), [ast.Constant(name), *arguments], keywords or [])
    return ast.fix_missing_locations(ast.copy_location(call, node))


def _operator(node: ast.BinOp | ast.AugAssign) -> ast.expr:
    return ast.Attribute(ast.Name(OPERATORS, ast.Load()), _function_of(node), ast.Load())


def _function_of(node: ast.BinOp | ast.AugAssign) -> str:
    """Its name in the module ``operator``."""
    name = _OPERATORS[type(node.op)]
    if isinstance(node, ast.AugAssign):
        return f"i{name}"
    return f"{name}_" if name in ("and", "or") else name


def _position(node: OperationTree) -> tuple[int, ...]:
    # Of a chain of calls, which all begin at one place, the first comes first.
    return node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0


def _name(node: OperationTree) -> str:
    if not isinstance(node, ast.Call):
        return _OPERATORS[type(node.op)]
    return "_".join(_parts(node.func)).lstrip("_") or "call"


def _parts(node: ast.AST) -> list[str]:
    """The names in what is called: of ``self.layers[0](x).view`` they are self, layers, view."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        return [*_parts(node.value), node.attr]
    if isinstance(node, (ast.Call, ast.Subscript)):
        return _parts(node.func if isinstance(node, ast.Call) else node.value)
    return []


def _callee(node: OperationTree) -> tuple[str, ...]:
    if not isinstance(node, ast.Call):
        return (OPERATORS, _function_of(node))
    root = node.func
    while isinstance(root, ast.Attribute):
        root = root.value
    return tuple(_parts(node.func)) if isinstance(root, ast.Name) else ()


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)))
