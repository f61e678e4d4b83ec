"""Blocks and functions of a client's, compiled under the guard. The worker runs them as it runs any other."""

from __future__ import annotations

import ast
import functools
import hashlib
import sys
from collections.abc import Iterable, Mapping
from types import CodeType
from typing import Any, NamedTuple

from insitu.block import Lost, Saves, current_saves
from insitu.block.marks import saved_within
from insitu.block.names import binds, reads
from insitu.block.refuse import refuse
from insitu.block.rewrite import rewritten
from insitu.block.source import compile_quietly
from insitu.guard.builtins import BUILTINS
from insitu.guard.errors import NotAllowedError
from insitu.guard.limits import GuardLimits
from insitu.guard.runtime import Runtime
from insitu.guard.transform import Restricting, require_names
from insitu.net.errors import WireError
from insitu.net.sources import CodeSource, remote_name

__all__ = ["GuardedBlock", "GuardedFunction", "as_definition"]

_PYTHONS = frozenset(dir(__builtins__) if not isinstance(__builtins__, dict) else __builtins__)


class _Compiled(NamedTuple):
    code: CodeType
    reads: frozenset[str]
    binds: frozenset[str]
    saved_within: frozenset[int]
    name: str


class GuardedBlock:
    """A block from the network, with the interface of ``insitu.block.Block``.

    Raises ``NotAllowedError``, with the line, for code that holds what a restricted block can't, and ``WireError``
    for what is no Python. Pickles as its source.
    """

    def __init__(self, source: CodeSource, limits: GuardLimits | None = None) -> None:
        self.source = source
        self.limits = limits or GuardLimits()
        compiled = _block(source)
        self.filename = remote_name(source.filename)
        self.lineno = source.first
        self.name = source.name
        self.qualname = source.qualname
        self.code = compiled.code
        self.reads = compiled.reads
        self.binds = compiled.binds
        self.digest = hashlib.sha256(repr((source, sys.version_info[:2])).encode()).hexdigest()

    @property
    def tree(self) -> ast.Module:
        """Its statements, as the client wrote them."""
        return self.source.tree()

    def check(self, names: Iterable[str]) -> None:
        """Raises ``NotAllowedError`` for a built-in function that is not in the list and has no value in ``names``."""
        _require_builtins(self.reads - self.binds - set(names))

    def namespace(self, values: Mapping[str, Any], saves: Saves, module_name: str) -> dict[str, Any]:
        """The dict that holds the block's names while it runs."""
        runtime = Runtime(self.limits, saves)
        require_public(values)
        return {**runtime.globals(self.code, values, module_name), "_runtime_": runtime}

    def execute(self, namespace: dict[str, Any]) -> None:
        """Run in a dict made by ``namespace``. What the block raises is raised, and ``LimitError``."""
        runtime: Runtime = namespace["_runtime_"]
        saves: Saves = namespace["_runtime_"]._saves
        self.check(namespace)
        token = current_saves.set(saves)
        try:
            with runtime.active():
                exec(self.code, namespace)
            runtime.require_savable(saves.collect(namespace, self.binds).values())
        finally:
            current_saves.reset(token)

    def run(self, values: Mapping[str, Any], saves: Saves, module_name: str) -> dict[str, Any]:
        """Run with these values for the names it reads; returns all names it has at the end."""
        namespace = self.namespace(values, saves, module_name)
        self.execute(namespace)
        return namespace

    def lost(self, saves: Saves, namespace: Mapping[str, Any], home: Iterable[str]) -> list[Lost]:
        """What a run of it saved and what comes home under none of the names ``home``."""
        within = _block(self.source).saved_within
        found = saves.lost(namespace, home)
        return [
            each
            for each in found
            if each.holder or each.deleted or each.filename != self.filename or each.lineno not in within
        ]

    def __reduce__(self) -> Any:
        return GuardedBlock, (self.source, self.limits)


class GuardedFunction:
    """A function of a client's: called by a restricted block, or as the function form's block.

    ``names``, ``defaults`` and ``kwdefaults`` are what it uses and has; they may be set after it was made, as functions
    may use each other.
    """

    def __init__(self, source: CodeSource, limits: GuardLimits | None = None) -> None:
        self.source = source
        self.limits = limits or GuardLimits()
        self.names: dict[str, Any] = {}
        self.defaults: tuple[Any, ...] = ()
        self.kwdefaults: dict[str, Any] = {}
        self.__qualname__ = source.qualname
        _function(source)

    def check(self) -> None:
        """As ``GuardedBlock.check``."""
        compiled = _function(self.source)
        _require_builtins(compiled.reads - {compiled.name} - set(self.names))

    def guarded(self) -> tuple[CodeType, dict[str, Any], str]:
        """Code that defines the function, the values of names in it, and the name that it has there."""
        compiled = _function(self.source)
        require_public(self.names)
        return compiled.code, self.names, compiled.name

    def text(self) -> tuple[CodeType, Mapping[str, Any]]:
        """Its code, and what names in it mean."""
        return _function(self.source).code, self.names

    def __call__(self, tracer: Any) -> Any:
        """Runs it as a block: what it returns comes home."""
        self.check()
        runtime = Runtime(self.limits)
        with runtime.active():
            returned = runtime.instance(self)(tracer)
        runtime.require_savable([returned])
        return returned

    @property
    def __code__(self) -> CodeType:
        return _function(self.source).code


@functools.lru_cache(maxsize=512)
def _block(source: CodeSource) -> _Compiled:
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


@functools.lru_cache(maxsize=512)
def _function(source: CodeSource) -> _Compiled:
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


def _compiled(tree: ast.Module, source: CodeSource, within: frozenset[int], name: str) -> _Compiled:
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
    return _Compiled(code, _public(reads(code)), _public(binds(code)), within, name)


def _public(names: frozenset[str]) -> frozenset[str]:
    return frozenset(name for name in names if name == "_" or not name.startswith("_"))


def require_public(names: Iterable[str]) -> None:
    """Refuses values for names that the guard's own functions may have."""
    for name in names:
        if name.startswith("_") and name != "_":
            raise NotAllowedError(f"`{name:.60}`: no name of a restricted block may begin with an underscore")


def _require_builtins(names: Iterable[str]) -> None:
    for name in sorted(names):
        if name in _PYTHONS and name not in BUILTINS:
            raise NotAllowedError(f"`{name}` is not in the list of what a restricted block may use")
