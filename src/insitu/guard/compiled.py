"""What RestrictedPython makes of a client's text. That of the last ones is kept, by their size."""

from __future__ import annotations

import ast
import marshal
import sys
import threading
from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple

from insitu.block.marks import saved_within
from insitu.block.names import binds, reads
from insitu.block.refuse import refuse
from insitu.block.rewrite import rewritten
from insitu.block.source import compile_quietly
from insitu.guard.errors import NotAllowedError
from insitu.guard.transform import Restricting, require_names
from insitu.net.errors import WireError
from insitu.net.sources import CodeSource, remote_name

__all__ = ["Compiled", "as_definition", "block_of", "function_of"]

_KEPT = 1_000_000
"""Characters of the texts whose code is kept."""


class Compiled(NamedTuple):
    """Goes to a worker as it is: that has the same Python, and compiles nothing while others wait."""

    code: CodeType
    reads: frozenset[str]
    binds: frozenset[str]
    saved_within: frozenset[int]
    name: str

    def __reduce__(self) -> Any:
        return _arrived, (marshal.dumps(self.code), *self[1:])


def _arrived(code: bytes, *rest: Any) -> Compiled:
    return Compiled(marshal.loads(code), *rest)


class _Kept:
    def __init__(self, make: Callable[[CodeSource], Compiled]) -> None:
        self._make = make
        self._made: dict[CodeSource, Compiled] = {}
        self._size = 0
        self._lock = threading.Lock()

    def __call__(self, source: CodeSource) -> Compiled:
        with self._lock:
            if (known := self._made.pop(source, None)) is not None:
                self._made[source] = known  # the last to go
                return known
        made = self._make(source)
        with self._lock:
            if source not in self._made:
                self._made[source] = made
                self._size += len(source.text)
            while self._size > _KEPT:
                oldest = next(iter(self._made))
                del self._made[oldest]
                self._size -= len(oldest.text)
        return made


@_Kept
def block_of(source: CodeSource) -> Compiled:
    """The body of a block. Raises ``NotAllowedError`` and ``WireError``."""
    filename = remote_name(source.filename)
    tree = source.tree()
    require_names(tree, filename)
    try:
        refuse(tree.body, filename)
    except SyntaxError as error:
        raise NotAllowedError(f"line {error.lineno} of a restricted block: {error.msg}") from None
    tree = rewritten(tree.body, None, None)
    within = saved_within(tree)
    return _compiled(tree, source, within, "")


@_Kept
def function_of(source: CodeSource) -> Compiled:
    """A function: code that defines it. Raises as ``block_of``."""
    filename = remote_name(source.filename)
    tree = source.tree()
    require_names(tree, filename)
    return _compiled(tree, source, frozenset(), as_definition(tree))


def as_definition(tree: ast.Module) -> str:
    """Makes the text of a function, one def or one lambda, a statement that binds it; returns the name. Raises
    ``WireError`` for another text."""
    (statement, *others) = tree.body
    name = "insitu_lambda"
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Lambda) and not others:
        _drop_defaults(statement.value.args)
        target = ast.copy_location(ast.Name(name, ast.Store()), statement)
        tree.body = [ast.copy_location(ast.Assign([target], statement.value), statement)]
    elif isinstance(statement, ast.FunctionDef) and not others:
        name = statement.name
        _drop_defaults(statement.args)
    else:
        raise WireError("the text of a function is one def, or one lambda")
    return name


def _drop_defaults(arguments: ast.arguments) -> None:
    """Their values come along, as they were where the function was made."""
    none = ast.Constant(None, lineno=1, col_offset=0, end_lineno=1, end_col_offset=0)
    arguments.defaults = [none for _ in arguments.defaults]
    arguments.kw_defaults = [None if each is None else none for each in arguments.kw_defaults]


def _compiled(tree: ast.Module, source: CodeSource, within: frozenset[int], name: str) -> Compiled:
    filename = remote_name(source.filename)
    try:
        restricted = ast.fix_missing_locations(Restricting(filename).visit(tree))
        code = compile_quietly(restricted, filename)
    except RecursionError:
        raise NotAllowedError("a restricted block: its code is nested too deeply") from None
    except (SyntaxError, ValueError, OverflowError) as error:
        line = f"line {error.lineno} of " if isinstance(error, SyntaxError) else ""
        raise NotAllowedError(f"{line}a restricted block: {getattr(error, 'msg', error)}") from None
    names: dict[str, Any] = {"co_name": source.name}
    if sys.version_info >= (3, 11):
        names["co_qualname"] = source.qualname
    if not name:
        code = code.replace(**names)
    return Compiled(code, _public(reads(code)), _public(binds(code)), within, name)


def _public(names: frozenset[str]) -> frozenset[str]:
    return frozenset(name for name in names if name == "_" or not name.startswith("_"))
