"""Whether a parsed source is what running code was compiled from."""

from __future__ import annotations

import ast
import dis
from collections.abc import Iterator
from types import CodeType

from .locate import Place
from .mangle import mangled
from .source import Source, compiled, future_flags

__all__ = ["is_source_of"]


def is_source_of(source: Source, place: Place, code: CodeType) -> bool:
    """Whether `code`, which is entering a `with`, came from `source`, where `place` is that `with`.

    True if compiling the source again gives the same code. Where the code may have come from a rewritten tree
    (pytest's assertions, a notebook's statements one by one) names and constants are compared instead.
    """
    if source.certain or _compiles_to(source.tree, code):
        return True
    return source.rewritten and _looks_like(place, code)


def _compiles_to(tree: ast.Module, code: CodeType) -> bool:
    # All of it is compiled: what a module imports changes the code of its functions.
    fresh = compiled(tree, code.co_filename, future_flags(code))
    return fresh is not None and any(_same_code(candidate, code) for candidate in _all_code(fresh))


def _all_code(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _all_code(constant)


def _same_code(one: CodeType, other: CodeType) -> bool:
    return (
        one.co_code == other.co_code
        and one.co_firstlineno == other.co_firstlineno
        and one.co_name == other.co_name
        and one.co_names == other.co_names
        and one.co_varnames == other.co_varnames
        and one.co_freevars == other.co_freevars
        and one.co_cellvars == other.co_cellvars
        and list(one.co_lines()) == list(other.co_lines())
        and len(one.co_consts) == len(other.co_consts)
        and all(map(_same_constant, one.co_consts, other.co_consts))
    )


def _same_constant(one: object, other: object) -> bool:
    if isinstance(one, CodeType) and isinstance(other, CodeType):
        return _same_code(one, other)
    return type(one) is type(other) and repr(one) == repr(other)


# The weaker comparison.


def _looks_like(place: Place, code: CodeType) -> bool:
    function = place.scopes[-1].name if place.scopes else "<module>"
    if code.co_name not in (function, "<module>", "<cell line: 1>") and place.scopes:
        return False
    nodes = list(_own_nodes(place))
    return (
        _names_of(nodes, place.class_name) <= _names_in(code)
        and _same_at_positions(nodes, place.class_name, code)
        and _every_statement_compiled(place, code)
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
        if kind is ast.Constant and op.opname == "LOAD_CONST" and not _same_constant(op.argval, value):
            return False
        is_name = op.opname.startswith(("LOAD_", "STORE_", "DELETE_")) and isinstance(op.argval, str)
        if kind is ast.Name and is_name and op.opname != "LOAD_CONST" and op.argval != value:
            return False
    return True


def _every_statement_compiled(place: Place, code: CodeType) -> bool:
    lines = {line for _, _, line in code.co_lines()}
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
