"""Whether code looks like a source, where something has changed the tree between the two.

pytest rewrites assertions, IPython compiles the statements of a cell one by one, import hooks add checks of
their own. All of them keep the lines, and the places of the names and constants that they leave alone.
"""

from __future__ import annotations

import ast
import dis
from collections.abc import Iterator
from types import CodeType

from .constants import same_constant
from .locate import Place
from .mangle import mangled

__all__ = ["looks_like"]

_TIMEIT = "<magic-timeit>"
_CONSTANTS = ("LOAD_CONST", "LOAD_SMALL_INT")


def looks_like(place: Place, tree: ast.Module, code: CodeType) -> bool:
    """Whether names, constants and lines of `code` agree with the `with` at `place` and what is around it."""
    if place.scopes and code.co_name != place.scopes[-1].name:
        return False
    nodes = list(_own_nodes(place))
    return (
        _names_of(nodes, place.class_name) <= _names_in(code)
        and _same_at_positions(nodes, place.class_name, code)
        and _every_statement_compiled(place, code)
        and _lines_agree(place, tree, code)
    )


def _own_nodes(place: Place) -> Iterator[ast.AST]:
    """Nodes that must have left a trace in the code itself, not in that of an inner function."""
    pending: list[ast.AST] = [place.node]
    while pending:
        node = pending.pop()
        yield node
        if isinstance(node, (ast.Assert, ast.JoinedStr, ast.Lambda, ast.ClassDef)):
            continue  # rewritten, or without positions of its own, or another scope
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            pending.append(node.generators[0].iter)
            continue
        if isinstance(node, (ast.If, ast.While, ast.IfExp)) and isinstance(node.test, ast.Constant):
            continue
        if isinstance(node, ast.AnnAssign):
            pending.extend(part for part in (node.target, node.value) if part is not None)
            continue
        pending.extend(ast.iter_child_nodes(node))


def _names_of(nodes: list[ast.AST], class_name: str | None) -> set[str]:
    names = {node.id for node in nodes if isinstance(node, ast.Name) and node.id != "__debug__"}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return {mangled(name, class_name) for name in names}


def _names_in(code: CodeType) -> set[str]:
    return {*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars}


def _same_at_positions(nodes: list[ast.AST], class_name: str | None, code: CodeType) -> bool:
    """Whether instructions that stand exactly where a name or constant does are about that one."""
    expected: dict[tuple[int | None, ...], tuple[type, object]] = {}
    # The clean-up of `except ... as name` stands where the handler's last statement does.
    cleaned = {mangled(node.name, class_name) for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    for node in nodes:
        if isinstance(node, (ast.Name, ast.Constant)):
            value = mangled(node.id, class_name) if isinstance(node, ast.Name) else node.value
            where = (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)
            expected[where] = (type(node), value)
    for op in dis.get_instructions(code):
        where = tuple(getattr(op, "positions", None) or ())
        if where not in expected:
            continue
        kind, value = expected[where]
        if kind is ast.Constant and op.opname in _CONSTANTS and not same_constant(op.argval, value):
            return False
        is_name = op.opname.startswith(("LOAD_", "STORE_", "DELETE_")) and isinstance(op.argval, str)
        if is_name and op.argval in cleaned and not op.opname.startswith("LOAD_"):
            continue
        if kind is ast.Name and is_name and op.opname not in _CONSTANTS and op.argval != value:
            return False
    return True


def _every_statement_compiled(place: Place, code: CodeType) -> bool:
    lines = _lines_of(code)
    for statement in place.node.body:
        end = statement.end_lineno or statement.lineno
        if not _leaves_no_code(statement) and lines.isdisjoint(range(statement.lineno, end + 1)):
            return False
        if isinstance(statement, (ast.Raise, ast.Return, ast.Break, ast.Continue)):
            return True
    return True


def _leaves_no_code(statement: ast.stmt) -> bool:
    if isinstance(statement, (ast.Pass, ast.Global, ast.Nonlocal)):
        return True
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return True
    if isinstance(statement, (ast.If, ast.While)) and isinstance(statement.test, ast.Constant):
        return True
    return isinstance(statement, ast.AnnAssign) and statement.value is None


def _lines_agree(place: Place, tree: ast.Module, code: CodeType) -> bool:
    if code.co_filename == _TIMEIT:  # puts the cell into a function of its own, with lines of its own
        return True
    return _lines_of(code) <= _lines_with_code(place.scopes[-1] if place.scopes else tree)


def _lines_of(code: CodeType) -> set[int]:
    return {line for _, _, line in code.co_lines() if line}


def _lines_with_code(scope: ast.AST) -> set[int]:
    """Lines on which the code of a function, class or module can have something to do."""
    lines: set[int] = set()
    if isinstance(scope, ast.stmt):
        lines.update(_lines_of_statement(scope))
    pending = [*ast.iter_child_nodes(scope)]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            lines.update(_lines_of_statement(node))
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                pending.extend(ast.iter_child_nodes(node))
    return lines


def _lines_of_statement(node: ast.stmt | ast.ExceptHandler | ast.match_case) -> range:
    """All lines of a simple statement, those of the head of a compound one."""
    first = node.pattern.lineno if isinstance(node, ast.match_case) else node.lineno
    decorators = getattr(node, "decorator_list", ())
    body = getattr(node, "body", None)
    last = body[0].lineno if body else getattr(node, "end_lineno", first)
    return range(min([first, *(decorator.lineno for decorator in decorators)]), last + 1)
