"""The text of functions, and functions rewritten to stop at each operation in it."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import linecache
import operator
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType
from typing import Any

from insitu.block import LocationError
from insitu.block.mangle import Mangler, mangled
from insitu.block.source import compile_quietly, future_flags
from insitu.block.syntax import syntax_tree
from insitu.block.verify import compiles_to
from insitu.block.walk import clone
from insitu.run.op_tree import OPERATORS, STOP, find, stop_at
from insitu.tree import Listing, Operation

Stop = Callable[..., Any]
"""Called instead of an operation: with its name, and the function and arguments that it stands for."""


@dataclass(frozen=True, eq=False)
class Rewritten:
    """One function's text, and its code with stops."""

    listing: Listing
    callees: dict[str, tuple[str, ...]]
    code: CodeType

    def bound(self, function: FunctionType, stop: Stop) -> FunctionType:
        """``function``, its globals, closure and defaults, with each operation handed to ``stop``."""
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        cells |= {STOP: CellType(stop), OPERATORS: CellType(operator)}
        closure = tuple(cells[name] for name in self.code.co_freevars)
        made = FunctionType(self.code, function.__globals__, function.__name__, function.__defaults__, closure)
        made.__kwdefaults__ = function.__kwdefaults__
        return made

    def callee(self, name: str, function: FunctionType, owner: Any) -> Any:
        """What an operation calls, if that can be told before it runs; ``owner`` is the ``self`` of a method.

        Raises ``LookupError`` if it can't.
        """
        if not self.callees[name]:
            raise LookupError(name)
        root, *attributes = self.callees[name]
        code = function.__code__
        if root == OPERATORS:
            value: Any = operator
        elif owner is not None and root == code.co_varnames[0]:
            value = owner
        elif root in code.co_freevars:
            value = (function.__closure__ or ())[code.co_freevars.index(root)].cell_contents
        elif root in (*code.co_varnames, *code.co_cellvars):
            raise LookupError(root)
        else:
            value = function.__globals__[root] if root in function.__globals__ else vars(builtins)[root]
        try:
            return functools.reduce(getattr, attributes, value)
        except AttributeError as error:
            raise LookupError(name) from error


def rewritten(function: FunctionType) -> Rewritten:
    """Raises ``LocationError`` if the function's text can't be had, or the function can't stop midway."""
    return _rewritten(function.__code__, function.__qualname__)


@functools.cache
def _rewritten(code: CodeType, qualname: str) -> Rewritten:
    if code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        raise LocationError(f"`{qualname}` is a generator or a coroutine, whose operations run after it has returned")
    lines = linecache.getlines(code.co_filename)
    tree = _tree("".join(lines))
    definition = _definition(tree, code, qualname)
    if not compiles_to(tree, code):
        raise LocationError(
            f"the source of `{qualname}` is not what is running: {code.co_filename} was edited after it was "
            f"imported, or something rewrote it on import"
        )
    text = textwrap.dedent("".join(lines[code.co_firstlineno - 1 : definition.end_lineno])).splitlines()
    found = find(definition)
    listing = Listing(
        qualname,
        code.co_firstlineno,
        tuple(text),
        tuple(Operation(each.name, each.line, each.text, each.loops) for each in found),
    )
    owner = _class_of(qualname)
    callees = {each.name: tuple(mangled(part, owner) for part in each.callee) for each in found}
    stop_at(definition, found)
    return Rewritten(listing, callees, _compiled(definition, code, qualname, [STOP, OPERATORS]))


def _definition(tree: ast.Module, code: CodeType, qualname: str) -> ast.FunctionDef:
    """A copy of the tree of the function that ``code`` was compiled from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first == code.co_firstlineno:
                return clone(node)
    raise LocationError(
        f"the source of `{qualname}` can't be found ({code.co_filename}): only functions written with `def` in a "
        f"file have operations to name"
    )


@functools.lru_cache(maxsize=8)
def _tree(text: str) -> ast.Module:
    try:
        return syntax_tree(text)
    except SyntaxError:
        return ast.Module([], [])


def _compiled(definition: ast.FunctionDef, code: CodeType, qualname: str, extra: Sequence[str] = ()) -> CodeType:
    """The code of a function that has the free variables of ``code``, and ``extra`` ones."""
    definition = Mangler(_class_of(qualname)).visit(definition)
    _take_rest_away(definition)
    module = syntax_tree("def around(): pass")
    around = module.body[0]
    assert isinstance(around, ast.FunctionDef)
    around.args.args = [ast.arg(name) for name in (*code.co_freevars, *extra)]
    around.body = [definition]
    outer = compile_quietly(ast.fix_missing_locations(module), code.co_filename, future_flags(code))
    names: dict[str, Any] = {"co_name": code.co_name, "co_firstlineno": code.co_firstlineno}
    if hasattr(code, "co_qualname"):
        names["co_qualname"] = code.co_qualname  # pyright: ignore[reportAttributeAccessIssue]
    return _inner(_inner(outer)).replace(**names)


def _class_of(qualname: str) -> str | None:
    around = qualname.split(".")[-2:-1]
    return around[0] if around and around[0] != "<locals>" else None


def _take_rest_away(definition: ast.FunctionDef) -> None:
    """Takes away what a ``def`` evaluates beside its body; the function has its own defaults."""
    definition.decorator_list, definition.returns = [], None
    given = definition.args
    given.defaults, given.kw_defaults = [], [None] * len(given.kwonlyargs)
    for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
        if each is not None:
            each.annotation = None


def _inner(code: CodeType) -> CodeType:
    return next(each for each in code.co_consts if isinstance(each, CodeType))
